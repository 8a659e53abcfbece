"""`python -m hkd_hpc.data ...`: named as `hkd` names its commands, for this package imports nothing from above."""

import runpy

runpy.run_module("hkd_hpc.commands.data", run_name="__main__", alter_sys=True)
