"""`python -m tools.bench_metrics`, the name of before: `python -m tools.bench.metrics`."""

import sys

from .bench.metrics import main

if __name__ == "__main__":
    sys.exit(main())
