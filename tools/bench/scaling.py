"""`python -m tools.bench --scaling`: the collectives and whole rounds by ranks on this machine, the cost model
(hkd_hpc/jobs/cost.py) fitted to them and tried on what was left out, and what it says of clusters that are not here.

Collectives: the slowest rank's seconds, median of repeats, `mpirun -n 2, 3, 5, 11`; the model's constants are their
non-negative least squares in relative error. Left out: each point in turn is predicted from all the others. Rank 0's
own part of a barrier is measured alone, for as many ranks as a cluster has. Rounds: workload J with fewer images of a
client; strong scaling keeps the clients, weak scaling the clients of a rank. Seconds of an image and the fixed part of
a round come from the two numbers of clients with one client rank; every other round is predicted. All is measured in
turns, twice. Ranks beyond the cores share them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from scipy.optimize import nnls

from hkd_hpc.common.groups import grouped
from hkd_hpc.common.words import counted
from hkd_hpc.jobs import cost
from hkd_hpc.jobs.cost import CLUSTER, CLUSTER_TEXT, Cost, Load, Network
from hkd_hpc.jobs.forecast import REFERENCE_IMAGES, REFERENCE_S

from .processes import BenchError, command_of, finish, start, start_mpi
from .table import heading, number
from .whole_round import Rounds, run_program

MPI_PIECE_BYTES = 8 * (1 << 18)
NUMBERS_J = 4_272_784  # of workload J that training can change: what is averaged
REPORT_BYTES, MESSAGE_BYTES = 4 * 10 * (64 + 10 + 1), 4 * 10 * (64 + 10 + 1)  # FedHKD, 10 classes, latent 64


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    ranks: tuple[int, ...] = (2, 3, 5, 11)
    sum_bytes: tuple[int, ...] = (1 << 13, 1 << 18, 1 << 22, 1 << 25)
    block_bytes: tuple[int, ...] = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
    repeats: int = 5
    coordinator_ranks: tuple[int, ...] = (9, 65, 257, 1_025)
    passes: int = 2
    workload: str = "J"
    images: int = 130
    rounds: int = 3  # of a run, without its first and last
    strong: tuple[tuple[int, int], ...] = ((2, 10), (3, 10), (5, 10))  # ranks, clients
    weak: tuple[tuple[int, int], ...] = ((2, 2), (3, 4), (5, 8))


QUICK = Sizes(
    ranks=(2, 3),
    sum_bytes=(1 << 13, 1 << 16),
    block_bytes=(1 << 10, 1 << 12),
    repeats=2,
    coordinator_ranks=(3, 9),
    passes=1,
    workload="tiny",
    images=16,
    rounds=1,
    strong=((2, 2), (3, 2)),
    weak=((2, 1), (3, 2)),
)


@dataclass(frozen=True)
class Point:
    """One collective, measured."""

    collective: str
    ranks: int
    nbytes: int
    seconds: float


def points(sizes: Sizes) -> list[Point]:
    """All collectives of all numbers of ranks."""
    wanted = [
        "agree:0",
        *(f"sum:{nbytes}" for nbytes in sizes.sum_bytes),
        *(f"{name}:{nbytes}" for name in ("relay", "gather", "broadcast") for nbytes in sizes.block_bytes),
    ]
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(sizes.passes):
        for ranks in sizes.ranks:
            process = start_mpi(ranks, "-m", f"{__package__}.collectives", str(sizes.repeats), *wanted)
            for name, values in answer_of(process).items():
                found[name, ranks] += values
    by_ranks = sorted(found, key=lambda point: sizes.ranks.index(point[1]))
    return [
        Point(name.partition(":")[0], ranks, int(name.partition(":")[2]), median(found[name, ranks]))
        for name, ranks in by_ranks
    ]


def coordinator_points(sizes: Sizes) -> list[Point]:
    """Rank 0's barriers, without status messages ("agree") and with them ("status")."""
    answer = answer_of(
        start("-m", f"{__package__}.coordinator", str(2 * sizes.repeats), *map(str, sizes.coordinator_ranks))
    )
    return [
        Point(name, int(ranks), 0, median(values))
        for name, kind in (("agree", "barrier"), ("status", "status and barrier"))
        for ranks, values in answer[kind].items()
    ]


def answer_of(process: subprocess.Popen) -> dict:
    """The JSON object in the last line that it writes."""
    output = finish(process)
    try:
        return json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        raise BenchError(f"{command_of(process)}: no result\n{output[-2000:]}") from None


# --- the fit


def fit(measured: list[Point], form: Network) -> Network:
    """`form` with the constants that fit best: least squares of the relative errors, none below 0."""
    terms = [cost.terms(p.collective, p.ranks, p.nbytes, form) for p in measured]
    barrier_s, latency_s, byte_s, sum_byte_s = best(terms, measured)
    return replace(form, barrier_s=barrier_s, latency_s=latency_s, byte_s=byte_s, sum_byte_s=sum_byte_s)


