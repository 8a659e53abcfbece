"""Is this machine fit for a run? `python -m hkd_hpc.doctor`: a file a section, each with the findings that it knows."""
