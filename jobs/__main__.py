"""`python -m jobs`: see hkd_hpc/jobs/__main__.py."""

import sys

from hkd_hpc.jobs.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