def fit_coordinator(measured: list[Point], form: Network) -> Network:
    """`form` with rank 0's constants: of a barrier by peers and by pairs of them, and of a status message by peers."""
    terms = [(p.ranks - 1, (p.ranks - 1) ** 2, (p.ranks - 1) * (p.collective == "status")) for p in measured]
    barrier_s, pair_s, status_s = best(terms, measured)
    return replace(form, barrier_s=barrier_s, pair_s=pair_s, status_s=status_s)


def best(terms: Sequence[tuple[float, ...]], measured: list[Point]) -> list[float]:
    """The constants, none below 0, that give terms @ constants / seconds = 1, about."""
    return nnls(np.array(terms) / np.array([[point.seconds] for point in measured]), np.ones(len(measured)))[0].tolist()


def left_out(measured: list[Point], form: Network, fit: Callable[[list[Point], Network], Network] = fit) -> list[float]:
    """For each point, predicted / measured by the model fitted to all others."""
    return [
        predicted_s(point, fit(measured[:place] + measured[place + 1 :], form)) / point.seconds
        for place, point in enumerate(measured)
    ]


def predicted_s(point: Point, network: Network) -> float:
    if point.collective == "status":
        return cost.seconds("agree", point.ranks, 0, network) + network.status_s * (point.ranks - 1)
    return cost.seconds(point.collective, point.ranks, point.nbytes, network)


def error(ratio: float) -> float:
    """0 when right; .5 when predicted is 1.5 or 1 / 1.5 of measured; infinite when nothing is predicted."""
    return max(ratio, 1 / ratio) - 1 if ratio else math.inf


# --- rounds


@dataclass(frozen=True)
class Run:
    """Rounds of a number of ranks and clients. wall_s, server_s: of each round; client_s: of each round and client."""

    ranks: int
    clients: int
    wall_s: list[float]
    server_s: list[float]
    client_s: np.ndarray

    @classmethod
    def joined(cls, ranks: int, clients: int, passes: list[Rounds]) -> Run:
        return cls(
            ranks,
            clients,
            [s for found in passes for s in found.wall_s],
            [s for found in passes for s in found.server_s],
            np.concatenate([found.client_s for found in passes]),
        )

    @property
    def round_s(self) -> float:
        return median(self.wall_s)


def runs(sizes: Sizes) -> dict[tuple[int, int], Run]:
    """By (ranks, clients), all of them in turns."""
    pairs = [*dict.fromkeys([*sizes.strong, *sizes.weak])] * sizes.passes
    run = lambda ranks, clients: run_program(sizes.workload, sizes.images, sizes.rounds, ranks=ranks, clients=clients)
    return {pair: Run.joined(*pair, passes) for pair, passes in grouped((pair, run(*pair)) for pair in pairs).items()}


@dataclass(frozen=True)
class Rank:
    """What the rounds of one client rank say. client_s: of one more client; fixed_s: of a round without any; spread: of
    a client's time, standard deviation / mean; server_s: of test and checkpoint."""

    client_s: float
    fixed_s: float
    spread: float
    server_s: float

    def cost(self, ranks: int, clients: int, network: Network) -> Cost:
        """Of a round; an image here is what a client trains on."""
        load = Load(clients, 1, NUMBERS_J, server_s=self.server_s, fixed_s=self.fixed_s)
        return cost.round_cost(load, ranks, ranks - 1, self.client_s, network, self.spread)


def learn(few: Run, many: Run, network: Network) -> Rank:
    """From two runs of one client rank: the line through their medians, less what the exchange takes."""
    client_s = max(0.0, (many.round_s - few.round_s) / (many.clients - few.clients))
    exchange = cost.round_cost(Load(few.clients, 0, NUMBERS_J), few.ranks, 1, 0.0, network)
    fixed_s = max(0.0, few.round_s - few.clients * client_s - exchange.round_s)
    spread = float((many.client_s.std(1) / many.client_s.mean(1)).mean())
    return Rank(client_s, fixed_s, spread, median([*few.server_s, *many.server_s]))


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
    """The fewest GPUs, a power of two, at which the exchange takes this share of a round, in words."""
    counts = [1 << power for power in range(1, 15) if 1 << power <= clients]
    found = [gpus for gpus in counts if cluster_cost(clients, gpus, network).exchange_share >= share]
    return f"from {found[0]:,} GPUs on" if found else "never"


def barriers_s(ranks: int, network: Network) -> float:
    """Of a round's exchange: rank 0's barriers (sum, relay, gather, broadcast, agreement) and status messages."""
    return 5 * cost.seconds("agree", ranks, 0, network) + cost.status_messages_s(ranks, network)


# --- what is printed


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def size_text(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.3g} kB" if nbytes else "-"


