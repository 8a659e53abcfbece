"""Launching: check everything, then submit the trials that are missing, failed or unfinished, through submitit."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import identity
from hkd_hpc.jobs import verdict, watch
from hkd_hpc.jobs.checks import Problems, check, check_no_file
from hkd_hpc.jobs.estimate import Forecast
from hkd_hpc.jobs.executors import SUBMIT, Say, arrays_of, at_a_time_of, fitting_trials
from hkd_hpc.jobs.files import (
    Launch,
    Status,
    launch_lock,
    launch_of,
    next_launch,
    read_launches,
    read_trials,
    write_trials,
)
from hkd_hpc.jobs.forecast import forecast
from hkd_hpc.jobs.options import Options, as_options, check_options, cores_of
from hkd_hpc.jobs.site import Site
from hkd_hpc.jobs.slurm import Array, Queue, jobs_that_fit_queue, longest_array
from hkd_hpc.jobs.sweep import Sweep, Trial
from hkd_hpc.jobs.task import end, keep_final_weights
from hkd_hpc.runtime import provenance, versions
from hkd_hpc.runtime.paths import named_path
from hkd_hpc.store.folder import RunFolder


def root_at(root: str | os.PathLike) -> Path:
    """The absolute path; UsageError for a file, and for none (an unset variable): that would be the current folder."""
    path = Path(os.path.abspath(named_path(root, "--root ")))
    check_no_file(path)
    return path


def options_at(site: str | os.PathLike | None, given: dict[str, Any]) -> Options:
    """The options, over those of the site file. UsageError."""
    return as_options(given, Site.read(site).options() if site is not None else None)


def top_up(root: Path, trials: list[Trial], states: list[watch.TrialState], queue: Queue, say: Say) -> None:
    """Submit trials that the last launch had to leave outside the queue, as far as they fit now."""
    last = read_launches(root)[-1:]
    options = Options(**last[0].options) if last else Options()
    if options.max_queued and not last[0].cancelled and jobs_that_fit_queue(options, queue):
        missing = [trial for trial, state in zip(trials, states) if state.state == "missing"]
        launch_trials(missing, last[0].executor, root, options, [], say, after=last[0].name)


def launch_trials(
    trials: list[Trial], executor: str, root: Path, options: Options, problems: list[str], say: Say, after: str = ""
) -> None:
    """Check, record, submit. Raises Problems with those given and those found, before anything is submitted; `after`
    as in submit_trials."""
    found = preflight(trials, executor, root, options, problems)
    if found.problems:
        raise Problems(found.problems)
    submit_trials(trials, executor, root, options, say, found.outlook, found.remarks, after)


def submit_trials(
    trials: list[Trial],
    executor: str,
    root: Path,
    options: Options,
    say: Say,
    outlook: Forecast | None,
    remarks: Sequence[str] = (),
    after: str = "",
) -> None:
    """Record trials that were checked, and submit those of them that are not complete, running or queued. `after`: the
    launch that left them; UsageError where that was cancelled meanwhile."""
    for folder in (root / "launches", root / "submitit"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # who can write pickles there can run code
    with launch_lock(root, say):
        if after and launch_of(root, after).cancelled:
            raise UsageError("the launch was cancelled")
        if outlook:
            outlook.remember()
        write_trials(root, {trial.name: trial for trial in [*read_trials(root), *trials]}.values())
        states, todo = to_start(root, trials)
        say(f"{watch.counts(states)}; {len(todo)} to start")
        for line in remarks:
            say(f"remark: {line}")
        if not options.keep_state:
            tidy_up(root, trials, states)
        if todo:
            name, code = next_launch(read_launches(root)), code_here(todo, options)
            record = Launch(name, executor, asdict(options), code=code, root=str(root))
            SUBMIT[executor](root, todo, options, record, say)


@dataclass
class Preflight:
    """What a launch finds before it does anything: how the trials stand, which are to start, their forecast (if there
    are any, with options that can be meant, and torch to try them), a line for each reason to reject the launch, and
    for what to know."""

    states: list[watch.TrialState]
    todo: list[Trial]
    outlook: Forecast | None
    problems: list[str]
    remarks: list[str]


def preflight(trials: list[Trial], executor: str, root: Path, options: Options, problems: list[str]) -> Preflight:
    problems = problems + check(trials, executor, root, options)
    states, todo = to_start(root, trials)
    problems += [f"{state.error}; move it away" for state in states if state.state == watch.OTHER]
    remarks = code_remarks(root, trials, todo, options)
    problems += [f"--strict-code: {line}" for line in remarks if options.strict_code]
    if not todo or executor not in SUBMIT or not options_fit(options, executor) or not versions.installed("torch"):
        return Preflight(states, todo, None, problems, remarks)
    rounds = {state.name: state.round for state in states}
    study = {trial.name: trial for trial in [*read_trials(root), *trials]}.values()
    outlook = forecast(
        root,
        todo,
        [rounds[trial.name] for trial in todo],
        list(study),
        executor,
        options,
        at_a_time(executor, options, root, todo),
    )
    return Preflight(states, todo, outlook, [*problems, *outlook.problems], remarks)


def code_remarks(root: Path, trials: list[Trial], todo: list[Trial], options: Options) -> list[str]:
    """A line where trials that have begun ran with other code than each other, or than is here for those to start."""
    runs = {trial.name: provenance.from_record(RunFolder(root / trial.name).record()) for trial in trials}
    here = {key: [value] for key, value in code_here(todo, options).items()}
    return provenance.lines(
        provenance.mixed({**runs, "this launch": here}, provenance.is_code), rejected=options.strict_code
    )


def code_here(trials: list[Trial], options: Options) -> dict[str, str]:
    """The code that these trials are submitted with; nothing is known of another Python's."""
    return identity.code_of(*(trial.config() for trial in trials)) if trials and not options.python else {}


