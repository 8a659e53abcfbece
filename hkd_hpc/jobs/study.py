"""A study: the trials of a root folder, how they stand, what they found; `launch` makes one."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hkd_hpc.analysis.tables import Table, document
from hkd_hpc.common.errors import UsageError
from hkd_hpc.console import messages
from hkd_hpc.jobs import results, slurm, watch
from hkd_hpc.jobs.executors import Say
from hkd_hpc.jobs.files import launch_lock, read_launches, read_trials
from hkd_hpc.jobs.launcher import launch_trials, options_at, root_at, top_up
from hkd_hpc.jobs.options import Options
from hkd_hpc.jobs.slurm import Queue
from hkd_hpc.jobs.sweep import Sweep
from hkd_hpc.results import existing, find_runs
from hkd_hpc.results.study import StudyRuns
from hkd_hpc.runtime.paths import named_path, path_text
from hkd_hpc.store.lock import is_alive, is_visible

Tell = Callable[[list[watch.TrialState]], None]  # takes the states again and again


class Study(StudyRuns):
    """The trials in a folder; made by `launch`, or for a study that was launched before.

    Args:
        root: The study's folder.

    Attributes:
        root: Its absolute path.
        trials: Those of all launches.

    Raises:
        UsageError: There is no study, or its record is damaged.
    """

    def __init__(self, root: str | os.PathLike) -> None:
        self.root = Path(os.path.abspath(named_path(root, "")))
        self.trials = read_trials(self.root)
        self._launches, self._queue, self._topped_up_s = 0, Queue(), float("-inf")
        if not self.trials:
            raise UsageError(
                f"{self.root}: no study here; make one by python -m hkd_hpc.jobs launch SPEC.toml --root DIR"
            )

    def status(self) -> list[watch.TrialState]:
        """How every trial stands now."""
        return self._states({})

    def _states(self, complete: dict[str, watch.TrialState]) -> list[watch.TrialState]:
        """The same; trials that were `complete` before, which this adds to, are not read again."""
        launches = read_launches(self.root)
        if len(launches) != self._launches:  # what the queue said before knows nothing of the new jobs
            self._launches, self._queue = len(launches), Queue()
        open_ones = [trial for trial in self.trials if trial.name not in complete]
        states = {state.name: state for state in watch.look(self.root, open_ones, launches, self._queue)}
        complete |= {name: state for name, state in states.items() if state.state == "complete"}
        return [states.get(trial.name) or complete[trial.name] for trial in self.trials]

    def wait(self, say: Say = messages.say, tell: Tell | None = None) -> bool:
        """Wait until no trial is running or queued any more; meanwhile submit what max_queued left outside the queue.

        Args:
            say: Takes a line about what is submitted.
            tell: Takes the states again and again; by default `say` gets their counts whenever these change.

        Returns:
            Whether all trials are complete.
        """
        complete: dict[str, watch.TrialState] = {}
        look = lambda: self._topped_up(say, complete)
        states = watch.wait(look, tell or watch.when_counts_change(say), more=self._waits_outside)
        return all(state.state == "complete" for state in states)

    def _waits_outside(self, states: list[watch.TrialState]) -> bool:
        """Whether trials are left that the last launch had to leave outside the queue."""
        last = read_launches(self.root)[-1:]
        return (
            any(state.state == "missing" for state in states)
            and bool(last)
            and not last[0].cancelled
            and last[0].options.get("max_queued", 0) > 0
        )

    def _topped_up(self, say: Say, complete: dict[str, watch.TrialState]) -> list[watch.TrialState]:
        """The states, after a try, now and then, to submit what is not in the queue yet."""
        states = self._states(complete)
        if time.monotonic() - self._topped_up_s <= slurm.QUEUE_S or all(state.state != "missing" for state in states):
            return states
        self._topped_up_s = time.monotonic()
        try:
            top_up(self.root, self.trials, states, self._queue, say)
        except UsageError as rejection:
            say(f"not submitted now: {rejection}")
        return self._states(complete)

    def parts(self) -> list[str | Table]:
        """Accuracies of the finished trials, in the layout of the paper's Table 1, and lines about them."""
        return results.parts(self.root, self.trials)

    def text(self, strict_code: bool = False, format: str = "markdown") -> str:
        """The same as text.

        Args:
            strict_code: Whether trials of different code are an error; else a line says so.
            format: "markdown", "latex" (booktabs), "csv" or "json".

        Returns:
            The table, and lines about it; in LaTeX and CSV these are comments.

        Raises:
            UsageError: With strict_code, where they are of different code.
        """
        if strict_code:
            results.check_code(self.root, self.trials)
        return document(self.parts(), format)

    def cancel(self) -> list[str]:
        """Ask SLURM to cancel the jobs of all launches, and interrupt the workers on this machine.

        Returns:
            Their ids.

        Raises:
            UsageError: SLURM does not take some of it; all else is cancelled.
        """
        ended: list[str] = []
        rejections: list[str] = []
        with launch_lock(self.root):
            alive = Queue().jobs()
            for launch in read_launches(self.root):
                queued = [job for job in launch.jobs if launch.executor == "slurm" and (alive is None or job in alive)]
                try:
                    slurm.cancel(queued)
                    ended += queued
                except UsageError as rejection:
                    rejections.append(str(rejection))
                ended += [name for name, process in launch.processes.items() if _interrupt(process)]
                launch.cancelled = True
                launch.write(self.root)
        if rejections:
            raise UsageError(f"{'; '.join(rejections)}; all else is cancelled")
        return ended


