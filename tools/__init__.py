"""Tools of this repository that are no part of the installed package."""

from hkd_hpc.command import tell_interrupts_of

tell_interrupts_of(__name__)
