"""What a round costs by clients, ranks and bytes: one model for the forecast of a launch and for the bench's --scaling.

    round_s = max(train_s, server_s) + weights_s + knowledge_s + fixed_s

train_s      the busiest worker (a client rank, or the GPU that some share): its clients x images x image_s, stretched
             by stragglers: all wait for the slowest of w workers, whose time is normal with the client's spread /
             sqrt(clients of a worker), so by 1 + that x E[largest of w standard normal numbers], by Blom's
             approximation; on one machine with fewer cores than ranks not less than all training and the server's
             work, divided by the cores
server_s     test and checkpoint of the round before, which rank 0 makes meanwhile; where there is only one rank: after
             it
weights_s    the all-reduce of the exact sum (8 bytes a number) among the client ranks, and rank 1's relay of the mean
             (4 bytes a number) to rank 0
knowledge_s  one gather of reports, one broadcast of the message, one agreement, and STATUS_MESSAGES of rank 0 to all
             ranks
fixed_s      what a round costs whatever is trained: measured, where it is known

A collective costs barrier_s x peers (rank 0 hears and answers each other rank before anything moves) + pair_s x peers^2
(what of that grows faster than the ranks, which is to be little) + latency_s x steps + byte_s x bytes over the busiest
link + sum_byte_s x bytes converted, added and divided in memory; `terms` has steps and bytes of each. Steps are those
of binary trees, bytes of the sum those of a ring (Thakur, Rabenseifner and Gropp 2005, sections 3 and 4). A status
message costs status_s x peers. Ranks that share cores take turns: a step, and the bytes that all ranks move at once,
take ranks / cores times as long. All constants of a `Network` are measured, or assumed and named. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Network:
    """What an exchange costs.

    Attributes:
        barrier_s: Seconds of a peer of rank 0 at a barrier.
        latency_s: Of a step between two ranks.
        byte_s: Of a byte over a link.
        sum_byte_s: Of a byte of an exact sum in memory.
        pair_s: Of a pair of peers at a barrier.
        status_s: Of a peer to whom rank 0 says where it is.
        piece_bytes: What one call of the all-reduce moves.
        cores: Of the one machine that all ranks share; None: a core for each.
    """

    barrier_s: float
    latency_s: float
    byte_s: float
    sum_byte_s: float
    pair_s: float = 0.0
    status_s: float = 0.0
    piece_bytes: float = 1 << 21
    cores: int | None = None

    @property
    def constants(self) -> tuple[float, float, float, float]:
        """Those that `terms` counts."""
        return self.barrier_s, self.latency_s, self.byte_s, self.sum_byte_s


# Not measured, vendors' figures: NCCL in one call over one 100 Gb/s port a GPU, 20 us a step, sums in a GPU's memory.
# Measured: what rank 0 alone takes for barriers and status messages, up to 1,025 ranks (docs/benchmarks.md).
CLUSTER = Network(
    barrier_s=3e-5,
    latency_s=2e-5,
    byte_s=1 / 12.5e9,
    sum_byte_s=1 / 1e11,
    pair_s=3e-8,
    status_s=1e-5,
    piece_bytes=math.inf,
)
CLUSTER_TEXT = "100 Gb/s a GPU, 20 us a step (assumed)"
STATUS_MESSAGES = 2  # "weights" and "message": the others are said while clients train
SPREAD = 0.05  # of a client's training time, standard deviation / mean: like clients on like devices


def steps(ranks: int) -> int:
    """Of a tree over so many ranks."""
    return math.ceil(math.log2(max(ranks, 1)))


def terms(collective: str, ranks: int, nbytes: float, network: Network) -> tuple[float, float, float, float]:
    """How often a collective pays each constant of the network. nbytes: of the sum; of one rank's block; of what all
    get.
    """
    if ranks < 2:
        return (0.0, 0.0, 0.0, 0.0)
    clients, pieces = ranks - 1, max(1, math.ceil(nbytes / network.piece_bytes))
    latency, link, memory = {
        "agree": (0.0, 0.0, 0.0),
        "sum": (pieces * 2 * steps(clients), 2 * (clients - 1) / clients * nbytes, nbytes),
        "relay": (1, nbytes, 0.0),
        "gather": (steps(ranks), (ranks - 1) * nbytes, 0.0),  # into one link
        "broadcast": (steps(ranks), steps(ranks) * nbytes, 0.0),
    }[collective]
    crowd = max(1.0, ranks / network.cores) if network.cores else 1.0
    all_move = crowd if collective in ("sum", "gather") else 1.0
    return (float(clients), latency * crowd, link * all_move, memory * all_move)


def seconds(collective: str, ranks: int, nbytes: float, network: Network) -> float:
    """Of one collective."""
    counted_s = sum(
        count * constant for count, constant in zip(terms(collective, ranks, nbytes, network), network.constants)
    )
    return counted_s + (network.pair_s * (ranks - 1) ** 2 if ranks > 1 else 0.0)


def status_messages_s(ranks: int, network: Network) -> float:
    """Of a round's status messages."""
    return STATUS_MESSAGES * network.status_s * (ranks - 1)


def straggle(workers: int, clients: int, spread: float) -> float:
    """The slowest of so many workers / their mean, each with so many clients."""
    largest = NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))
    return 1.0 + spread / math.sqrt(max(clients, 1)) * largest


@dataclass(frozen=True)
class Load:
    """What a round trains and moves. images: of a client, each as often as it is used; numbers: of the average;
    report_bytes: of a client; server_s: what rank 0 does beside the training; fixed_s: of a round, whatever is
    trained."""

    clients: int
    images: float
    numbers: int
    report_bytes: float = 0.0
    message_bytes: float = 0.0
    server_s: float = 0.0
    fixed_s: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Seconds of a round by part."""

    train_s: float
    server_s: float
    weights_s: float
    knowledge_s: float
    fixed_s: float
    is_alone: bool

    @property
    def round_s(self) -> float:
        beside_s = self.train_s + self.server_s if self.is_alone else max(self.train_s, self.server_s)
        return beside_s + self.weights_s + self.knowledge_s + self.fixed_s

    @property
    def without_server_s(self) -> float:
        return self.train_s + self.weights_s + self.knowledge_s + self.fixed_s

    @property
    def exchange_share(self) -> float:
        """Of the round: weights and knowledge."""
        return (self.weights_s + self.knowledge_s) / self.round_s


def round_cost(load: Load, ranks: int, workers: int, image_s: float, network: Network, spread: float = SPREAD) -> Cost:
    """A round of `load` on so many ranks (rank 0 is the server), of which `workers` train at the same time."""
    busiest = math.ceil(load.clients / workers)
    train_s = busiest * load.images * image_s * straggle(workers, busiest, spread)
    if network.cores and ranks > network.cores:
        train_s = max(train_s, (load.clients * load.images * image_s + load.server_s) / network.cores)
    slots = math.ceil(load.clients / max(ranks - 1, 1))
    cost = lambda collective, nbytes: seconds(collective, ranks, nbytes, network)
    weights_s = cost("sum", 8 * load.numbers) + cost("relay", 4 * load.numbers)
    knowledge_s = (
        cost("gather", slots * load.report_bytes)
        + cost("broadcast", load.message_bytes)
        + cost("agree", 0)
        + status_messages_s(ranks, network)
    )
    return Cost(train_s, load.server_s, weights_s, knowledge_s, load.fixed_s, ranks == 1)
