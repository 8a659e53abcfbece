"""One rank of a job under a real launcher, for the tests: `mpirun -n 4 python comm_script.py MODE [argument]`.

Most modes need no torch, so that a test takes a second or two.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time

from hkd_hpc.comm import World
from hkd_hpc.common.errors import UsageError

VICTIM = 2


def contract(world: World) -> None:
    """The whole contract, on the transport of the second argument and the devices of the third (default cpu)."""
    import comm_contract

    comm = world.connect(device=(*sys.argv, "cpu")[3], backend=sys.argv[2])
    comm_contract.check_all(comm)
    seen = world.control.barrier(["cray"], os.environ.get("MPICH_GPU_SUPPORT_ENABLED"))
    if comm.rank == 0:
        print(comm.plan_line, comm.cores_line, " ".join(map(str, seen)), sep="\n", flush=True)


def contract_with_nccl(world: World) -> None:
    """On one GPU: an NCCL group of rank 1 alone, and rank 0 outside it, which gets the sum over the CPU group."""
    import comm_contract
    import torch

    from hkd_hpc.comm.connect import make_comm
    from hkd_hpc.comm.devices import Plan
    from hkd_hpc.comm.transports.base import RankInfo

    device = torch.device("cuda" if world.rank else "cpu")
    plan = Plan("nccl", (("host", None), ("host", "GPU")), (1,), "a test")
    topology = world.topology
    info = RankInfo(world.rank, world.hosts, topology.local_rank, topology.local_size, device, "a test")
    comm = make_comm(world.control, plan, info, "127.0.0.1", None)
    comm_contract.check_all(comm)
    comm.close()
    if world.rank == 0:
        print("contract holds with rank 0 outside the NCCL group", flush=True)


def kill_in_sum(world: World) -> None:
    """One rank is killed while the others sit in the all-reduce itself."""
    import torch
    from comm_contract import sum_

    comm = world.connect(device="cpu")
    comm.at(3, "weights")
    if comm.rank == VICTIM:
        comm._sum = lambda buffer: os.kill(os.getpid(), signal.SIGKILL)
    sum_(comm, torch.zeros(1000, dtype=torch.float64))


def fail(world: World) -> None:
    """The rank of the third argument fails in the way of the second one; the others wait for it, or compute."""
    world.control.set_status(2, "training", 5)
    way, victim = sys.argv[2], int(sys.argv[3])
    if world.rank == victim:
        FAILURES[way]()
    if world.rank % 2:
        time.sleep(600)
    world.control.barrier(["after training"])


def raise_everywhere(world: World) -> None:
    """All ranks find the same mistake in the input."""
    raise UsageError("scheme.name=nope is unknown; allowed: fedavg")


def one_job(world: World) -> None:
    """Do the ranks that found each other belong to one job? Their parent is the same mpirun."""
    parents = world.control.barrier(["parents"], os.getppid())
    if world.rank == 0:
        print(f"{len(parents)} ranks of {'one job' if len(set(parents)) == 1 else 'several jobs'}", flush=True)


def address(world: World) -> None:
    """Where rank 0 listens."""
    if world.rank == 0:
        print(world.address, flush=True)


def beside_other_traffic(world: World) -> None:
    """A user's own code has sent rank 0 something on COMM_WORLD before the relay does; at the end nothing is left."""
    import numpy as np
    import torch
    from comm_contract import sum_
    from mpi4py import MPI

    comm = world.connect(device="cpu")
    own = np.full(4, 7.0)
    request = MPI.COMM_WORLD.Isend(own, dest=0) if comm.rank == 1 else MPI.REQUEST_NULL
    numbers = torch.ones(4, dtype=torch.float64)
    sum_(comm, numbers)
    if comm.rank == 0:
        got = np.zeros(4)
        MPI.COMM_WORLD.Recv(got, source=1)
        print(numbers.tolist(), got.tolist(), MPI.Query_thread() == MPI.THREAD_FUNNELED, flush=True)
        used = world._mpi.comm, comm._clients
        atexit.register(lambda: print([bool(each) for each in used], flush=True))
    request.Wait()


def stop_in_mpi(world: World) -> None:
    """Rank 1 is stopped as it comes to a call of MPI in which the others then wait: the making of a group, or the
    end.
    """
    from hkd_hpc.comm import world as world_module
    from hkd_hpc.comm.transports import mpi

    mpi.SPLIT_S = world_module.FINALIZE_S = 1.0
    owner, name = {"split": (mpi.MpiComm, "__init__"), "finalize": (mpi.MpiWorld, "finish")}[sys.argv[2]]
    original = getattr(owner, name)

    def stopped(*args: object) -> None:
        if world.rank == 1:
            FAILURES["stop"]()
        original(*args)

    setattr(owner, name, stopped)
    world.connect(device="cpu")


def wait(world: World) -> None:
    """Say which processes we are, and stay."""
    world.control.barrier(["all here"])
    print(f"pid {os.getpid()}", flush=True)
    time.sleep(600)


def _raise() -> None:
    raise ArithmeticError("a bad number")


FAILURES = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": _raise,
    "sys.exit": lambda: sys.exit(0),
    "os._exit": lambda: os._exit(0),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(600)),
}
MODES = {
    function.__name__: function
    for function in (
        address,
        beside_other_traffic,
        contract,
        contract_with_nccl,
        kill_in_sum,
        fail,
        raise_everywhere,
        one_job,
        stop_in_mpi,
        wait,
    )
}

if __name__ == "__main__":
    backend = sys.argv[2] if sys.argv[1] == "contract" else "auto"
    with World.open(backend=backend, timeout_s=float(os.environ.get("TEST_TIMEOUT_S", "120"))) as world:
        MODES[sys.argv[1]](world)
