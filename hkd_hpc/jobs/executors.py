"""The executors of a launch: SLURM, workers on this machine, or this process."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from hkd_hpc.common.errors import UsageError
from hkd_hpc.jobs import slurm
from hkd_hpc.jobs.environment import outside_of_any_job
from hkd_hpc.jobs.files import Launch
from hkd_hpc.jobs.logs import output_to
from hkd_hpc.jobs.options import Options
from hkd_hpc.jobs.pool import Pool, turned
from hkd_hpc.jobs.slurm import Array, Job, Queue
from hkd_hpc.jobs.sweep import Trial
from hkd_hpc.jobs.task import Task
from hkd_hpc.store.lock import process_mark

FOREVER_MIN = 1_000_000
TRIAL_GB = 2.0  # memory of a trial on a laptop, roughly: torch, data, model

Say = Callable[[str], None]


# ---- SLURM


def submit_slurm(root: Path, trials: list[Trial], options: Options, record: Launch, say: Say) -> None:
    """Arrays of jobs of one size, none longer than SLURM allows; no more jobs than options.max_queued lets in.

    UsageError where sbatch takes none or not all of them.
    """
    most = slurm.jobs_that_fit_queue(options, Queue())
    arrays = list(arrays_of(root, trials, options, record.name, slurm.longest_array(), most))
    record.write(root)  # also where no job fits into the queue: its options are for the next try
    shares = at_a_time_of(options, [len(array.jobs) for array in arrays])
    for number, (array, share) in enumerate(zip(arrays, shares), 1):
        try:
            jobs = slurm.submit(root, array, replace(options, array_parallelism=share))
        except UsageError as rejection:
            raise UsageError(
                f"sbatch rejected array {number} of {len(arrays)} ({rejection}); {len(record.given())} of "
                f"{len(trials)} trials are submitted, the same command submits the others"
            ) from None
        record.jobs |= {job: [trial.name for trial in given.trials] for job, given in zip(jobs, array.jobs)}
        record.write(root)
        say(f"submitted job {jobs[0].split('_')[0]}: {_described(array, options)}")
    _say_what_waits(len(trials) - len(record.given()), root, options, say)


def _described(array: Array, options: Options) -> str:
    if options.pack:
        return f"{len(array.jobs)} allocation(s), {array.ranks} trials at a time in each"
    return f"{len(array.jobs)} trials of {array.ranks} rank(s)"


def _say_what_waits(left: int, root: Path, options: Options, say: Say) -> None:
    if left:
        say(
            f"{left} trials wait outside the queue (max_queued={options.max_queued}): submitted as jobs end while "
            f"somebody waits (--wait, study.wait()), or by python -m hkd_hpc.jobs resubmit {shlex.quote(str(root))}"
        )


def at_a_time_of(options: Options, lengths: list[int]) -> list[int]:
    """How many jobs of each array run at a time, at least one: array_parallelism is meant for all of them together."""
    return [max(1, options.array_parallelism * length // sum(lengths)) for length in lengths]


def arrays_of(
    root: Path, trials: list[Trial], options: Options, launch: str, longest: int, most: int
) -> Iterator[Array]:
    """A job for each trial, by their ranks; or with options.pack a few jobs, each of which may take all trials."""
    if options.pack:
        count = min(options.allocations, -(-len(trials) // options.workers), most, longest)
        pools = [Pool(root, turned(trials, number * options.workers), launch) for number in range(count)]
        yield from [Array(options.workers, [Job(pool, trials) for pool in pools])] * bool(pools)
        return
    trials = trials[:most]
    for ranks in sorted({options.ranks_of(trial) for trial in trials}):
        jobs = [Job(Task(root, trial, launch), [trial]) for trial in trials if options.ranks_of(trial) == ranks]
        for begin in range(0, len(jobs), longest):
            yield Array(ranks, jobs[begin : begin + longest])


# ---- this machine


def submit_local(root: Path, trials: list[Trial], options: Options, record: Launch, say: Say) -> None:
    """Some workers in the background, which take the trials one by one; they outlive this process."""
    from submitit import AutoExecutor

    workers = min(options.parallel or fitting_trials(), len(trials))
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    record.jobs["here"] = [trial.name for trial in trials]
    with (
        outside_of_any_job(),
        interruptible(),
        output_to(root / "submitit" / "local.log"),
    ):  # else a pipe behind this command would wait for them
        executor = AutoExecutor(root / "submitit", cluster="local", local_max_num_timeout=1_000_000)
        executor.update_parameters(timeout_min=FOREVER_MIN)
        for place in range(workers):
            job = executor.submit(Pool(root, trials, record.name, place, devices))
            record.processes[job.job_id] = process_mark(int(job.job_id))
            record.write(root)  # each at once: whatever ends this loop, `cancel` knows of those that run
    status = f"python -m hkd_hpc.jobs status {shlex.quote(str(root))}"
    say(f"{len(trials)} trials, {workers} at a time, in the background; {status}")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """What is started within it can be interrupted, as `cancel` does, even if this process cannot (`nohup ... &`)."""
    ignores = (
        signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread()
    )
    if ignores:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ignores:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def fitting_trials() -> int:
    """How many trials fit on this machine, by cores and by free memory."""
    free_gb = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    return max(1, min(len(os.sched_getaffinity(0)), int(free_gb / TRIAL_GB)))


def submit_debug(root: Path, trials: list[Trial], options: Options, record: Launch, say: Say) -> None:
    """One after the other, in this process."""
    record.jobs["here"] = [trial.name for trial in trials]
    record.write(root)
    for number, trial in enumerate(trials, 1):
        say(f"{number}/{len(trials)} {trial.name}")
        try:
            Task(root, trial, record.name)()
        except SystemExit as end:
            say(f"exit code {end.code}, see {root / trial.name / 'log.txt'}")
            if isinstance(end.code, int) and end.code > 128:
                raise


SUBMIT = {"slurm": submit_slurm, "local": submit_local, "debug": submit_debug}
