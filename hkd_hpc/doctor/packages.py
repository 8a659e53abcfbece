"""Versions of all that a run is made of: the same on every rank, and fitting each other, the driver and the MPI."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hkd_hpc.comm.devices import rank_list
from hkd_hpc.common.errors import UsageError, obtainable
from hkd_hpc.common.groups import grouped
from hkd_hpc.config.identity import code_of
from hkd_hpc.doctor.context import Context
from hkd_hpc.doctor.findings import ERROR, NOTE, WARNING, Finding, Kind, Section
from hkd_hpc.runtime import versions
from hkd_hpc.runtime.environment import DEVICE_FILES
from hkd_hpc.runtime.versions import numbers
from hkd_hpc.version import __version__

NAME = "packages"
DRIVERS = {"nvidia": "/proc/driver/nvidia/version", "amd": "/sys/module/amdgpu/version"}
INSTALLING = obtainable("docs/getting_started.md, Installing")
# By major version of CUDA, the oldest driver on which its programs begin: docs.nvidia.com, CUDA Compatibility, Minor
# Version Compatibility; the full numbers are in the release notes of the CUDA Toolkit
OLDEST_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
NCCL_LIBRARIES = ("libnccl.so.2", "librccl.so.1")
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
OTHER_HDF5 = Kind(
    "packages.other_hdf5",
    WARNING,
    "h5py calls a library that it was not built for: a save may fail or crash, or spoil its file",
    "a module or LD_LIBRARY_PATH brings another HDF5: unload it; or HDF5_DIR=its folder pip install --force-reinstall "
    "--no-binary h5py h5py",
)
OTHER_NCCL = Kind(
    "packages.other_nccl",
    WARNING,
    "torch may call what this library lacks: the first sum of the weights on GPUs fails or hangs",
    "unset LD_PRELOAD, and a newer NCCL or none in LD_LIBRARY_PATH (module list); or comm.backend=gloo",
)
OLD_DRIVER = Kind(
    "packages.old_driver",
    WARNING,
    "the CPU is used though a GPU is there: programs of this CUDA do not begin on so old a driver",
    "a torch that was built for an older CUDA, or NVIDIA's driver {driver} or newer (the site's administrators)",
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


def collect(context: Context) -> Section | None:
    """Every rank tells what it has; rank 0 compares."""
    ranks = context.gathered(own_facts(context))
    return section_of(ranks, unfit(context)) if ranks else None


def own_facts(context: Context) -> dict[str, Any]:
    """Of this rank."""
    return {
        "host": context.comm.hosts[context.comm.rank],
        "versions": found(context),
        "built": built(),
        "mpi_libraries": context.world.mpi_libraries(),
        "drivers": [vendor for vendor, file in DEVICE_FILES.items() if Path(file).exists()],
        "on_gpu": context.comm.device.type == "cuda",
        "device": context.config.run.device,
    }


def found(context: Context) -> dict[str, str]:
    """{what: its version}, as far as it is there."""
    import h5py
    import torch

    libraries = context.world.mpi_libraries()
    all_found = {
        "hkd_hpc": f"{__version__}, sources {code_of(context.config)['code.hkd_hpc'][:12]}",
        "python": platform.python_version(),
        **{package: versions.installed(package) for package in versions.PACKAGES},
        "HDF5": h5py.version.hdf5_version,
        "MPI": libraries[1] if libraries else None,
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "NCCL": loaded_nccl() or built_nccl(),
        **{f"driver {vendor}": driver_version(file) for vendor, file in DRIVERS.items()},
    }
    return {name: version for name, version in all_found.items() if version}


def built() -> dict[str, str]:
    """{library: the version that h5py or torch was built for}, as far as they say."""
    import h5py

    all_built = {"HDF5": ".".join(map(str, h5py.version.hdf5_built_version_tuple)), "NCCL": built_nccl()}
    return {name: version for name, version in all_built.items() if version}


def built_nccl() -> str | None:
    """The NCCL or RCCL that torch was built for, None in a torch that has none."""
    import torch

    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return None


def loaded_nccl() -> str | None:
    """The NCCL or RCCL that this process has loaded; None where there is none, or it is a part of torch itself."""
    number = ctypes.c_int()
    for name in NCCL_LIBRARIES:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(name, mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number))
            return nccl_text(number.value)
    return None


def nccl_text(number: int) -> str:
    """NCCL's own number since 2.9: 23007 -> '2.30.7'"""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def driver_version(file: str) -> str | None:
    """The first line of what the kernel's driver says of itself, None without one."""
    try:
        return Path(file).read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def unfit(context: Context) -> str:
    """What `train` would say against the packages here; empty where it says nothing."""
    try:
        versions.check(context.config.model.title, context.config.model.needs_torchvision)
    except UsageError as error:
        return str(error)
    return ""


