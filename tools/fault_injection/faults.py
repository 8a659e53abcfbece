"""What tools.fault_injection does to a job: faults of a run, installed in a forked rank only, and faults of its files.

A fault of a run strikes once, when its victim says that it is in `phase` of `round` or of a later one, `delay_s` after
that where a signal does it. It notes itself in the attempt's notes before it acts, so that the harness knows.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.lock import LOCK_NAME, process_mark
from hkd_hpc.store.tree import is_intact

if TYPE_CHECKING:
    from hkd_hpc.client import Client
    from hkd_hpc.training import LocalTrainer

START_PHASES = ("import of torch", "set-up", "start")  # of no round
SERVER_PHASES = ("reports", "weights", "message", "saving", "evaluation", "final evaluation")
CLIENT_PHASES = ("training", "reports", "weights", "message", "final evaluation")
FULL_BYTES = 1 << 16  # written at a time until a disk is full
QUOTA_BYTES = 50_000  # more than anything printed, less than a checkpoint


class UserError(Exception):
    """Stands for whatever a user's scheme or model may raise."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault of a run. `reported_alone`: the survivors, or the victim itself, can say what happened."""

    name: str
    server: bool = False  # strikes rank 0
    min_ranks: int = 1
    starting: bool = False  # strikes before round 1
    writing: str = ""  # strikes while such a file is written
    delayed: bool = False  # a signal, at a random moment after its place
    phases: tuple[str, ...] = ()  # else all that the victim comes to
    reported_alone: bool = True  # a single process can still say it
    ends: bool = True  # the job ends, non-zero
    weight: float = 1.0


KILL_ALL, STOP, USR1, EXIT_0 = "SIGKILL, all ranks", "SIGSTOP", "SIGUSR1", "os._exit(0)"
SLEEP, FULL, SECOND = "sleep beyond the time-out", "disk full", "a second job on the folder"
REMOVED, NAN = "checkpoint folder removed", "NaN in a client's weights"
KINDS = {
    kind.name: kind
    for kind in (
        Kind("SIGKILL, one rank", delayed=True, reported_alone=False, weight=2),
        Kind(KILL_ALL, delayed=True, reported_alone=False, weight=2),
        Kind("SIGKILL in the start-up", starting=True, delayed=True, reported_alone=False),
        Kind("SIGKILL in an evaluation", server=True, phases=("evaluation",), reported_alone=False),
        Kind("SIGKILL in a checkpoint's write", server=True, writing=r"round_(\d+)", reported_alone=False, weight=2),
        Kind("SIGKILL before a checkpoint's rename", server=True, writing=r"rename round_(\d+)", reported_alone=False),
        Kind("SIGKILL in metrics.h5's write", server=True, writing=r"metrics", reported_alone=False),
        Kind(STOP, min_ranks=2),
        Kind("SIGTERM", delayed=True),
        Kind("SIGINT", delayed=True),
        Kind(USR1, delayed=True),
        Kind("exception in a client", phases=("training",), weight=1.5),
        Kind("exception in the start-up", starting=True),
        Kind("sys.exit(0)"),
        Kind(EXIT_0, reported_alone=False),
        Kind(SLEEP, min_ranks=2, phases=("training", "evaluation")),
        Kind(FULL, server=True, phases=("training", "reports", "message", "saving", "evaluation")),
        Kind("quota", server=True, phases=("training", "reports", "message", "saving", "evaluation")),
        Kind(REMOVED, server=True, phases=("message", "evaluation"), ends=False, weight=0.4),
        Kind(SECOND, server=True, phases=("reports", "evaluation"), ends=False, weight=0.4),
    )
}
SIGNALS = {name: signal.SIGKILL for name in KINDS if name.startswith("SIGKILL") and name != KILL_ALL} | {
    "SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
    USR1: signal.SIGUSR1,
}


@dataclass(frozen=True)
class Fault:
    """A fault of a run, drawn. `write`: which write to a file it strikes, from 1, for kinds that strike there."""

    kind: str
    victim: int
    phase: str
    round: int
    delay_s: float = 0.0
    write: int = 1

    def __str__(self) -> str:
        where = f"write {self.write}" if KINDS[self.kind].writing else self.phase
        return f"rank {self.victim}, {where} of round {self.round} or later, + {self.delay_s:.2f} s"


