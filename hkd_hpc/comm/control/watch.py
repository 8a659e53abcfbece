"""Watching the launcher: is it still alive, and did all the ranks that it started here arrive?"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hkd_hpc.comm.control.diagnostics import condition_of
from hkd_hpc.comm.launchers import Hint
from hkd_hpc.common.processes import stat_of

GRACE_S = 5.0  # launchers start the ranks of a host within a moment; a rank still missing after this has ended
SILENT_S = 20.0  # the lowest rank that is left says it; after this others do, for it may have been stopped
TURN_S = 0.5  # the lowest rank prints first; then it ends, and the launcher ends the others
POLL_S = 0.25
MPIRUN = (b"mpirun", b"mpiexec", b"prterun", b"orterun")
RELEASE_S = 1.5  # once a rank has printed and ended, the launcher ends the others, which need not report its end

Problem = Callable[[], "str | None"]  # one line when a wait is hopeless, else None


def parent_of(pid: int) -> int:
    """The parent's process id; 0 when the process is gone or the system has no /proc (other processes only)."""
    if pid == os.getpid():
        return os.getppid()
    fields = stat_of(pid)
    return int(fields[1]) if fields else 0


def launcher_chain(rank_name: str) -> tuple[tuple[int, int], ...]:
    """(process, parent) from this process up to the launcher.

    Wrapper scripts between the launcher and Python carry this rank's variable in their environment, the launcher does
    not. They matter: a wrapper outlives its launcher, so watching only the direct parent is not enough.
    """
    chain = [(os.getpid(), os.getppid())]
    own = f"{rank_name}={os.environ.get(rank_name, '')}".encode()
    while rank_name and chain[-1][1] > 1 and own in _environment(chain[-1][1]):
        chain.append((chain[-1][1], parent_of(chain[-1][1])))
    return tuple(chain)


def launcher_alive(chain: tuple[tuple[int, int], ...]) -> bool:
    """False once a process of the chain has lost its parent."""
    return all(parent_of(pid) == parent for pid, parent in chain)


def children_of(pid: int) -> list[int] | None:
    """The children of a process, None where the system does not say."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [int(child) for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()]
    except OSError:
        return None


def descendants(pid: int) -> list[int]:
    """The processes that it started, those that they started, and so on."""
    return [found for child in children_of(pid) or [] for found in (child, *descendants(child))]


@dataclass(frozen=True)
class StartGuard:
    """Says why the world will not become complete: a rank of this host has ended, or time is up."""

    hint: Hint
    launcher: int
    timeout_s: float
    began_s: float

    @classmethod
    def begin(cls, hint: Hint, timeout_s: float) -> StartGuard:
        """A guard whose time starts now."""
        return cls(hint, launcher_chain(hint.rank_name)[-1][1], timeout_s, time.monotonic())

    def problem(self) -> str | None:
        """One line when the wait is hopeless, else None."""
        waited_s = time.monotonic() - self.began_s - TURN_S * min(self.hint.rank, 10)
        if waited_s > GRACE_S:
            here, size = self.hint.local_size, self.hint.size
            alive = self._ranks_here()
            is_ours_to_say = waited_s > GRACE_S + SILENT_S or self.hint.rank == min(alive or {}, default=self.hint.rank)
            if here and alive is not None and len(alive) < here and is_ours_to_say:
                gone = ", ".join(str(rank) for rank in range(size) if rank not in alive) if here == size else "?"
                return f"rank {gone} ended before it joined the job; {len(alive)} of {here} ranks are left on this host"
        if waited_s > self.timeout_s:
            conditions = {rank: condition_of(pid) for rank, pid in sorted((self._ranks_here() or {}).items())}
            found = "".join(f"; rank {rank}: {condition}" for rank, condition in conditions.items() if condition)
            return f"not all of the {self.hint.size} ranks joined the job within {self.timeout_s:.0f} s{found}"
        return None

    def _ranks_here(self) -> dict[int, int] | None:
        """{rank: process} of the launcher's children; None unless we surely see the launcher and all its children."""
        own = _environment(self.launcher)
        children = children_of(self.launcher) if self.launcher > 1 else None
        if not children or not own or _rank_in(own, self.hint.rank_name) is not None:
            return None
        ranks = {_rank_in(_environment(child), self.hint.rank_name): child for child in children}
        return {rank: child for rank, child in ranks.items() if rank is not None}


@dataclass(frozen=True)
class EndGuard:
    """Says that MPI_Finalize waits in vain: for a rank that was stopped, or a host that was lost, after the last
    barrier.
    """

    rank: int
    timeout_s: float
    began_s: float = field(default_factory=time.monotonic)

    def problem(self) -> str | None:
        """One line when the wait is hopeless, else None."""
        if time.monotonic() - self.began_s - TURN_S * min(self.rank, 10) < self.timeout_s:
            return None
        return (
            f"rank {self.rank}: the work is done and its files are intact, but MPI_Finalize did not end within "
            f"{self.timeout_s:g} s: "
            "a rank was stopped, or a node was lost; the job ends here"
        )


class ForkedGuard:
    """The guard in a process of its own: MPI_Init and MPI_Finalize hold Python's lock, no thread could report."""

    def __init__(self, guard: StartGuard | EndGuard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        reader, self._writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of a library do no harm to this child
            parent, self._child = os.getpid(), os.fork()
        if self._child:
            os.close(reader)
            return
        try:
            os.close(self._writer)
            _guard_parent(self._guard, reader, parent)
        finally:
            os._exit(0)

    def __exit__(self, *_: object) -> None:
        os.close(self._writer)
        os.waitpid(self._child, 0)


def write_stderr(text: str, descriptor: int = 2) -> None:
    """Write to stderr in one piece, past Python's buffers and locks; one that is closed, or that nobody reads, is no
    reason to fail."""
    shortly(partial(_write, descriptor, (text.rstrip("\n") + "\n").encode(errors="replace")))


def _write(descriptor: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        pass


def shortly(action: Callable[[], None]) -> None:
    """Do it, and wait for it half a second: a disk or a terminal that hangs must not keep a failing job."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(0.5)


def write_mpirun_stderr(launcher: int, text: str) -> None:
    """Write to the stderr of Open MPI's mpirun: when it ends the ranks it passes nothing of theirs on. Others do."""
    try:
        if _read(f"/proc/{launcher}/comm").strip() not in MPIRUN:
            return
        descriptor = os.open(f"/proc/{launcher}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return
    write_stderr(text, descriptor)
    os.close(descriptor)


def _guard_parent(guard: StartGuard | EndGuard, reader: int, parent: int) -> None:
    """Wait for the release (the pipe closes); at a problem print it once for the host, and kill the parent."""
    problem = None
    while not problem:
        if _closed(reader, POLL_S):
            return
        problem = guard.problem()
        if problem and _closed(reader, RELEASE_S):
            return
    write_stderr(f"hkd_hpc: {problem}")
    os.kill(parent, signal.SIGKILL)


def _closed(reader: int, wait_s: float) -> bool:
    return bool(select.select([reader], [], [], wait_s)[0])


def _rank_in(environment: list[bytes], rank_name: str) -> int | None:
    """The rank that a process was started with, None if it is no rank."""
    prefix = f"{rank_name}=".encode()
    text = next((entry[len(prefix) :] for entry in environment if entry.startswith(prefix)), b"")
    return int(text) if text.isdigit() else None


def _environment(pid: int) -> list[bytes]:
    try:
        return _read(f"/proc/{pid}/environ").split(b"\0")
    except OSError:
        return []


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
