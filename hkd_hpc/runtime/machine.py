"""This machine: memory, and what no measurement is worth without (machine, packages, date and commit)."""

from __future__ import annotations

import datetime
import os
import platform
import resource
from pathlib import Path

from hkd_hpc.runtime.revision import revision
from hkd_hpc.runtime.versions import installed


def header() -> str:
    """Machine, torch, date and commit."""
    return (
        f"machine: {cpu_model()}, {len(os.sched_getaffinity(0))} cores; torch {installed('torch') or '?'}, "
        f"Python {platform.python_version()}\n"
        f"date: {datetime.datetime.now().astimezone().isoformat(' ', 'minutes')}; commit: {revision()}"
    )


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def memory_bytes() -> int:
    """Memory of this machine, or of the share of it that this job may use."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine


def peak_memory_bytes() -> int:
    """The most memory that this process has held so far, in RAM."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
