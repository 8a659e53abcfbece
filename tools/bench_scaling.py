"""`python -m tools.bench --scaling`: the collectives and whole rounds by ranks on this machine, the cost model (jobs/cost.py)
fitted to them and tried on what was left out, and what it says of clusters that are not here.

Collectives: the slowest rank's seconds, median of repeats, `mpirun -n 2, 3, 5, 11`; the model's four constants are their
non-negative least squares in relative error. Left out: each point in turn is predicted from all the others. Rounds: job J with
fewer images a client; strong scaling keeps the clients, weak scaling the clients of a rank. From the run with one client rank
come seconds of an image and the clients' spread; every other is predicted. Ranks beyond the cores share them.
"""
from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from hkd_hpc import schemes
from jobs import cost
from jobs.cost import CLUSTER, CLUSTER_TEXT, Cost, Load, Network
from jobs.forecast import REFERENCE_IMAGES, REFERENCE_S
from tools.bench_process import BenchError, finish, start_mpi
from tools.bench_round import Rounds, run_program
from tools.bench_table import header, number

MPI_PIECE_BYTES = 8 * (1 << 18)
NUMBERS_J = 4_272_784  # of job J that training can change: what is averaged
REPORT_BYTES, MESSAGE_BYTES = 4 * 10 * (64 + 10 + 1), 4 * 10 * (64 + 10 + 1)  # FedHKD, 10 classes, latent 64


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    ranks: tuple[int, ...] = (2, 3, 5, 11)
    sum_bytes: tuple[int, ...] = (1 << 13, 1 << 18, 1 << 22, 1 << 25)
    block_bytes: tuple[int, ...] = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
    repeats: int = 9
    job: str = "J"
    images: int = 130
    strong: tuple[tuple[int, int], ...] = ((2, 10), (3, 10), (5, 10))  # ranks, clients
    weak: tuple[tuple[int, int], ...] = ((2, 2), (3, 4), (5, 8))


QUICK = Sizes(ranks=(2, 3), sum_bytes=(1 << 13, 1 << 16), block_bytes=(1 << 10, 1 << 12), repeats=2, job="S", images=16,
              strong=((2, 2), (3, 2)), weak=((3, 2),))


@dataclass(frozen=True)
class Point:
    """One collective, measured."""

    collective: str
    ranks: int
    nbytes: int
    seconds: float


def points(sizes: Sizes) -> list[Point]:
    """All collectives of all numbers of ranks."""
    wanted = ["agree:0", *(f"sum:{nbytes}" for nbytes in sizes.sum_bytes),
              *(f"{name}:{nbytes}" for name in ("relay", "gather", "broadcast") for nbytes in sizes.block_bytes)]
    found = []
    for ranks in sizes.ranks:
        output = finish(start_mpi(ranks, "-m", "tools.bench_collectives", str(sizes.repeats), *wanted))
        try:
            seconds = json.loads(output.splitlines()[-1])
        except (ValueError, IndexError):
            raise BenchError(f"the collectives of {ranks} ranks: no result\n{output[-2000:]}") from None
        for name, values in seconds.items():
            collective, _, nbytes = name.partition(":")
            found.append(Point(collective, ranks, int(nbytes), median(values)))
    return found


# --- the fit


def fit(measured: list[Point], form: Network) -> Network:
    """`form` with the constants that fit best: least squares of the relative errors, none below 0."""
    terms = np.array([cost.terms(p.collective, p.ranks, p.nbytes, form) for p in measured])
    constants = non_negative(terms / np.array([[p.seconds] for p in measured]), np.ones(len(measured)))
    return Network(*constants, form.piece_bytes, form.cores)


def non_negative(terms: np.ndarray, wanted: np.ndarray) -> list[float]:
    """The x >= 0 that minimises |terms x - wanted|: the best of all choices of which are 0; there are four at most."""
    columns, best = terms.shape[1], (math.inf, np.zeros(terms.shape[1]))
    for choice in range(1, 1 << columns):
        used = [column for column in range(columns) if choice >> column & 1]
        x = np.zeros(columns)
        x[used] = np.linalg.lstsq(terms[:, used], wanted, rcond=None)[0]
        if (x >= 0).all():
            best = min(best, (float(np.linalg.norm(terms @ x - wanted)), x), key=lambda found: found[0])
    return best[1].tolist()


def left_out(measured: list[Point], form: Network) -> list[float]:
    """For each point, predicted / measured by the model fitted to all others."""
    ratios = []
    for place, point in enumerate(measured):
        network = fit(measured[:place] + measured[place + 1:], form)
        ratios.append(cost.seconds(point.collective, point.ranks, point.nbytes, network) / point.seconds)
    return ratios


def error(ratio: float) -> float:
    """0 when right; .5 when predicted is 1.5 or 1 / 1.5 of measured."""
    return max(ratio, 1 / ratio) - 1


# --- rounds


@dataclass(frozen=True)
class Run:
    """Rounds of a number of ranks and clients, and what the model says of them."""

    ranks: int
    clients: int
    found: Rounds
    predicted: Cost

    @property
    def wall_s(self) -> float:
        return median(self.found.wall_s)


