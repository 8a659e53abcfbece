"""A run while it trains, in a terminal: `python -m hkd_hpc.report RUN --follow`.

Its files alone are looked at, so that it may run on another node of a shared file system. Without a terminal each round
is a plain line.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.stop import STOPPED
from hkd_hpc.console import messages, output
from hkd_hpc.results import Run, load
from hkd_hpc.runtime.paths import named_path
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.history import PHASES
from hkd_hpc.store.lock import is_held

if TYPE_CHECKING:
    from rich.console import RenderableType

EVERY_S = 1.0
TAIL_BYTES = 65536  # as much of a log's end is looked at
SHOWN_WARNINGS = 3
CURVE_CELLS = 48
RAMP, PLAIN_RAMP = "▁▂▃▄▅▆▇█", "_.-=+*#@"
EXIT_CODES = {"complete": 0, "broken": 1, "stopped": STOPPED}
MEAN_OVER = 5  # rounds, for what remains


@dataclass(frozen=True)
class Look:
    """A run at one moment.

    Attributes:
        run: its files as they were read then.
        state: one of results.STATES, or "gone": there was a run, and its folder holds none any more.
        quiet_s: since its rows last grew.
        warnings: the last lines of its log that warn.
    """

    run: Run
    state: str
    quiet_s: float
    warnings: tuple[str, ...]

    @property
    def done(self) -> int:
        """Completed rounds."""
        return len(self.run)

    @property
    def rounds(self) -> int:
        """All that there will be."""
        return int(self.run.settings.get("fed.rounds", self.done))

    @property
    def terms(self) -> list[str]:
        """Of the loss, in the scheme's order; those of a class of one's own, which is not loaded to look, by name."""
        found = [name.partition("/")[2] for name in self.run.round_columns if name.startswith("loss/")]
        scheme = self.run.settings.get("scheme.name", "")
        known = schemes.get(scheme).terms if scheme in {**schemes.REGISTRY, **schemes.CONTROLS} else ()
        return [*(term for term in known if term in found), *(term for term in found if term not in known)]

    def column(self, name: str) -> np.ndarray:
        """(rounds,) float64; empty where it is not recorded."""
        return np.asarray(self.run.round_columns.get(name, ()), float)

    def left_s(self, done: int) -> float:
        """After so many rounds, until the last is done: from how long the newest ones took, with the tests and saves
        after which rank 0 begins the next; NaN before the first."""
        seconds = (self.column("wall_s") + self.column("seconds/evaluate_and_save"))[-MEAN_OVER:]
        return float(seconds.mean()) * (self.rounds - done) if len(seconds) else float("nan")


def follow(path: str | os.PathLike, wait: bool = False, every_s: float = EVERY_S) -> int:
    """Show a run until it is complete, broken or stopped.

    Args:
        path: the run's folder.
        wait: for a run that is not there yet, and for one that is stopped and may be resumed.
        every_s: between two looks.

    Returns:
        The exit code: 0 complete, or left by Ctrl-C; 1 broken; 75 stopped.

    Raises:
        UsageError: there is no run's folder, or the terminal needs a package that is not installed.
    """
    folder = named_path(path, "")
    if folder.is_file():
        raise UsageError(f"{folder}: is a file; --follow looks at all that a run writes: name its folder")
    if not wait:
        load(folder)
    try:
        with shown_on() as show:
            for look in looks(folder, wait, every_s):
                show(look)
    except KeyboardInterrupt:
        return 0
    return EXIT_CODES[look.state]


# --- looking


def looks(folder: Path, wait: bool, every_s: float) -> Iterator[Look]:
    """The run again and again, until it has ended. Its files are read anew where they have changed."""
    read: tuple[Any, Run] | None = None
    look: Look | None = None
    while True:
        is_running = is_held(folder)  # before the files are read: one that has ended has written all of them
        signature = signature_of(folder)
        if read is None or read[0] != signature or not is_running:
            read = signature, Run(folder)
        is_gone = wait and not RunFolder(folder).holds_run()
        if look or not is_gone:
            look = look_at(read[1], is_running)
            look = replace(look, state="gone") if is_gone else look
            yield look
            if look.state in ("complete", "broken") or (look.state == "stopped" and not wait):
                return
        time.sleep(every_s)


def signature_of(folder: Path) -> tuple[int, ...] | None:
    """Changes with each round that is written."""
    with contextlib.suppress(OSError):
        status = RunFolder(folder).metrics_path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None


def look_at(run: Run, is_running: bool) -> Look:
    """What there is to see of a run."""
    state = "broken" if run.problem else "complete" if run.summary else "running" if is_running else "stopped"
    signature = signature_of(run.path)
    quiet_s = max(time.time() - signature[2] / 1e9, 0.0) if signature else float("nan")
    return Look(run, state, quiet_s, warnings_in(RunFolder(run.path).log_path))


def warnings_in(log: Path) -> tuple[str, ...]:
    """The last lines of a log that warn, empty where there is no log."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return tuple([line for line in lines if " warning: " in line][-SHOWN_WARNINGS:])
    return ()


# --- showing


