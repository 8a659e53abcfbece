"""`python -m tools.bench_gpu`, the name of before: `python -m tools.bench.gpu`."""

import sys

from hkd_hpc.console import messages

from .bench.gpu import main

if __name__ == "__main__":
    messages.warn("python -m tools.bench_gpu is called python -m tools.bench.gpu now; it runs that")
    sys.exit(main())
