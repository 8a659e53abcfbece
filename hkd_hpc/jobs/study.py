"""A study: the cells of a root folder, how they stand, and what they found."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from hkd_hpc.console import messages
from hkd_hpc.errors import UsageError
from hkd_hpc.jobs import results, watch
from hkd_hpc.jobs.files import read_cells, read_launches
from hkd_hpc.runtime.paths import expanded


class Study:
    """What is in `root`; made by `launch`, or for one that was launched before."""

    def __init__(self, root: str | os.PathLike) -> None:
        self.root = Path(os.path.abspath(expanded(root, "")))
        self.cells = read_cells(self.root)
        self._launches, self._queue, self._fed_s = 0, watch.Queue(), float("-inf")
        if not self.cells:
            raise UsageError(
                f"{self.root}: no study here; python -m hkd_hpc.jobs launch SPEC.toml --root DIR makes one"
            )

    def status(self) -> list[watch.CellState]:
        """How every cell stands now."""
        launches = read_launches(self.root)
        if len(launches) != self._launches:  # what the queue said before knows nothing of the new jobs
            self._launches, self._queue = len(launches), watch.Queue()
        return watch.look(self.root, self.cells, launches, self._queue)

    def wait(self, say=messages.say) -> bool:
        """Until no cell is running or queued any more; whether all are complete. Submits what max_queued left
        outside.
        """
        states = watch.wait(lambda: self._fed(say), say, more=self._waits_outside)
        return all(state.state == "complete" for state in states)

    def _waits_outside(self, states: list[watch.CellState]) -> bool:
        """Whether cells are left that the last launch had to leave outside the queue."""
        last = read_launches(self.root)[-1:]
        return (
            any(state.state == "missing" for state in states)
            and bool(last)
            and not last[0].cancelled
            and last[0].options.get("max_queued", 0) > 0
        )

    def _fed(self, say) -> list[watch.CellState]:
        """The states, after a try, now and then, to submit what is not in the queue yet."""
        from hkd_hpc.jobs.launcher import top_up  # which itself imports this module

        states = self.status()
        if time.monotonic() - self._fed_s > watch.QUEUE_S and any(state.state == "missing" for state in states):
            self._fed_s = time.monotonic()
            try:
                top_up(self, states, self._queue, say)
            except UsageError as refusal:
                say(f"not submitted now: {refusal}")
            return self.status()
        return states

    def table(self, strict_code: bool = False) -> str:
        """Accuracies of the finished cells, in the layout of the paper's Table 1, as Markdown.

        strict_code: UsageError where they are of different code; else a line says so.
        """
        if strict_code:
            results.check_code(self.root, self.cells)
        return results.table(self.root, self.cells)

    def cancel(self) -> list[str]:
        """Ask SLURM to cancel the jobs of all launches, and interrupt those on this machine. Their ids; UsageError."""
        alive = watch.Queue().jobs()
        ended = []
        for launch in read_launches(self.root):
            here = {job: process for job, process in launch.processes.items() if watch.is_safe_to_signal(process)}
            queued = [job for job in launch.jobs if launch.executor == "slurm" and (alive is None or job in alive)]
            if queued:
                _scancel(queued)
            for process in here.values():
                os.kill(process["pid"], signal.SIGINT)
            launch.cancelled = True
            launch.write(self.root)
            ended += [*queued, *here]
        return ended


def _scancel(jobs: list[str]) -> None:
    try:
        subprocess.run(["scancel", *jobs], capture_output=True, text=True, check=True, timeout=60)
    except subprocess.CalledProcessError as error:
        raise UsageError(f"scancel refused: {(error.stderr or '').strip().splitlines()[-1:]}") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"scancel cannot be asked: {error}") from None
