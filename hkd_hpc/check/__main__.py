"""`python -m hkd_hpc.check`, or `hkd check`."""

import sys

from hkd_hpc.check.command import main

if __name__ == "__main__":
    sys.exit(main())
