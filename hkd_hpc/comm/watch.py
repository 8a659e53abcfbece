"""Watching the launcher: is it still alive, and did all the ranks that it started here arrive?"""
from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from hkd_hpc.comm.world import Hint

GRACE_S = 5.0  # launchers start the ranks of a host within a moment; a rank still missing after this has ended
POLL_S = 0.25


def parent_of(pid: int) -> int:
    """The parent's process id; 0 when the process is gone or the system has no /proc (other processes only)."""
    if pid == os.getpid():
        return os.getppid()
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


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


def children_of(pid: int) -> int | None:
    """How many children the process has, None where the system does not tell."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return sum(len(_read(f"/proc/{pid}/task/{thread}/children").split()) for thread in threads)
    except OSError:
        return None


@dataclass(frozen=True)
class StartGuard:
    """Tells why the world will not become complete: a rank of this host has ended, or time is up."""
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
        waited_s = time.monotonic() - self.began_s
        here, children = self.hint.local_size, children_of(self.launcher)
        if here and children is not None and children < here and waited_s > GRACE_S:
            return (f"only {children} of the {here} ranks on this host are still there after {waited_s:.0f} s: "
                    f"a rank ended before it joined the job of {self.hint.size} ranks")
        if waited_s > self.timeout_s:
            return f"not all of the {self.hint.size} ranks joined the job within {self.timeout_s:.0f} s"
        return None


class ForkedGuard:
    """The guard in a process of its own: MPI_Init blocks with Python's lock held, so that no thread could speak."""

    def __init__(self, guard: StartGuard) -> None:
        reader, self._writer = os.pipe()
        self._child = os.fork()
        if self._child:
            os.close(reader)
            return
        try:
            os.close(self._writer)
            _guard_parent(guard, reader)
        finally:
            os._exit(0)

    def release(self) -> None:
        """The world is complete: end the guard."""
        os.close(self._writer)
        os.waitpid(self._child, 0)


def speak(text: str) -> None:
    """Write to stderr in one piece, past Python's buffers and locks; a closed stderr is no reason to fail."""
    data = (text.rstrip("\n") + "\n").encode(errors="replace")
    try:
        while data:
            data = data[os.write(2, data):]
    except OSError:
        pass


def _guard_parent(guard: StartGuard, reader: int) -> None:
    """Wait for the release (the pipe closes); at a problem say it once for the host, and kill the parent."""
    parent = os.getppid()
    problem = None
    while not problem:
        if _closed(reader, POLL_S):
            return
        problem = guard.problem()
    if not _closed(reader, min(guard.hint.rank, 10) * 0.3):  # the lowest rank speaks; the launcher ends the others
        speak(f"hkd_hpc: {problem}")
        os.kill(parent, signal.SIGKILL)


def _closed(reader: int, wait_s: float) -> bool:
    return bool(select.select([reader], [], [], wait_s)[0])


def _environment(pid: int) -> list[bytes]:
    try:
        return _read(f"/proc/{pid}/environ").split(b"\0")
    except OSError:
        return []


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


Problem = Callable[[], "str | None"]