@dataclass(frozen=True)
class Notes:
    """What the ranks write down in an attempt, a file each: struck, saved (round), trained (round, client), nan."""

    folder: Path

    def add(self, name: str, text: str = "") -> None:
        with open(self.folder / name, "a") as file:
            file.write(text + "\n")

    def numbers(self, name: str) -> list[tuple[int, ...]]:
        """The lines, each as a tuple of numbers."""
        path = self.folder / name
        return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()


# ---- in a forked rank ----


def note_progress(rank: int, notes: Notes) -> None:
    """Every local training, and on rank 0 every round that is past its save."""
    from hkd_hpc.training import LocalTrainer

    before(LocalTrainer, "run", lambda trainer, given: notes.add("trained", f"{given.round} {given.client.id}"))
    if rank == 0:
        on_status(lambda round, phase: notes.add("saved", str(round)) if phase == "evaluation" else None)


def install(rank: int, fault: Fault, notes: Notes, folder: Path) -> None:
    """Make this rank do it, if it is the victim."""
    if rank != fault.victim:
        return
    kind, act = KINDS[fault.kind], action_of(fault, folder, notes)
    struck = threading.Event()

    def strike_now() -> None:
        notes.add("struck")
        act()

    def strike() -> None:
        if struck.is_set():
            return
        struck.set()
        if fault.delay_s:
            timer = threading.Timer(fault.delay_s, strike_now)
            timer.daemon = True
            timer.start()
        else:
            strike_now()

    if kind.writing:
        on_write(kind.writing, fault, strike)
    else:
        due = lambda round, phase: phase == fault.phase and (kind.starting or (round or 0) >= fault.round)
        on_status(lambda round, phase: strike() if due(round, phase) else None)


def install_nan(client_id: int, round: int, notes: Notes) -> None:
    """This client's weights become NaN at the end of its training in `round`, in every run of the scenario."""
    from hkd_hpc.training import LocalTrainer

    def spoil(trainer: LocalTrainer, client: Client, *_: object) -> None:
        if (client.id, client.round) == (client_id, round):
            notes.add("nan")
            trainer.flat.parameters_P[5] = float("nan")

    before(LocalTrainer, "end", spoil)


def around(owner: type | ModuleType, name: str, function: Callable) -> None:
    """Call function(original, ...) wherever a method or function of this name is called."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: function(original, *args, **kwargs))


def before(owner: type | ModuleType, name: str, action: Callable[..., object]) -> None:
    """Call `action` with the arguments before each call of a method."""

    def first(original: Callable, *args: object, **kwargs: object) -> object:
        action(*args, **kwargs)
        return original(*args, **kwargs)

    around(owner, name, first)


def on_status(action: Callable[[int | None, str], object]) -> None:
    """Call `action`(round, phase) whenever this rank says where it is."""
    from hkd_hpc.comm.control.base import Control, NullControl

    def set_status(original: Callable, self: object, round: int | None, phase: str, client: int | None = None) -> None:
        original(self, round, phase, client)
        action(round, phase)

    for owner in (Control, NullControl):
        around(owner, "set_status", set_status)


def on_write(pattern: str, fault: Fault, strike: Callable[[], object]) -> None:
    """Call `strike` at the fault's write to a file whose name has the pattern, or before its rename ("rename ...")."""
    from hkd_hpc.store import tree

    def due(name: str) -> bool:
        found = re.search(pattern, name)
        return found is not None and (not found.groups() or int(found[1]) >= fault.round)

    if pattern.startswith("rename "):
        before(os, "replace", lambda source, path: due(f"rename {Path(path).name}") and strike())
        return
    writes = iter(range(1, sys.maxsize))
    before(
        tree.DeferredErrorFile,
        "write",
        lambda file, data: due(Path(file.name).name) and next(writes) >= fault.write and strike(),
    )


