"""`python -m tools.bench_masks`, the name of before: `python -m tools.bench.masks`."""

import sys

from . import renamed
from .bench.masks import main

if __name__ == "__main__":
    renamed.tell(__package__, "bench_masks", "bench.masks")
    sys.exit(main())
