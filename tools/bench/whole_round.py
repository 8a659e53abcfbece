"""The rows of tools.bench that run whole jobs: rounds of `mpirun -n 3` against the bare loop in as many processes.

Ten clients of the workload's images each, five on each of two client ranks; the server is the third rank. The bare loop
trains the same clients in two processes side by side, one thread each. Seconds are the wall's, with the test of the
global model and a checkpoint in every round on our side alone. First and last round of a run are left out: start-up,
and what is done once at the end. No model of a client is kept, as in the bare loop.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.cohort import assign_clients
from hkd_hpc.comm.control.watch import children_of
from hkd_hpc.store.tree import load_tree

from .processes import Child, finish, peak_until, start_mpi
from .table import Line

CLIENTS, RANKS = 10, 3
GIGA = 1e9
MODEL = {
    "J": ("model.name=resnet18", "model.latent=64"),
    "S": ("model.name=shufflenet_v2", "model.latent=32"),
    "tiny": ("model.name=small", "model.latent=8"),
}
TARGETS = {"J": 0.45, "S": 0.82}


class Sizes(Protocol):
    """How much is measured: images of a client, clients, rounds of a run, and how often one is alternated."""

    @property
    def images(self) -> int: ...

    @property
    def clients(self) -> int: ...

    @property
    def rounds(self) -> int: ...

    @property
    def round_pairs(self) -> int: ...


@dataclass(frozen=True)
class Rounds:
    """What one run of the program showed. `beside_s`: a round's seconds in which the busiest rank did not train;
    `client_s`: of each client's training; `server_s`: of the server's test and checkpoint."""

    wall_s: list[float]
    beside_s: list[float]
    client_s: np.ndarray
    server_s: list[float]
    peak_bytes: int


def write_images(path: Path, images: int, clients: int) -> None:
    """Random images, a client's own `images` and one test image each: what they show makes no difference to the
    time.
    """
    random, count = np.random.default_rng(0), clients * images
    np.savez(
        path,
        x_train=random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8),
        y_train=np.arange(count) % 10,
        client_train=np.repeat(np.arange(clients), images),
        client_test=np.arange(clients),
        x_test=random.integers(0, 256, (clients, 3, 32, 32), dtype=np.uint8),
        y_test=np.arange(clients) % 10,
    )


def run_program(
    workload: str, images: int, rounds: int, *more: str, ranks: int = RANKS, clients: int = CLIENTS
) -> Rounds:
    """One job of `mpirun -n RANKS python -m hkd_hpc.train` with the reference scheme, one local epoch, and perhaps more
    settings; so many rounds count."""
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder, "data.npz"), Path(folder, "run")
        write_images(data, images, clients)
        process = start_mpi(
            ranks,
            "-m",
            "hkd_hpc.train",
            "--out",
            str(out),
            "data.name=file",
            f"data.path={data}",
            "data.partition=natural",
            "data.fraction=1",
            "data.public_fraction=0",
            f"fed.clients={clients}",
            f"fed.rounds={rounds + 2}",
            "run.client_models=false",
            "train.epochs=1",
            f"scheme.name={schemes.REFERENCE}",
            *MODEL[workload],
            *more,
        )
        with ThreadPoolExecutor() as beside:
            peak_bytes = beside.submit(
                peak_until, lambda: process.poll() is not None, lambda: children_of(process.pid) or []
            )
            finish(process)
        return rounds_of(out / "metrics.h5", images, clients, ranks, peak_bytes.result())


def rounds_of(metrics: Path, images: int, clients: int, ranks: int, peak_bytes: int) -> Rounds:
    """Those of a run that count: neither the first, which wakes the libraries, nor the last, which no round follows."""
    tree = load_tree(metrics, only=["rounds", "clients"])
    of_rounds, train_s = tree["rounds"], tree["clients"]["train_s"]
    # clients begin a round while rank 0 still tests and saves the one before
    wall_s = (of_rounds["wall_s"][1:] + of_rounds["seconds"]["evaluate_and_save"][:-1])[:-1]
    rank_of = np.array(assign_clients([images] * clients, ranks))
    busiest_s = np.max([train_s[1:-1, rank_of == rank].sum(1) for rank in range(1, ranks)], axis=0)
    return Rounds(
        wall_s.tolist(),
        (wall_s - busiest_s).tolist(),
        train_s[1:-1],
        of_rounds["seconds"]["evaluate_and_save"][1:-1].tolist(),
        peak_bytes,
    )


def run_bare(pair: list[Child], clients: int = CLIENTS) -> float:
    """Seconds in which the two processes train half of the clients each for an epoch, side by side."""
    own_clients = [",".join(map(str, range(first, clients, len(pair)))) for first in range(len(pair))]
    start_s = time.monotonic()
    with ThreadPoolExecutor() as beside:
        list(beside.map(lambda child, own: child.ask(f"bare {own} 1"), pair, own_clients))
    return time.monotonic() - start_s


def whole_round(sizes: Sizes, workload: str) -> list[Line]:
    """The reference scheme's round under mpirun against the bare loop, and what it spends beside training."""
    pair = [Child(f"{__package__}.bare_loop", workload, str(sizes.images)) for _ in range(RANKS - 1)]
    runs, bare_s = [], []
    try:
        run_bare(pair, sizes.clients)  # warm up
        for _ in range(sizes.round_pairs):
            runs.append(run_program(workload, sizes.images, sizes.rounds, clients=sizes.clients))
            bare_s += [run_bare(pair, sizes.clients) for _ in runs[-1].wall_s]
    finally:
        for child in pair:
            child.close()
    wall_s = [seconds for run in runs for seconds in run.wall_s]
    beside = tuple(100 * beside_s / seconds for run in runs for beside_s, seconds in zip(run.beside_s, run.wall_s))
    lines = [
        Line(
            f"{schemes.REFERENCE} round, workload {workload}, mpirun -n 3: ours / bare loop in 2 processes",
            tuple(ours / bare for ours, bare in zip(wall_s, bare_s)),
            TARGETS[workload],
        ),
        Line(f"  a round, workload {workload}: ours", tuple(wall_s), unit="s"),
        Line(f"  a round, workload {workload}: bare loop", tuple(bare_s), unit="s"),
        Line(f"share of a round that is no training, workload {workload}", beside, 5.0, "%"),
    ]
    peaks = tuple(run.peak_bytes / GIGA for run in runs)
    return [
        *lines,
        Line(f"peak memory (PSS) of 3 ranks, workload {workload}", peaks, 2.3 if workload == "J" else None, "GB"),
    ]