def _interrupt(process: dict[str, Any]) -> bool:
    """Interrupt a worker on this machine; whether it still ran, and was ours to signal."""
    if not is_visible(process) or not is_alive(process) or process["pid"] == os.getpid():
        return False
    with contextlib.suppress(ProcessLookupError):  # it has ended just now
        os.kill(process["pid"], signal.SIGINT)
    return True


def wait_or_cancel(study: Study, executor: str, say: Say = messages.say, tell: Tell | None = None) -> bool:
    """As `study.wait`; but Ctrl-C ends the trials on this machine, as it would if they ran in this process."""
    try:
        return study.wait(say, tell)
    except KeyboardInterrupt:
        if executor == "local":
            say("interrupted: the runs end now; the same command resumes them from their last checkpoints")
            study.cancel()
            study.wait(say, tell)
        raise


def launch(
    sweep: Sweep | str | os.PathLike,
    executor: str = "slurm",
    *,
    root: str | os.PathLike,
    site: str | os.PathLike | None = None,
    say: Say = messages.say,
    **options: Any,
) -> Study:
    """Submit the trials of a sweep that are neither complete nor running nor queued.

    Args:
        sweep: The grid, or the path of a spec.
        executor: "slurm"; "local" for workers in the background of this machine; "debug" for this process.
        root: The study's folder. Trials of earlier launches stay in it.
        site: A site file, for what is not among the options.
        say: Takes the lines about what is done.
        options: The fields of Options; others go to submitit's SLURM executor.

    Returns:
        The study.

    Raises:
        Problems: A line for each thing that is wrong; nothing was submitted.
        UsageError: One thing that is wrong, or what SLURM said against the submission.
    """
    if not isinstance(sweep, Sweep):
        sweep = Sweep.from_toml(path_text(sweep, "the sweep "))
    trials, problems = sweep.trials()
    folder = root_at(root)
    launch_trials(trials, executor, folder, options_at(site, options), problems, say)
    return Study(folder)


def load_study(root: str | os.PathLike) -> StudyRuns:
    """What many runs have found, at any time: a sweep's, a comparison's, or those of any folder.

    Args:
        root: The folder.

    Returns:
        A Study where a sweep was launched; else the runs that are there, with the same `runs` and `table`.

    Raises:
        UsageError: There is neither a study nor a run, or the record of a study is damaged.
    """
    place = existing(root)
    if place.is_dir() and read_trials(place):
        return Study(place)
    found = find_runs(place)
    if not found:
        raise UsageError(f"{place}: holds no run, nor does any folder below it")
    if place.is_file() and found[0].problem:
        raise UsageError(found[0].problem)
    return StudyRuns(place)


def resubmit(root: str | os.PathLike, say: Say = messages.say) -> Study:
    """Launch the trials of a study again, with the options of the last launch."""
    study = Study(root)
    last = read_launches(study.root)[-1:]
    if not last:
        raise UsageError(f"{study.root}: nothing was launched here yet")
    launch_trials(study.trials, last[0].executor, study.root, Options(**last[0].options), [], say)
    return study
