"""One run per folder: an exclusive lock that says who holds it, and that survives its holder's death only briefly.

The lock is a file (run.lock), made by an atomic create; the holder touches it every 2 s. Whoever finds it waits, and
may take over from a holder that is dead: at once where its process can be seen (same host), else after 10 s in which
the file did not change, measured by the own clock, for the clocks of two hosts need not agree.

flufl.lock, which is safe on NFS too, was tried in its place under tests/store/test_lock.py (10.0, 2026-11-29): with a
heartbeat around it 22 of the 29 tests fail. It judges a holder by comparing the clocks of two hosts, has no takeover of
a dead process before its lifetime ends, believes in zombies and in process ids that were given anew, never breaks an
empty or damaged lock, and two that break the same one can remove the lock of a third (its own comment says so).

Two may find the same dead holder, and the slower one must not remove the lock that the faster one has just made. So a
lock is removed only by whoever first makes the file .<its name>.<its mark>, and only while it still has that mark.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.processes import stat_of

LOCK_NAME = "run.lock"
POLL_S = 0.1
PROGRESS_AFTER_S = 2.0
STALE_S = 10.0  # a holder on another host that does not touch its lock for so long, by the own clock, is dead
TAKEOVER_S = 12.0  # a wait that outlasts it
SILENT_S = 60.0  # by one look, at the clocks of two hosts, which differ by less


def to_standard_error(text: str) -> None:
    """Print one line."""
    print(text, file=sys.stderr, flush=True)


class InUse(UsageError):
    """Somebody who lives holds the lock."""


@dataclass(frozen=True)
class LockContent:
    """A lock file as it was at one moment: its bytes and its time of change."""

    content: bytes
    mtime_ns: int

    @property
    def holder(self) -> dict[str, Any] | None:
        """What the holder wrote about itself; None if the file is empty or damaged."""
        try:
            holder = json.loads(self.content)
        except ValueError:
            return None
        return holder if isinstance(holder, dict) else None

    @property
    def mark(self) -> str:
        """Names this one lock and no later one: intact content has a token of its own, damaged content has its time."""
        name = self.content if self.holder else self.content + str(self.mtime_ns).encode()
        return hashlib.sha256(name).hexdigest()[:16]


class RunLock:
    """The exclusive right to write in a run folder, as a context manager or with acquire() and release().

    Args:
        folder: the run folder, which must be there unless `makes_folder`.
        wait_s: how long to wait for a living holder; at least `stale_s` to outwait a dead one on another host.
        progress: gets one line if that takes longer than 2 s.
        on_lost: gets one line, in a thread, if the lock turns out to be someone else's.
        heartbeat_s: how often the holder touches the file; the same for all.
        stale_s: a holder on another host that does not touch it for so long is dead; the same for all.
        name: of the file.
        makes_folder: whether a folder that is not there is made, since another job may take it away before this lock.
        holder: what holds such a lock, for people.
        advice: what to do while somebody holds it.
    """

    def __init__(
        self,
        folder: str | Path,
        wait_s: float = TAKEOVER_S,
        progress: Callable[[str], None] = to_standard_error,
        on_lost: Callable[[str], None] = to_standard_error,
        heartbeat_s: float = 2.0,
        stale_s: float = STALE_S,
        name: str = LOCK_NAME,
        makes_folder: bool = False,
        holder: str = "another run",
        advice: str = "wait for its end or choose another --out",
    ):
        self.path = Path(folder) / name
        self._wait_s, self._heartbeat_s, self._stale_s = wait_s, heartbeat_s, stale_s
        self._progress, self._on_lost, self._makes_folder = progress, on_lost, makes_folder
        self._holder, self._advice = holder, advice
        self._content = b""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, wait_s: float | None = None) -> None:
        """Take the lock, from a dead holder if need be.

        Args:
            wait_s: instead of the lock's own.

        Raises:
            InUse: naming a holder that lives after `wait_s`.
            UsageError: naming a folder that cannot be written to.
        """
        self._content = _own_content()
        try:
            self._wait_for_lock(self._wait_s if wait_s is None else wait_s)
        except OSError as error:
            raise UsageError(
                f"cannot lock {self.path.parent}: {error.strerror}; name a folder that can be written to"
            ) from error
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._heartbeat, name="run lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lock back if it is still ours; harmless when it is not held."""
        thread, self._thread = self._thread, None
        if not thread:
            return
        self._stop.set()
        if thread is not threading.current_thread():  # as when on_lost gives up the run
            thread.join()
        seen = _look(self.path)
        if seen and seen.content == self._content:
            with contextlib.suppress(OSError):
                self._remove_own(seen)

    def _remove_own(self, seen: LockContent) -> None:
        """On a full disk a claim cannot be written; then the lock itself, whose holder lives, is linked as the
        claim.
        """
        try:
            _remove(self.path, seen, self._stale_s)
        except OSError:
            claim = _claim_path(self.path, seen)
            os.link(self.path, claim)
            now = _look(claim)
            if now and now.content == self._content:
                self.path.unlink()
            claim.unlink()

    def _wait_for_lock(self, wait_s: float) -> None:
        start_s = time.monotonic()
        watch = _Watch(self._stale_s)
        is_reported = False
        while not self._create_unless_held(was_held=watch.has_seen):
            seen = _look(self.path)
            if seen is None and self.path.is_symlink():  # to nowhere: it can be neither made nor read, for ever
                raise UsageError(f"{self.path}: is a link to a file that is not there; remove it")
            if seen is None or (watch.is_dead(seen) and _remove(self.path, seen, self._stale_s)):
                continue
            waited_s = time.monotonic() - start_s
            if waited_s >= wait_s:
                raise InUse(f"{self.path.parent} is in use by {_describe(seen, self._holder)}; {self._advice}")
            if waited_s > PROGRESS_AFTER_S and not is_reported:
                held = _describe(seen, self._holder)
                self._progress(f"waiting up to {wait_s:.0f} s for {self.path.parent}, held by {held}")
                is_reported = True
            time.sleep(POLL_S)

    def _create_unless_held(self, was_held: bool) -> bool:
        """Whether the lock is ours now. A holder may have taken the folder, which it had made, away with its lock."""
        try:
            return _create(self.path, self._content)
        except FileNotFoundError:
            if not (was_held or self._makes_folder):
                raise
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return False

    def _heartbeat(self) -> None:
        while not self._stop.wait(self._heartbeat_s):
            try:
                lost = self._touch()
            except OSError:
                continue  # a file system that hesitates: the next heartbeat tries again
            if lost:
                self._on_lost(f"the lock of {self.path.parent} was taken over by {_describe(lost, self._holder)}")
                return

    def _touch(self) -> LockContent | None:
        """Show that we live; the lock of someone else, if that is what is there now."""
        seen = _look(self.path)
        if seen is None:
            _create(self.path, self._content)  # removed by hand: whoever creates it first has it
        elif seen.content == self._content:
            os.utime(self.path)
        else:
            return seen
        return None


