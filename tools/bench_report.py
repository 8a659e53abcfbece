"""`python -m tools.bench_report`, the name of before: `python -m tools.bench.report`."""

import sys

from . import renamed
from .bench.report import main

if __name__ == "__main__":
    renamed.tell(__package__, "bench_report", "bench.report")
    sys.exit(main())
