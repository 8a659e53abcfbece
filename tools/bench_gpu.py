"""`python -m tools.bench_gpu`, the name of before: `python -m tools.bench.gpu`."""

import sys

from .bench.gpu import main

if __name__ == "__main__":
    sys.exit(main())