def is_held(folder: str | Path, name: str = LOCK_NAME) -> bool:
    """Whether a living process holds the lock, by one look: exact on its own host, elsewhere by its last sign of
    life.
    """
    seen = _look(Path(folder) / name)
    if seen is None:
        return False
    if seen.holder and is_visible(seen.holder):
        return is_alive(seen.holder)
    return abs(time.time() - seen.mtime_ns / 1e9) < SILENT_S  # a clock that was put back makes no holder live on


class LockWatch:
    """The same by looks over time: sure also of a holder elsewhere, whose clock nobody knows.

    Args:
        folder: as of RunLock.
        name: of the file.
        stale_s: as of RunLock.
    """

    def __init__(self, folder: str | Path, name: str = LOCK_NAME, stale_s: float = STALE_S) -> None:
        self._path, self._watch = Path(folder) / name, _Watch(stale_s)

    def is_held(self) -> bool | None:
        """Whether a living process holds the lock; None as long as that cannot be told."""
        seen = _look(self._path)
        return False if seen is None else self._watch.lives(seen)


def describe_lock(folder: str | Path, name: str = LOCK_NAME) -> str | None:
    """Who made the lock, for people, None if there is none; `is_held` says whether the holder lives."""
    seen = _look(Path(folder) / name)
    return None if seen is None else _describe(seen, "another run")


