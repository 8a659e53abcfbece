"""`python -m tools.torture`, the name of before: `python -m tools.fault_injection`."""

import sys

from .fault_injection.runner import command

if __name__ == "__main__":
    sys.exit(command())
