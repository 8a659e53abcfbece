"""Runs as they lie on the disk, to look at: finished, running or broken. Nothing is locked or written; no torch."""

from hkd_hpc.results.find import existing, find_runs, load
from hkd_hpc.results.run import Run

__all__ = ["Run", "existing", "find_runs", "load"]
