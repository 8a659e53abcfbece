"""hkd_hpc: federated learning on non-IID data as an HPC job (FedHKD and the schemes it is compared with)."""

__version__ = "0.1.0"
