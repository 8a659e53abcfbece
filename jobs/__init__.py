"""`from jobs import Sweep, launch` in a clone; once installed it is `from hkd_hpc.jobs import ...`, which clashes with
none.
"""

from hkd_hpc.jobs import Study, Sweep, launch

__all__ = ["Study", "Sweep", "launch"]
