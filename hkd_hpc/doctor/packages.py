"""Versions of all that a run is made of: the same on every rank, and fitting each other, the driver and the MPI."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hkd_hpc.comm.devices import rank_list
from hkd_hpc.config.identity import code_of
from hkd_hpc.doctor.findings import ERROR, NOTE, WARNING, Finding, Kind, Section
from hkd_hpc.doctor.job import Job
from hkd_hpc.errors import UsageError, obtainable
from hkd_hpc.runtime import versions
from hkd_hpc.runtime.environment import DEVICE_FILES

NAME = "packages"
DRIVERS = {"nvidia": "/proc/driver/nvidia/version", "amd": "/sys/module/amdgpu/version"}
INSTALLING = obtainable("docs/getting_started.md, Installing")
MPICH_LIKE = ("MPICH", "Intel", "CRAY", "Cray", "MVAPICH", "ParaStation")  # one ABI since 2014

DIFFERENT = Kind(
    "packages.different",
    ERROR,
    "ranks would compute other bits, or speak other protocols, than their neighbours",
    f"one environment for all nodes: a VENV on a shared disk, or STAGE=env.tar: {obtainable('slurm/README.md')}",
)
UNFIT = Kind(
    "packages.unfit",
    ERROR,
    "no run begins with these packages",
    f"what the line itself says; {INSTALLING}",
)
OTHER_MPI = Kind(
    "packages.other_mpi",
    ERROR,
    "mpi4py calls a library that it was not built for: wrong numbers or a crash, now or later",
    "MPICC=mpicc pip install --force-reinstall --no-binary mpi4py mpi4py, with the mpicc of the MPI to be used",
)
NO_DRIVER = Kind(
    "packages.no_driver",
    NOTE,
    "the CPU is used; that is all right where there is no GPU",
    "nothing, or a partition with GPUs: sbatch --gpus-per-node=1",
)
UNUSED_GPU = Kind(
    "packages.unused_gpu",
    WARNING,
    "the CPU is used though a GPU's driver is there",
    f"a torch of this GPU's kind: {INSTALLING}; or unset CUDA_VISIBLE_DEVICES and "
    "ROCR_VISIBLE_DEVICES; see python -c 'import torch; print(torch.version.cuda, torch.version.hip)'",
)


def look(job: Job) -> Section | None:
    """Every rank tells what it has; rank 0 compares."""
    ranks = job.gathered(own_facts(job))
    return section_of(ranks, unfit(job)) if ranks else None


def own_facts(job: Job) -> dict[str, Any]:
    """Of this rank."""
    return {
        "host": job.comm.hosts[job.comm.rank],
        "versions": found(job),
        "mpi_libraries": job.world.mpi_libraries(),
        "drivers": [vendor for vendor, file in DEVICE_FILES.items() if Path(file).exists()],
        "on_gpu": job.comm.device.type == "cuda",
        "device": job.config.run.device,
    }


def found(job: Job) -> dict[str, str]:
    """{what: its version}, as far as it is there."""
    import h5py
    import torch

    libraries = job.world.mpi_libraries()
    all_found = {
        "hkd_hpc": code_of(job.config)["code.hkd_hpc"][:12],
        "python": platform.python_version(),
        **{package: versions.installed(package) for package in versions.PACKAGES},
        "HDF5": h5py.version.hdf5_version,
        "MPI": libraries[1] if libraries else None,
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "NCCL": nccl_version(),
        **{f"driver {vendor}": driver_version(file) for vendor, file in DRIVERS.items()},
    }
    return {name: version for name, version in all_found.items() if version}


def nccl_version() -> str | None:
    """Of NCCL or RCCL in this torch, None without a GPU or in a torch that has none."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return None


def driver_version(file: str) -> str | None:
    """The first line of what the kernel's driver says of itself, None without one."""
    try:
        return Path(file).read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def unfit(job: Job) -> str:
    """What `train` would say against the packages here; empty where it says nothing."""
    try:
        versions.check(job.config.model.title, job.config.model.needs_torchvision)
    except UsageError as error:
        return str(error)
    return ""


def section_of(ranks: Sequence[Mapping[str, Any]], problem: str = "") -> Section:
    """The section, from the facts of all ranks, and what speaks against rank 0's packages."""
    line = ", ".join(f"{name} {version}" for name, version in ranks[0]["versions"].items())
    findings = [UNFIT.found(problem)] if problem else []
    findings += [*check_same(ranks), *check_mpi(ranks), *check_gpu(ranks)]
    return Section(NAME, [line], {"ranks": list(ranks)}, findings)


def check_same(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What is not the same everywhere, one finding each."""
    names = dict.fromkeys(name for facts in ranks for name in facts["versions"])
    findings = []
    for name in names:
        by_version: dict[str, list[int]] = {}
        for rank, facts in enumerate(ranks):
            by_version.setdefault(facts["versions"].get(name, "absent"), []).append(rank)
        if len(by_version) > 1:
            parts = [f"{version} on {of_hosts(ranks, members)}" for version, members in by_version.items()]
            findings.append(DIFFERENT.found(f"{name}: {', '.join(parts)}"))
    return findings


def of_hosts(ranks: Sequence[Mapping[str, Any]], members: Sequence[int]) -> str:
    """`ranks 0-2 (n1, n2)`"""
    hosts = dict.fromkeys(ranks[rank]["host"] for rank in members)
    return f"{rank_list(members)} ({', '.join(hosts)})"


def check_mpi(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """mpi4py built for one family of MPI, and loaded with another."""
    pairs = dict.fromkeys(tuple(facts["mpi_libraries"]) for facts in ranks if facts["mpi_libraries"])
    return [
        OTHER_MPI.found(f"mpi4py was built for {built}, and loads {loaded}")
        for built, loaded in pairs
        if family(built) != family(loaded)
    ]


def family(text: str) -> str:
    """Libraries of one family take each other's place."""
    return "MPICH" if any(name in text for name in MPICH_LIKE) else " ".join(text.split()[:2])


def check_gpu(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """A torch without a driver, or a driver that torch does not use."""
    without = [rank for rank, facts in enumerate(ranks) if is_for_gpu(facts) and not facts["drivers"]]
    unused = [rank for rank, facts in enumerate(ranks) if facts["drivers"] and not facts["on_gpu"]]
    unused = [rank for rank in unused if ranks[rank]["device"] != "cpu"]  # asked for
    found = (
        [NO_DRIVER.found(f"torch is built for GPUs, {of_hosts(ranks, without)}: no driver there")] if without else []
    )
    return found + (
        [
            UNUSED_GPU.found(
                f"{of_hosts(ranks, unused)}: torch sees no device of the {ranks[unused[0]]['drivers'][0]} driver"
            )
        ]
        if unused
        else []
    )


def is_for_gpu(facts: Mapping[str, Any]) -> bool:
    return bool({"CUDA", "ROCm"} & set(facts["versions"]))
