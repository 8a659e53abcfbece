"""The collectives' rows of `tools.bench --scaling`, run on every rank: `mpirun -n RANKS python -m
tools.bench.collectives REPEATS POINT...`, a point being COLLECTIVE:BYTES. Prints one JSON object: seconds of the
slowest rank by point and repeat.

BYTES: of the exact sum (8 a number), of the mean that is relayed (4 a number), of each rank's block, of what all ranks
get.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from hkd_hpc.aggregate import FixedPointSum
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.comm.world import World

WEIGHT = 375  # images of a client
LARGE_BYTES, MORE = 1 << 20, 5  # what takes a millisecond is repeated more often


def sum_of(comm: Comm, numbers: int) -> Callable[[], None]:
    """The exact sum and its division, without the relay to rank 0."""
    total, values_V = FixedPointSum(numbers, WEIGHT * comm.size), torch.full((numbers,), float(comm.rank))

    def work() -> None:
        total.clear()
        if comm.rank:
            total.add(values_V, WEIGHT)
        total.mean_into(values_V, comm.summed(total.pieces(comm.piece), total.length + 1))

    return work


def work_of(comm: Comm, collective: str, nbytes: int) -> Callable[[], object]:
    """One call of a collective, its tensors made before."""
    if collective == "agree":
        return comm.agree
    if collective == "sum":
        return sum_of(comm, nbytes // 8)
    if collective == "relay":
        return partial(comm.relay, [torch.zeros(nbytes // 4)])
    block = np.zeros(nbytes, np.uint8)
    return partial(getattr(comm, collective), block, "knowledge")


def seconds(mpi: Any, work: Callable[[], object]) -> float:
    """Of the slowest rank. Not by mpi4py's `allreduce` of objects: it waits with Python's lock held, and on rank 0 the
    thread that lets the others go on from a barrier needs it."""
    mpi.COMM_WORLD.Barrier()
    start_s = mpi.Wtime()
    work()
    slowest_s = np.array([mpi.Wtime() - start_s])
    mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, slowest_s, mpi.MAX)
    return float(slowest_s[0])


def on_every_rank(measure: Callable[[Comm, Any], dict[str, Any]]) -> None:
    """Rank 0 prints what it has measured, one JSON object. `measure` gets mpi4py's module too."""
    with World.open() as world:
        comm = world.connect(device="cpu")
        from mpi4py import MPI  # only now: the World says how MPI is started

        torch.set_num_threads(1)
        found = measure(comm, MPI)
        if comm.rank == 0:
            print(json.dumps(found), flush=True)


def measure(comm: Comm, mpi: Any, repeats: int, points: list[str]) -> dict[str, list[float]]:
    """Seconds by point."""
    found = {}
    for point in points:
        collective, _, nbytes = point.partition(":")
        work = work_of(comm, collective, int(nbytes))
        work()  # touches the memory
        found[point] = [seconds(mpi, work) for _ in range(repeats if int(nbytes) >= LARGE_BYTES else MORE * repeats)]
    return found


if __name__ == "__main__":
    on_every_rank(partial(measure, repeats=int(sys.argv[1]), points=sys.argv[2:]))
