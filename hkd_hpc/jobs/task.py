"""What a job does, on each of its ranks: its trial, as `hkd_hpc.train --resume=auto` in this process.

Rank 0 holds the trial's job.lock meanwhile, so that no trial is worked on twice, and keeps its status.json. submitit
sends a signal before the time limit and on preemption; hkd_hpc then ends the round, saves and returns STOPPED on all
ranks, and only then is submitit asked to requeue the job. One that the time limit kills before is requeued by its shell
(slurm.SETUP). A job that ends unreported shows in the lock: nobody holds it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import hkd_hpc.train as train
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.common.rank import guess_rank
from hkd_hpc.common.stop import STOPPED, StopRequest
from hkd_hpc.config import identity
from hkd_hpc.console import messages
from hkd_hpc.jobs.files import JOB_LOCK, Status, launch_of
from hkd_hpc.jobs.logs import START, error_in, output_to, repeated_error
from hkd_hpc.jobs.slurm import JobFunction, job_id, requeue
from hkd_hpc.jobs.sweep import Trial
from hkd_hpc.runtime import provenance
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.lock import RunLock

MOST_STALLS = 3  # starts of one job in a row without a new round; one more would not help
MOST_EQUAL_STALLS = 2  # of them, where the log has the same error twice
LOCK_WAIT_S = 20.0  # the processes of a job that was requeued may need seconds to end
FAILED = 1


class Task(JobFunction):
    """The function of a job of one trial, called by every rank."""

    def __init__(self, root: Path, trial: Trial, launch: str) -> None:
        self.root, self.trial, self.launch = Path(root), trial, launch

    def __call__(self) -> None:
        """Raises SystemExit with the trial's exit code, unless that is 0."""
        is_first = guess_rank(os.environ) == 0
        if is_complete(self.trial, RunFolder(self.root / self.trial.name)):
            return
        code = self._rank_0() if is_first else exit_code_of(self.trial, self.root, self.launch)
        if code == STOPPED and not is_first:
            return  # exit code 0: a bad one would let srun kill rank 0 while it asks for the requeue
        if code == STOPPED:
            requeue(self.root, self, [self.trial], self.launch)
        if code:
            sys.exit(code)

    def _rank_0(self) -> int:
        try:
            return start(self.trial, self.root, self.launch, job_id(), LOCK_WAIT_S)
        except (UsageError, RunError) as error:
            messages.say(f"{self.trial.name}: {error}")
            return FAILED


def start(trial: Trial, root: Path, launch: str, job: str, wait_s: float, stop: StopRequest | None = None) -> int:
    """Begin or resume the trial as its rank 0: the exit code; `stop` as train.main takes it. UsageError when another
    job has it after wait_s; RunError when not even a status can be written."""
    folder = RunFolder(root / trial.name, warn=messages.warn)
    folder.create()
    with RunLock(
        folder.path,
        wait_s,
        on_lost=train.lock_lost,
        name=JOB_LOCK,
        holder="another job",
        advice="that job works on it",
    ):
        before = Status.read(folder.path)
        if is_complete(trial, folder) or has_failed(before, launch):
            return 0  # another job of this launch was here just now
        return _start(trial, root, folder, begin(trial, folder, before, launch, job), stop)


def is_complete(trial: Trial, folder: RunFolder) -> bool:
    """Whether there is a complete run of the trial's settings."""
    return bool(folder.summary()) and not identity.other_run(folder, trial.config())


def has_failed(status: Status | None, launch: str) -> bool:
    """Whether this launch has tried the trial already, for good."""
    return status is not None and (status.state, status.launch) == ("failed", launch)


def _start(trial: Trial, root: Path, folder: RunFolder, status: Status, stop: StopRequest | None) -> int:
    with output_to(folder.path / "log.txt") as log_begin:
        messages.say(
            f"{START}{time.strftime('%Y-%m-%d %H:%M:%S')}, job {status.job} on {status.node}: "
            f"start {status.starts}, after round {status.round} of {status.rounds}; "
            f"{status.stalls} starts without a new round"
        )
        reason = why_not(trial, root, folder, status, log_begin)
        if reason:
            messages.say(f"hkd_hpc: {reason}")
            code = FAILED
        else:
            status.write(folder.path)
            code = exit_code_of(trial, root, status.launch, stop)
        if code == STOPPED:
            messages.say("stopped after its round, saved; the job asks to be requeued")
        if code == 0 and not launch_of(root, status.launch).options.get("keep_state"):
            keep_final_weights(folder)
    end(status, folder, code, error_in(folder.path / "log.txt", log_begin, code))
    return code


def why_not(trial: Trial, root: Path, folder: RunFolder, status: Status, log_begin: int) -> str:
    """Why the trial is not to be started, empty where it is; warns of code that is not what was submitted."""
    again = repeated_error(folder.path / "log.txt", log_begin) if status.stalls >= MOST_EQUAL_STALLS else ""
    if again or status.stalls >= MOST_STALLS:
        return f"the last {status.stalls} starts brought no new round; not started again: " + (
            f"both ended with {again}" if again else "give it a longer time limit, or see above"
        )
    other = identity.other_run(folder, trial.config())
    if other:
        return f"{folder.path} holds another run: {other}; move it away and launch again"
    launch = launch_of(root, status.launch)
    now = identity.code_of(trial.config())
    changed = {key: [launch.code[key], now[key]] for key in now if launch.code.get(key, now[key]) != now[key]}
    if changed and launch.options.get("strict_code"):
        return (
            f"--strict-code: the code is not that of the submission ({provenance.text_of(changed)}); "
            "launch again, or put it back"
        )
    if changed:
        messages.warn(
            f"the code is not that of the submission: {provenance.text_of(changed)}; --strict-code rejects it"
        )
    return ""


def begin(trial: Trial, folder: RunFolder, before: Status | None, launch: str, job: str) -> Status:
    """The status at the start, from that of the start before."""
    rounds = trial.config().fed.rounds
    done = len(folder.rounds().get("round", ()))
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    status = Status("running", launch, job, node, done, rounds, first_round=done, began=time.time())
    if before:
        status.starts = before.starts + 1
        requeued = before.launch == launch  # or followed by another job; else somebody asked for it: count anew
        status.stalls = before.stalls + 1 if requeued and done <= before.first_round else 0
    return status


def end(status: Status, folder: RunFolder, code: int, error: str) -> None:
    """Write how it ended."""
    status.round = len(folder.rounds().get("round", ())) or status.round
    status.state = "complete" if code == 0 else "stopped" if code == STOPPED or code > 128 else "failed"
    status.error = error
    status.write(folder.path)


def keep_final_weights(folder: RunFolder) -> None:
    """Of a complete run keep metrics and global model alone; where that is impossible, all that is there."""
    try:
        with RunLock(folder.path, LOCK_WAIT_S):
            folder.clean()
            folder.keep_final_weights()
    except (UsageError, RunError) as error:
        messages.warn(f"the run is complete, but its checkpoints stay as they were: {error}")


def exit_code_of(trial: Trial, root: Path, launch: str, stop: StopRequest | None = None) -> int:
    """Train the trial as this rank; `stop` as train.main takes it."""
    strict = ["--strict-code"] * bool(launch_of(root, launch).options.get("strict_code"))
    try:
        return train.main(["--resume=auto", *strict, "--out", str(root / trial.name), *trial.arguments()], stop)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
