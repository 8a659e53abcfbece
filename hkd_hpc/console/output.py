"""Where lines go: to the terminal, as many as were asked for, and to the run's log.txt with time and rank.

`current()` is what this process says things through; `messages.say` and its kin use it. A run opens one of its own:

    with opened(Level.QUIET) as output:
        ...
        output.keep(Log(folder / "log.txt"))
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import datetime
from enum import IntEnum
from pathlib import Path
from typing import TextIO

from hkd_hpc.common.command import discard

HELD_LINES = 1000  # at most, said before the run has a log
REDRAW_S = 0.5
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d rank \d+: ")  # before a line of a log
ERASE = "\r\x1b[K"  # the line on which the cursor stands


class Level(IntEnum):
    """How much a terminal shows."""

    QUIET = 0  # errors, and what the run was for
    NORMAL = 1
    VERBOSE = 2


class Log:
    """A run's log.txt, to which lines are appended: ISO time, rank, text.

    It is opened for each line: whatever becomes of the file, the folder or the disk, nothing else suffers.

    Args:
        path: of the file; its folder must be there.
        rank: of this process.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path, self.rank = path, rank

    def stamped(self, text: str) -> str:
        """The lines of a text as they stand in the log: "2026-11-29T15:04:05+00:00 rank 0: round  1/10 ..."."""
        stamp = f"{datetime.now().astimezone().isoformat(timespec='seconds')} rank {self.rank}: "
        return "".join(f"{stamp}{line}\n" for line in text.splitlines() if line.strip())

    def append(self, lines: str) -> None:
        """Add stamped lines. Raises OSError."""
        with open(self.path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(lines)

    def is_terminal(self) -> bool:
        """Whether what the process prints goes to this very file, as in a trial of a study."""
        with contextlib.suppress(OSError):
            return any(os.path.samestat(os.fstat(descriptor), os.stat(self.path)) for descriptor in (1, 2))
        return False


class Output:
    """What a process says, where, and how much of it.

    Args:
        level: how much the terminal shows; the log has the lines of every level up to the terminal's, and those of
            NORMAL always.
    """

    def __init__(self, level: Level = Level.NORMAL) -> None:
        self.level = level
        self._log: Log | None = None
        self._is_stamped = False  # what is printed goes to the log itself, as in a trial of a study
        self._held: list[str] | None = None  # stamped lines for the log to come; None: there will be none
        self._lock = threading.RLock()
        self._is_drawn = False

    def say(self, text: str, level: Level = Level.NORMAL) -> None:
        """A line, or several, of this level."""
        with self._lock:
            if level <= max(self.level, Level.NORMAL):
                self._record(text)
            if level <= self.level:
                self.erase()
                write(sys.stdout, self._printed(text))

    def warn(self, text: str, level: Level = Level.NORMAL) -> None:
        """A line for people who watch, from this level on."""
        with self._lock:
            self._record(f"warning: {text}")
            if level <= self.level:
                self.erase()
                write(sys.stderr, self._printed(f"hkd_hpc: warning: {text}"))

    # ---- the log

    def hold(self) -> None:
        """Keep from now on what is said for the log that `keep` will name."""
        self._held = []

    def keep(self, log: Log) -> None:
        """Write to this log from now on, what was held first."""
        with self._lock:
            held, self._held, self._log = "".join(self._held or []), None, log
            self._is_stamped = log.is_terminal()
            self._append(held)

    def record(self, text: str) -> None:
        """Only for the log: what another part of the program has told people already."""
        with self._lock:
            self._record(text)

    def _printed(self, text: str) -> str:
        return self._log.stamped(text).rstrip("\n") if self._log and self._is_stamped else text

    def _record(self, text: str) -> None:
        if self._log:
            self._append(self._log.stamped(text))
        elif self._held is not None and len(self._held) < HELD_LINES:
            self._held.append(Log(Path()).stamped(text))

    def _append(self, lines: str) -> None:
        """A log that cannot be written ends no run: it is told once."""
        log, self._log = self._log, None
        try:
            if log and not self._is_stamped:
                log.append(lines)
            self._log = log
        except OSError as error:
            self.warn(f"{log.path if log else ''}: {error.strerror}; the run goes on without a log")

    # ---- a line that is redrawn in place

    def draw(self, text: str) -> None:
        """Show this in place of what was drawn before, until the next line that is said."""
        columns = shutil.get_terminal_size().columns
        with self._lock, contextlib.suppress(OSError):
            sys.stderr.write(ERASE + text[: columns - 1])
            sys.stderr.flush()
            self._is_drawn = True

    def erase(self) -> None:
        """Take away what was drawn."""
        if self._is_drawn:
            self.draw("")
            self._is_drawn = False

    @contextlib.contextmanager
    def redrawn(self, text: Callable[[], str]) -> Iterator[None]:
        """Within it `text()` is drawn, anew twice a second; on a terminal only, by a thread that computes nothing."""
        if self.level == Level.QUIET or not is_terminal(sys.stderr):
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._redraw, args=(text, ended), name="hkd-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.erase()

    def _redraw(self, text: Callable[[], str], ended: threading.Event) -> None:
        while not ended.wait(REDRAW_S):
            self.draw(text())


class Screen:
    """A text on stdout that takes the place of the one shown before it; one below the other where there is no terminal.

    Of a text that is longer than the terminal the end is shown.
    """

    def __init__(self) -> None:
        self._lines = 0

    def show(self, text: str) -> None:
        """Show it."""
        if is_terminal(sys.stdout):
            columns, rows = shutil.get_terminal_size()
            lines = [line[: columns - 1] for line in text.splitlines()][1 - rows :]
            text = f"\x1b[{self._lines}F\x1b[J" * bool(self._lines) + "\n".join(lines)
            self._lines = len(lines)
        write(sys.stdout, text)


CURRENT: ContextVar[Output] = ContextVar("output")
PLAIN = Output()  # of a process that has opened none


def current() -> Output:
    """What this process says things through."""
    return CURRENT.get(PLAIN)


@contextlib.contextmanager
def opened(level: Level) -> Iterator[Output]:
    """Within it `current()` is a new output of this level, which holds what is said for a log."""
    output = Output(level)
    output.hold()
    token = CURRENT.set(output)
    try:
        yield output
    finally:
        CURRENT.reset(token)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether people watch it, and lines can be redrawn there. None: the process was started without it (`2>&-`)."""
    return stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def write(stream: TextIO | None, text: str) -> None:
    """A line, flushed at once so that a killed job leaves a readable log. A reader that has gone (`| head`) or a full
    disk must not end a run of hours: then the rest is not printed.
    """
    if stream is None:
        return
    try:
        print(printable(text, stream), file=stream, flush=True)
    except OSError:
        discard(stream)


def printable(text: str, stream: TextIO) -> str:
    """What the stream's encoding lacks (a name of a file that is not UTF-8) becomes an escape."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
