"""What state each cell is in: from its own files first, from SLURM's queue only where these leave it open."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hkd_hpc.config import Config, identity
from hkd_hpc.console import messages
from hkd_hpc.jobs.files import JOB_LOCK, Launch, Status, no_room
from hkd_hpc.jobs.sweep import Cell
from hkd_hpc.jobs.task import last_words
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.lock import is_alive, is_held, is_visible

BUSY = ("running", "queued")  # not to be started
OTHER = "other settings"
STATES = ("complete", *BUSY, "stopped", "cancelled", "failed", "lost", OTHER, "missing")
QUEUE_S = 30.0  # the queue is asked no more often
NAN = float("nan")


@dataclass(frozen=True)
class CellState:
    """state: one of STATES; stopped: by a signal, and saved; lost: its job died without a word; other settings: the
    folder holds another run. NaN: not measured."""

    name: str
    state: str
    round: int
    rounds: int
    local: float = NAN  # accuracy of the last round
    global_: float = NAN
    node: str = ""
    job: str = ""
    starts: int = 0
    left_s: float = NAN
    error: str = ""


class Queue:
    """Which of the user's jobs SLURM has, waiting or running; asked at most every QUEUE_S."""

    def __init__(self) -> None:
        self._asked_s, self._jobs = float("-inf"), None

    def jobs(self) -> set[str] | None:
        """Their ids (12, 12_3), None where SLURM does not answer: then nobody knows."""
        if time.monotonic() - self._asked_s > QUEUE_S:
            self._jobs, self._asked_s = _ask_queue(), time.monotonic()
        return self._jobs


def _ask_queue() -> set[str] | None:
    try:
        answer = subprocess.run(
            ["squeue", "--noheader", "--array", "--me", "--format=%i"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return set(answer.stdout.split())


def look(root: Path, cells: list[Cell], launches: list[Launch], queue: Queue) -> list[CellState]:
    """The state of every cell; what counts is the last launch that gave it to a job, or to several."""
    given: dict[str, tuple[Launch, list[str]]] = {}
    for launch in launches:
        for job, names in launch.jobs.items():
            for name in names:
                if name not in given or given[name][0] is not launch:
                    given[name] = (launch, [])
                given[name][1].append(job)
    return [_look_at(cell, RunFolder(root / cell.name), *given.get(cell.name, (None, [])), queue) for cell in cells]


def _look_at(cell: Cell, folder: RunFolder, launch: Launch | None, jobs: list[str], queue: Queue) -> CellState:
    status = Status.read(folder.path)
    config = cell.config()
    state, error = _state(folder, config, status, launch, jobs, queue)
    rows = folder.rounds() if state != OTHER else {}
    done, rounds = len(rows.get("round", ())), config.fed.rounds
    last = {name: float(rows[f"{name}_test_accuracy"][-1]) if done else NAN for name in ("local", "global")}
    left_s = NAN
    if (
        state == "running" and status and done > status.first_round
    ):  # tests and saves, and what else takes time, included
        left_s = (time.time() - status.began) / (done - status.first_round) * (rounds - done)
    job = status.job if status and state != "queued" else "".join(jobs[-1:])
    node, starts = (status.node, status.starts) if status else ("", 0)
    return CellState(cell.name, state, done, rounds, last["local"], last["global"], node, job, starts, left_s, error)


def _state(
    folder: RunFolder, config: Config, status: Status | None, launch: Launch | None, jobs: list[str], queue: Queue
) -> tuple[str, str]:
    """(state, what went wrong)."""
    if is_held(folder.path, JOB_LOCK):
        return "running", ""
    other = identity.other_run(folder, config)
    if other:
        return OTHER, f"{folder.path} holds another run: {other}"
    if folder.summary():
        return "complete", ""
    tried = status is not None and launch is not None and status.launch == launch.name
    if tried and status.state == "failed":
        return "failed", status.error
    if launch is not None and launch.cancelled:
        return "cancelled", ""
    if launch is not None and _is_waiting(launch, jobs, queue):
        return "queued", ""
    if status is None:
        return ("missing", "") if launch is None or not jobs else ("lost", _why_not_begun(folder.path.parent, jobs[-1]))
    if status.state == "running":
        return "lost", no_room(folder.path) or last_words(folder.path / "log.txt")
    if status.state == "complete":
        return "lost", folder.damage() or f"{folder.metrics_path} is not there any more"
    return status.state, status.error


def _why_not_begun(root: Path, job: str) -> str:
    """A job that never reached a cell: the disk, else what its shell lines or srun said last, and where that stands."""
    log = root / "submitit" / f"{job}_0_log.err"
    said = last_words(log, weak="srun: ")
    why = no_room(root) or (f"{said} ({log})" if said else f"see {log}" if log.exists() else "")
    return "; ".join(filter(None, [f"job {job} ended before it began with this cell", why]))


def _is_waiting(launch: Launch, jobs: list[str], queue: Queue) -> bool:
    """Whether one of the jobs may still begin with, or go on with, the cell."""
    if launch.executor == "slurm":
        queued = queue.jobs()
        return queued is None or not queued.isdisjoint(jobs)
    return any(is_visible(process) and is_alive(process) for process in launch.processes.values())


def table(states: list[CellState]) -> str:
    """For a plain terminal: what needs attention last, so that it stands above the prompt; counts at the end."""
    rows = [("cell", "state", "round", "local", "global", "job", "node", "starts", "left")]
    ordered = sorted(states, key=lambda state: STATES.index(state.state))
    for state in ordered:
        rows.append(
            (
                state.name,
                state.state,
                f"{state.round}/{state.rounds}",
                messages.number_text(state.local),
                messages.number_text(state.global_),
                state.job,
                state.node,
                str(state.starts),
                messages.seconds_text(state.left_s) if state.left_s == state.left_s else "",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
    for i in range(len(ordered), 0, -1):
        if ordered[i - 1].error:
            lines.insert(i + 1, f"    {ordered[i - 1].error}")
    return "\n".join([*lines, counts(states)])


def counts(states: list[CellState]) -> str:
    """54 cells: 50 complete, 4 running"""
    found = {state: sum(s.state == state for s in states) for state in STATES}
    return f"{len(states)} cells: " + ", ".join(f"{count} {state}" for state, count in found.items() if count)


def wait(
    look: Callable[[], list[CellState]],
    say: Callable[[str], None],
    poll_s: float = 2.0,
    more: Callable[[list[CellState]], bool] = lambda states: False,
) -> list[CellState]:
    """The states once no cell is running or queued any more, and there are no `more` to come; says the counts when they
    change."""
    said = ""
    while True:
        states = look()
        if counts(states) != said:
            said = counts(states)
            say(said)
        if not any(state.state in BUSY for state in states) and not more(states):
            return states
        time.sleep(poll_s)


def repeat(look: Callable[[], list[CellState]], show: Callable[[list[CellState]], None], every_s: float | None) -> None:
    """Show the states once, or every so many seconds until no cell is running or queued any more."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            states = look()
            show(states)
            if every_s is None or not any(state.state in BUSY for state in states):
                return
            time.sleep(max(every_s, 0.1))


def is_safe_to_signal(process: dict) -> bool:
    """Whether a job on this machine still runs, and is ours to signal."""
    return is_visible(process) and is_alive(process) and process["pid"] != os.getpid()
