"""Tools beside the package: a top-level package in a clone, `hkd_hpc.tools` once installed."""

from hkd_hpc.common.command import tell_interrupts_of

tell_interrupts_of(__name__)
