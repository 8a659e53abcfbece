"""`from jobs import Sweep, launch` in a clone; once installed it is `from hkd_hpc.jobs import ...`, which clashes with
none.
"""

from hkd_hpc.common.command import tell_interrupts_of

tell_interrupts_of(__name__)

from hkd_hpc.jobs import Study, Sweep, launch  # noqa: E402 - Ctrl-C during this import is what the call is for

__all__ = ["Study", "Sweep", "launch"]
