"""`python -m tools.compare` in a clone: `python -m hkd_hpc.compare`, or `hkd compare`."""

import sys

from hkd_hpc.compare import main

if __name__ == "__main__":
    sys.exit(main())
