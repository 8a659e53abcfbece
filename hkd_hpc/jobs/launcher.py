"""Launching: check everything, then submit the cells that are missing, failed or unfinished, through submitit."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hkd_hpc.config import identity
from hkd_hpc.console import messages
from hkd_hpc.errors import UsageError
from hkd_hpc.jobs import verdict, watch
from hkd_hpc.jobs.checks import Problems, check, check_no_file
from hkd_hpc.jobs.executors import SUBMIT, at_a_time_of, fitting_cells, jobs_to_submit, longest_array, room_in_queue
from hkd_hpc.jobs.files import LAUNCH_LOCK, Launch, Status, next_launch, read_cells, read_launches, write_cells
from hkd_hpc.jobs.forecast import Forecast, forecast
from hkd_hpc.jobs.options import Options, as_options, check_options, cores_of
from hkd_hpc.jobs.site import Site
from hkd_hpc.jobs.study import Study
from hkd_hpc.jobs.sweep import Cell, Sweep
from hkd_hpc.jobs.task import LOCK_WAIT_S, end, keep_final_weights
from hkd_hpc.runtime import provenance, versions
from hkd_hpc.runtime.paths import expanded
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.lock import RunLock


def launch(
    sweep: Sweep | str | os.PathLike,
    executor: str = "slurm",
    *,
    root: str | os.PathLike,
    site: str | os.PathLike | None = None,
    say=messages.say,
    **options: Any,
) -> Study:
    """Submit what is not complete, running or queued; `options`: the fields of Options, others go to submitit.

    `sweep`: or the path of a spec. `site`: a site file, for what is not among the options. Cells of earlier launches
    stay in the study. Raises Problems or UsageError, before anything is submitted.
    """
    if isinstance(sweep, (str, os.PathLike)):
        sweep = Sweep.from_toml(sweep)
    cells, problems = sweep.cells()
    return launch_cells(cells, executor, root_at(root), options_at(site, options), problems, say)


def root_at(root: str | os.PathLike) -> Path:
    """The absolute path; UsageError for a file, and for none (an unset variable): that would be the current folder."""
    if not os.fspath(root):
        raise UsageError("--root: is empty; name a folder")
    path = Path(os.path.abspath(expanded(root, "--root ")))
    check_no_file(path)
    return path


def options_at(site: str | os.PathLike | None, given: dict[str, Any]) -> Options:
    """The options, over those of the site file. UsageError."""
    return as_options(given, Site.read(site).options() if site is not None else None)


def resubmit(root: str | os.PathLike, say=messages.say) -> Study:
    """Launch the cells of a study again, with the options of the last launch."""
    study = Study(root)
    last = read_launches(study.root)[-1:]
    if not last:
        raise UsageError(f"{study.root}: nothing was launched here yet")
    return launch_cells(study.cells, last[0].executor, study.root, Options(**last[0].options), [], say)


def top_up(study: Study, states: list[watch.CellState], queue: watch.Queue, say) -> None:
    """Submit cells that the last launch had to leave outside the queue, as far as there is room now."""
    last = read_launches(study.root)[-1:]
    options = Options(**last[0].options) if last else Options()
    if options.max_queued and not last[0].cancelled and room_in_queue(options, queue):
        missing = [cell for cell, state in zip(study.cells, states) if state.state == "missing"]
        launch_cells(missing, last[0].executor, study.root, options, [], say)


def launch_cells(cells: list[Cell], executor: str, root: Path, options: Options, problems: list[str], say) -> Study:
    """The end of `launch`, `resubmit` and `top_up`: check, record, submit."""
    look = examine(cells, executor, root, options, problems)
    if look.problems:
        raise Problems(look.problems)
    for folder in (root / "launches", root / "submitit"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # who can write pickles there can run code
    with RunLock(root, LOCK_WAIT_S, say, name=LAUNCH_LOCK):
        if look.outlook:
            look.outlook.remember()
        write_cells(root, {cell.id: cell for cell in [*read_cells(root), *cells]}.values())
        states, todo = to_start(root, cells)
        say(f"{watch.counts(states)}; {len(todo)} to start")
        for line in look.remarks:
            say(f"remark: {line}")
        if not options.keep_state:
            tidy_up(root, cells, states)
        if todo:
            record = Launch(next_launch(read_launches(root)), executor, asdict(options), code=code_here(todo, options))
            SUBMIT[executor](root, todo, options, record, say)
    return Study(root)


@dataclass
class Look:
    """What a launch finds before it does anything: how the cells stand, which are to start, their forecast (if there
    are any, with options that can be meant, and torch to try them), a line for each reason to refuse, and for what to
    know."""

    states: list[watch.CellState]
    todo: list[Cell]
    outlook: Forecast | None
    problems: list[str]
    remarks: list[str]


def examine(cells: list[Cell], executor: str, root: Path, options: Options, problems: list[str]) -> Look:
    problems = problems + check(cells, executor, root, options)
    states, todo = to_start(root, cells)
    problems += [f"{state.error}; move it away" for state in states if state.state == watch.OTHER]
    remarks = code_remarks(root, cells, todo, options)
    problems += [f"--strict-code: {line}" for line in remarks if options.strict_code]
    if not todo or executor not in SUBMIT or not options_fit(options, executor) or not versions.installed("torch"):
        return Look(states, todo, None, problems, remarks)
    rounds = {state.name: state.round for state in states}
    study = {cell.name: cell for cell in [*read_cells(root), *cells]}.values()
    outlook = forecast(
        root,
        todo,
        [rounds[cell.name] for cell in todo],
        list(study),
        executor,
        options,
        at_a_time(executor, options, root, todo),
    )
    return Look(states, todo, outlook, [*problems, *outlook.problems], remarks)


def code_remarks(root: Path, cells: list[Cell], todo: list[Cell], options: Options) -> list[str]:
    """A line where cells that have begun ran with other code than each other, or than is here for those to start."""
    runs = {cell.name: provenance.facts_of(RunFolder(root / cell.name).record()) for cell in cells}
    here = {key: [value] for key, value in code_here(todo, options).items()}
    return provenance.lines(provenance.mixed_code({**runs, "this launch": here}), refused=options.strict_code)


def code_here(cells: list[Cell], options: Options) -> dict[str, str]:
    """The code that these cells are submitted with; nothing is known of another Python's."""
    return identity.code_of(*(cell.config() for cell in cells)) if cells and not options.python else {}


