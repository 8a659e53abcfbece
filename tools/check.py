"""`python -m tools.check`, the name of before: `python -m hkd_hpc.check`."""

import sys

from hkd_hpc.check import main

if __name__ == "__main__":
    sys.exit(main())
