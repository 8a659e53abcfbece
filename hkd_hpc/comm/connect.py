"""The second half of opening the world: torch, devices, and the communicator that fits them."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from hkd_hpc.comm.control.rendezvous import Topology
from hkd_hpc.comm.cores import describe_cores, describe_ranks, own_cores
from hkd_hpc.comm.devices import (
    Plan,
    choose_backend,
    cuda_identity,
    describe,
    device_offset,
    pick_device,
    require_devices,
    sharers,
    visible_devices,
)
from hkd_hpc.comm.interfaces import check_interfaces
from hkd_hpc.comm.transports.base import Comm, ControlPlane, RankInfo
from hkd_hpc.comm.transports.local import LocalComm
from hkd_hpc.comm.transports.mpi import MpiComm, MpiWorld
from hkd_hpc.common.errors import UsageError

DEVICES = ("auto", "cpu", "cuda")


def connect(
    control: ControlPlane,
    topology: Topology,
    address: str,
    mpi: MpiWorld | None,
    requested: str,
    backend: str,
    signals_safe: AbstractContextManager[None],
) -> Comm:
    """Choose this rank's device and the transport of all, and return the communicator. See World.connect.

    `signals_safe`: within it no signal raises an exception, which would abort the process in torch's C++.
    """
    if requested not in DEVICES:
        raise UsageError(f"run.device={requested} is unknown; allowed: {', '.join(DEVICES)}")
    if topology.size > 1 and (mpi is None or backend in ("gloo", "nccl")):  # for certain, before anybody pays for torch
        check_interfaces(os.environ, backend == "nccl")
    with signals_safe:
        import torch  # takes seconds: only once the input is known to be good

    index = pick_device(topology.local_rank + device_offset(os.environ), visible_devices(requested))
    plan, cores = agree_on_plan(control, topology, index, mpi is not None, backend)
    if requested == "cuda":
        require_devices(plan, os.environ)
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    if index is not None:
        torch.cuda.set_device(device)
    remark = f"; {mpi.remark}" if mpi and mpi.remark else ""
    info = RankInfo(
        topology.rank,
        topology.hosts,
        topology.local_rank,
        topology.local_size,
        device,
        plan_line=describe(plan) + remark,
        sharers=sharers(plan.device_by_rank, topology.rank),
        cores_line=describe_cores(cores),
        rank_lines=describe_ranks(plan, cores),
        devices=[device or "cpu" for _, device in plan.device_by_rank],
        backend=plan.backend,
    )
    return make_comm(control, plan, info, address, mpi)


def agree_on_plan(
    control: ControlPlane, topology: Topology, index: int | None, has_mpi: bool, backend: str
) -> tuple[Plan, list[str]]:
    """Exchange (device, cores) of every rank over the control plane; every rank comes to the same plan."""
    import torch

    device = None if index is None else cuda_identity(index)
    mine = [device, torch.distributed.is_available() and _has_nccl(), own_cores()]
    seen = control.barrier(["devices"], mine)
    host_devices = [(host, device) for host, (device, _, _) in zip(topology.hosts, seen)]
    plan = choose_backend(backend, host_devices, has_mpi, all(has_nccl for _, has_nccl, _ in seen))
    return plan, [cores for _, _, cores in seen]


def make_comm(control: ControlPlane, plan: Plan, info: RankInfo, address: str, mpi: MpiWorld | None) -> Comm:
    """The communicator of the plan."""
    if plan.backend == "local":
        return LocalComm(control, info)
    if plan.backend == "mpi" and mpi is not None:
        return MpiComm(mpi, control, info)
    if plan.backend not in ("gloo", "nccl"):
        raise ValueError(f"no communicator is made for {plan.backend}")
    from hkd_hpc.comm.transports.torch_dist import TorchComm, open_groups  # imports torch, see above

    check_interfaces(os.environ, plan.backend == "nccl")
    group = open_groups(control, info.rank, len(info.hosts), address, plan.backend == "nccl")
    return TorchComm(plan.backend == "nccl", group, control, info)


def _has_nccl() -> bool:
    import torch.distributed as dist

    return dist.is_nccl_available()
