"""What a job with many trials does: each of its processes takes one after the other, until none is left or time is up.

For workers on this machine, and for packed jobs under SLURM, which bill whole nodes. Each process is a world of its
own: a trial that fails or a process that dies takes nobody with it. The first process stays until the others have
ended, since the end of its job, or the requeue, would end them too.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.common.rank import guess_rank
from hkd_hpc.common.stop import STOPPED, StopRequest
from hkd_hpc.console import messages
from hkd_hpc.jobs.environment import world_of_its_own
from hkd_hpc.jobs.files import JOB_LOCK, Status
from hkd_hpc.jobs.slurm import JobFunction, job_id, requeue
from hkd_hpc.jobs.sweep import Trial
from hkd_hpc.jobs.task import FAILED, has_failed, start
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.lock import TAKEOVER_S, InUse, LockWatch, describe_lock, is_held

POLL_S = 1.0


class Pool(JobFunction):
    """The function of a job. `place`: of this process among those of this machine, None: as SLURM says.

    `devices`: CUDA_VISIBLE_DEVICES for processes that are no job of SLURM, since submitit hides all GPUs from them.
    """

    def __init__(
        self, root: Path, trials: list[Trial], launch: str, place: int | None = None, devices: str | None = None
    ) -> None:
        self.root, self.trials, self.launch, self.place, self.devices = Path(root), trials, launch, place, devices

    def __call__(self) -> None:
        """Raises SystemExit: STOPPED when a signal ended it, else FAILED when a trial failed (the first process says
        so).
        """
        env = os.environ
        is_first = self.place is not None or guess_rank(env) == 0
        place = int(env.get("SLURM_LOCALID", 0)) if self.place is None else self.place
        begin = guess_rank(env) if self.place is None else self.place  # so that not all try the same trial at first
        with StopRequest().listening() as stop:
            code = self._work(stop, begin, place)
            if is_first and self.place is None:
                self._wait_for_the_others()
        unfinished = self._unfinished() if is_first and (code == STOPPED or stop.asked) else []
        if unfinished:
            requeue(self.root, Pool(self.root, unfinished, self.launch), unfinished, self.launch)
            sys.exit(STOPPED)
        if code > 128:
            sys.exit(code)
        if is_first and any(has_failed(Status.read(self.root / trial.name), self.launch) for trial in self.trials):
            sys.exit(FAILED)

    def _work(self, stop: StopRequest, begin: int, place: int) -> int:
        """Passes over the trials until one finds nothing to do; STOPPED or above 128 when a signal ended it, else 0."""
        trials = turned(self.trials, begin)
        locks = {trial.name: LockWatch(self.root / trial.name, JOB_LOCK) for trial in trials}
        given_up: set[str] = set()  # here: where nothing can be written, not even their failure can
        while left := [trial for trial in trials if trial.name not in given_up and not self._is_done(trial)]:
            held = {trial.name: locks[trial.name].is_held() for trial in left}
            for trial in left:
                if stop.asked:
                    return STOPPED
                if held[trial.name] is not False or locks[trial.name].is_held() or self._is_done(trial):
                    continue
                code = self._start(trial, place, stop)
                if code == STOPPED or code > 128:  # a signal ended it: the other trials are for the next start
                    return code
                if code:
                    given_up.add(trial.name)
            if all(held.values()):
                break  # others have them all
            if False not in held.values():
                time.sleep(POLL_S)  # a job that was requeued elsewhere at once finds its own lock, and must outwait it
        return 0

    def _start(self, trial: Trial, place: int, stop: StopRequest) -> int:
        """The trial's exit code; 0 for one that another process was quicker to take; FAILED where nothing can be
        written.
        """
        job = job_id()  # said by variables that are hidden below
        wait_s = TAKEOVER_S if describe_lock(self.root / trial.name, JOB_LOCK) else 0.0
        try:
            with world_of_its_own(place, self.devices, set_devices=self.place is not None):
                return start(trial, self.root, self.launch, job, wait_s, stop)
        except InUse as holder:
            messages.say(f"{trial.name}: {holder}")
            return 0
        except (UsageError, RunError) as error:
            messages.say(f"{trial.name}: {error}")
            return FAILED

    def _is_done(self, trial: Trial) -> bool:
        """Whether it is complete or failed."""
        folder = RunFolder(self.root / trial.name)
        return has_failed(Status.read(folder.path), self.launch) or bool(folder.summary())

    def _unfinished(self) -> list[Trial]:
        """The trials that are for the next start."""
        return [trial for trial in self.trials if not self._is_done(trial)]

    def _wait_for_the_others(self) -> None:
        """Until no process of this job works on a trial any more."""
        while any(
            is_held(self.root / trial.name, JOB_LOCK) and _job_of(self.root / trial.name) == job_id()
            for trial in self.trials
        ):
            time.sleep(POLL_S)


def turned(trials: list[Trial], by: int) -> list[Trial]:
    """The same trials, begun elsewhere, so that not all workers try the same one first."""
    by %= len(trials)
    return trials[by:] + trials[:by]


def _job_of(folder: Path) -> str | None:
    status = Status.read(folder)
    return status.job if status else None