def options_fit(options: Options, executor: str) -> bool:
    try:
        check_options(options, executor)
    except UsageError:
        return False
    return True


def at_a_time(executor: str, options: Options, root: Path, trials: list[Trial]) -> int:
    """How many trials run together, at most."""
    if executor != "slurm":
        return min(options.parallel or fitting_trials(), len(trials)) if executor == "local" else 1
    lengths = [len(array.jobs) for array in all_arrays(root, trials, options)]
    jobs = sum(map(min, lengths, at_a_time_of(options, lengths)))
    jobs = min(jobs, options.max_queued or sys.maxsize)
    return min(jobs * (options.workers if options.pack else 1), len(trials))


def all_arrays(root: Path, trials: list[Trial], options: Options) -> list[Array]:
    """What would be submitted if the queue took all."""
    return list(arrays_of(root, trials, options, "", longest_array(), sys.maxsize))


def to_start(root: Path, trials: list[Trial]) -> tuple[list[watch.TrialState], list[Trial]]:
    """(how the trials stand, those of them that are neither complete nor running nor queued, nor another run's
    place).
    """
    states = watch.look(root, trials, read_launches(root), Queue())
    return states, [
        trial for trial, state in zip(trials, states) if state.state not in ("complete", watch.OTHER, *watch.BUSY)
    ]


def tidy_up(root: Path, trials: list[Trial], states: list[watch.TrialState]) -> None:
    """What is left to do for complete trials whose job died between the last round and its own end."""
    for trial, state in zip(trials, states):
        folder = RunFolder(root / trial.name)
        status = Status.read(folder.path) if state.state == "complete" else None
        if status and status.state != "complete":
            keep_final_weights(folder)
            end(status, folder, 0, "")


def plan(sweep: Sweep, executor: str, root: str | os.PathLike, options: Options) -> str:
    """What `launch` would do and what that costs, and a line for each reason why it would be rejected. Nothing is
    written or submitted."""
    root = root_at(root)
    trials, problems = sweep.trials()
    found = preflight(trials, executor, root, options, problems)
    axes = ", ".join(f"{len(points)} {name}" for name, points in sweep.axes.items())
    return plan_lines(axes, found, executor, root, options)


def plan_lines(what: str, found: Preflight, executor: str, root: Path, options: Options) -> str:
    """A plan as people read it; `what`: of which kinds its trials are."""
    lines = [f"{what}: {watch.counts(found.states)}; {len(found.todo)} to start"]
    if executor == "slurm" and options_fit(options, executor):
        lines += submission_lines(all_arrays(root, found.todo, options), options)
    lines += verdict.lines(found.outlook) if found.outlook else []
    lines += [f"remark: {line}" for line in found.remarks]
    return "\n".join([*lines, *(f"would be rejected: {problem}" for problem in found.problems)])


def submission_lines(arrays: list[Array], options: Options) -> list[str]:
    """What would be submitted to SLURM: a line for each array, and the bound on the queue."""
    node = f"{options.nodes} node(s) with {options.gpus_of_node()} GPU(s)"
    what = "trials at a time, one process each" if options.pack else "rank(s)"
    lengths = [len(array.jobs) for array in arrays]
    lines = [
        f"array of {length} jobs, {min(share, length)} at a time: each {array.ranks} {what} of "
        f"{cores_of(options, array.ranks)} core(s) on {node}, {options.time_min} min and longer by requeues"
        for array, length, share in zip(arrays, lengths, at_a_time_of(options, lengths))
    ]
    return lines + [f"never more than {options.max_queued} jobs of yours in the queue"] * bool(options.max_queued)