def section_of(ranks: Sequence[Mapping[str, Any]], problem: str = "") -> Section:
    """The section, from the facts of all ranks, and what speaks against rank 0's packages."""
    line = ", ".join(f"{name} {version}" for name, version in ranks[0]["versions"].items())
    findings = [UNFIT.found(problem)] if problem else []
    findings += [finding for check in CHECKS for finding in check(ranks)]
    return Section(NAME, [line], {"ranks": list(ranks)}, findings)


def check_same(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What is not the same everywhere, one finding each."""
    names = dict.fromkeys(name for facts in ranks for name in facts["versions"])
    findings = []
    for name in names:
        by_version = grouped((facts["versions"].get(name, "absent"), rank) for rank, facts in enumerate(ranks))
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


def check_hdf5(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """An HDF5 that is not the one that h5py was built for."""
    return [
        OTHER_HDF5.found(f"{of_hosts(ranks, members)}: h5py was built for HDF5 {built}, and loads {loaded}")
        for (built, loaded), members in ranks_by_library(ranks, "HDF5").items()
        if built != loaded
    ]


def check_nccl(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """An NCCL or RCCL older than the one that torch was built for; newer ones of the same major version fit."""
    return [
        OTHER_NCCL.found(f"{of_hosts(ranks, members)}: torch was built for NCCL {built}, and loads {loaded}")
        for (built, loaded), members in ranks_by_library(ranks, "NCCL").items()
        if numbers(loaded) < numbers(built) or numbers(loaded)[0] != numbers(built)[0]
    ]


def ranks_by_library(ranks: Sequence[Mapping[str, Any]], name: str) -> dict[tuple[str, str], list[int]]:
    """The ranks by (version that was built for, version that is loaded) of a library, where both are known."""
    return grouped(
        ((facts["built"][name], facts["versions"][name]), rank)
        for rank, facts in enumerate(ranks)
        if name in facts["built"] and name in facts["versions"]
    )


def check_no_driver(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """A torch for GPUs without a driver."""
    without = [rank for rank, facts in enumerate(ranks) if is_for_gpu(facts) and not facts["drivers"]]
    return [NO_DRIVER.found(f"torch is built for GPUs, {of_hosts(ranks, without)}: no driver there")] if without else []


def check_unused_gpu(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """A driver that torch does not use, because it is too old or for another reason."""
    unused = [rank for rank, facts in enumerate(ranks) if leaves_gpu(facts)]
    old = [rank for rank in unused if needed_driver(ranks[rank]["versions"])]
    other = [rank for rank in unused if rank not in old]
    findings = []
    if old:
        versions, needed = ranks[old[0]]["versions"], needed_driver(ranks[old[0]]["versions"])
        text = (
            f"{of_hosts(ranks, old)}: NVIDIA's driver {driver_number(versions)}, CUDA {versions['CUDA']} needs {needed}"
        )
        findings += [OLD_DRIVER.found(text, driver=needed)]
    if other:
        text = f"{of_hosts(ranks, other)}: torch sees no device of the {ranks[other[0]]['drivers'][0]} driver"
        findings += [UNUSED_GPU.found(text)]
    return findings


def leaves_gpu(facts: Mapping[str, Any]) -> bool:
    """Whether a rank computes on the CPU beside a GPU's driver, and nobody asked for that."""
    return bool(facts["drivers"]) and not facts["on_gpu"] and facts["device"] != "cpu"


def needed_driver(versions: Mapping[str, str]) -> str:
    """The driver that torch's CUDA needs, where the one that is there is older; else empty."""
    driver, cuda = driver_number(versions), numbers(versions.get("CUDA", ""))
    needed = OLDEST_DRIVERS.get(cuda[0], "") if cuda else ""
    return needed if driver and numbers(driver) < numbers(needed) else ""


def driver_number(versions: Mapping[str, str]) -> str:
    """535.129.03 of what NVIDIA's driver says of itself, empty where it says nothing."""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", versions.get("driver nvidia", ""))
    return found[0] if found else ""


def is_for_gpu(facts: Mapping[str, Any]) -> bool:
    return bool({"CUDA", "ROCm"} & set(facts["versions"]))


CHECKS = (check_same, check_mpi, check_hdf5, check_nccl, check_no_driver, check_unused_gpu)