def runs(sizes: Sizes, pairs: tuple[tuple[int, int], ...], network: Network, base: Rounds | None = None) -> list[Run]:
    """The first pair has one client rank, or `base` is such a run: from it come seconds of an image and spread."""
    found = {(ranks, clients): run_program(sizes.job, schemes.REFERENCE, 1, sizes.images, ranks=ranks, clients=clients)
             for ranks, clients in pairs}
    base = base or found[pairs[0]]
    image_s = float(np.median(base.client_s)) / sizes.images
    spread = float((base.client_s.std(1) / base.client_s.mean(1)).mean())
    server_s = median(base.server_s)
    return [Run(ranks, clients, rounds, cost.round_cost(Load(clients, sizes.images, NUMBERS_J, server_s=server_s),
                                                        ranks, ranks - 1, image_s, network, spread))
            for (ranks, clients), rounds in found.items()]


# --- clusters that are not here

CLIENTS, GPUS = (100, 1_000, 10_000), (8, 64, 256, 1_024)
IMAGES = 375 * 5  # of a client in a round of the preset cifar10
SAVE_S = 0.5  # a checkpoint of ResNet18 and a test of 10,000 images on a GPU, about


def cluster_cost(clients: int, gpus: int, network: Network = CLUSTER) -> Cost:
    """A FedHKD round of the preset cifar10 with this many clients, one rank on each GPU and one for the server."""
    workers = min(clients, gpus)
    load = Load(clients, IMAGES, NUMBERS_J, REPORT_BYTES, MESSAGE_BYTES, SAVE_S)
    return cost.round_cost(load, workers + 1, workers, REFERENCE_S / REFERENCE_IMAGES, network)


def where_it_matters(clients: int, share: float, network: Network = CLUSTER) -> str:
    """The fewest GPUs, a power of two, at which the exchange takes this share of a round."""
    counts = [1 << power for power in range(1, 15) if 1 << power <= clients]
    return next((f"{gpus:,}" for gpus in counts if cluster_cost(clients, gpus, network).exchange_share >= share), "never")


# --- the report


def aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def size_text(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.3g} kB" if nbytes else "-"


def collectives_text(measured: list[Point], network: Network, ratios: list[float]) -> str:
    rows = [("collective", "ranks", "bytes", "ms", "left out: predicted / measured")]
    rows += [(p.collective, str(p.ranks), size_text(p.nbytes), number(1e3 * p.seconds), f"{ratio:.2f}")
             for p, ratio in zip(measured, ratios)]
    errors = sorted(map(error, ratios))
    worst = max(zip(map(error, ratios), measured), key=lambda pair: pair[0])[1]
    return (f"{aligned(rows)}\nfitted: meeting {1e6 * network.meeting_s:.0f} us a rank, step {1e6 * network.latency_s:.1f} us, link "
            f"{1e-9 / network.byte_s if network.byte_s else math.inf:.2g} GB/s, exact sum "
            f"{1e-9 / network.sum_byte_s if network.sum_byte_s else math.inf:.2g} GB/s; {network.cores} cores\n"
            f"left out, error: median {100 * median(errors):.0f} %, nine of ten below {100 * errors[int(0.9 * (len(errors) - 1))]:.0f} %, "
            f"worst {100 * errors[-1]:.0f} % ({worst.collective}, {worst.ranks} ranks, {size_text(worst.nbytes)})")


def runs_text(title: str, found: list[Run]) -> str:
    first = found[0]
    rows = [(title, "clients", "s a round", "clients/s, / first", "predicted s", "predicted / measured")]
    for run in found:
        gain = (run.clients / run.wall_s) / (first.clients / first.wall_s)
        rows.append((f"{run.ranks - 1} client rank{'s' * (run.ranks > 2)}", str(run.clients), number(run.wall_s), f"{gain:.2f}",
                     number(run.predicted.round_s), f"{run.predicted.round_s / run.wall_s:.2f}"))
    return aligned(rows)


def cluster_text(network: Network) -> str:
    rows = [("clients", "GPUs", "s a round", "training", "server", "weights", "knowledge", "exchange")]
    for clients in CLIENTS:
        for gpus in GPUS:
            if gpus <= clients:
                c = cluster_cost(clients, gpus, network)
                rows.append((f"{clients:,}", f"{gpus:,}", number(c.round_s), number(c.train_s), number(c.server_s),
                             number(c.weights_s), number(c.knowledge_s), f"{100 * c.exchange_share:.1f} %"))
    notes = [f"{clients:,} clients: the exchange takes 5 % from {where_it_matters(clients, 0.05, network)} GPUs on, 50 % from "
             f"{where_it_matters(clients, 0.5, network)}" for clients in CLIENTS]
    return "\n".join([aligned(rows), *notes])


def report(sizes: Sizes, say: Callable[[str], None] = print) -> None:
    """Measure, fit, try and predict. BenchError when something crashed."""
    say(header())
    form = Network(0, 0, 0, 0, MPI_PIECE_BYTES, len(os.sched_getaffinity(0)))
    measured = points(sizes)
    network = fit(measured, form)
    say(collectives_text(measured, network, left_out(measured, form)))
    strong = runs(sizes, sizes.strong, network)
    say("\n" + runs_text("strong scaling", strong))
    say("\n" + runs_text("weak scaling", runs(sizes, sizes.weak, network, strong[0].found)))
    far = replace(CLUSTER, meeting_s=network.meeting_s)
    say(f"\nPredicted, not measured: FedHKD, preset cifar10 ({IMAGES} images a client and round), {1e6 * REFERENCE_S / REFERENCE_IMAGES:.0f} us "
        f"an image as on one H200 without graphs; {CLUSTER_TEXT};\na meeting as here; a rank a GPU and one for the server, whose "
        f"checkpoint and test take {SAVE_S} s (assumed) beside the training\n{cluster_text(far)}")
