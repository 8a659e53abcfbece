"""`python -m hkd_hpc` is `hkd`: see commands/hkd.py."""

import sys

from hkd_hpc.commands.hkd import main

if __name__ == "__main__":
    sys.exit(main())