class _Watch:
    """Tells whether the holder of a lock lives, from looks at the file over time."""

    def __init__(self, stale_s: float):
        self._stale_s = stale_s
        self._last: LockContent | None = None
        self._changed_s, self._has_changed = 0.0, False

    @property
    def has_seen(self) -> bool:
        """Whether there was a holder at all."""
        return self._last is not None

    def is_dead(self, seen: LockContent) -> bool:
        return self.lives(seen) is False

    def lives(self, seen: LockContent) -> bool | None:
        """None at first of a holder elsewhere, until it gives a sign or has been silent for stale_s."""
        if seen != self._last:
            self._has_changed = self.has_seen
            self._last, self._changed_s = seen, time.monotonic()
        if seen.holder and is_visible(seen.holder):
            return is_alive(seen.holder)
        if time.monotonic() - self._changed_s > self._stale_s:
            return False
        return True if self._has_changed else None


def _own_content() -> bytes:
    return json.dumps(
        {
            **process_mark(os.getpid()),
            "job": os.environ.get("SLURM_JOB_ID", ""),
            "user": os.environ.get("USER") or str(os.getuid()),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "token": uuid.uuid4().hex,
        }
    ).encode()


def _create(path: Path, content: bytes) -> bool:
    """Make the file, unless it exists, and say whether it is ours."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    except OSError:
        path.unlink(missing_ok=True)  # a full disk: an empty lock would keep others waiting
        raise
    finally:
        os.close(descriptor)
    # Someone may have taken it for damaged between the create and the write.
    seen = _look(path)
    return seen is not None and seen.content == content


def _look(path: Path) -> LockContent | None:
    """The file now (opened anew, since that makes NFS ask its server), None if there is none."""
    try:
        with open(path, "rb") as file:
            return LockContent(file.read(), os.fstat(file.fileno()).st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _remove(path: Path, seen: LockContent, stale_s: float) -> bool:
    """Remove the lock that was seen and no other; False if someone else is about to do it."""
    claim = _claim_path(path, seen)
    if not _create(claim, _own_content()):
        _remove_dead_claim(claim, stale_s)
        return False
    try:
        now = _look(path)
        if now and now.mark == seen.mark:
            path.unlink()
    finally:
        claim.unlink(missing_ok=True)
    return True


def _claim_path(path: Path, seen: LockContent) -> Path:
    return path.with_name(f".{path.name}.{seen.mark}")


def _remove_dead_claim(claim: Path, stale_s: float) -> None:
    """Claims live for moments; one whose maker died is removed by the same rule as a lock."""
    seen = _look(claim)
    if seen is None:
        return
    if seen.holder and is_visible(seen.holder):
        dead = not is_alive(seen.holder)
    else:
        time.sleep(stale_s)
        dead = _look(claim) == seen
    if dead:
        _remove(claim, seen, stale_s)


def _describe(seen: LockContent, what: str) -> str:
    holder = seen.holder
    if not holder:
        return "someone whose lock cannot be read"
    job = f", job {holder['job']}" if holder.get("job") else ""
    return (
        f"{what}: host {holder.get('host')}, process {holder.get('pid')}{job}, "
        f"user {holder.get('user')}, since {holder.get('since')}"
    )


# ---- processes ----


def process_mark(pid: int) -> dict[str, Any]:
    """What tells a process of this host from every other one, now and later; for `is_visible` and `is_alive`."""
    return {"host": socket.gethostname(), "pid_space": _pid_space(), "pid": pid, "pid_start": _start_of(stat_of(pid))}


def _pid_space() -> str:
    """Names the set of processes in which a pid means one process: this boot of this machine, this container."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_visible(holder: dict[str, Any]) -> bool:
    """Whether the holder's process would be seen from here if it lived."""
    space = _pid_space()
    return (
        bool(space)
        and holder.get("host") == socket.gethostname()
        and holder.get("pid_space") == space
        and isinstance(holder.get("pid"), int)
    )


def is_alive(holder: dict[str, Any]) -> bool:
    """Whether the holder's process runs. A zombie does not: in a container process 1 may never collect it."""
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is there and belongs to someone else
    fields = stat_of(holder["pid"])
    if not fields:
        return True  # hidden from us (/proc mounted with hidepid), or gone just now: the next look will show
    return fields[0] not in "ZX" and _start_of(fields) == holder.get("pid_start")


def _start_of(fields: list[str]) -> int | None:
    """When a process was started, in clock ticks since boot; None if it cannot be seen."""
    return int(fields[19]) if fields else None
