"""Launching: check everything, then submit the cells that are missing, failed or unfinished, through submitit."""
from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hkd_hpc import report, versions
from hkd_hpc.comm.world import outside_of_jobs
from hkd_hpc.data.sources import check_present
from hkd_hpc.errors import UsageError
from hkd_hpc.store.lock import RunLock, process_mark
from jobs import watch
from jobs.files import LAUNCH_LOCK, Launch, read_cells, read_launches, write_cells
from jobs.study import Study
from jobs.sweep import Cell, Sweep
from jobs.task import Task, output_to

EXECUTORS = ("slurm", "local", "debug")
DEFAULT_ARRAY = 1001  # SLURM's own default of MaxArraySize
FOREVER_MIN = 1_000_000
DEAF = ("bash", "-c", 'trap "" USR1 USR2; exec "$@"', "bash")  # until Python listens, a signal must not end the job
CELL_GB = 2.0  # memory of a cell on a laptop, roughly: torch, data, model


class Problems(UsageError):
    """All that is wrong; `lines`, one each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = list(lines)


@dataclass(frozen=True)
class Options:
    """How the jobs of a launch run. `slurm`: further parameters of submitit's SLURM executor, without its prefix."""

    ranks: int | str = 1  # of a cell, or "clients": one for each client, and the server. Only under SLURM
    nodes: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    time_min: int = 60
    mem_gb: float | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    array_parallelism: int = 256
    signal_delay_s: int = 120  # time for the running round and its save, before the limit
    mpi: str = "none"
    parallel: int = 0  # cells at a time on this machine; 0: as many as fit
    setup: list[str] = field(default_factory=list)
    slurm: dict[str, Any] = field(default_factory=dict)

    def ranks_of(self, cell: Cell) -> int:
        return cell.config().fed.clients + 1 if self.ranks == "clients" else int(self.ranks)


def launch(sweep: Sweep, executor: str = "slurm", *, root: str | os.PathLike, say=report.say, **options: Any) -> Study:
    """Submit what is not complete, running or queued; `options`: the fields of Options, others go to submitit.

    Cells of earlier launches stay in the study. Raises Problems, before anything is submitted.
    """
    cells, problems = sweep.cells()
    return launch_cells(cells, executor, Path(os.path.abspath(root)), as_options(options), problems, say)


def as_options(given: dict[str, Any]) -> Options:
    """Fields of Options by name; what is none of them goes to submitit's SLURM executor."""
    known = {name: value for name, value in given.items() if name in Options.__dataclass_fields__}
    more = {name: value for name, value in given.items() if name not in known}
    return Options(**{**known, "slurm": {**known.get("slurm", {}), **more}})


def resubmit(root: str | os.PathLike, say=report.say) -> Study:
    """Launch the cells of a study again, with the options of the last launch."""
    study = Study(root)
    last = read_launches(study.root)[-1:]
    if not last:
        raise UsageError(f"{study.root}: nothing was launched here yet")
    return launch_cells(study.cells, last[0].executor, study.root, Options(**last[0].options), [], say)


def launch_cells(cells: list[Cell], executor: str, root: Path, options: Options, problems: list[str], say) -> Study:
    """The end of `launch` and `resubmit`: check, record, submit."""
    problems = problems + check(cells, executor, root, options)
    if problems:
        raise Problems(problems)
    for folder in (root / "launches", root / "submitit"):
        folder.mkdir(parents=True, exist_ok=True)
    with RunLock(root, 0.0, name=LAUNCH_LOCK):
        write_cells(root, {cell.id: cell for cell in [*read_cells(root), *cells]}.values())
        states, todo = to_start(root, cells)
        say(f"{watch.counts(states)}; {len(todo)} to start")
        if todo:
            record = Launch(f"{len(read_launches(root)) + 1:04d}", executor, asdict(options))
            SUBMIT[executor](root, todo, options, record, say)
    return Study(root)


def to_start(root: Path, cells: list[Cell]) -> tuple[list[watch.CellState], list[Cell]]:
    """(how the cells stand, those of them that are neither complete nor running nor queued)."""
    states = watch.look(root, cells, read_launches(root), watch.Queue())
    return states, [cell for cell, state in zip(cells, states) if state.state not in ("complete", *watch.BUSY)]