@contextlib.contextmanager
def shown_on() -> Iterator[Callable[[Look], None]]:
    """Shows looks: on a terminal in one place, elsewhere as lines. UsageError where its package is not installed."""
    if not output.is_terminal(sys.stdout):
        yield Lines().show
        return
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise UsageError("--follow: rich is not installed; pip install 'hkd_hpc[report]'") from None
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        yield lambda look: live.update(picture(look, RAMP if console.encoding == "utf-8" else PLAIN_RAMP), refresh=True)


class Lines:
    """Each round and each warning once, as plain lines."""

    def __init__(self) -> None:
        self._done, self._state, self._warned = 0, "", set[str]()

    def show(self, look: Look) -> None:
        """What is new."""
        for warning in look.warnings:
            if warning not in self._warned:
                messages.say(warning)
        self._warned |= set(look.warnings)
        for index in range(self._done, look.done):
            left_s = look.left_s(index + 1) if look.state == "running" else None
            messages.say(messages.round_line(row_of(look, index), look.rounds, left_s, look.terms))
        self._done = look.done
        if look.state != self._state and look.state != "running":
            messages.say(state_text(look))
        self._state = look.state


def row_of(look: Look, index: int) -> dict[str, Any]:
    """A row of the rounds, by column."""
    return {name: column[index] for name, column in look.run.round_columns.items()}


def state_text(look: Look) -> str:
    """How it stands, in one line."""
    if look.state == "broken":
        return f"broken: {look.run.problem}"
    if look.state == "gone":
        return f"gone: {look.run.path} holds no run any more; waiting for one there (Ctrl-C ends that)"
    if look.state == "stopped":
        return (
            f"stopped after round {look.done} of {look.rounds}: no process has its folder; "
            f"python -m hkd_hpc.train --resume --out {shlex.quote(str(look.run.path))} resumes it"
        )
    return f"{look.state}: {look.done} of {look.rounds} rounds, {look.run.path}"


def picture(look: Look, ramp: str = RAMP) -> RenderableType:
    """All there is to see, for rich."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(headline(look), style="bold", overflow="crop", no_wrap=True)]
    bar = Table.grid()  # which ends its line
    bar.add_row(ProgressBar(look.rounds, look.done, width=CURVE_CELLS, finished_style="green"))
    parts += [bar, Text(where_text(look)), curves(look, ramp)]
    parts += [Text(seconds_text(look))] if look.done else []
    parts += [Text(line, style="yellow", overflow="crop", no_wrap=True) for line in look.warnings]
    return Group(*parts)


def headline(look: Look) -> str:
    """fedhkd on fmnist, 10 clients, seed 0: runs/one"""
    settings = look.run.settings
    if "scheme.name" not in settings:
        return str(look.run.path)
    scheme, data, clients, seed = (settings[key] for key in ("scheme.name", "data.name", "fed.clients", "run.seed"))
    return f"{scheme} on {data}, {clients} clients, seed {seed}: {look.run.path}"


def where_text(look: Look) -> str:
    """round 3/10, 12.3 s each, 1 min 26 s left; the last one 4.0 s ago"""
    if look.state != "running":
        return state_text(look)
    if not look.done:
        return f"round 1/{look.rounds} is running"
    return (
        f"{look.done} of {look.rounds} rounds; the last took {messages.seconds_text(look.column('wall_s')[-1])} "
        f"and ended {messages.seconds_text(look.quiet_s)} ago; {messages.seconds_text(look.left_s(look.done))} left"
    )


def curves(look: Look, ramp: str) -> RenderableType:
    """Accuracies and loss terms: name, last value, curve, least and largest."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    columns = {"local": "local_test_accuracy", "global": "global_test_accuracy"}
    columns |= {f"loss {term}": f"loss/{term}" for term in look.terms}
    for title, name in columns.items():
        values = look.column(name)
        finite = values[np.isfinite(values)]
        if len(finite):
            span = f"{finite.min():.3f} to {finite.max():.3f}"
            table.add_row(title, f"{finite[-1]:.3f}", sparkline(values, ramp), span)
    return table


def sparkline(values: np.ndarray, ramp: str = RAMP, cells: int = CURVE_CELLS) -> str:
    """A curve of one line: in each cell the mean of as many values, from the least to the largest; a space for none."""
    parts = [part[np.isfinite(part)] for part in np.array_split(values, min(cells, len(values)))] if len(values) else []
    means = np.array([part.mean() if len(part) else np.nan for part in parts])
    finite = means[np.isfinite(means)]
    if not len(finite):
        return " " * len(means)
    low, span = finite.min(), np.ptp(finite) or 1.0
    return "".join(" " if np.isnan(mean) else ramp[round((mean - low) / span * (len(ramp) - 1))] for mean in means)


def seconds_text(look: Look) -> str:
    """Of the last round by phase on rank 0, and who did not deliver."""
    values = {phase: look.column(f"seconds/{phase}")[-1:] for phase in (*PHASES, "save")}
    phases = ", ".join(f"{phase} {seconds[0]:.1f}" for phase, seconds in values.items() if len(seconds))
    lost = {
        "rejected": look.column("clients_refused")[-1:],
        "stragglers or dropped out": look.column("clients_failed")[-1:],
    }
    told = [f"{int(counts.sum())} clients {word}" for word, counts in lost.items() if counts.sum() > 0]
    return "; ".join([f"seconds of the last round (rank 0): {phases}", *told])
