"""The second half of opening the world: torch, devices, and the communicator that fits them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hkd_hpc.comm.control.rendezvous import Member
from hkd_hpc.comm.control.watch import speak
from hkd_hpc.comm.cores import describe_cores, describe_ranks, own_cores
from hkd_hpc.comm.devices import (
    Plan,
    choose_backend,
    cuda_identity,
    describe,
    device_offset,
    pick_device,
    sharers,
    visible_devices,
)
from hkd_hpc.comm.interfaces import check_interfaces
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.errors import UsageError

if TYPE_CHECKING:
    import torch

    from hkd_hpc.comm.transports.mpi import MpiWorld
    from hkd_hpc.comm.world import World

DEVICES = ("auto", "cpu", "cuda")


def connect(
    world: World, members: list[Member], address: str, mpi: MpiWorld | None, requested: str, backend: str
) -> Comm:
    """Choose this rank's device and the transport of all, and return the communicator. See World.connect."""
    if requested not in DEVICES:
        raise UsageError(f"run.device={requested} is unknown; allowed: {', '.join(DEVICES)}")
    if world.size > 1 and (mpi is None or backend in ("gloo", "nccl")):  # for certain, before anybody pays for torch
        check_interfaces(os.environ, backend == "nccl")
    import torch

    index = pick_device(world.local_rank + device_offset(os.environ), visible_devices(requested))
    plan, cores = agree_on_plan(world, members, index, mpi is not None, backend)
    if requested == "cuda" and world.rank == 0:
        _say_what_is_absent(plan)
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    if index is not None:
        torch.cuda.set_device(device)
    comm = make_comm(world, plan, address, mpi, device)
    comm.sharers = sharers(plan.device_by_rank, world.rank)
    comm.cores_line, comm.rank_lines = describe_cores(cores), describe_ranks(plan, cores)
    return comm


def agree_on_plan(
    world: World, members: list[Member], index: int | None, has_mpi: bool, backend: str
) -> tuple[Plan, list[str]]:
    """Exchange (machine, device, cores) of every rank over the control plane; every rank comes to the same plan."""
    import torch

    device = None if index is None else cuda_identity(index)
    mine = [device, torch.distributed.is_available() and _has_nccl(), own_cores()]
    seen = world.control.meet(["devices"], mine)
    hosts = [member.host for member in members]
    if len({member.machine for member in members}) > len(set(hosts)):  # two machines of one name: tell them apart
        hosts = [member.machine for member in members]
    places = [(host, device) for host, (device, _, _) in zip(hosts, seen)]
    plan = choose_backend(backend, places, has_mpi, all(has_nccl for _, has_nccl, _ in seen))
    return plan, [cores for _, _, cores in seen]


def make_comm(world: World, plan: Plan, address: str, mpi: MpiWorld | None, device: torch.device) -> Comm:
    """The communicator of the plan."""
    note = f"; {mpi.note}" if mpi and mpi.note else ""
    local = (world.local_rank, world.local_size)
    common = (world.control, world.rank, world.hosts, local, device, describe(plan) + note)
    if plan.backend == "local":
        from hkd_hpc.comm.transports.local import LocalComm

        return LocalComm(*common)
    if plan.backend == "mpi" and mpi is not None:
        from hkd_hpc.comm.transports.mpi import MpiComm

        return MpiComm(mpi, *common)
    from hkd_hpc.comm.transports.torch_dist import TorchComm, open_groups

    check_interfaces(os.environ, plan.backend == "nccl")
    group = open_groups(world.control, world.rank, world.size, address, plan.backend == "nccl")
    return TorchComm(plan.backend == "nccl", group, *common)


def _has_nccl() -> bool:
    import torch.distributed as dist

    return dist.is_nccl_available()


def _say_what_is_absent(plan: Plan) -> None:
    """CUDA was asked for: say in one line which ranks compute on the CPU all the same."""
    without = [rank for rank, (_, device) in enumerate(plan.device_by_rank) if device is None]
    if without:
        ranks = "every rank" if len(without) == len(plan.device_by_rank) else f"ranks {', '.join(map(str, without))}"
        speak(
            f"hkd_hpc: run.device=cuda, but torch sees no CUDA or ROCm device for {ranks} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): the CPU is used there"
        )
