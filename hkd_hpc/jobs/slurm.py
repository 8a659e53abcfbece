"""All that is SLURM's: its queue, submission through submitit, requeues, and what sbatch says against a job.

Knows no trainer: a job runs the callable that it is given.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.stop import SIGNALS
from hkd_hpc.console import messages
from hkd_hpc.jobs.environment import outside_of_any_job
from hkd_hpc.jobs.files import Status, launch_lock, read_launches
from hkd_hpc.jobs.logs import output_to
from hkd_hpc.jobs.options import Options, cores_of, setup_lines
from hkd_hpc.jobs.sweep import Trial

if TYPE_CHECKING:
    from submitit import AutoExecutor
    from submitit.helpers import DelayedSubmission

PROGRAMS = ("sbatch", "srun", "squeue", "scancel")
HELD = "held"  # in squeue's reasons: JobHeldUser, launch failed requeued held
QUEUE_S = 30.0  # the queue is asked no more often
ANSWER_S = 30.0  # within which a program of SLURM is to answer
DEFAULT_ARRAY = 1001  # SLURM's own default of MaxArraySize
MOST_TIMEOUTS = 1_000_000  # whether a requeue makes sense is for the job to say, not a count
IGNORED_SIGNALS = ("bash", "-c", 'trap "" USR1 USR2; exec "$@"', "bash")  # until Python listens, none must end the job
# srun warns of ranks that do not divide evenly. At the end of a job: one whose round outlasted the notice was killed at
# its time limit, its ranks before they could ask for a requeue, so that its shell does; and the job's folder on each
# node, where hkd_hpc keeps caches, goes, as in slurm/common.sh.
SETUP = (
    "unset SLURM_NTASKS_PER_NODE",
    r"""HKD_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n'); export HKD_TOKEN""",  # only its ranks can join it
    'export HKD_SCRATCH="${TMPDIR:-/tmp}/hkd-$(id -un)-$SLURM_JOB_ID"',
    """\
hkd_end() {
    trap '' TERM  # SLURM sends another one meanwhile
    local job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
    [ "$(timeout 20 squeue --noheader --jobs="$job" --format=%r)" != TimeLimit ] || scontrol requeue "$job"
    rm -rf "$HKD_SCRATCH"
    [ "$SLURM_JOB_NUM_NODES" = 1 ] || timeout 60 srun --mpi=none --nodes="$SLURM_JOB_NUM_NODES" \\
        --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=1 --overlap rm -rf "$HKD_SCRATCH"
}
trap hkd_end EXIT""",
)


class JobFunction(ABC):
    """What a job runs."""

    @abstractmethod
    def __call__(self) -> None: ...

    def checkpoint(self) -> DelayedSubmission:
        """What the requeued job runs, as submitit's handler of the signal asks: the same again, since what is saved is
        in the run folders."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True)
class Job:
    """A job to submit: what it runs, and the trials that it may take."""

    function: JobFunction
    trials: list[Trial]


@dataclass(frozen=True)
class Array:
    """Jobs of so many ranks each, submitted at once."""

    ranks: int
    jobs: list[Job]


# ---- the queue


class Queue:
    """Which of the user's jobs SLURM has, waiting or running; asked at most every QUEUE_S."""

    def __init__(self) -> None:
        self._asked_s = float("-inf")
        self._jobs: dict[str, str] | None = None

    def jobs(self) -> dict[str, str] | None:
        """Their ids (12, 12_3) to why SLURM lets them wait; None where it does not answer: then nobody knows."""
        if time.monotonic() - self._asked_s > QUEUE_S:
            self._jobs, self._asked_s = _ask_queue(), time.monotonic()
        return self._jobs

    def held(self, jobs: Iterable[str]) -> str:
        """Which of these SLURM will not start by itself, why, and what lets them continue; empty: none."""
        reasons = self.jobs() or {}
        held = [job for job in jobs if HELD in reasons.get(job, "").lower()]
        if not held:
            return ""
        release = f"scontrol release {' '.join(held)}"
        return f"SLURM holds job {', '.join(held)} ({reasons[held[0]]}): {release} lets it continue"


def _ask_queue() -> dict[str, str] | None:
    answer = _answer("squeue", "--noheader", "--array", "--me", "--format=%i %r")
    return None if answer is None else dict(line.strip().partition(" ")[::2] for line in answer.splitlines())


def jobs_that_fit_queue(options: Options, queue: Queue) -> int:
    """How many jobs may be submitted now. UsageError where SLURM does not say how many there are."""
    if not options.max_queued:
        return sys.maxsize
    queued = queue.jobs()
    if queued is None:
        raise UsageError(f"max_queued={options.max_queued}: squeue does not say how many jobs you have; try again")
    return max(0, options.max_queued - len(queued))


def cancel(jobs: list[str]) -> None:
    """Ask for the end of these jobs. UsageError with scancel's last line."""
    if not jobs:
        return
    try:
        subprocess.run(["scancel", *jobs], capture_output=True, text=True, check=True, timeout=60)
    except subprocess.CalledProcessError as error:
        raise UsageError(f"scancel rejected: {last_of(error.stderr) or 'no reason'}") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"scancel cannot be asked: {error}") from None


