"""`python -m tools.compare`, the name of before: `python -m hkd_hpc.compare`."""

import sys

from hkd_hpc.compare import main

if __name__ == "__main__":
    sys.exit(main())