def plan(sweep: Sweep, executor: str, root: str | os.PathLike, options: Options) -> str:
    """What `launch` would do, and a line for each reason why it would refuse. Nothing is written or submitted."""
    root = Path(os.path.abspath(root))
    cells, problems = sweep.cells()
    problems = problems + check(cells, executor, root, options)
    states, todo = to_start(root, cells)
    axes = ", ".join(f"{len(points)} {name}" for name, points in sweep.axes.items())
    lines = [f"{axes}: {watch.counts(states)}; {len(todo)} to start"]
    if executor == "slurm":
        each = (f"{options.nodes} node(s), {options.cpus_per_task} core(s) a rank, {options.gpus_per_node} GPU(s) a "
                f"node, {options.time_min} min and longer by requeues")
        lines += [f"array of {len(part)} jobs, {options.array_parallelism} at a time: each {ranks} rank(s) on {each}"
                  for ranks, part in array_parts(todo, options, longest_array())]
        lines.append(f"at most {len(todo) * options.nodes * options.gpus_per_node * options.time_min / 60:.4g} GPU hours "
                     "without requeues")
    elif executor == "local":
        lines.append(f"{min(options.parallel or fitting_cells(), len(todo))} at a time on this machine")
    return "\n".join([*lines, *(f"would be refused: {problem}" for problem in problems)])


# ---------------------------------------------------------------------------------------------- checks


def check(cells: list[Cell], executor: str, root: Path, options: Options) -> list[str]:
    """A line for each thing that would make the jobs fail; equal ones once."""
    if executor not in EXECUTORS:
        return [f"executor {executor}: not known; one of {', '.join(EXECUTORS)}"]
    configs = [cell.config() for cell in cells]
    tests = [lambda: check_root(root), lambda: check_options(options, executor)]
    tests += [lambda files=files: check_present(*files)
              for files in dict.fromkeys((config.data.name, config.data.dir, config.data.path) for config in configs)]
    tests += [lambda name=name: versions.check(name) for name in dict.fromkeys(config.model.name for config in configs)]
    problems: dict[str, None] = {}
    for test in tests:
        try:
            test()
        except UsageError as error:
            problems[str(error)] = None
    if executor == "slurm" and not problems:
        problems.update(dict.fromkeys(refusals(cells, root, options)))
    return list(problems)


