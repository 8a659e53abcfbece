"""`python -m tools.bench_gpu`, the name of before: `python -m tools.bench.gpu`."""

import sys

from . import renamed
from .bench.gpu import main

if __name__ == "__main__":
    renamed.tell(__package__, "bench_gpu", "bench.gpu")
    sys.exit(main())
