"""`python -m tools.torture`, the name of before: `python -m tools.fault_injection`."""

import sys

from hkd_hpc.console import messages

from .fault_injection.runner import command

if __name__ == "__main__":
    messages.warn("python -m tools.torture is called python -m tools.fault_injection now; it runs that")
    sys.exit(command())
