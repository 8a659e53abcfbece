"""`python -m tools.bench_report`, the name of before: `python -m tools.bench.report`."""

import sys

from hkd_hpc.console import messages

from .bench.report import main

if __name__ == "__main__":
    messages.warn("python -m tools.bench_report is called python -m tools.bench.report now; it runs that")
    sys.exit(main())
