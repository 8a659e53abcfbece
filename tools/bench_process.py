"""Processes that tools.bench starts: children that answer requests with seconds, MPI jobs, and their memory."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tools.bench_table import ROOT

PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
MAPPING = re.compile(r"^(?=[0-9a-f]+-[0-9a-f]+ )", re.MULTILINE)
DATA_FILE = "hkd_hpc-data-"


class BenchError(Exception):
    """Something that was to be measured did not work."""


def environment(**more: str) -> dict[str, str]:
    """One thread a process; Open MPI may start more ranks than cores, and as root. What is set already stays."""
    mpi = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
           "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
    return {**mpi, **os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **more}


class Child:
    """A process that reads one request a line and answers each with seconds."""

    def __init__(self, module: str, *arguments: str):
        self.module = module
        self.process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, text=True,
                                        stdout=subprocess.PIPE, cwd=ROOT, env=environment())

    def ask(self, request: str) -> float:
        """Seconds. BenchError when the process has ended instead."""
        try:
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
            return float(self.process.stdout.readline())
        except (OSError, ValueError):
            raise BenchError(f"{self.module} ended with exit code {self.process.wait()} at: {request}") from None

    def peak_bytes(self) -> int:
        """Largest resident memory so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) * 1024

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def start_mpi(ranks: int, *arguments: str, **more: str) -> subprocess.Popen:
    """`mpirun -n ranks python ...`. BenchError when there is no mpirun."""
    if shutil.which("mpirun") is None:
        raise BenchError("mpirun: not found; activate the environment that `make demo` makes")
    return subprocess.Popen(["mpirun", "-n", str(ranks), sys.executable, *arguments], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment(**more))


def finish(process: subprocess.Popen, limit_s: float = 600) -> str:
    """What it wrote. BenchError with the end of it when it failed or took longer than limit_s."""
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        process.terminate()  # mpirun ends its ranks
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise BenchError(f"{' '.join(process.args)}: not done after {limit_s:.0f} s\n{output[-2000:]}") from None
    if process.returncode:
        raise BenchError(f"{' '.join(process.args)}: exit code {process.returncode}\n{output[-2000:]}")
    return output


# --- memory

def data_and_rest(smaps: str) -> tuple[int, int]:
    """(bytes of the node's shared data file, all other bytes) that /proc/PID/smaps counts as this process's share."""
    found = {True: 0, False: 0}
    for mapping in MAPPING.split(smaps):
        found[DATA_FILE in mapping.partition("\n")[0]] += sum(int(kilobytes) for kilobytes in PSS.findall(mapping))
    return found[True] * 1024, found[False] * 1024


def data_file_bytes(smaps: str) -> int:
    """Size of the mapping of the shared data file; 0 when there is none."""
    ranges = re.findall(rf"^([0-9a-f]+)-([0-9a-f]+) .*{DATA_FILE}", smaps, re.MULTILINE)
    return sum(int(stop, 16) - int(start, 16) for start, stop in ranges)


def read_smaps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/smaps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has just ended
        return ""


def watch_memory(process: subprocess.Popen, pids: list[int], every_s: float = 0.3) -> tuple[int, float]:
    """Until the job ends: (largest sum of all ranks' PSS in bytes, largest number of copies of the data file)."""
    peak_bytes, copies = 0, 0.0
    while process.poll() is None:
        smaps = [read_smaps(pid) for pid in pids]
        data, rest = map(sum, zip(*map(data_and_rest, smaps)))
        peak_bytes = max(peak_bytes, data + rest)
        copies = max(copies, data / max(max(map(data_file_bytes, smaps)), 1))
        time.sleep(every_s)
    return peak_bytes, copies
