"""A run for other programs: `python -m hkd_hpc.export`."""

from hkd_hpc.export.command import main

__all__ = ["main"]
