"""Every collective of a round at this suite's sizes: are the values right, to the bit, and how fast do they travel?

Whole numbers are sent, so that the expected values are known exactly, whatever the order of the ranks. Times are from
the moment in which all ranks are there to the one in which the last of them is done; the first turn is not counted.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.common.lazy import torch
from hkd_hpc.console.messages import bytes_text
from hkd_hpc.doctor.context import Context
from hkd_hpc.doctor.findings import ERROR, WARNING, Finding, Kind, Section

NAME = "collectives"
TURNS = 5  # that are timed, fewer where they take longer than
TURNS_S = 1.0
COPIED_BYTES = 64 << 20
ALLOWED_S, ALLOWED_COPIES = 0.05, 100  # a collective is slow above 50 ms and 100 times a copy of the same bytes
PERIOD = 251  # of the numbers that are sent: prime, below 256

# of a network with 10 classes and 64 or 512 features: all floats of its state, which is what travels
SMALL_FLOATS, RESNET18_FLOATS = 102_832, 11_453_904
REPORT_BYTES = 4 * 10 * (64 + 10 + 1)  # a client's hyper-knowledge and counts: 10 classes, 64 features
LARGE_REPORT_BYTES = 4 * 100 * (512 + 100 + 1)  # 100 classes, 512 features

WRONG = Kind(
    "collectives.wrong",
    ERROR,
    "every result of a run would be wrong",
    "another transport (comm.backend=gloo, comm.backend=mpi) until MPI, NCCL or the network is mended",
)
SLOW = Kind(
    "collectives.slow",
    WARNING,
    "the ranks wait for the network, or for each other's turn on a core, in each round",
    "see what placement and transport say above; else fewer ranks, each with several clients, on fewer hosts",
)

Once = Callable[[Comm, int, bool], int]


@dataclass(frozen=True)
class Transfer:
    """One collective at one size.

    Attributes:
        operation: its name.
        what: what a round sends with it.
        nbytes: of one rank.
        once: does it and gives how many values were wrong here; what would be timed too is checked in the first turn.
        all_ranks: whether nbytes travel for each rank but one, or once.
    """

    operation: str
    what: str
    nbytes: int
    once: Once
    all_ranks: bool = True

    def moved_bytes(self, ranks: int) -> int:
        """Handed to the transport, over all ranks."""
        return self.nbytes * (ranks - 1 if self.all_ranks else 1)


@dataclass(frozen=True)
class Measured:
    """A transfer in this job: the seconds of each turn in the slowest rank, and the values that were wrong by rank."""

    operation: str
    what: str
    nbytes: int
    moved_bytes: int
    seconds: list[float]
    wrong: list[int]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


# ---- the collectives, each with numbers that tell rank and place


def pattern(length: int, dtype: Any) -> np.ndarray:
    """0, 1, ... 250, 0, 1, ..."""
    return np.resize(np.arange(PERIOD, dtype=dtype), length)


def gather(comm: Comm, nbytes: int, is_first: bool) -> int:
    """Rank r sends the pattern shifted by r."""
    sent = np.roll(pattern(nbytes, np.uint8), comm.rank)
    rows = comm.gather(sent, "knowledge_up")
    if rows is None:
        return 0
    return sum(int((row != np.roll(pattern(nbytes, np.uint8), rank)).sum()) for rank, row in enumerate(rows))


def broadcast(comm: Comm, nbytes: int, is_first: bool) -> int:
    """Rank 0 sends the pattern; before it the others hold something else everywhere."""
    expected = pattern(nbytes, np.uint8)
    block = expected.copy() if comm.rank == 0 else expected + 1
    comm.broadcast(block, "knowledge_down")
    return int((block != expected).sum())


def all_reduce(comm: Comm, nbytes: int, is_first: bool) -> int:
    """Client rank r sends r times the pattern, in pieces as a round does."""
    numbers = nbytes // 8
    own = torch.from_numpy(pattern(min(numbers, comm.piece), np.float64)).to(comm.device)
    factor, wrong = comm.size * (comm.size - 1) // 2, 0  # 1 + 2 + ... + (size - 1)
    for piece in comm.summed(pieces_of(own * comm.rank, numbers), numbers):
        if is_first:
            wrong += int((piece != own[: len(piece)] * factor).sum())
        elif piece.is_cuda:
            torch.cuda.synchronize(piece.device)  # NCCL comes back before it is done
    return wrong


def pieces_of(source: torch.Tensor, numbers: int) -> Iterator[torch.Tensor]:
    """So many numbers, copied from the beginning of `source` into one buffer again and again."""
    buffer = torch.empty_like(source)
    for start in range(0, numbers, len(source)):
        piece = buffer[: min(len(source), numbers - start)]
        yield piece.copy_(source[: len(piece)])


def relay(comm: Comm, nbytes: int, is_first: bool) -> int:
    """Rank 1 sends the pattern to rank 0, as it does with the mean of the weights."""
    expected = torch.from_numpy(pattern(nbytes // 4, np.float32))
    sent = (expected if comm.rank == 1 else expected + 1).to(comm.device)
    comm.relay([sent])
    return int((sent.cpu() != expected).sum()) if comm.rank == 0 else 0


TRANSFERS = (
    Transfer("gather", "reports, 10 classes", REPORT_BYTES, gather),
    Transfer("gather", "reports, 100 classes", LARGE_REPORT_BYTES, gather),
    Transfer("broadcast", "weights of small", 4 * SMALL_FLOATS, broadcast),
    Transfer("broadcast", "weights of ResNet18", 4 * RESNET18_FLOATS, broadcast),
    Transfer("all-reduce", "weights of small", 8 * SMALL_FLOATS, all_reduce),
    Transfer("all-reduce", "weights of ResNet18", 8 * RESNET18_FLOATS, all_reduce),
    Transfer("relay", "weights of ResNet18", 4 * RESNET18_FLOATS, relay, all_ranks=False),
)


# ---- measuring


def collect(context: Context) -> Section | None:
    """All ranks make every transfer; rank 0 alone copies."""
    comm = context.comm
    copy_mb_s = copy_speed() if comm.rank == 0 else 0.0
    if comm.size == 1:
        return Section(
            NAME, [f"one process: nothing travels; it copies {copy_mb_s:,.0f} MB/s"], {"copy_mb_s": copy_mb_s}
        )
    own = [measure(comm, transfer) for transfer in TRANSFERS]
    by_rank = [json.loads(text) for text in comm.gather_text(json.dumps(own))]
    return section_of(together(by_rank), copy_mb_s) if by_rank else None


def copy_speed() -> float:
    """MB/s, the median of some turns: the yardstick of this machine."""
    source = np.zeros(COPIED_BYTES, np.uint8)
    target, times_s = np.ones_like(source), []
    for _ in range(TURNS):
        began_s = time.perf_counter()
        np.copyto(target, source)
        times_s.append(time.perf_counter() - began_s)
    return COPIED_BYTES / 1e6 / statistics.median(times_s)


def measure(comm: Comm, transfer: Transfer) -> tuple[int, list[float]]:
    """(values that were wrong in this rank, its seconds of each turn); all ranks take the same turns."""
    times_s: list[float] = []
    wrong, began_s = transfer.once(comm, transfer.nbytes, True), time.perf_counter()
    while len(times_s) < TURNS:
        before_s = comm.transfer_s
        wrong += transfer.once(comm, transfer.nbytes, False)
        times_s.append(comm.transfer_s - before_s)
        if comm.agree(int(comm.rank == 0 and time.perf_counter() - began_s > TURNS_S)):
            break
    return wrong, times_s


def together(by_rank: Sequence[Sequence[tuple[int, list[float]]]]) -> list[Measured]:
    """Of each transfer, what all ranks measured."""
    return [
        Measured(
            transfer.operation,
            transfer.what,
            transfer.nbytes,
            transfer.moved_bytes(len(by_rank)),
            [max(turn) for turn in zip(*(rank[number][1] for rank in by_rank))],
            [rank[number][0] for rank in by_rank],
        )
        for number, transfer in enumerate(TRANSFERS)
    ]


# ---- what it means


def section_of(found: Sequence[Measured], copy_mb_s: float) -> Section:
    """The section, from all transfers and the speed of a copy."""
    lines = [f"this machine copies {copy_mb_s:,.0f} MB/s", *(line_of(measured) for measured in found)]
    facts = {"copy_mb_s": copy_mb_s, "transfers": [vars(measured) for measured in found]}
    findings = [finding for measured in found for finding in check(measured, copy_mb_s)]
    return Section(NAME, lines, facts, findings)


def line_of(measured: Measured) -> str:
    """A transfer in one line: median, spread, and speed of all bytes that travelled."""
    median_s, low_s, high_s = measured.median_s, min(measured.seconds), max(measured.seconds)
    return (
        f"{measured.operation:11s}{measured.what:21s}{bytes_text(measured.nbytes):>8s} a rank"
        f"{1000 * median_s:9.1f} ms {measured.moved_bytes / 1e6 / max(median_s, 1e-9):7,.0f} MB/s"
        f"  ({1000 * low_s:.1f} to {1000 * high_s:.1f} ms)"
    )


def check(measured: Measured, copy_mb_s: float) -> list[Finding]:
    """Wrong values, or a median beyond what is allowed."""
    name = f"{measured.operation} of {measured.what} ({bytes_text(measured.nbytes)} a rank)"
    wrong = {rank: count for rank, count in enumerate(measured.wrong) if count}
    if wrong:
        counts = ", ".join(f"{count:,} on rank {rank}" for rank, count in wrong.items())
        return [WRONG.found(f"{name}: wrong values: {counts}")]
    allowed_s = ALLOWED_S + ALLOWED_COPIES * measured.moved_bytes / 1e6 / copy_mb_s
    if measured.median_s <= allowed_s:
        return []
    return [
        SLOW.found(
            f"{name} takes {1000 * measured.median_s:,.0f} ms; from {1000 * allowed_s:,.0f} ms on "
            f"({1000 * ALLOWED_S:.0f} ms and {ALLOWED_COPIES} times a copy of its bytes) it is slow"
        )
    ]
