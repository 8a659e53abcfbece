"""What a report of many runs costs: `python -m tools.bench.report [--runs 1000] [--rounds 50]`; 2.5 minutes on 2 cores.

Runs of nine schemes in the layout of a study, made and not trained (tools/synthetic_runs.py), are made into one report
by the command: seconds, the peak memory of all its processes together, and the size of the file. Exit code 0:
measured, whatever the verdicts; 2: wrong arguments.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.comm.control.watch import descendants
from hkd_hpc.common.settings import first_paragraph
from hkd_hpc.runtime.machine import header

from ..synthetic_runs import write_run
from .processes import finish, peak_until, start
from .table import Line, table

CLIENTS = 10
LIMIT_S = 900.0  # for the report: 15 times as long as it may take
SEEDS = 28  # x 9 schemes x 4 settings = 1,008
SETTINGS = [("data.beta=0.2", "fed.clients=10"), ("data.beta=0.5", "fed.clients=10")]
SETTINGS += [("data.beta=0.5", "fed.clients=20"), ("data.beta=5", "fed.clients=10")]


def make_study(root: Path, runs: int, rounds: int) -> None:
    """So many runs below a folder: schemes first, then settings, then seeds."""
    grid = [(scheme, setting) for setting in SETTINGS for scheme in schemes.PAPER]
    for place in range(runs):
        (scheme, setting), seed = grid[place % len(grid)], place // len(grid)
        draw = np.random.default_rng(place)
        rising_R = 1 - 1 / np.sqrt(np.arange(2, rounds + 2))
        local_R, global_R = 0.8 * rising_R + 0.01 * draw.standard_normal((2, rounds))
        overrides = [f"scheme.name={scheme}", f"run.seed={seed}", f"fed.rounds={rounds}", *setting]
        write_run(root / f"{place:04d}", overrides, local_R.tolist(), global_R.tolist(), summary={})


def measure(name: str, root: Path, out: Path) -> list[Line]:
    """What the command takes; `name`: of it in the table."""
    start_s = time.perf_counter()
    process = start("-m", "hkd_hpc.report", str(root), "--out", str(out))
    tree = lambda: [process.pid, *descendants(process.pid)]
    with ThreadPoolExecutor() as beside:
        peak_bytes = beside.submit(peak_until, lambda: process.poll() is not None, tree, every_s=0.25)
        finish(process, LIMIT_S)
        wall_s = time.perf_counter() - start_s
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return [
        Line(name, (wall_s,), 60, "s"),
        Line(f"{name}: CPU time", (used.ru_utime + used.ru_stime,), None, "s"),
        Line(f"{name}: peak memory of all its processes", (peak_bytes.result() / 1e6,), 500, "MB"),
        Line(f"{name}: the file", (out.stat().st_size / 1e6,), 20, "MB"),
    ]


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}.report", description=first_paragraph(__doc__))
    parser.add_argument("--runs", type=int, default=SEEDS * len(SETTINGS) * len(schemes.PAPER))
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-report-") as folder:
        root = Path(folder) / "study"
        make_study(root, options.runs, options.rounds)
        name = f"report of {options.runs:,} runs x {options.rounds} rounds"
        lines = measure(name, root, Path(folder) / "report.html")
    print(header())
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
