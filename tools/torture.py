"""`python -m tools.torture`, the name of before: `python -m tools.fault_injection`."""

import sys

from . import renamed
from .fault_injection.runner import command

if __name__ == "__main__":
    renamed.tell(__package__, "torture", "fault_injection")
    sys.exit(command())
