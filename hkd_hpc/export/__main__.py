"""`python -m hkd_hpc.export`, or `hkd export`."""

import sys

from hkd_hpc.export.command import main

if __name__ == "__main__":
    sys.exit(main())
