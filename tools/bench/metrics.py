"""What it costs to keep the record of a run (bench.metrics [--quick]); a minute on 2 cores.

Rows as a FedAvg run makes them, with 15 numbers of each client, added to a metrics.h5 one round after the other,
nothing else done: the seconds of all rounds (wall), and whether the last rounds cost more than the first (CPU seconds).
Beside it the whole file written anew in every round, and rounds that have a checkpoint (of small weights) each.
Exit code 0: everything was measured, whatever the verdicts; 2: wrong arguments.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from hkd_hpc.analysis.metrics import SINGLE
from hkd_hpc.common.command import Parser, exit_code
from hkd_hpc.common.settings import first_paragraph
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.growing import GrowingTree
from hkd_hpc.store.history import PAYLOAD_KINDS, PHASES, WIRE_KINDS, History
from hkd_hpc.store.tree import save_tree

from .table import Line, heading, table

PAYLOADS = tuple(f"payload_bytes/{kind}" for kind in PAYLOAD_KINDS)
KNOWLEDGE = ("knowledge_classes", "noise_std", "signal_rms")  # which FedAvg has not
OF_CLIENTS = (*(metric.name for metric in SINGLE if metric.of_clients and metric.name not in KNOWLEDGE), *PAYLOADS)
OF_ROUNDS = (
    *(metric.name for metric in SINGLE if metric.of_round and metric.name not in KNOWLEDGE),
    *(f"seconds/{phase}" for phase in (*PHASES, "save")),
    *PAYLOADS,
    *(f"wire_bytes/{kind}" for kind in WIRE_KINDS),
)
WEIGHTS = {"w": np.zeros(10_000, np.float32)}
STATIC = {"config_json": "{}", "partition": {"train_index": np.arange(5000)}}


@dataclass(frozen=True)
class Sizes:
    """(rounds, clients), and of how many rounds the first and the last are compared."""

    short: tuple[int, int] = (200, 10)
    long: tuple[int, int] = (5000, 100)
    compared: int = 100


QUICK = Sizes((6, 2), (80, 3), 3)


def add_round(history: History) -> None:
    """One round, its numbers as good as any."""
    round = len(history) + 1
    row = dict.fromkeys(OF_ROUNDS, 0.25 * round) | {"round": round, "weights_sha256": "ab" * 32, "warning": ""}
    row |= {"global_test_correct_by_class": [round] * 10, "global_test_undefined": ""}
    history.append(row, {name: np.full(history.clients_count, 0.5 * round) for name in OF_CLIENTS})


def seconds_of(rounds: int, clients: int, write: Callable[[History], None]) -> tuple[float, list[float]]:
    """(wall seconds of `write` in all, its CPU seconds in each round)."""
    history, wall_s, took_s = History(clients), 0.0, []
    for _ in range(rounds):
        add_round(history)
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        write(history)
        took_s.append(time.thread_time() - start_cpu_s)
        wall_s += time.perf_counter() - start_s
        history.finalize()
    return wall_s, took_s


def grow(path: Path) -> Callable[[History], None]:
    """Add the new rows to the file."""
    file = GrowingTree(path)
    return lambda history: file.save(STATIC, history.tree)


def write_anew(path: Path) -> Callable[[History], None]:
    return lambda history: save_tree(path, {**STATIC, **history.tree()})


def save_checkpoint(path: Path) -> Callable[[History], None]:
    """The rows that are final to one file, the last one with the weights to another, as the server does."""
    folder = RunFolder(path)
    folder.create()
    file = GrowingTree(folder.rows_path, sync_every_s=0)

    def write(history: History) -> None:
        if history.finalized["rounds"]:
            file.save(STATIC, lambda since: history.tree(since, history.finalized))
        folder.save_checkpoint(
            len(history), {**STATIC, **history.tree(history.finalized), "round": len(history), "global": WEIGHTS}
        )

    return write


def later_by_earlier(took_s: list[float], compared: int) -> float:
    """What one of the last rounds costs by one of the first; medians, for now and then a file is made anew."""
    return median(took_s[-compared:]) / median(took_s[:compared])


def measure(sizes: Sizes, folder: Path) -> list[Line]:
    lines = []
    for (rounds, clients), at_most_s in ((sizes.short, 2.0), (sizes.long, 20.0)):
        wall_s, took_s = seconds_of(rounds, clients, grow(folder / f"{rounds}.h5"))
        name = f"metrics.h5, {rounds:,} rounds x {clients} clients x {len(OF_CLIENTS)} numbers"
        lines += [
            Line(f"{name}: all rounds", (wall_s,), at_most_s, "s"),
            Line(f"{name}: a last round / a first one", (later_by_earlier(took_s, sizes.compared),), 1.5),
        ]
    rounds, clients = sizes.short
    anew_s, _ = seconds_of(rounds, clients, write_anew(folder / "anew.h5"))
    lines.append(
        Line(f"the same {rounds} rounds x {clients} clients, written anew in each: all rounds", (anew_s,), None, "s")
    )
    _, took_s = seconds_of(rounds, clients, save_checkpoint(folder / "run"))
    lines.append(
        Line(
            f"a checkpoint in each of {rounds} rounds x {clients} clients: a last one / a first one",
            (later_by_earlier(took_s, sizes.compared),),
            1.5,
        )
    )
    return lines


@exit_code
def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    parser = Parser(prog=f"python -m {__package__}.metrics", description=first_paragraph(__doc__))
    parser.add_argument("--quick", action="store_true", help="a smoke test: tiny sizes, the numbers mean nothing")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-metrics-") as folder:
        lines = measure(QUICK if options.quick else Sizes(), Path(folder))
    print(heading(options.quick))
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
