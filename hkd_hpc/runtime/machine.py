"""This machine: the cores and memory that a job may use, and what no measurement is worth without (machine, packages,
date and commit).
"""

from __future__ import annotations

import datetime
import os
import platform
import resource
from collections.abc import Mapping
from pathlib import Path

from hkd_hpc.runtime.revision import revision
from hkd_hpc.runtime.versions import installed

CGROUPS = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")
VECTORS = ("avx512f", "avx2", "avx", "sse4_1")  # the widest first: float kernels take the widest that there is
KERNELS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR")  # variables that have them take less
# With these, one with wider vectors computes as one whose widest are these: whole runs were seen to give the same bits.
NARROWED = {"avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}}


def header() -> str:
    """Machine, torch, date and commit."""
    return (
        f"machine: {cpu_model()}, {len(os.sched_getaffinity(0))} cores; torch {installed('torch') or '?'}, "
        f"Python {platform.python_version()}\n"
        f"date: {datetime.datetime.now().astimezone().isoformat(' ', 'minutes')}; commit: {revision()}"
    )


def cpu_model() -> str:
    return _cpu_line("model name") or platform.machine()


def cpu_kind(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the last bits of float32 results depend on: machines and environments of one kind repeat them.

    Args:
        env: the environment of the process that computes.

    Returns:
        {"model": the CPU's name, "vectors": its widest vector instructions, "" where it has none of VECTORS}, and those
        of KERNELS that the environment sets.
    """
    flags = _cpu_line("flags").split()
    vectors = next((name for name in VECTORS if name in flags), "")
    return {"model": cpu_model(), "vectors": vectors, **{name: env[name] for name in KERNELS if env.get(name)}}


def computed_as(cpu: Mapping[str, str]) -> dict[str, str]:
    """The kind of CPU whose bits one of this kind gives: its `vectors` are those that its variables leave it."""
    for vectors, variables in NARROWED.items():
        if variables.items() <= cpu.items():
            return {name: value for name, value in cpu.items() if name not in variables} | {"vectors": vectors}
    return dict(cpu)


def narrowing(cpu: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a machine of the kind `here` computes as `cpu` did; none where it does so by itself, or
    where no such variables are known."""
    kind = computed_as(cpu).get("vectors", "")
    wider = VECTORS[: VECTORS.index(kind)] if kind in VECTORS else ()
    own = {name: value for name, value in cpu.items() if name in KERNELS}
    return own or (NARROWED.get(kind, {}) if here.get("vectors") in wider else {})


def _cpu_line(name: str) -> str:
    """What /proc/cpuinfo says of the first core; empty where it does not say this."""
    lines = CPUINFO.read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def memory_bytes() -> int:
    """Memory of this machine, or of the share of it that this job may use."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(int(text) for text in cgroup_values("memory.max") if text.isdigit())])


def peak_memory_bytes() -> int:
    """The most memory that this process has held so far, in RAM."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def quota_cores() -> float | None:
    """How many cores' time this job may use at once, None without a limit."""
    shares = [text.split() for text in cgroup_values("cpu.max")]  # "150000 100000", or "max 100000"
    return min((int(used) / int(period) for used, period in shares if used.isdigit()), default=None)


def cgroup_values(name: str) -> list[str]:
    """What a file says in the cgroup (version 2) of this process and in those around it, the innermost first."""
    found = []
    for folder in cgroup_folders(_text(Path("/proc/self/cgroup"))):
        found += [text] if (text := _text(folder / name)) else []
    return found


def cgroup_folders(text: str) -> list[Path]:
    """From /proc/self/cgroup: `0::/job_7/step_0` gives that folder, job_7, and the root."""
    own = next((line[3:].strip("/") for line in text.splitlines() if line.startswith("0::")), "")
    folder = CGROUPS / own
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(CGROUPS))]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
