"""Processes that tools.bench starts: children that answer requests with seconds, MPI jobs, and their memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hkd_hpc.common.lazy import torch_environment

LIMIT_S = 300.0  # for one MPI job; what takes longer hangs


class BenchError(Exception):
    """Something that was to be measured did not work."""


def environment(**more: str) -> dict[str, str]:
    """One thread and huge pages for all, the baselines too; Open MPI may start more ranks than cores, and as root. What
    is set already stays.
    """
    mpi = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    return {**mpi, **os.environ, **torch_environment(threads=1), **more}


class Child:
    """A process that reads one request a line and answers each with seconds."""

    def __init__(self, module: str, *arguments: str):
        self.module = module
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            text=True,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout

    def ask(self, request: str) -> float:
        """Seconds. BenchError when the process has ended instead."""
        try:
            self.requests.write(request + "\n")
            self.requests.flush()
            return float(self.answers.readline())
        except (OSError, ValueError):
            raise BenchError(f"{self.module} ended with exit code {self.process.wait()} at: {request}") from None

    def peak_bytes(self) -> int:
        """Largest resident memory so far."""
        return bytes_in(Path(f"/proc/{self.process.pid}/status").read_text(), "VmHWM")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def start(*arguments: str, launcher: Sequence[str] = (), **more: str) -> subprocess.Popen:
    """`python ...`, one process, or as many as the launcher makes of it."""
    return subprocess.Popen(
        [*launcher, sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**more),
    )


def start_mpi(ranks: int, *arguments: str, **more: str) -> subprocess.Popen:
    """`mpirun -n ranks python ...`. BenchError when there is no mpirun."""
    if shutil.which("mpirun") is None:
        raise BenchError("mpirun: not found; pip install 'hkd_hpc[mpi]', or load your site's MPI")
    return start(*arguments, launcher=("mpirun", "-n", str(ranks)), **more)


def command_of(process: subprocess.Popen) -> str:
    return " ".join(process.args) if isinstance(process.args, list) else str(process.args)


def finish(process: subprocess.Popen, limit_s: float = LIMIT_S) -> str:
    """What it wrote. BenchError with the end of it when it failed or took longer than limit_s."""
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        process.terminate()  # mpirun ends its ranks
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise BenchError(f"{command_of(process)}: not done after {limit_s:.0f} s\n{output[-2000:]}") from None
    if process.returncode:
        raise BenchError(f"{command_of(process)}: exit code {process.returncode}\n{output[-2000:]}")
    return output


# --- memory


def pss_bytes(pid: int) -> int:
    """Proportional share of the memory of a process; 0 when it has just ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return bytes_in(rollup, "Pss")


def bytes_in(text: str, name: str) -> int:
    """Of a file in /proc, the line "name:   123 kB"."""
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}:"))


def peak_until(done: Callable[[], bool], pids: Callable[[], list[int]], every_s: float = 0.5) -> int:
    """The largest sum of the PSS of these processes, in bytes, until it is done. One look at a process that trains
    takes the kernel 5 ms, so a few of them ten times a second would slow the training."""
    peak_bytes = 0
    while not done():
        peak_bytes = max(peak_bytes, sum(map(pss_bytes, pids())))
        time.sleep(every_s)
    return peak_bytes
