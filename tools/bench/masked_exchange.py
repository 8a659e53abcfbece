"""The rows of tools.bench.masks, run on every rank: `mpirun -n RANKS python -m tools.bench.masked_exchange FLOATS
REPEATS`. Prints one JSON object: seconds of the slowest rank by step and repeat.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from hkd_hpc.aggregate import FixedPointSum
from hkd_hpc.cohort import assign_clients
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.secure_sum.exchange import SecureSum

from .collectives import on_every_rank, seconds

CLIENTS = 10
WEIGHT = 375  # images of a client


class MaskedExchange:
    """The weights of ten clients, averaged with and without masks, step by step."""

    def __init__(self, comm: Comm, floats: int) -> None:
        self.comm, rank_of = comm, assign_clients([WEIGHT] * CLIENTS, comm.size)
        self.here = [client for client, rank in enumerate(rank_of) if rank == comm.rank]
        self.values_V, self.mean_V = torch.full((floats,), float(comm.rank)), torch.empty(floats)
        self.sum = FixedPointSum(floats, WEIGHT * CLIENTS)
        self.secure_sum = SecureSum(comm, rank_of, ["small"] * CLIENTS)
        self.dropped: set[int] = set()

    def keys(self) -> None:
        """Two gathers and broadcasts."""
        self.secure_sum.agree_on_keys(1, range(CLIENTS))

    def masks(self) -> None:
        """Of the clients here."""
        self.secure_sum.make_masks([self.sum.numbers], [client for client in self.here if client not in self.dropped])

    def take(self) -> None:
        """The numbers under their masks."""
        self.sum.clear()
        if self.comm.rank:
            self.sum.add(self.values_V, WEIGHT)
            self.secure_sum.add_masked(self.sum.pieces(self.comm.piece))

    def unmask(self) -> None:
        """A broadcast and an agreement; with somebody dropped, shares and what his masks left."""
        self.secure_sum.unmask(1, [client for client in range(CLIENTS) if client not in self.dropped])

    def plain(self) -> None:
        """The exchange as it is without masks."""
        self.comm.at(1, "weights")
        self.sum.clear()
        if self.comm.rank:
            self.sum.add(self.values_V, WEIGHT)
        self._mean(self.comm.summed(self.sum.pieces(self.comm.piece), self.sum.numbers))

    def masked(self) -> None:
        """The same of what `take` left."""
        self.comm.at(1, "weights")
        self._mean(self.secure_sum.summed(self.sum.numbers))

    def _mean(self, summed: Iterator[torch.Tensor]) -> None:
        self.sum.mean_into(self.mean_V, summed)
        self.comm.relay(self.sum.parts(self.mean_V))

    def check(self) -> None:
        """The mean of ranks 1 .. n - 1 is n / 2. RuntimeError when the exchange gave something else."""
        if not bool((self.mean_V == self.comm.size / 2).all()):
            raise RuntimeError(f"the exchange gave {self.mean_V[0]} instead of {self.comm.size / 2}")


def measure(comm: Comm, mpi: Any, floats: int, repeats: int) -> dict[str, list[float]]:
    """Seconds by step, all steps in turns; a first turn, which touches the memory, does not count."""
    exchange, turns = MaskedExchange(comm, floats), []
    for _ in range(repeats + 1):
        steps = (exchange.plain, exchange.keys, exchange.masks, exchange.take, exchange.unmask, exchange.masked)
        turn = {step.__name__: seconds(mpi, step) for step in steps}
        exchange.check()
        exchange.dropped = {0}
        exchange.keys()
        exchange.masks()
        turn["dropped"] = seconds(mpi, exchange.unmask)
        exchange.dropped = set()
        turns.append(turn)
    return {name: [turn[name] for turn in turns[1:]] for name in turns[0]}


if __name__ == "__main__":
    on_every_rank(partial(measure, floats=int(sys.argv[1]), repeats=int(sys.argv[2])))
