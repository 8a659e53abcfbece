"""The files of a study: study.json and launches/ in its root, status.json, job.lock and log.txt in each trial's folder.

ROOT/study.json                the trials
ROOT/launches/0001.json        which job was given which trials, and with what options
ROOT/submitit/                 submitit's own files: submission scripts, logs of the jobs
ROOT/<trial>/                   the run folder of hkd_hpc.train, and the three files above
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.jobs.sweep import Trial
from hkd_hpc.store.atomic import replace_text
from hkd_hpc.store.lock import RunLock, to_standard_error

JOB_LOCK, LAUNCH_LOCK = "job.lock", "launch.lock"  # held while a trial is worked on, and while a study is launched
LAUNCH_WAIT_S = 60.0  # another job of the same study may be noting its successor
STATUS_BYTES = 4096
LEAST_FREE_BYTES = 1 << 18  # with less than that no checkpoint can be written


@dataclass
class Status:
    """What a trial's job says about it when it starts and ends. `began`: seconds since 1970.

    state: running, complete, stopped (by a signal, saved: resumed when it is started again) or failed.
    `starts` of the trial in all; `stalls`: the latest of them in a row, within one job, that brought no new round;
    `first_round`: rounds done when this one began.
    """

    state: str
    launch: str
    job: str
    node: str
    round: int
    rounds: int
    first_round: int = 0
    starts: int = 1
    stalls: int = 0
    began: float = 0.0
    error: str = ""

    def write(self, folder: Path) -> None:
        """Raises RunError. The file has always the same size, so that on a full disk it can still be written in
        place.
        """
        text = json.dumps(asdict(self), indent=1).ljust(STATUS_BYTES)
        try:
            replace_text(folder / "status.json", text)
        except RunError:
            if not _overwrite(folder / "status.json", text.encode()):
                raise

    @classmethod
    def read(cls, folder: Path) -> Status | None:
        """None while there is none."""
        try:
            stored = dict(json.loads((folder / "status.json").read_text(encoding="utf-8")))
            stored.pop("heartbeat", None)  # of earlier versions
            return cls(**stored)
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
            return None


def _overwrite(path: Path, content: bytes) -> bool:
    """Write into a file of that very size; whether it could be."""
    try:
        with open(path, "r+b", buffering=0) as file:
            return os.fstat(file.fileno()).st_size == len(content) == file.write(content)
    except OSError:
        return False


def disk_full(folder: Path) -> str:
    """A line where the disk of a folder is full, else nothing. A quota is not seen."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return "" if free_bytes >= LEAST_FREE_BYTES else f"no space is left in {folder}; free some, then launch again"


@dataclass
class Launch:
    """One launch. jobs: job id to its trials; processes: marks (store.lock.process_mark) of workers on this machine.
    root: the study that it was made in."""

    name: str
    executor: str
    options: dict[str, Any]
    jobs: dict[str, list[str]] = field(default_factory=dict)
    processes: dict[str, dict[str, Any]] = field(default_factory=dict)
    cancelled: bool = False
    code: dict[str, str] = field(default_factory=dict)  # at submission, as identity.code_of; empty: not known
    root: str = ""

    def given(self) -> set[str]:
        """The names of the trials that its jobs may take."""
        return {name for names in self.jobs.values() for name in names}

    def jobs_of(self, trial: str) -> list[str]:
        """The jobs that may take a trial, the latest last."""
        return [job for job, names in self.jobs.items() if trial in names]

    def write(self, root: Path) -> None:
        replace_text(root / "launches" / f"{self.name}.json", json.dumps(asdict(self), indent=1))


def read_launches(root: Path) -> list[Launch]:
    """All launches of a study, oldest first; in a copy of it without the jobs and processes, which are the original's.
    UsageError for a damaged file."""
    found = [_read_launch(path) for path in sorted((root / "launches").glob("*.json"))]
    return [replace(one, jobs={}, processes={}) if is_of_another(one.root, root) else one for one in found]


def is_of_another(recorded: str, root: Path) -> bool:
    """Whether the study that was recorded is there, and another one; one that was moved is no more where it was."""
    return os.path.isdir(recorded) and not os.path.samefile(recorded, root)


def _read_launch(path: Path) -> Launch:
    try:
        return Launch(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path}: is damaged ({error}); once no job of that launch runs any more, remove it") from None


def next_launch(launches: list[Launch]) -> str:
    """A name after all of them, also where an older one was removed."""
    return f"{int(launches[-1].name) + 1 if launches else 1:04d}"


def launch_of(root: Path, launch: str) -> Launch:
    """The launch with this name; an empty one, which asks for nothing, where nothing is known of it."""
    try:
        return _read_launch(root / "launches" / f"{launch}.json")
    except UsageError:
        return Launch(launch, "", {})


def launch_lock(root: Path, say: Callable[[str], None] = to_standard_error) -> RunLock:
    """Of a study, for whoever adds to its launches or ends them; `say` gets a line where it has to wait."""
    return RunLock(
        root,
        LAUNCH_WAIT_S,
        say,
        name=LAUNCH_LOCK,
        holder="another command that launches or cancels",
        advice="wait for its end, then do it again",
    )


def write_trials(root: Path, trials: Iterable[Trial]) -> None:
    """The trials of the study, those of earlier launches included."""
    cells = [{name: value for name, value in asdict(trial).items() if name != "folder" or value} for trial in trials]
    replace_text(root / "study.json", json.dumps({"cells": cells}, indent=1))


def read_trials(root: Path) -> list[Trial]:
    """The trials, none for a folder that is no study yet. UsageError for a damaged file."""
    path = root / "study.json"
    try:
        return [Trial(**trial) for trial in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: is damaged ({error})") from None
