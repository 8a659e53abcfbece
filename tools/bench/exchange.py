"""The exchange rows of tools.bench, run on every rank: `mpirun -n RANKS python -m tools.bench.exchange FLOATS REPEATS`.

Alternates our exact exchange (conversions and barrier included), one bare MPI all-reduce of as many bytes, and a
gather, sum and broadcast of pickled state dicts. Rank 0 is the server and contributes nothing. Prints one JSON object:
seconds of the slowest rank per repeat, and the plan of the communicator.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import torch

from hkd_hpc.aggregate import FixedPointSum
from hkd_hpc.comm.transports.base import Comm

from .collectives import on_every_rank, seconds

TENSORS = 124  # in the state dict of the ResNet18
WEIGHT = 375  # images of a client


class Exchange:
    """The three ways to average one float32 vector per client rank. `mpi`: mpi4py's module, started by the World."""

    def __init__(self, comm: Comm, mpi: Any, floats: int):
        self.comm, self.mpi, self.world = comm, mpi, mpi.COMM_WORLD
        self.values_V = torch.full((floats,), float(comm.rank))
        self.mean_V = torch.empty(floats)
        self.sum = FixedPointSum(floats, WEIGHT * comm.size)
        self.bare_V = np.zeros(floats + 1)  # float64, as many bytes as the exact sum moves
        self.state = {f"tensor{i}": part.clone() for i, part in enumerate(torch.chunk(self.values_V, TENSORS))}

    def exact(self) -> None:
        self.sum.clear()
        if self.comm.rank:
            self.sum.add(self.values_V, WEIGHT)
        summed = self.comm.summed(self.sum.pieces(self.comm.piece), self.sum.length + 1)
        self.sum.mean_into(self.mean_V, summed)
        self.comm.relay(self.sum.parts(self.mean_V))

    def bare(self) -> None:
        self.world.Allreduce(self.mpi.IN_PLACE, self.bare_V)

    def pickled(self) -> None:
        states = self.world.gather(self.state if self.comm.rank else None)
        mean = None
        if self.comm.rank == 0:
            mean = {name: sum(state[name] for state in states[1:]) / (len(states) - 1) for name in states[1]}
        self.world.bcast(mean)

    def check(self) -> None:
        """The mean of ranks 1 .. n - 1 is n / 2. RuntimeError when the exact exchange gave something else."""
        if not bool((self.mean_V == self.comm.size / 2).all()):
            raise RuntimeError(f"the exact exchange gave {self.mean_V[0]} instead of {self.comm.size / 2}")


def measure(comm: Comm, mpi: Any, floats: int, repeats: int) -> dict[str, Any]:
    """Seconds by way, and the plan. A first pass, which touches the memory, does not count."""
    exchange = Exchange(comm, mpi, floats)
    ways = {"exact": exchange.exact, "bare": exchange.bare, "pickled": exchange.pickled}
    passes = [{name: seconds(mpi, way) for name, way in ways.items()} for _ in range(repeats + 1)]
    exchange.check()
    return {**{name: [found[name] for found in passes[1:]] for name in ways}, "plan": comm.plan_line}


if __name__ == "__main__":
    on_every_rank(partial(measure, floats=int(sys.argv[1]), repeats=int(sys.argv[2])))