def fields_of(what: str, name: str) -> dict[str, str] | None:
    """What SLURM says about a job (TimeLimit, Requeue, NodeList ...) or a partition; None where it does not answer."""
    text = _answer("scontrol", "--oneliner", "show", what, name)
    return None if text is None else dict(field.partition("=")[::2] for field in text.split() if "=" in field)


def longest_array() -> int:
    """MaxArraySize: the largest index of an array is one less."""
    match = re.search(r"MaxArraySize\s*=\s*(\d+)", _answer("scontrol", "show", "config") or "")
    return max(1, int(match[1]) if match else DEFAULT_ARRAY)


def last_of(text: str) -> str:
    """The last line that is not blank; empty where there is none."""
    return "".join([line.strip() for line in text.splitlines() if line.strip()][-1:])


def _answer(*command: str) -> str | None:
    """What a program of SLURM prints, None where it is not there, fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


# ---- submission


def submit(root: Path, array: Array, options: Options) -> list[str]:
    """Submit one array: the ids of its jobs. UsageError with sbatch's line."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        with outside_of_any_job():
            submitted = executor_for(root, options, array.ranks).submit_array([job.function for job in array.jobs])
            return [job.job_id for job in submitted]
    except (FailedJobError, FailedSubmissionError, OSError, subprocess.SubprocessError) as error:
        raise UsageError(last_of(str(error))) from None


def executor_for(root: Path, options: Options, ranks: int) -> AutoExecutor:
    """submitit's executor for jobs of so many ranks."""
    from submitit import AutoExecutor

    python = options.python or shlex.quote(sys.executable)
    executor = AutoExecutor(
        root / "submitit",
        cluster="slurm",
        slurm_max_num_timeout=MOST_TIMEOUTS,
        slurm_python=f"{shlex.join(IGNORED_SIGNALS)} {python}",
    )
    slurm = dict(options.slurm)
    more_of_sbatch = {**_layout(options, ranks), **options.sbatch, **slurm.pop("additional_parameters", {})}
    executor.update_parameters(
        name="hkd",
        timeout_min=options.time_min,
        nodes=options.nodes,
        cpus_per_task=cores_of(options, ranks),
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
        slurm_additional_parameters=more_of_sbatch,
        slurm_srun_args=_srun_arguments(options, ranks),
        **{f"slurm_{name}": value for name, value in slurm.items()},
    )
    return executor


