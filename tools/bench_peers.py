"""`python -m tools.bench_peers`, the name of before: `python -m tools.bench.peers`."""

import sys

from hkd_hpc.console import messages

from .bench.peers import main

if __name__ == "__main__":
    messages.warn("python -m tools.bench_peers is called python -m tools.bench.peers now; it runs that")
    sys.exit(main())
