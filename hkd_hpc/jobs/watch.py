"""What state each trial is in: from its own files first, from SLURM's queue only where these leave it open."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hkd_hpc.analysis.tables import aligned
from hkd_hpc.config import Config, identity
from hkd_hpc.console import messages
from hkd_hpc.jobs.files import JOB_LOCK, Launch, Status, disk_full
from hkd_hpc.jobs.logs import last_line
from hkd_hpc.jobs.slurm import Queue
from hkd_hpc.jobs.sweep import Trial
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.lock import is_alive, is_held, is_visible

BUSY = ("running", "queued")  # not to be started
OTHER = "other settings"
STATES = ("complete", *BUSY, "stopped", "cancelled", "failed", "lost", OTHER, "missing")
NAN = float("nan")
LOOKING = 0.02  # share of a core that looking at trials may take while waiting for them


@dataclass(frozen=True)
class TrialState:
    """state: one of STATES; stopped: by a signal, and saved; lost: its job ended unreported; other settings: the
    folder holds another run. error: what went wrong; of a queued trial why SLURM holds its job. NaN: not measured."""

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


def look(root: Path, trials: list[Trial], launches: list[Launch], queue: Queue) -> list[TrialState]:
    """The state of every trial; what counts is the last launch that gave it to a job, or to several."""
    last: dict[str, Launch] = {name: launch for launch in launches for name in launch.given()}
    return [_look_at(trial, RunFolder(root / trial.name), last.get(trial.name), queue) for trial in trials]


def _look_at(trial: Trial, folder: RunFolder, launch: Launch | None, queue: Queue) -> TrialState:
    status, config = Status.read(folder.path), trial.config()
    jobs = launch.jobs_of(trial.name) if launch else []
    state, error = _state(folder, config, status, launch, jobs, queue)
    rows = folder.rounds() if state != OTHER else {}
    done, rounds = len(rows.get("round", ())), config.fed.rounds
    last = {name: float([NAN, *rows.get(f"{name}_test_accuracy", ())][-1]) for name in ("local", "global")}
    left_s = _left_s(status, done) if status and state == "running" else NAN
    job = status.job if status and state != "queued" else "".join(jobs[-1:])
    node, starts = (status.node, status.starts) if status else ("", 0)
    return TrialState(trial.name, state, done, rounds, last["local"], last["global"], node, job, starts, left_s, error)


def _left_s(status: Status, done: int) -> float:
    """From the rounds since this start, their tests and saves included; NaN before the first."""
    new = done - status.first_round
    return (time.time() - status.began) / new * (status.rounds - done) if new > 0 else NAN


def _state(
    folder: RunFolder, config: Config, status: Status | None, launch: Launch | None, jobs: list[str], queue: Queue
) -> tuple[str, str]:
    """(state, what went wrong)."""
    if is_held(folder.path, JOB_LOCK):
        return "running", ""
    if folder.path.exists() and not folder.path.is_dir():
        return OTHER, f"{folder.path} is no folder"
    other = identity.other_run(folder, config)
    if other:
        return OTHER, f"{folder.path} holds another run: {other}"
    if folder.summary():
        return "complete", ""
    if status and launch and (status.state, status.launch) == ("failed", launch.name):
        return "failed", status.error
    if launch and launch.cancelled:
        return "cancelled", ""
    if launch and _is_waiting(launch, jobs, queue):
        return "queued", queue.held(jobs) if launch.executor == "slurm" else ""
    if status is None:
        return ("lost", _why_not_begun(folder.path.parent, jobs[-1])) if jobs else ("missing", "")
    if status.state == "running":
        return "lost", disk_full(folder.path) or last_line(folder.path / "log.txt")
    if status.state == "complete":
        return "lost", folder.damage() or f"{folder.metrics_path} is not there any more"
    return status.state, status.error


def _why_not_begun(root: Path, job: str) -> str:
    """A job that never reached a trial: the disk, else the last line of its shell or srun, and where that stands."""
    log = root / "submitit" / f"{job}_0_log.err"
    said = last_line(log, weak="srun: ")
    why = disk_full(root) or (f"{said} ({log})" if said else f"see {log}" if log.exists() else "")
    return "; ".join(filter(None, [f"job {job} ended before it began with this trial", why]))


def _is_waiting(launch: Launch, jobs: list[str], queue: Queue) -> bool:
    """Whether one of the jobs may still begin with the trial, or resume it."""
    if launch.executor == "slurm":
        queued = queue.jobs()
        return queued is None or not queued.keys().isdisjoint(jobs)
    return any(is_visible(process) and is_alive(process) for process in launch.processes.values())


def table(states: list[TrialState]) -> str:
    """For a plain terminal: what needs attention last, so that it stands above the prompt; counts at the end."""
    rows = [("trial", "state", "round", "local", "global", "job", "node", "starts", "left")]
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
    lines = aligned(rows)
    for i in range(len(ordered), 0, -1):
        if ordered[i - 1].error:
            lines.insert(i + 1, f"    {ordered[i - 1].error}")
    return "\n".join([*lines, counts(states)])


def counts(states: list[TrialState]) -> str:
    """54 trials: 50 complete, 4 running"""
    found = {state: sum(s.state == state for s in states) for state in STATES}
    return f"{len(states)} trials: " + ", ".join(f"{count} {state}" for state, count in found.items() if count)


def wait(
    look: Callable[[], list[TrialState]],
    tell: Callable[[list[TrialState]], None],
    poll_s: float = 2.0,
    more: Callable[[list[TrialState]], bool] = lambda states: False,
) -> list[TrialState]:
    """The states once no trial is running or queued any more, and there are no `more` to come; `tell` takes all before
    them too. The longer a look takes, of many trials, the longer it waits for the next: a core is theirs."""
    while True:
        start_s = time.process_time()
        states = look()
        look_s = time.process_time() - start_s
        tell(states)
        if not any(state.state in BUSY for state in states) and not more(states):
            return states
        time.sleep(max(poll_s, look_s / LOOKING))


def when_counts_change(say: Callable[[str], None]) -> Callable[[list[TrialState]], None]:
    """Takes the states again and again; says their counts, and why jobs are held, when these change."""
    said: list[str] = []

    def tell(states: list[TrialState]) -> None:
        nonlocal said
        held = dict.fromkeys(state.error for state in states if state.state == "queued" and state.error)
        lines = [counts(states), *held]
        for line in [line for line in lines if line not in said]:
            say(line)
        said = lines

    return tell


def repeat(
    look: Callable[[], list[TrialState]], show: Callable[[list[TrialState]], None], every_s: float | None
) -> None:
    """Show the states once, or every so many seconds until no trial is running or queued any more."""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            states = look()
            show(states)
            if every_s is None or not any(state.state in BUSY for state in states):
                return
            time.sleep(max(every_s, 0.1))
