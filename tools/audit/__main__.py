"""`python -m tools.audit`: see suite.py."""

import sys

from .suite import main

sys.exit(main())
