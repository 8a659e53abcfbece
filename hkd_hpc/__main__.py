"""`python -m hkd_hpc` is `hkd`: see cli.py."""

import sys

from hkd_hpc.cli import main

if __name__ == "__main__":
    sys.exit(main())
