"""`python -m hkd_hpc.compare`, or `hkd compare`."""

import sys

from hkd_hpc.compare.command import main

if __name__ == "__main__":
    sys.exit(main())