def action_of(fault: Fault, folder: Path, notes: Notes) -> Callable[[], None]:
    """What happens in the victim."""
    if fault.kind in SIGNALS:
        return lambda: os.kill(os.getpid(), SIGNALS[fault.kind])
    return {
        KILL_ALL: lambda: None,  # the harness sees the note and kills them
        STOP: lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "exception in a client": raise_user_error,
        "exception in the start-up": raise_user_error,
        "sys.exit(0)": lambda: sys.exit(0),
        EXIT_0: lambda: os._exit(0),
        SLEEP: lambda: time.sleep(600),
        FULL: lambda: fill(folder),
        "quota": limit_files,
        REMOVED: lambda: shutil.rmtree(folder / "checkpoints"),
        SECOND: lambda: wait_for(notes, "second job ended"),
    }[fault.kind]


def raise_user_error() -> None:
    raise UserError("on purpose")


def fill(folder: Path) -> None:
    """Take all that is left on the folder's disk. The harness allows it only on a small disk of its own."""
    with contextlib.suppress(OSError), open(filler(folder), "ab", buffering=0) as file:
        while True:
            file.write(bytes(FULL_BYTES))


def filler(folder: Path) -> Path:
    return folder.parent / "filler"


def limit_files() -> None:
    """As a quota: no file of this process may grow beyond QUOTA_BYTES any more."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (QUOTA_BYTES, resource.RLIM_INFINITY))


def wait_for(notes: Notes, name: str) -> None:
    while not notes.has(name):
        time.sleep(0.01)


# ---- faults of files, between two attempts ----


def newest(folder: Path) -> Path | None:
    """The newest checkpoint, if an older one is good: with none a resume is rejected."""
    checkpoints = [path for _, path in RunFolder(folder).checkpoints()]
    return checkpoints[0] if any(map(is_intact, checkpoints[1:])) else None


def metrics(folder: Path) -> Path | None:
    path = RunFolder(folder).metrics_path
    return path if path.exists() else None


def flip(path: Path, place: float) -> None:
    """One bit, `place` (0 to 1) of the way into the file."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << int(place * 1e6) % 8
    path.write_bytes(content)


def cut(path: Path, place: float) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path, place: float) -> None:
    os.truncate(path, 0)


def remove(path: Path, place: float) -> None:
    path.unlink()


DAMAGES = {  # name: (which file, what is done to it)
    "newest checkpoint, a bit flipped": (newest, flip),
    "newest checkpoint cut to half": (newest, cut),
    "newest checkpoint emptied": (newest, empty),
    "metrics.h5, a bit flipped": (metrics, flip),
    "metrics.h5 cut to half": (metrics, cut),
    "metrics.h5 deleted": (metrics, remove),
}


def dead_lock(folder: Path) -> None:
    """The lock of a process of this host that is no more."""
    child = subprocess.Popen(["sleep", "60"])
    holder = process_mark(child.pid)
    child.kill()
    child.wait()
    write_lock(folder, holder)


def distant_lock(folder: Path) -> None:
    """The lock of another host that gives no sign of life."""
    write_lock(folder, {"host": "elsewhere", "pid": 1, "pid_space": "x", "pid_start": 1})


def write_lock(folder: Path, holder: dict) -> None:
    about = {"user": "fault injection", "since": "", "job": "", "token": "of nobody"}
    (folder / LOCK_NAME).write_text(json.dumps(holder | about))


def stale_files(folder: Path) -> None:
    """What a writer that was killed leaves."""
    for name in (".metrics.h5.999999.tmp", "checkpoints/.round_0001.h5.999999.tmp", ".config.json.999999.tmp"):
        (folder / name).write_bytes(b"half a file")


LEFTOVERS = {
    "lock of a dead process": dead_lock,
    "lock of a silent host": distant_lock,
    "temporary files of a dead process": stale_files,
}
FILE_KINDS = dict.fromkeys((*DAMAGES, *LEFTOVERS), 1.0) | {"lock of a silent host": 0.3}  # name: weight


def damage_files(name: str, folder: Path, place: float) -> Path | None:
    """Do it to the folder of a run that nobody works on; the file that is damaged, None where it is none of the run's.

    FileNotFoundError where there is nothing to damage.
    """
    if name in LEFTOVERS:
        LEFTOVERS[name](folder)
        return None
    find, damage = DAMAGES[name]
    path = find(folder)
    if path is None:
        raise FileNotFoundError(name)
    damage(path, place)
    return path
