"""`python -m tools.bench`: see suite.py."""

import sys

from .suite import main

sys.exit(main())
