"""`python -m tools.fault_injection`: see runner.py."""

import sys

from .runner import command

sys.exit(command())
