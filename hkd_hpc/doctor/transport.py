"""What would carry the weights, over which network interface, and why: decided by what `train` calls."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hkd_hpc.comm.devices import nccl_members
from hkd_hpc.comm.interfaces import GLOO, NCCL, address_of, interface_of, own_address_towards
from hkd_hpc.doctor.context import Context
from hkd_hpc.doctor.findings import NOTE, WARNING, Finding, Kind, Section

NAME = "transport"
INTERFACES = Path("/sys/class/net")
MPI_CHOICES = (  # beginnings of the variables with which people tell MPI what to use
    *(f"OMPI_MCA_{part}" for part in ("btl", "pml", "mtl", "coll")),
    "UCX_NET_DEVICES",
    "UCX_TLS",
    "FI_PROVIDER",
    "MPICH_OFI_",
    "I_MPI_FABRICS",
)

SLOW_INTERFACE = Kind(
    "transport.slow_interface",
    WARNING,
    "weights and knowledge take the slower network",
    "export {variable}={interface} (slurm: as a line of SETUP, or [environment] of the site file)",
)
HOST_MEMORY = Kind(
    "transport.host_memory",
    NOTE,
    "each round copies the weights from each GPU to the host and back",
    "comm.backend=auto takes NCCL or RCCL here",
)


def collect(context: Context) -> Section | None:
    """Every rank tells its interfaces; rank 0 compares."""
    ranks = context.gathered(own_facts(context))
    if not ranks:
        return None
    return section_of(
        context.comm.plan_line, context.comm.backend, ranks, chosen_by_mpi(os.environ), context.several_hosts
    )


def own_facts(context: Context) -> dict[str, Any]:
    """Of this rank: its way to rank 0, and what else it could take."""
    own = own_address_towards(context.world.address)
    return {
        "host": context.comm.hosts[context.comm.rank],
        "address": own,
        "interface": interface_of(own) or "?",
        "gloo": os.environ.get(GLOO, ""),
        "nccl": os.environ.get(NCCL, ""),
        "speeds_mb_s": {name: speed for _, name in socket.if_nameindex() if (speed := speed_of(name))},
        "device": context.device,
    }


def speed_of(interface: str) -> float:
    """MB/s of an interface that is up, as the kernel has it; 0 where it does not say, or where the interface is no way
    to other hosts: it has no address, or no adapter (bridges and pairs of containers say 10 Gbit/s)."""
    folder = INTERFACES / interface
    try:
        is_up = (folder / "operstate").read_text().strip() == "up"
        has_adapter = any((folder / of_adapters).exists() for of_adapters in ("device", "bonding"))
        if not (is_up and has_adapter and address_of(interface)):
            return 0.0
        return max(0.0, int((folder / "speed").read_text()) / 8)
    except (OSError, ValueError):
        return 0.0


def chosen_by_mpi(env: Mapping[str, str]) -> list[str]:
    """Variables with which MPI was told what to use."""
    return [f"{name}={value}" for name, value in sorted(env.items()) if name.startswith(MPI_CHOICES)]


def section_of(
    plan_line: str, backend: str, ranks: Sequence[Mapping[str, Any]], told: Sequence[str], several_hosts: bool
) -> Section:
    """The section, from the facts of all ranks."""
    findings = check_devices(backend, ranks) + (check_interface(backend, ranks) if several_hosts else [])
    facts = {"backend": backend, "ranks": list(ranks), "mpi_variables": list(told)}
    return Section(NAME, [plan_line.partition("; devices:")[0], ways(backend, ranks[0], told)], facts, findings)


def ways(backend: str, own: Mapping[str, Any], told: Sequence[str]) -> str:
    """Rank 0's interfaces, in one line."""
    if backend == "local":
        return "nothing travels"
    parts = [f"control plane over {own['interface']} ({own['address']})"]
    if backend == "mpi":
        parts += [f"MPI chooses its own way, told {', '.join(told)}" if told else "MPI chooses its own way"]
    else:
        parts += [f"gloo over {own['gloo'] or 'what it finds'}"]
    parts += [f"NCCL over {own['nccl'] or 'what it finds'}"] if backend == "nccl" else []
    return "; ".join(parts)


def check_interface(backend: str, ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """An interface of gloo while a faster one is up; MPI and NCCL know more about theirs. One finding a job."""
    everywhere = set.intersection(*(set(facts["speeds_mb_s"]) for facts in ranks))  # one name is for all ranks
    for facts in ranks if backend == "gloo" else ():
        speeds, used = facts["speeds_mb_s"], facts["gloo"].partition(",")[0]
        fastest = max(sorted(everywhere), key=lambda name: speeds[name], default="")
        if used in speeds and fastest and speeds[fastest] > speeds[used]:
            text = (
                f"gloo takes {used} ({speeds[used]:g} MB/s) on {facts['host']}, while {fastest} "
                f"({speeds[fastest]:g} MB/s) is up"
            )
            return [SLOW_INTERFACE.found(text, variable=GLOO, interface=fastest)]
    return []


def check_devices(backend: str, ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """GPUs whose weights could travel from one to the next, and do not."""
    members = nccl_members([(facts["host"], facts["device"]) for facts in ranks])
    if backend == "nccl" or not members:
        return []
    return [HOST_MEMORY.found(f"each client rank has a GPU of its own, but weights go by {backend}")]
