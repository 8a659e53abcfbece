"""`python -m tools.bench_masks`, the name of before: `python -m tools.bench.masks`."""

import sys

from .bench.masks import main

if __name__ == "__main__":
    sys.exit(main())
