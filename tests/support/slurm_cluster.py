"""A real SLURM of its own for tests: four nodes on this machine, each with two make-believe GPUs, all in one folder.

No path is fixed and the system gives the ports, so that several can run at once. It needs SLURM's programs and root,
no munge, nothing below /etc.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tools.forked_ranks import FOREIGN, held_port

PROGRAMS = ("slurmctld", "slurmd", "sinfo", "srun", "sbatch", "scontrol", "setpriv")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
# Jobs take rank 0's address from the name of its node. These names are addresses (127.0.0.1 to .4), and unlike the
# dotted form they are host names to SLURM: no /etc/hosts is needed.
NODES = tuple(f"0x7f00000{i}" for i in range(1, 5))
START_S = END_S = 60.0

CONFIGURATION = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
TmpFS={folder}/tmp/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MinJobAge=600
MaxArraySize=10
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
NodeName=DEFAULT CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 State=UNKNOWN
"""


def why_not() -> str | None:
    """Why no cluster can be had here, None if it can."""
    absent = [program for program in PROGRAMS if not find(program)]
    if absent:
        return f"no {', '.join(absent)} here: apt-get install --no-install-recommends slurm-wlm munge"
    return "a private SLURM needs root" if os.geteuid() else None


def need(reason: str | None) -> None:
    """Skip for this reason, or fail where SLURM is required."""
    if reason and os.environ.get("HKD_REQUIRE_SLURM") == "1":
        pytest.fail(f"HKD_REQUIRE_SLURM=1, but {reason}")
    if reason:
        pytest.skip(reason)


def find(program: str) -> str | None:
    """The path of a program; daemons are often not on a user's PATH."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Cluster:
    """A running cluster. `env` is for SLURM's commands and passes on into the jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"test{secrets.token_hex(6)}"  # jobs derive ports and token from the names of cluster, job and step
        self.env = {name: value for name, value in os.environ.items() if not name.startswith((*FOREIGN, "SBATCH_"))}
        self.env["SLURM_CONF"] = str(folder / "slurm.conf")
        temporary = folder / "tmp"  # two clusters count their jobs alike: each has folders of jobs of its own
        temporary.mkdir(exist_ok=True)
        self.env["TMPDIR"] = str(temporary)
        self.gpus_per_node = 0
        self._daemons: list[subprocess.Popen] = []
        self._held_ports = ExitStack()

    def run(self, *command: object, timeout_s: float = 300, **options) -> subprocess.CompletedProcess[str]:
        """A command to its end, srun or another; its outputs are text."""
        return subprocess.run(
            list(map(str, command)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            **{"env": self.env, **options},
        )

    def job(self, number: str) -> dict[str, str]:
        """What SLURM says about a job: JobState, ExitCode, Restarts and so on."""
        text = self.run("scontrol", "--oneliner", "show", "job", number).stdout
        return dict(field.partition("=")[::2] for field in text.split() if "=" in field)

    def wait_for(self, number: str, timeout_s: float = 300) -> dict[str, str]:
        """What SLURM says about a job once it has ended; AssertionError when time is up."""
        end_s = time.monotonic() + timeout_s
        while (job := self.job(number)).get("JobState") not in ENDED:
            assert time.monotonic() < end_s, f"job {number} did not end in time: {job}"
            time.sleep(0.1)
        return job

    def cancel_all(self) -> list[str]:
        """Cancel every job there is. Returns a line about each: its id, state and why it waits."""
        left = self.run("squeue", "--noheader", "--array", "--format=%i %T %r").stdout.splitlines()
        for line in left:
            self.run("scancel", line.split()[0])
        return left

    def start(self) -> None:
        """Start all daemons and wait until all nodes are idle. Raises RuntimeError with the daemons' last words."""
        for path in ("state", "log", *(f"{kind}/{node}" for kind in ("spool", "tmp") for node in NODES)):
            (self.folder / path).mkdir(parents=True, exist_ok=True)
        self.gpus_per_node = len(make_gpus(self.folder))
        self._configure([self._held_ports.enter_context(held_port()) for _ in range(1 + len(NODES))])
        self._begin("slurmctld", "-D", "-c")
        for node in NODES:
            self._begin("slurmd", "-D", "-N", node, name=node)
        if self._is_idle_in_time():
            return
        words = [path.name + ":\n" + path.read_text()[-1500:] for path in sorted((self.folder / "log").iterdir())]
        raise RuntimeError("the private SLURM did not start\n" + "\n".join(words))

    def stop(self) -> None:
        """End the daemons, then whatever is left of their jobs."""
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(END_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        end_s = time.monotonic() + END_S
        while (left := self.processes()) and time.monotonic() < end_s:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.05)
        self._held_ports.close()

    def processes(self) -> list[int]:
        """All that runs in this cluster, daemons, step managers and tasks: they all have its SLURM_CONF."""
        mark = f"SLURM_CONF={self.env['SLURM_CONF']}".encode()
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and int(entry.name) != os.getpid() and mark in _environment(entry)
        ]

    def _configure(self, ports: list[int]) -> None:
        host = socket.gethostname().partition(".")[0]
        gpus = f" Gres=gpu:{self.gpus_per_node}" if self.gpus_per_node else ""
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}{gpus}"
            for node, port in zip(NODES, ports[1:])
        ]
        lines.append(f"PartitionName=debug Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP")
        if gpus:
            lines.append("GresTypes=gpu")
            devices = f"{self.folder}/gpu[0-{self.gpus_per_node - 1}]"
            (self.folder / "gres.conf").write_text(
                f"AutoDetect=off\nNodeName={','.join(NODES)} Name=gpu File={devices}\n"
            )
        text = CONFIGURATION.format(name=self.name, host=host, folder=self.folder, ports=ports)
        (self.folder / "slurm.conf").write_text(text + "\n".join(lines) + "\n")

    def _begin(self, program: str, *options: str, name: str = "") -> None:
        """Start a daemon that ends with this process, however that ends."""
        with open(self.folder / "log" / f"{program}{name}.log", "a") as log:
            self._daemons.append(
                subprocess.Popen(
                    [find("setpriv"), "--pdeathsig", "TERM", find(program), *options],
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def _is_idle_in_time(self) -> bool:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and all(daemon.poll() is None for daemon in self._daemons):
            if self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() == str(len(NODES)):
                return True
            time.sleep(0.1)
        return False


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster in `folder`, which must be new and have a short path without blanks; nothing of it runs afterwards."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def make_gpus(folder: Path) -> list[Path]:
    """Two devices that SLURM takes for GPUs (they are /dev/null); none where devices may not be made."""
    paths = [folder / "gpu0", folder / "gpu1"]
    try:
        for path in paths:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError:
        return []
    return paths


def _environment(entry: Path) -> list[bytes]:
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
