"""`python -m tools.bench_peers`, the name of before: `python -m tools.bench.peers`."""

import sys

from .bench.peers import main

if __name__ == "__main__":
    sys.exit(main())
