"""`python -m tools.bench_masks`, the name of before: `python -m tools.bench.masks`."""

import sys

from hkd_hpc.console import messages

from .bench.masks import main

if __name__ == "__main__":
    messages.warn("python -m tools.bench_masks is called python -m tools.bench.masks now; it runs that")
    sys.exit(main())
