"""Is the folder of a run good, and what can be saved: `python -m hkd_hpc.check`."""

from hkd_hpc.check.command import main

__all__ = ["main"]