def options_fit(options: Options, executor: str) -> bool:
    try:
        check_options(options, executor)
    except UsageError:
        return False
    return True


def at_a_time(executor: str, options: Options, root: Path, cells: list[Cell]) -> int:
    """How many cells run together, at most."""
    if executor != "slurm":
        return min(options.parallel or fitting_cells(), len(cells)) if executor == "local" else 1
    batches = [batch for _, batch in jobs_to_submit(root, cells, options, "", longest_array(), sys.maxsize)]
    lengths = [len(batch) for batch in batches]
    jobs = sum(map(min, lengths, at_a_time_of(options, lengths)))
    jobs = min(jobs, options.max_queued or sys.maxsize)
    return min(jobs * (options.nodes * options.workers_per_node() if options.pack else 1), len(cells))


def to_start(root: Path, cells: list[Cell]) -> tuple[list[watch.CellState], list[Cell]]:
    """(how the cells stand, those of them that are neither complete nor running nor queued, nor another run's
    place).
    """
    states = watch.look(root, cells, read_launches(root), watch.Queue())
    return states, [
        cell for cell, state in zip(cells, states) if state.state not in ("complete", watch.OTHER, *watch.BUSY)
    ]


def tidy_up(root: Path, cells: list[Cell], states: list[watch.CellState]) -> None:
    """What is left to do for complete cells whose job died between the last round and its own end."""
    for cell, state in zip(cells, states):
        folder = RunFolder(root / cell.name)
        status = Status.read(folder.path) if state.state == "complete" else None
        if status and status.state != "complete":
            keep_final_weights(folder)
            end(status, folder, 0, "")


def plan(sweep: Sweep, executor: str, root: str | os.PathLike, options: Options) -> str:
    """What `launch` would do and what that costs, and a line for each reason why it would refuse. Nothing is written or
    submitted."""
    root = root_at(root)
    cells, problems = sweep.cells()
    look = examine(cells, executor, root, options, problems)
    todo = look.todo
    axes = ", ".join(f"{len(points)} {name}" for name, points in sweep.axes.items())
    lines = [f"{axes}: {watch.counts(look.states)}; {len(todo)} to start"]
    if executor == "slurm" and options_fit(options, executor):
        each = (
            f"on {options.nodes} node(s) with {options.gpus_of_node()} GPU(s), {options.time_min} min and longer by "
            "requeues"
        )
        what = "cells at a time, one process each" if options.pack else "rank(s)"
        batches = list(jobs_to_submit(root, todo, options, "", longest_array(), sys.maxsize))
        shares = at_a_time_of(options, [len(batch) for _, batch in batches])
        lines += [
            f"array of {len(batch)} jobs, {min(share, len(batch))} at a time: each {ranks} {what} of "
            f"{cores_of(options, ranks)} core(s) {each}"
            for (ranks, batch), share in zip(batches, shares)
        ]
        if options.max_queued:
            lines.append(f"never more than {options.max_queued} jobs of yours in the queue")
    lines += verdict.lines(look.outlook) if look.outlook else []
    lines += [f"remark: {line}" for line in look.remarks]
    return "\n".join([*lines, *(f"would be refused: {problem}" for problem in look.problems)])
