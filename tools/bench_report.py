"""`python -m tools.bench_report`, the name of before: `python -m tools.bench.report`."""

import sys

from .bench.report import main

if __name__ == "__main__":
    sys.exit(main())