def _layout(options: Options, ranks: int) -> dict[str, int | bool]:
    """Ranks evenly over the nodes; a job of which a node fails is requeued."""
    return {"ntasks": ranks, "ntasks-per-node": -(-ranks // options.nodes), "requeue": True}


def _srun_arguments(options: Options, ranks: int) -> list[str]:
    return [
        f"--mpi={options.mpi}",
        f"--kill-on-bad-exit={int(not options.pack)}",
        "--wait=0",
        "--open-mode=append",
        "--export=ALL",
        f"--cpus-per-task={cores_of(options, ranks)}",  # else srun gives a task one
        *options.srun_args,
    ]


# ---- within a job


def job_id() -> str:
    """Of this job as submitit names it, "here" in no job."""
    env = os.environ
    if "SUBMITIT_LOCAL_JOB_ID" in env:
        return env["SUBMITIT_LOCAL_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "here")


def requeue(root: Path, function: JobFunction, trials: list[Trial], launch: str) -> None:
    """All is saved: have this job requeued, by submitit's own handler of the signal, which then ends the process.

    Where the site rejects that, another job with this function follows. Returns in that case, and where no submitit
    runs this.
    """
    try:
        for handler in map(signal.getsignal, SIGNALS):
            if callable(handler):
                handler(signal.SIGUSR2, None)
    except Exception as rejection:
        _submit_successor(root, function, trials, launch, rejection)


def _submit_successor(root: Path, function: JobFunction, trials: list[Trial], launch: str, why: Exception) -> None:
    """Say in the trials' logs which job follows; where none could be submitted, in their status too."""
    job, problem = job_id(), ""
    try:
        outcome = f"job {follow(root, function, trials, launch, job)} follows"
    except Exception as error:
        resubmit = f"python -m hkd_hpc.jobs resubmit {shlex.quote(str(root))}"
        outcome = f"nor could a job that follows be submitted ({error}); {resubmit} resumes it"
        problem = f"saved, but the requeue was rejected ({why}), {outcome}"
    for folder in (root / trial.name for trial in trials):
        status = Status.read(folder)
        if status and (status.state, status.job) == ("stopped", job):
            with output_to(folder / "log.txt"):
                messages.say(f"requeue rejected ({why}): {outcome}")
            if problem:
                status.error = problem
                status.write(folder)


def follow(root: Path, function: JobFunction, trials: list[Trial], launch: str, job: str) -> str:
    """Submit a job that takes these trials after the end of `job`, in the same launch: its id. UsageError."""
    with launch_lock(root):
        record = next(record for record in read_launches(root) if record.name == launch)
        if record.cancelled:
            raise UsageError("the launch was cancelled")
        options = Options(**record.options)
        ranks = options.workers if options.pack else options.ranks_of(trials[0])
        options = replace(options, slurm=options.slurm | {"dependency": f"afterany:{job}"})
        [successor] = submit(root, Array(ranks, [Job(function, trials)]), options)
        record.jobs[successor] = [trial.name for trial in trials]
        record.write(root)
    return successor


# ---- what would be rejected


def check_programs() -> None:
    """UsageError where SLURM's programs are not here."""
    for program in PROGRAMS:
        if not shutil.which(program):
            raise UsageError(f"executor slurm: no {program} here; launch on a login node, or use --executor local")


def check_root(root: Path) -> None:
    """UsageError where SLURM would look for the jobs' logs elsewhere, and end the jobs."""
    if "%" in str(root):
        raise UsageError(f"--root {root}: SLURM takes % in the names of its logs for a pattern; name another folder")


def rejections(trials: list[Trial], root: Path, options: Options) -> list[str]:
    """What sbatch says against a job of each size; nothing is submitted."""
    least = min(map(options.ranks_of, trials), default=options.nodes)
    if not options.pack and options.nodes > least:
        return [f"nodes={options.nodes}: more than the {least} rank(s) of a trial; --ranks N, or fewer --nodes"]
    sizes = {options.workers} if options.pack else {options.ranks_of(trial) for trial in trials}
    try:
        scripts = {ranks: submission_script(root, options, ranks) for ranks in sorted(sizes)}
    except (NameError, ValueError, TypeError, AssertionError) as error:  # a parameter that submitit does not know
        return [str(error).splitlines()[0]]
    lines = {ranks: rejection_of(script, options) for ranks, script in scripts.items()}
    absent = next((line for line in lines.values() if any(part in line for part in UNREACHABLE)), "")
    if absent:
        return [f"SLURM cannot be reached from here: {absent}; launch on a login node, or use --executor local"]
    return [
        f"SLURM rejects a job of {ranks} rank(s) on {options.nodes} node(s): {line}{remedy_for(line)}"
        for ranks, line in lines.items()
        if line
    ]


def submission_script(root: Path, options: Options, ranks: int) -> str:
    """The script that would be submitted, for `sbatch --test-only`."""
    from submitit import SlurmExecutor

    executor = executor_for(root, options, ranks)._executor
    assert isinstance(executor, SlurmExecutor)
    return executor._make_submission_file_text("true", "")


def rejection_of(script: str, options: Options) -> str:
    """The line of sbatch against a script; empty where it would take it."""
    with outside_of_any_job():
        try:
            answer = subprocess.run(
                ["sbatch", "--test-only"], input=script, capture_output=True, text=True, timeout=ANSWER_S
            )
        except subprocess.TimeoutExpired:
            return f"sbatch --test-only did not answer within {ANSWER_S:g} s; sinfo says whether SLURM is up"
    if answer.returncode == 0 or (is_about_size(answer.stderr) and all_down(options)):
        return ""
    return " ".join(answer.stderr.split()).removeprefix("sbatch: ").removeprefix("error: ") or "no reason"


UNREACHABLE = (  # what sbatch says without a SLURM that it could ask
    "resolve_ctls_from_dns_srv",
    "configuration source",
    "Unable to contact slurm controller",
    "Unable to establish",
)
SMALLER = (
    "fewer --ranks, --cpus-per-task or --gpus-per-node, more --nodes, or another --partition; "
    "sinfo -o '%P %D %c %m %G %l' says what there is"
)
REMEDIES = {
    "account": "another --account",
    "qos": "another --qos",
    "time limit": "a shorter --time-min, or another --partition",
    "emory": "a smaller --mem-gb",
    "node count": f"fewer --nodes, or as many ranks as nodes; {SMALLER}",
    "node configuration": SMALLER,
    "processors": SMALLER,
    "gres": "another --gpus-per-node, or another --partition",
    "partition": "another --partition; sinfo says which there are",
}


def is_about_size(line: str) -> bool:
    return "node configuration" in line or "node count" in line


def all_down(options: Options) -> bool:
    """Whether no node of the partition is up, as in a maintenance: jobs then wait, whatever sbatch --test-only says."""
    partition = [f"--partition={options.partition}"] if options.partition else []
    states = (_answer("sinfo", "--noheader", "--format=%T", *partition) or "").split()
    down = ("down", "drain", "maint", "fail", "reboot", "power")
    return bool(states) and all(state.startswith(down) for state in states)


def remedy_for(line: str) -> str:
    """Which option ends this rejection of sbatch."""
    found = (remedy for part, remedy in REMEDIES.items() if part in line or part in line.lower())
    return next((f"; mended by {remedy}" for remedy in found), "")
