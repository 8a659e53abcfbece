"""What a job does, on each of its ranks: its cell, as `hkd_hpc.train --resume=auto` in this process.

Rank 0 holds the cell's job.lock meanwhile, so that no cell is worked on twice, and keeps its status.json. submitit
sends a signal before the time limit and on preemption; hkd_hpc then ends the round, saves and returns STOPPED on all
ranks, and only then is submitit asked to requeue the job. What kills a job without a word shows in the lock: nobody
holds it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hkd_hpc import train
from hkd_hpc.comm.launchers import guess_rank
from hkd_hpc.config import identity
from hkd_hpc.console import messages
from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.jobs.files import JOB_LOCK, Status, launch_of, no_room
from hkd_hpc.jobs.sweep import Cell
from hkd_hpc.runtime import provenance
from hkd_hpc.stop import SIGNALS, STOPPED
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.lock import RunLock

BEAT_S = 10.0
MOST_STALLS = 3  # starts of one job in a row without a new round; one more would not help
MOST_EQUAL_STALLS = 2  # of them, where the log has the same error twice
ERROR = re.compile(
    r"(?!.*(warning:|ended by signal))"
    r"(hkd_hpc: |Fatal Python error|[\w.]*(Error|Exception)\b|\w+: error: )"
)
START = "--- "  # how a start begins in a cell's log
LOCK_WAIT_S = 20.0  # the processes of a job that was requeued may need seconds to end
FAILED = 1


class Task:
    """The function of a job of one cell. Called by every rank; submitit's signal handler calls `checkpoint` on rank
    0.
    """

    def __init__(self, root: Path, cell: Cell, launch: str) -> None:
        self.root, self.cell, self.launch = Path(root), cell, launch

    def __call__(self) -> None:
        """Raises SystemExit with the cell's exit code, unless that is 0."""
        is_first = guess_rank(os.environ) == 0
        if is_complete(self.cell, RunFolder(self.root / self.cell.name)):
            return
        code = self._rank_0() if is_first else exit_code_of(self.cell, self.root, self.launch)
        if code == STOPPED and not is_first:
            return  # exit code 0: a bad one would let srun kill rank 0 while it asks for the requeue
        if code == STOPPED:
            go_on(self.root, [self.cell], self.launch)
        if code:
            sys.exit(code)

    def checkpoint(self):
        """The same again: what is saved is in the run folders."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _rank_0(self) -> int:
        try:
            return start(self.cell, self.root, self.launch, job_id(), LOCK_WAIT_S)
        except (UsageError, RunError) as error:
            messages.say(f"{self.cell.name}: {error}")
            return FAILED


def start(cell: Cell, root: Path, launch: str, job: str, wait_s: float) -> int:
    """Train the cell, or go on with it, as its rank 0: the exit code. UsageError when another job has it after wait_s;
    RunError when not even a status can be written."""
    folder = RunFolder(root / cell.name, warn=messages.warn)
    folder.create()
    with RunLock(folder.path, wait_s, on_lost=train.lock_lost, name=JOB_LOCK):
        before = Status.read(folder.path)
        if is_complete(cell, folder) or has_failed(before, launch):
            return 0  # another job of this launch was here just now
        return _start(cell, root, folder, begin(cell, folder, before, launch, job))


def is_complete(cell: Cell, folder: RunFolder) -> bool:
    """Whether there is a complete run of the cell's settings."""
    return bool(folder.summary()) and not identity.other_run(folder, cell.config())


def has_failed(status: Status | None, launch: str) -> bool:
    """Whether this launch has tried the cell already, for good."""
    return status is not None and (status.state, status.launch) == ("failed", launch)


def _start(cell: Cell, root: Path, folder: RunFolder, status: Status) -> int:
    with output_to(folder.path / "log.txt") as log_begin:
        messages.say(
            f"{START}{time.strftime('%Y-%m-%d %H:%M:%S')}, job {status.job} on {status.node}: "
            f"start {status.starts}, after round {status.round} of {status.rounds}; "
            f"{status.stalls} starts without a new round"
        )
        reason = why_not(cell, root, folder, status, log_begin)
        if reason:
            messages.say(f"hkd_hpc: {reason}")
            code = FAILED
        else:
            with beating(status, folder):
                code = exit_code_of(cell, root, status.launch)
        if code == STOPPED:
            messages.say("stopped after its round, saved; the job asks to be requeued")
        if code == 0 and not launch_of(root, status.launch).options.get("keep_state"):
            keep_final_weights(folder)
    end(status, folder, code, error_in(folder.path / "log.txt", log_begin, code))
    return code


def why_not(cell: Cell, root: Path, folder: RunFolder, status: Status, log_begin: int) -> str:
    """Why the cell is not to be started, empty where it is; warns of code that is not what was submitted."""
    again = repeated_error(folder.path / "log.txt", log_begin) if status.stalls >= MOST_EQUAL_STALLS else ""
    if again or status.stalls >= MOST_STALLS:
        return f"the last {status.stalls} starts brought no new round; not started again: " + (
            f"both ended with {again}" if again else "give it a longer time limit, or see above"
        )
    other = identity.other_run(folder, cell.config())
    if other:
        return f"{folder.path} holds another run: {other}; move it away and launch again"
    launch = launch_of(root, status.launch)
    now = identity.code_of(cell.config())
    changed = {key: [launch.code[key], now[key]] for key in now if launch.code.get(key, now[key]) != now[key]}
    if changed and launch.options.get("strict_code"):
        return (
            f"--strict-code: the code is not that of the submission ({provenance.text_of(changed)}); "
            "launch again, or put it back"
        )
    if changed:
        messages.warn(f"the code is not that of the submission: {provenance.text_of(changed)}; --strict-code refuses")
    return ""


