"""Submission through submitit: to SLURM, to workers on this machine, or in this process."""
from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from hkd_hpc.comm.world import outside_of_jobs
from hkd_hpc.errors import UsageError
from hkd_hpc.store.lock import process_mark
from jobs.files import Launch
from jobs.options import Options
from jobs.sweep import Cell
from jobs.task import Task, output_to

DEFAULT_ARRAY = 1001  # SLURM's own default of MaxArraySize
FOREVER_MIN = 1_000_000
DEAF = ("bash", "-c", 'trap "" USR1 USR2; exec "$@"', "bash")  # until Python listens, a signal must not end the job
CELL_GB = 2.0  # memory of a cell on a laptop, roughly: torch, data, model


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
