"""`python -m tools.bench_metrics`, the name of before: `python -m tools.bench.metrics`."""

import sys

from . import renamed
from .bench.metrics import main

if __name__ == "__main__":
    renamed.tell(__package__, "bench_metrics", "bench.metrics")
    sys.exit(main())
