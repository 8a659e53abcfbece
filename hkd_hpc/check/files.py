"""One look at each file of a run: a line that says ok, or what is wrong and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hkd_hpc import config as config_module
from hkd_hpc.check.contents import (
    FileProblem,
    changed_since,
    check_partition,
    check_rows,
    check_same_partition,
    check_weights,
    completeness,
    rows_text,
    settings_of,
    value_in,
)
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.common.words import counted
from hkd_hpc.config import DAMAGED, Config, identity
from hkd_hpc.jobs.files import read_trials
from hkd_hpc.runtime import versions
from hkd_hpc.runtime.revision import package_sha256
from hkd_hpc.store.folder import NO_ROWS, RunFolder, temporary_files
from hkd_hpc.store.lock import LOCK_NAME, describe_lock, is_held
from hkd_hpc.store.tree import BadFile, is_intact, open_tree


@dataclass(frozen=True)
class FileCheck:
    """What one look at a file gave. `advice`: what to do; a file with a problem is wrong, any other is good."""

    name: str
    text: str
    problem: bool = False
    advice: str = ""

    def __str__(self) -> str:
        text = f"WRONG: {self.text}" if self.problem else self.text
        return f"  {self.name:28s} {text}" + (f"; {self.advice}" if self.advice else "")


def check_run(folder: RunFolder) -> list[FileCheck]:
    """All lines about a run."""
    config, settings = check_config(folder)
    lines = [settings, check_metrics(folder, config), *check_earlier_rows(folder)]
    lines += [check_checkpoint(folder, round, path, config) for round, path in folder.checkpoints()]
    return [*lines, *check_trial(folder), *check_versions(folder), *check_leftovers(folder)]


def check_trial(folder: RunFolder) -> Iterator[FileCheck]:
    """In a study, whether this is the run of its trial."""
    place = folder.path.resolve()
    try:
        other = [
            identity.other_run(folder, trial.config())
            for trial in read_trials(place.parent)
            if trial.name == place.name
        ]
    except UsageError as error:
        yield FileCheck("../study.json", str(error), True)
        return
    for text in filter(None, other):
        yield FileCheck(
            "../study.json",
            f"this trial of the study has other settings: {text}",
            True,
            "move the folder away; launch then computes the trial",
        )


def check_config(folder: RunFolder) -> tuple[Config | None, FileCheck]:
    """The settings, if they can be used, and the line about them."""
    name, advice = folder.config_path.name, "config_json in metrics.h5 and in the checkpoints is the same text"
    try:
        text = folder.read_config()
        if text is None:
            return None, FileCheck(name, "it is missing", True, advice)
        config = config_module.from_json(text)
    except DAMAGED as error:
        return None, FileCheck(name, f"it is damaged ({error})", True, advice)
    except (UsageError, RunError) as error:
        return None, FileCheck(name, str(error), True)
    fed = config.fed
    told = (
        f"{config.scheme.name} on {config.data.name}, {counted(fed.clients, 'client')}, {counted(fed.rounds, 'round')}"
    )
    return config, FileCheck(name, f"ok: {told}")


def check_metrics(folder: RunFolder, config: Config | None) -> FileCheck:
    """Its rows, and whether the run is complete."""
    name = folder.metrics_path.name
    advice = "--resume writes it anew from the newest good checkpoint; --repair OUT.h5 saves the rows that can be saved"
    if not folder.metrics_path.exists():
        if any(round > 1 for round, _ in folder.checkpoints()):  # that of a round follows the row of the round before
            return FileCheck(name, "it is missing", True, advice)
        return FileCheck(name, "ok: none yet, no round has been tested")
    try:
        with open_tree(folder.metrics_path) as file:
            rows = check_rows(file)
            check_partition(file)
            settings = settings_of(file) or config
            told = completeness(file, rows, settings)
            is_complete = told.startswith("complete")
            other = identity.different(settings, config) if settings and config and config.fed.rounds == rows else ""
            if is_complete and other:
                raise FileProblem(
                    f"it is that of another run ({other})",
                    "put back the one that belongs "
                    "to config.json, or remove it to have it written anew from the last checkpoint",
                )
            return FileCheck(name, f"ok: {rows_text(rows)}, {told}{changed_since(file, config)}")
    except (BadFile, FileProblem) as bad:
        return FileCheck(name, reason_of(bad), True, getattr(bad, "advice", "") or advice)


def check_earlier_rows(folder: RunFolder) -> Iterator[FileCheck]:
    """The rows before the checkpoints' own, while a run is not complete."""
    if not folder.rows_path.exists():
        return
    name = str(folder.rows_path.relative_to(folder.path))
    try:
        with open_tree(folder.rows_path) as file:
            yield FileCheck(name, f"ok: {rows_text(check_rows(file))}, for the checkpoints to continue")
    except (BadFile, FileProblem) as bad:
        yield FileCheck(name, reason_of(bad), True, "metrics.h5 has these rows too; --resume writes it anew")


