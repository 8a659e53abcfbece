"""`python -m tools.bench_metrics`, the name of before: `python -m tools.bench.metrics`."""

import sys

from hkd_hpc.console import messages

from .bench.metrics import main

if __name__ == "__main__":
    messages.warn("python -m tools.bench_metrics is called python -m tools.bench.metrics now; it runs that")
    sys.exit(main())
