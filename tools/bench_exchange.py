"""The exchange rows of tools.bench, run on every rank: `mpirun -n RANKS python -m tools.bench_exchange FLOATS REPEATS`.

Alternates one bare all-reduce of the buffer's bytes, our exact exchange (conversions included) and a gather, sum and
broadcast of pickled state dicts. Rank 0 is the server and contributes nothing. Prints one JSON object: seconds of the
slowest rank, per repeat.
"""
from __future__ import annotations

import json
import sys

import torch
from mpi4py import MPI

from hkd_hpc.aggregate import FixedPointSum

TENSORS = 124  # in the state dict of the ResNet18
WEIGHT = 375   # images of a client


class Exchange:
    """The three ways to average one float32 vector per client rank."""

    def __init__(self, world: MPI.Comm, floats: int):
        self.world = world
        self.values_V = torch.full((floats,), float(world.rank))
        self.mean_V = torch.empty(floats)
        self.sum = FixedPointSum(floats, WEIGHT * world.size)
        self.state = {f"tensor{i}": part for i, part in enumerate(torch.chunk(self.values_V, TENSORS))}

    def bare(self) -> None:
        self.world.Allreduce(MPI.IN_PLACE, self.sum.settle().numpy())

    def exact(self) -> None:
        self.sum.clear()
        if self.world.rank:
            self.sum.add(self.values_V, WEIGHT)
        self.world.Allreduce(MPI.IN_PLACE, self.sum.settle().numpy())
        self.sum.mean_into(self.mean_V)

    def pickled(self) -> None:
        states = self.world.gather(self.state if self.world.rank else None)
        mean = None
        if self.world.rank == 0:
            mean = {name: sum(state[name] for state in states[1:]) / (len(states) - 1) for name in states[1]}
        self.world.bcast(mean)

    def seconds(self, way) -> float:
        """Of the slowest rank."""
        self.world.Barrier()
        start_s = MPI.Wtime()
        way()
        return self.world.allreduce(MPI.Wtime() - start_s, MPI.MAX)


def check(exchange: Exchange) -> None:
    """The mean of ranks 1 .. n - 1 is n / 2."""
    expected = exchange.world.size / 2
    if not bool((exchange.mean_V == expected).all()):
        raise RuntimeError(f"the exact exchange gave {exchange.mean_V[0]} instead of {expected}")


def main(floats: int, repeats: int) -> None:
    torch.set_num_threads(1)
    exchange = Exchange(MPI.COMM_WORLD, floats)
    ways = {"exact": exchange.exact, "bare": exchange.bare, "pickled": exchange.pickled}
    found = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            wall_s = exchange.seconds(way)
            if name == "exact":
                check(exchange)
            if repeat:  # the first one touches the memory
                found[name].append(wall_s)
    if exchange.world.rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