def points_text(title: str, measured: list[Point], ratios: list[float]) -> str:
    """The points, each with what the model fitted to all others says of it."""
    rows = [(title, "ranks", "bytes", "ms", "left out: predicted / measured")]
    rows += [
        (p.collective, str(p.ranks), size_text(p.nbytes), number(1e3 * p.seconds), f"{ratio:.2f}")
        for p, ratio in zip(measured, ratios)
    ]
    errors = sorted(map(error, ratios))
    worst = max(zip(map(error, ratios), measured), key=lambda pair: pair[0])[1]
    return (
        f"{aligned(rows)}\n"
        f"left out, error: median {100 * median(errors):.0f} %, nine of ten below "
        f"{100 * errors[int(0.9 * (len(errors) - 1))]:.0f} %, "
        f"worst {100 * errors[-1]:.0f} % ({worst.collective}, {worst.ranks} ranks, {size_text(worst.nbytes)})"
    )


def network_text(network: Network) -> str:
    speed = lambda byte_s: f"{1e-9 / byte_s if byte_s else math.inf:.2g} GB/s"
    return (
        f"fitted: barrier {1e6 * network.barrier_s:.0f} us a peer of rank 0, step {1e6 * network.latency_s:.1f} us, "
        "link "
        f"{speed(network.byte_s)}, exact sum {speed(network.sum_byte_s)}; {network.cores} cores"
    )


def coordinator_text(network: Network) -> str:
    return (
        f"fitted: barrier {1e6 * network.barrier_s:.0f} us a peer and {1e9 * network.pair_s:.0f} ns a pair of peers, "
        "status "
        f"{1e6 * network.status_s:.0f} us a peer"
    )


def runs_text(title: str, found: list[Run], rank: Rank, network: Network) -> str:
    first = found[0]
    rows = [(title, "clients", "s a round", "clients/s, / first", "predicted s", "predicted / measured")]
    for run in found:
        predicted_s, gain = (
            rank.cost(run.ranks, run.clients, network).round_s,
            first.round_s * run.clients / run.round_s / first.clients,
        )
        ratio = f"{predicted_s / run.round_s:.2f}" if run.ranks > 2 else "fitted"
        rows.append(
            (
                counted(run.ranks - 1, "client rank"),
                str(run.clients),
                number(run.round_s),
                f"{gain:.2f}",
                number(predicted_s),
                ratio,
            )
        )
    return aligned(rows)


def rank_text(rank: Rank) -> str:
    return (
        f"fitted: {number(rank.client_s)} s a client, {number(rank.fixed_s)} s a round; a client's time spreads by "
        f"{100 * rank.spread:.1f} %, the server's test and checkpoint take {number(rank.server_s)} s"
    )


def cluster_text(network: Network) -> str:
    rows = [
        ("clients", "GPUs", "s a round", "training", "server", "weights", "knowledge", "of both barriers", "exchange")
    ]
    for clients in CLIENTS:
        for gpus in GPUS:
            if gpus <= clients:
                c = cluster_cost(clients, gpus, network)
                rows.append(
                    (
                        f"{clients:,}",
                        f"{gpus:,}",
                        number(c.round_s),
                        number(c.train_s),
                        number(c.server_s),
                        number(c.weights_s),
                        number(c.knowledge_s),
                        number(barriers_s(gpus + 1, network)),
                        f"{100 * c.exchange_share:.1f} %",
                    )
                )
    notes = [
        f"{clients:,} clients: the exchange takes 5 % {where_it_matters(clients, 0.05, network)}, 50 % "
        f"{where_it_matters(clients, 0.5, network)}"
        for clients in CLIENTS
    ]
    return "\n".join([aligned(rows), *notes])


def measure_and_predict(sizes: Sizes) -> None:
    """Measure, fit, try and predict. BenchError when something crashed."""
    print(heading(sizes is QUICK))
    form = Network(0, 0, 0, 0, piece_bytes=MPI_PIECE_BYTES, cores=len(os.sched_getaffinity(0)))
    measured = points(sizes)
    network = fit(measured, form)
    print(f"{points_text('collective', measured, left_out(measured, form))}\n{network_text(network)}")
    alone = coordinator_points(sizes)
    far = fit_coordinator(alone, CLUSTER)
    print(f"\n{points_text('rank 0 alone', alone, left_out(alone, CLUSTER, fit_coordinator))}\n{coordinator_text(far)}")
    found = runs(sizes)
    strong, weak = [found[pair] for pair in sizes.strong], [found[pair] for pair in sizes.weak]
    few, many = sorted([strong[0], weak[0]], key=lambda run: run.clients)
    rank = learn(few, many, network)
    print(
        f"\n{runs_text('strong scaling', strong, rank, network)}\n\n"
        f"{runs_text('weak scaling', weak, rank, network)}\n{rank_text(rank)}"
    )
    print(
        f"\nPredicted, not measured: FedHKD, preset cifar10 ({IMAGES} images a client and round), "
        f"{1e6 * REFERENCE_S / REFERENCE_IMAGES:.0f} us an image as on one H200 without graphs; {CLUSTER_TEXT};\n"
        "barriers and status messages as of rank 0 alone here; a rank a GPU and one for the server, whose checkpoint "
        f"and test take {SAVE_S} s "
        f"(assumed) beside the training\n{cluster_text(far)}"
    )