def check_root(root: Path) -> None:
    place = next(path for path in (root, *root.parents) if path.exists())
    if not place.is_dir():
        raise UsageError(f"--root {root}: {place} is a file; name a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"--root {root}: {place} cannot be written to; name another folder")


def check_options(options: Options, executor: str) -> None:
    if options.ranks != "clients" and not (isinstance(options.ranks, int) and options.ranks >= 1):
        raise UsageError(f"ranks={options.ranks}: must be a whole number >= 1, or clients: one for each and the server")
    for name in ("nodes", "cpus_per_task", "time_min", "array_parallelism", "signal_delay_s"):
        if not isinstance(getattr(options, name), int) or getattr(options, name) < 1:
            raise UsageError(f"{name}={getattr(options, name)}: must be a whole number >= 1")
    if executor != "slurm":
        return
    if options.signal_delay_s >= options.time_min * 60:
        raise UsageError(f"signal_delay_s={options.signal_delay_s}: must be below time_min={options.time_min} minutes")
    for program in ("sbatch", "srun", "squeue", "scancel"):
        if not shutil.which(program):
            raise UsageError(f"executor slurm: no {program} here; launch on a login node, or use --executor local")


def refusals(cells: list[Cell], root: Path, options: Options) -> list[str]:
    """What sbatch says against a job of each size; nothing is submitted."""
    found = []
    for ranks in sorted({options.ranks_of(cell) for cell in cells}):
        try:
            text = slurm_executor(root, options, ranks)._executor._make_submission_file_text("true", "")
        except (NameError, ValueError, TypeError, AssertionError) as error:
            return [str(error).splitlines()[0]]
        with environment():
            answer = subprocess.run(["sbatch", "--test-only"], input=text, capture_output=True, text=True)
        if answer.returncode:
            words = " ".join(answer.stderr.split()).removeprefix("sbatch: ").removeprefix("error: ")
            found.append(f"SLURM refuses a job of {ranks} rank(s) on {options.nodes} node(s): {words or 'no reason'}")
    return found


# ---------------------------------------------------------------------------------------------- submission


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Within it the variables are those outside of any job, and this package can be imported by what is started."""
    before = dict(os.environ)
    project = str(Path(__file__).resolve().parents[1])
    paths = [project, *filter(None, [before.get("PYTHONPATH")])]
    try:
        os.environ.clear()
        os.environ.update(outside_of_jobs(before), PYTHONPATH=os.pathsep.join(paths))
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def submit_slurm(root: Path, cells: list[Cell], options: Options, record: Launch, say) -> None:
    """Arrays of cells that need the same number of ranks, none longer than SLURM allows."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    parts = list(array_parts(cells, options, longest_array()))
    for number, (ranks, part) in enumerate(parts, 1):
        tasks = [Task(root, [cell], record.name) for cell in part]
        try:
            with environment():
                jobs = slurm_executor(root, options, ranks).submit_array(tasks)
        except (FailedJobError, FailedSubmissionError, OSError, subprocess.SubprocessError) as error:
            words = [line for line in str(error).splitlines() if line.strip()][-1:]
            submitted = sum(map(len, record.jobs.values()))
            raise UsageError(f"sbatch refused array {number} of {len(parts)} ({''.join(words)}); {submitted} of "
                             f"{len(cells)} cells are submitted, the same command submits the others") from None
        record.jobs.update({job.job_id: [cell.name] for job, cell in zip(jobs, part)})
        record.write(root)
        say(f"submitted job {jobs[0].job_id.split('_')[0]}: {len(part)} cells of {ranks} rank(s)")


def array_parts(cells: list[Cell], options: Options, longest: int) -> Iterator[tuple[int, list[Cell]]]:
    """(ranks, cells) of each array."""
    for ranks in sorted({options.ranks_of(cell) for cell in cells}):
        same = [cell for cell in cells if options.ranks_of(cell) == ranks]
        for begin in range(0, len(same), longest):
            yield ranks, same[begin:begin + longest]


def longest_array() -> int:
    """MaxArraySize: the largest index of an array is one less."""
    try:
        text = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        text = ""
    match = re.search(r"MaxArraySize\s*=\s*(\d+)", text)
    return max(1, int(match[1]) if match else DEFAULT_ARRAY)


def slurm_executor(root: Path, options: Options, ranks: int):
    """submitit's executor for jobs of so many ranks. Whether a requeue makes sense is for Task to say, not a count."""
    from submitit import AutoExecutor

    executor = AutoExecutor(root / "submitit", cluster="slurm", slurm_max_num_timeout=1_000_000,
                            slurm_python=shlex.join([*DEAF, sys.executable]))
    executor.update_parameters(
        name="hkd", timeout_min=options.time_min, nodes=options.nodes, cpus_per_task=options.cpus_per_task,
        gpus_per_node=options.gpus_per_node or None, mem_gb=options.mem_gb, slurm_partition=options.partition,
        slurm_account=options.account, slurm_qos=options.qos, slurm_constraint=options.constraint,
        slurm_array_parallelism=options.array_parallelism, slurm_signal_delay_s=options.signal_delay_s,
        slurm_setup=options.setup or None,
        slurm_additional_parameters={"ntasks": ranks, "requeue": True},
        slurm_srun_args=[f"--mpi={options.mpi}", "--kill-on-bad-exit=1", "--open-mode=append", "--export=ALL",
                         f"--cpus-per-task={options.cpus_per_task}"],  # srun does not take it from the batch job
        **{f"slurm_{name}": value for name, value in options.slurm.items()})
    return executor


def submit_local(root: Path, cells: list[Cell], options: Options, record: Launch, say) -> None:
    """Some workers in the background, which take the cells one by one; they outlive this process."""
    from submitit import AutoExecutor

    workers = min(options.parallel or fitting_cells(), len(cells))
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    with environment(), output_to(root / "submitit" / "local.log"):  # else a pipe behind this command would wait for them
        executor = AutoExecutor(root / "submitit", cluster="local", local_max_num_timeout=1_000_000)
        executor.update_parameters(timeout_min=FOREVER_MIN)
        for first in range(workers):
            task = Task(root, cells[first:] + cells[:first], record.name, shared=True, devices=devices)
            job = executor.submit(task)
            record.processes[job.job_id] = process_mark(int(job.job_id))
    record.jobs["here"] = [cell.name for cell in cells]
    record.write(root)
    say(f"{len(cells)} cells, {workers} at a time, in the background; python -m jobs status {root}")


def fitting_cells() -> int:
    """How many cells fit on this machine, by cores and by free memory."""
    free_gb = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    return max(1, min(len(os.sched_getaffinity(0)), int(free_gb / CELL_GB)))


def submit_debug(root: Path, cells: list[Cell], options: Options, record: Launch, say) -> None:
    """One after the other, in this process."""
    record.jobs["here"] = [cell.name for cell in cells]
    record.write(root)
    for number, cell in enumerate(cells, 1):
        say(f"{number}/{len(cells)} {cell.name}")
        try:
            Task(root, [cell], record.name)()
        except SystemExit as end:
            say(f"exit code {end.code}, see {root / cell.name / 'log.txt'}")
            if isinstance(end.code, int) and end.code > 128:
                raise


SUBMIT = {"slurm": submit_slurm, "local": submit_local, "debug": submit_debug}
