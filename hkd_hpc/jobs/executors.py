"""Submission through submitit: to SLURM, to workers on this machine, or in this process."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from hkd_hpc.comm.launchers import outside_of_jobs
from hkd_hpc.errors import UsageError
from hkd_hpc.jobs.files import LAUNCH_LOCK, Launch, read_launches
from hkd_hpc.jobs.options import Options, cores_of, setup_lines
from hkd_hpc.jobs.pool import Pool, turned, variables
from hkd_hpc.jobs.sweep import Cell
from hkd_hpc.jobs.task import Task, output_to
from hkd_hpc.jobs.watch import Queue
from hkd_hpc.store.lock import RunLock, process_mark

DEFAULT_ARRAY = 1001  # SLURM's own default of MaxArraySize
FOREVER_MIN = 1_000_000
IGNORED_SIGNALS = (
    "bash",
    "-c",
    'trap "" USR1 USR2; exec "$@"',
    "bash",
)  # until Python listens, a signal must not end the job
LOCK_WAIT_S = 60.0  # another job of the same study may be noting its successor
# srun warns of ranks that do not divide evenly. The job's folder on each node, which goes at its end: hkd_hpc keeps
# caches there, as in slurm/common.sh.
SETUP = (
    "unset SLURM_NTASKS_PER_NODE",
    r"""HKD_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n'); export HKD_TOKEN""",  # only its ranks can join it
    'export HKD_SCRATCH="${TMPDIR:-/tmp}/hkd-$(id -un)-$SLURM_JOB_ID"',
    """trap 'rm -rf "$HKD_SCRATCH"; [ "$SLURM_JOB_NUM_NODES" = 1 ] || """
    """timeout 60 srun --mpi=none --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" """
    """--ntasks-per-node=1 --cpus-per-task=1 --overlap rm -rf "$HKD_SCRATCH"' EXIT""",
)
CELL_GB = 2.0  # memory of a cell on a laptop, roughly: torch, data, model


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Within it the variables are those outside of any job, and this package can be imported by what is started."""
    project = str(Path(__file__).resolve().parents[2])
    paths = [project, *filter(None, [os.environ.get("PYTHONPATH")])]
    with variables(outside_of_jobs(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}):
        yield


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """What is started within it can be interrupted, as `cancel` does, even if this process cannot (`nohup ... &`)."""
    is_deaf = (
        signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread()
    )
    if is_deaf:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if is_deaf:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


Job = tuple[Callable[[], None], list[Cell]]  # what it runs, and the cells that it may have


def submit_slurm(root: Path, cells: list[Cell], options: Options, record: Launch, say) -> None:
    """Arrays of jobs of one size, none longer than SLURM allows; no more jobs than options.max_queued leaves room
    for.
    """
    batches = list(jobs_to_submit(root, cells, options, record.name, longest_array(), room_in_queue(options, Queue())))
    record.write(root)  # also where there is no room for a job: its options are for the next try
    shares = at_a_time_of(options, [len(batch) for _, batch in batches])
    for number, ((ranks, batch), share) in enumerate(zip(batches, shares), 1):
        try:
            jobs = submit_batch(root, batch, replace(options, array_parallelism=share), ranks)
        except UsageError as refusal:
            submitted = len({name for names in record.jobs.values() for name in names})
            raise UsageError(
                f"sbatch refused array {number} of {len(batches)} ({refusal}); {submitted} of "
                f"{len(cells)} cells are submitted, the same command submits the others"
            ) from None
        record.jobs.update({job: [cell.name for cell in own] for job, (_, own) in zip(jobs, batch)})
        record.write(root)
        say(
            f"submitted job {jobs[0].split('_')[0]}: "
            + (
                f"{len(batch)} allocation(s), {ranks} cells at a time in each"
                if options.pack
                else f"{len(batch)} cells of {ranks} rank(s)"
            )
        )
    left = len(cells) - len({name for names in record.jobs.values() for name in names})
    if left:
        say(
            f"{left} cells wait outside the queue (max_queued={options.max_queued}): submitted as jobs end while "
            "somebody "
            f"waits (--wait, study.wait()), or by python -m hkd_hpc.jobs resubmit {root}"
        )


def at_a_time_of(options: Options, lengths: list[int]) -> list[int]:
    """How many jobs of each array run at a time, at least one: array_parallelism is meant for all of them together."""
    return [max(1, options.array_parallelism * length // sum(lengths)) for length in lengths]


def submit_batch(root: Path, batch: list[Job], options: Options, ranks: int) -> list[str]:
    """One array; the jobs' ids. UsageError with sbatch's words."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        with environment():
            return [job.job_id for job in slurm_executor(root, options, ranks).submit_array([run for run, _ in batch])]
    except (FailedJobError, FailedSubmissionError, OSError, subprocess.SubprocessError) as error:
        raise UsageError("".join([line for line in str(error).splitlines() if line.strip()][-1:])) from None


