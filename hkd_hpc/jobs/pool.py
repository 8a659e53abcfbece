"""What a job with many cells does: each of its processes takes one after the other, until none is left or time is up.

For workers on this machine, and for packed jobs under SLURM, which bill whole nodes. Each process is a world of its
own: a cell that fails or a process that dies takes nobody with it. The first process stays until the others have ended,
since the end of its job, or the requeue, would end them too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hkd_hpc.comm.devices import DEVICE_OFFSET
from hkd_hpc.comm.launchers import guess_rank, outside_of_jobs
from hkd_hpc.console import messages
from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.jobs.files import JOB_LOCK, Status, no_room
from hkd_hpc.jobs.sweep import Cell
from hkd_hpc.jobs.task import FAILED, go_on, has_failed, job_id, start
from hkd_hpc.stop import STOPPED, StopRequest
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.lock import is_held

POLL_S = 1.0


class Pool:
    """The function of a job. `place`: of this process among those of this machine, None: as SLURM says.

    `devices`: CUDA_VISIBLE_DEVICES for processes that are no job of SLURM, since submitit hides all GPUs from them.
    """

    def __init__(
        self, root: Path, cells: list[Cell], launch: str, place: int | None = None, devices: str | None = None
    ) -> None:
        self.root, self.cells, self.launch, self.place, self.devices = Path(root), cells, launch, place, devices

    def __call__(self) -> None:
        """Raises SystemExit: STOPPED when a signal ended it, else FAILED when a cell failed (the first process says
        so).
        """
        env = os.environ
        is_first = self.place is not None or guess_rank(env) == 0
        place = int(env.get("SLURM_LOCALID", 0)) if self.place is None else self.place
        begin = guess_rank(env) if self.place is None else self.place  # so that not all try the same cell at first
        with StopRequest().listening() as stop:
            code = self._work(stop, begin, place)
            if is_first and self.place is None:
                self._wait_for_the_others()
        if is_first and (code == STOPPED or stop.asked) and self._unfinished():
            go_on(self.root, self._unfinished(), self.launch)
            sys.exit(STOPPED)
        if code > 128:
            sys.exit(code)
        if is_first and any(has_failed(Status.read(self.root / cell.name), self.launch) for cell in self.cells):
            sys.exit(FAILED)

    def checkpoint(self):
        """The same again: what is saved is in the run folders."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _work(self, stop: StopRequest, begin: int, place: int) -> int:
        """Passes over the cells until one finds nothing to do; STOPPED or above 128 when a signal ended it, else 0."""
        cells, found = turned(self.cells, begin), True
        given_up: set[str] = set()  # here: on a full disk not even their failure can be written down
        while found:
            found = False
            for cell in cells:
                if stop.asked:
                    return STOPPED
                if cell.name in given_up or not self._is_free(cell):
                    continue
                code = self._start(cell, place)
                if code == STOPPED or code > 128:  # a signal ended it: the other cells are for the next start
                    return code
                found = True
                if code:
                    given_up.add(cell.name)
        return 0

    def _start(self, cell: Cell, place: int) -> int:
        """The cell's exit code; 0 for one that another process was quicker to take; FAILED where nothing can be
        written.
        """
        job = job_id()  # said by variables that are hidden below
        try:
            with world_of_its_own(place, self.devices, set_devices=self.place is not None):
                return start(cell, self.root, self.launch, job, wait_s=0.0)
        except (UsageError, RunError) as error:
            messages.say(f"{cell.name}: {error}")
            return FAILED if isinstance(error, RunError) or no_room(self.root) else 0

    def _is_free(self, cell: Cell) -> bool:
        """Whether nobody has it and it is neither complete nor failed."""
        folder = RunFolder(self.root / cell.name)
        return not (
            is_held(folder.path, JOB_LOCK) or has_failed(Status.read(folder.path), self.launch) or folder.summary()
        )

    def _unfinished(self) -> list[Cell]:
        """The cells that are for the next start."""
        return [
            cell
            for cell in self.cells
            if not (
                has_failed(Status.read(self.root / cell.name), self.launch)
                or RunFolder(self.root / cell.name).summary()
            )
        ]

    def _wait_for_the_others(self) -> None:
        """Until no process of this job works on a cell any more."""
        while any(
            is_held(self.root / cell.name, JOB_LOCK) and _job_of(self.root / cell.name) == job_id()
            for cell in self.cells
        ):
            time.sleep(POLL_S)


def turned(cells: list[Cell], by: int) -> list[Cell]:
    """The same cells, begun elsewhere, so that not all workers try the same one first."""
    by %= len(cells)
    return cells[by:] + cells[:by]


def _job_of(folder: Path) -> str | None:
    status = Status.read(folder)
    return status and status.job


@contextlib.contextmanager
def world_of_its_own(place: int, devices: str | None, set_devices: bool) -> Iterator[None]:
    """Within it this process is no rank of its job; of the GPUs it sees, it takes number `place`, modulo their
    number.
    """
    alone = outside_of_jobs(os.environ) | {DEVICE_OFFSET: str(place)}
    if set_devices:
        alone.pop("CUDA_VISIBLE_DEVICES", None)
        alone |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    with variables(alone):
        yield


@contextlib.contextmanager
def variables(new: dict[str, str]) -> Iterator[None]:
    """Within it the process has these environment variables and no others."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(new)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
