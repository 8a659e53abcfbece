"""Sweeps: many runs of hkd_hpc as one study, under SLURM or on a laptop. Imports no torch.

from hkd_hpc.jobs import Sweep, launch
sweep = Sweep.from_toml("table1.toml")
study = launch(sweep, executor="slurm", partition="gpu", time_min=60, root="/scratch/me/study1")
study.wait(); print(study)
"""

from hkd_hpc.jobs.study import Study, launch, load_study
from hkd_hpc.jobs.sweep import Sweep

__all__ = ["Study", "Sweep", "launch", "load_study"]
