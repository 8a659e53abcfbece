"""`python -m tools.bench_peers`, the name of before: `python -m tools.bench.peers`."""

import sys

from . import renamed
from .bench.peers import main

if __name__ == "__main__":
    renamed.tell(__package__, "bench_peers", "bench.peers")
    sys.exit(main())