def check_checkpoint(folder: RunFolder, round: int, path: Path, config: Config | None) -> FileCheck:
    """Whether it is intact, of this round, and holds the weights that the rows speak of."""
    name = str(path.relative_to(folder.path))
    try:
        with open_tree(path) as file:
            if file.load("round") != round:
                raise FileProblem(f"it is of round {file.load('round')}, not of {round}")
            check_partition(file)
            check_same_partition(folder, file)
            if "before" in file.names() and not folder.with_all_rows({"before": file.load("before")}):
                raise FileProblem(NO_ROWS)
            return FileCheck(name, f"ok: {check_weights(folder, round, file)}{changed_since(file, config)}")
    except (BadFile, FileProblem) as bad:
        advice = bad.advice if isinstance(bad, FileProblem) else ""
        return FileCheck(name, reason_of(bad), True, advice or f"remove it; {fallback(folder, path)}")


def fallback(folder: RunFolder, bad: Path) -> str:
    """What --resume does without this checkpoint."""
    good = next((path.name for _, path in folder.checkpoints() if path != bad and is_intact(path)), None)
    return f"--resume continues from {good}" if good else "no other checkpoint is good, so the run has to begin anew"


def reason_of(bad: Exception) -> str:
    """Without the path, which stands before it."""
    return bad.reason if isinstance(bad, BadFile) else str(bad)


def check_versions(folder: RunFolder) -> Iterator[FileCheck]:
    """A line where the run was written with other packages than are here; worth knowing, not wrong."""
    written = json_in(folder.metrics_path, "versions_json")
    if json_in(folder.metrics_path, "identity_json").get("code.hkd_hpc") == package_sha256():
        written.pop(versions.REVISION, None)  # of docs and tests, perhaps: the code is the same
    other = [
        f"{name} {written[name]} (here {here})"
        for name, here in versions.found().items()
        if written.get(name, here) != here
    ]
    if other:
        yield FileCheck("versions", f"written with {', '.join(other)}")


def json_in(path: Path, key: str) -> dict[str, Any]:
    """A table that is stored as text; empty where it is not there or cannot be read."""
    try:
        found = json.loads(value_in(path, key) or "{}")
    except (ValueError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def check_leftovers(folder: RunFolder) -> Iterator[FileCheck]:
    """The lock and its holder, and what killed processes left."""
    holder = describe_lock(folder.path)
    if holder and is_held(folder.path):
        yield FileCheck(LOCK_NAME, f"in use by {holder}: files change while they are looked at")
    elif holder:
        yield FileCheck(LOCK_NAME, f"left by {holder}, which does not run any more; --resume takes it over")
    for path in (*temporary_files(folder.path), *temporary_files(folder.checkpoint_folder)):
        yield FileCheck(str(path.relative_to(folder.path)), "left by a process that was killed; --resume removes it")