def room_in_queue(options: Options, queue: Queue) -> int:
    """How many jobs may be submitted now. UsageError where SLURM does not say how many there are."""
    if not options.max_queued:
        return sys.maxsize
    queued = queue.jobs()
    if queued is None:
        raise UsageError(f"max_queued={options.max_queued}: squeue does not say how many jobs you have; try again")
    return max(0, options.max_queued - len(queued))


def jobs_to_submit(
    root: Path, cells: list[Cell], options: Options, launch: str, longest: int, room: int
) -> Iterator[tuple[int, list[Job]]]:
    """(ranks, jobs) of each array: a job for each cell, or with options.pack a few jobs that may have all of them."""
    if options.pack:
        workers = options.nodes * options.workers_per_node()
        count = min(options.allocations, -(-len(cells) // workers), room, longest)
        if count:
            yield workers, [(Pool(root, turned(cells, number * workers), launch), cells) for number in range(count)]
        return
    cells = cells[:room]
    for ranks in sorted({options.ranks_of(cell) for cell in cells}):
        same = [cell for cell in cells if options.ranks_of(cell) == ranks]
        for begin in range(0, len(same), longest):
            yield ranks, [(Task(root, cell, launch), [cell]) for cell in same[begin : begin + longest]]


def follow(root: Path, cells: list[Cell], launch: str, job: str) -> str:
    """Submit a job that goes on with the cells after the end of `job`, in the same launch: its id. UsageError."""
    with RunLock(root, LOCK_WAIT_S, name=LAUNCH_LOCK):
        record = next(record for record in read_launches(root) if record.name == launch)
        options = Options(**record.options)
        options = replace(options, max_queued=0, allocations=1, slurm=options.slurm | {"dependency": f"afterany:{job}"})
        [(ranks, batch)] = jobs_to_submit(root, cells, options, launch, 1, sys.maxsize)
        [successor] = submit_batch(root, batch, options, ranks)
        record.jobs[successor] = [cell.name for cell in cells]
        record.write(root)
    return successor


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

    python = options.python or shlex.quote(sys.executable)
    cores = cores_of(options, ranks)
    executor = AutoExecutor(
        root / "submitit",
        cluster="slurm",
        slurm_max_num_timeout=1_000_000,
        slurm_python=f"{shlex.join(IGNORED_SIGNALS)} {python}",
    )
    slurm = dict(options.slurm)
    additional = {
        "ntasks": ranks,
        "ntasks-per-node": -(-ranks // options.nodes),
        "requeue": True,  # evenly over nodes
        **options.sbatch,
        **slurm.pop("additional_parameters", {}),
    }
    executor.update_parameters(
        name="hkd",
        timeout_min=options.time_min,
        nodes=options.nodes,
        cpus_per_task=cores,
        gpus_per_node=options.gpus_per_node or None,
        mem_gb=options.mem_gb,
        slurm_partition=options.partition,
        slurm_account=options.account,
        slurm_qos=options.qos,
        slurm_constraint=options.constraint,
        slurm_gres=options.gres,
        slurm_exclusive=options.exclusive or None,
        slurm_array_parallelism=options.array_parallelism,
        slurm_signal_delay_s=options.signal_delay_s,
        slurm_setup=[*setup_lines(options.setup, options.environment), *SETUP],
        slurm_additional_parameters=additional,
        slurm_srun_args=[
            f"--mpi={options.mpi}",
            f"--kill-on-bad-exit={int(not options.pack)}",
            "--wait=0",
            "--open-mode=append",
            "--export=ALL",
            f"--cpus-per-task={cores}",  # else srun gives a task one
            *options.srun_args,
        ],
        **{f"slurm_{name}": value for name, value in slurm.items()},
    )
    return executor


def submit_local(root: Path, cells: list[Cell], options: Options, record: Launch, say) -> None:
    """Some workers in the background, which take the cells one by one; they outlive this process."""
    from submitit import AutoExecutor

    workers = min(options.parallel or fitting_cells(), len(cells))
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    with (
        environment(),
        interruptible(),
        output_to(root / "submitit" / "local.log"),
    ):  # else a pipe behind this command would wait for them
        executor = AutoExecutor(root / "submitit", cluster="local", local_max_num_timeout=1_000_000)
        executor.update_parameters(timeout_min=FOREVER_MIN)
        for place in range(workers):
            job = executor.submit(Pool(root, cells, record.name, place, devices))
            record.processes[job.job_id] = process_mark(int(job.job_id))
    record.jobs["here"] = [cell.name for cell in cells]
    record.write(root)
    say(f"{len(cells)} cells, {workers} at a time, in the background; python -m hkd_hpc.jobs status {root}")


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
            Task(root, cell, record.name)()
        except SystemExit as end:
            say(f"exit code {end.code}, see {root / cell.name / 'log.txt'}")
            if isinstance(end.code, int) and end.code > 128:
                raise


SUBMIT = {"slurm": submit_slurm, "local": submit_local, "debug": submit_debug}