def go_on(root: Path, cells: list[Cell], launch: str) -> None:
    """All is saved: have this job requeued, by submitit's own handler of the signal, which then ends the process.

    Where the site refuses that, another job follows this one. Returns in that case, and where no submitit runs this.
    """
    try:
        for handler in map(signal.getsignal, SIGNALS):
            if callable(handler):
                handler(signal.SIGUSR2, None)
    except Exception as refusal:
        from hkd_hpc.jobs.executors import follow  # which itself imports this module

        job = job_id()
        try:
            found, problem = f"job {follow(root, cells, launch, job)} follows", ""
        except Exception as error:
            found = (
                f"nor could a job that follows be submitted ({error}); python -m hkd_hpc.jobs resubmit {root} goes on"
            )
            problem = f"saved, but the requeue was refused ({refusal}), {found}"
        for folder in (root / cell.name for cell in cells):
            status = Status.read(folder)
            if status and (status.state, status.job) == ("stopped", job):
                with output_to(folder / "log.txt"):
                    messages.say(f"requeue refused ({refusal}): {found}")
                if problem:
                    status.error = problem
                    status.write(folder)


def begin(cell: Cell, folder: RunFolder, before: Status | None, launch: str, job: str) -> Status:
    """The status at the start, from that of the start before."""
    rounds = cell.config().fed.rounds
    done = len(folder.rounds().get("round", ()))
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    status = Status(
        "running", launch, job, node, done, rounds, first_round=done, began=time.time(), heartbeat=time.time()
    )
    if before:
        status.starts = before.starts + 1
        requeued = before.launch == launch  # or followed by another job; else somebody asked for it: count anew
        status.stalls = before.stalls + 1 if requeued and done <= before.first_round else 0
    return status


def end(status: Status, folder: RunFolder, code: int, error: str) -> None:
    """Write how it ended."""
    status.round = len(folder.rounds().get("round", ())) or status.round
    status.state = "complete" if code == 0 else "stopped" if code == STOPPED or code > 128 else "failed"
    status.error, status.heartbeat = error, time.time()
    status.write(folder.path)


def keep_final_weights(folder: RunFolder) -> None:
    """Of a complete run keep metrics and global model alone; where that is impossible, all that is there."""
    try:
        with RunLock(folder.path, LOCK_WAIT_S):
            folder.clean()
            folder.keep_final_weights()
    except (UsageError, RunError) as error:
        messages.warn(f"the run is complete, but its checkpoints stay as they were: {error}")


@contextlib.contextmanager
def beating(status: Status, folder: RunFolder) -> Iterator[None]:
    """Within it the status is written every BEAT_S."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with contextlib.suppress(Exception):  # a full disk: the run itself says so
                status.heartbeat, status.round = time.time(), len(folder.rounds().get("round", ()))
                status.write(folder.path)

    status.write(folder.path)
    thread = threading.Thread(target=beat, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def exit_code_of(cell: Cell, root: Path, launch: str) -> int:
    """Train the cell as this rank."""
    strict = ["--strict-code"] * bool(launch_of(root, launch).options.get("strict_code"))
    try:
        return train.main(["--resume=auto", *strict, "--out", str(root / cell.name), *cell.arguments()])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def job_id() -> str:
    """Of this job as submitit names it, "here" in no job."""
    env = os.environ
    if "SUBMITIT_LOCAL_JOB_ID" in env:
        return env["SUBMITIT_LOCAL_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID", "here")


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[int]:
    """Within it all output of this process, also that of libraries, is appended to `path`; gives its size before."""
    kept = [os.dup(1), os.dup(2)]
    with open(path, "a", buffering=1, encoding="utf-8") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                yield os.path.getsize(path)
        finally:
            for descriptor, old in zip((1, 2), kept):
                os.dup2(old, descriptor)
                os.close(old)


def error_in(log: Path, begin: int, code: int) -> str:
    """The line that says what went wrong, from this start's part of the log; empty where nothing did."""
    if code in (0, STOPPED):
        return ""
    words = last_words(log, begin)
    return words if words.startswith("hkd_hpc: ") else no_room(log.parent) or words or f"exit code {code}"


def repeated_error(log: Path, end: int) -> str:
    """The error that each of the last two starts in the log's first `end` bytes ended with; else empty."""
    with open(log, "rb") as file:
        file.seek(max(0, end - 65536))
        text = file.read(min(end, 65536)).decode(errors="replace")
    starts = [start.splitlines()[1:] for start in ("\n" + text).split("\n" + START)[1:]]
    errors = [next(filter(ERROR.match, reversed(lines)), "") for lines in starts[-2:]]
    kinds = {re.sub(r"0x[0-9a-f]+|\d+", "", error) for error in errors}  # processes and addresses differ
    return errors[-1] if len(errors) == 2 and len(kinds) == 1 else ""


def last_words(log: Path, begin: int = 0, weak: str = "hkd_hpc: warning:") -> str:
    """The last line of ours that is no warning, else the last that does not begin with `weak`, else the last; of the
    log from `begin` on."""
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, os.path.getsize(log) - 65536))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    ours = [line for line in lines if line.startswith("hkd_hpc: ") and not line.startswith("hkd_hpc: warning:")]
    return (ours or [line for line in lines if not line.startswith(weak)] or lines or [""])[-1].strip()[:500]
