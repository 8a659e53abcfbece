"""The table of a study: mean and 95 % interval over the seeds of what its finished trials found."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.analysis.tables import COLUMNS, Cell, Table, document, estimate
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.groups import grouped
from hkd_hpc.config import identity, is_location
from hkd_hpc.jobs.pairs import Against
from hkd_hpc.jobs.sweep import Trial
from hkd_hpc.results.differences import AGAINST, GOALS
from hkd_hpc.runtime import provenance
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.tree import BadFile, load_tree

COSTS = ["parameters held (M)", "seconds per client and round", "public data"]
SEED = "run.seed"
ACROSS = ("clients", "beta")  # the axes that stand across, as in the paper's tables; the others stand down


CAPTION = "Accuracy in the last round: mean ± half of the 95 % interval over the seeds (their number)"


def table(root: Path, trials: list[Trial], format: str = "markdown") -> str:
    """The table and what is said about it, as text."""
    return document(parts(root, trials), format)


def parts(root: Path, trials: list[Trial]) -> list[str | Table]:
    """Rows: data, scheme and whatever else was varied; columns: clients or beta, once for local, once for global, and
    for the differences from the reference scheme where there are pairs of several seeds."""
    found = read(root, trials)
    return [
        f"{CAPTION}; {len(found.summaries)} of {len(trials)} runs are complete",
        "",
        *_grid(root, trials, found),
        *(f"not in the table: {line}" for line in [*found.faults, *gaps(root, found.summaries)]),
        *(f"remark: {line}" for line in remarks(found.provenances)),
    ]


def _grid(root: Path, trials: list[Trial], found: StudyRecords) -> list[str | Table]:
    """The table, and how differences in it were told."""
    axes = list(dict.fromkeys(axis for trial in trials for axis in trial.labels if axis != "seed"))
    across = [axis for axis in ACROSS if axis in axes]
    down = sorted((axis for axis in axes if axis not in across), key=lambda axis: axis != "data")
    down += settings_apart(trials)
    columns = list(dict.fromkeys(_labels(trial, across) for trial in trials))
    groups = grouped(((_labels(trial, down), _labels(trial, across)), trial) for trial in trials)
    clashing = {trial.name for own in alike(trials) if different_data(own, found.provenances) for trial in own}
    sound = {name: summary for name, summary in found.summaries.items() if name not in clashing}
    against = Against(groups, down, lambda group, goal: _by_seed(group, sound, goal))
    rows: list[list[Cell | str]] = []
    for row in dict.fromkeys(row for row, _ in groups):
        own = [groups.get((row, column), []) for column in columns]
        means = [_mean(group, found, goal) for goal in GOALS for group in own]
        paired = [against.cell((row, column), goal) for goal in against.goals for column in columns]
        rows.append([*row, *means, *paired, *_costs([trial for group in own for trial in group], root, found)])
    heads = [" ".join(f"{axis} {label}" for axis, label in zip(across, labels)) for labels in columns]
    return [grid(down, heads if across else [], rows, CAPTION, against.goals), *against.methods]


def settings_apart(trials: Sequence[Trial]) -> list[str]:
    """The settings that tell trials of the same labels apart, launched into one study by turns: no mean is over all."""
    groups = grouped((tuple(label for label in trial.labels.items() if label[0] != "seed"), trial) for trial in trials)
    keys = dict.fromkeys(key for trial in trials for key in trial.settings if key != SEED and not is_location(key))
    return [key for key in keys if any(len({_value(trial, key) for trial in group}) > 1 for group in groups.values())]


def _value(trial: Trial, key: str) -> str:
    return str(trial.settings.get(key, "default"))


def grid(
    down: Sequence[str],
    across: Sequence[str],
    rows: Sequence[Sequence[Cell | str]],
    caption: str,
    against: Sequence[str] = (),
) -> Table:
    """The layout of the paper's tables: what stands across once for local and once for global, and once for each goal
    whose differences are told; then COSTS."""
    titles = [*GOALS, *(AGAINST[goal] for goal in against)]
    if not across:
        return Table([*down, *titles, *COSTS], rows, caption, len(down))
    spans = [("", len(down)), *((title, len(across)) for title in titles), ("", len(COSTS))]
    return Table([*down, *list(across) * len(titles), *COSTS], rows, caption, len(down), spans)


@dataclass(frozen=True)
class StudyRecords:
    """summaries, provenances: of the complete trials, by name. faults: a line for each trial whose metrics.h5
    cannot be read or is that of another run, and for runs of different data."""

    summaries: dict[str, dict]
    provenances: dict[str, provenance.Provenance]
    faults: list[str]


def read(root: Path, trials: list[Trial]) -> StudyRecords:
    found = StudyRecords({}, {}, [])
    for trial in trials:
        folder = RunFolder(root / trial.name)
        summary = folder.summary()
        other = summary and identity.other_run(folder, trial.config())
        if other:
            found.faults.append(f"{folder.path} holds another run: {other}")
        elif summary:
            found.summaries[trial.name] = summary
            found.provenances[trial.name] = provenance.from_record(folder.record())
        elif folder.damage():
            found.faults.append(folder.damage())
    clashes = [line for group in alike(trials) for line in different_data(group, found.provenances)]
    found.faults.extend(dict.fromkeys(clashes))
    return found


def alike(trials: list[Trial]) -> Iterator[list[Trial]]:
    """Trials that must have the same data: those of one mean, and those whose settings name the same data set."""
    mean = lambda trial: tuple(label for axis, label in trial.labels.items() if axis != "seed")
    named = lambda trial: tuple(
        os.path.basename(str(trial.settings.get(f"data.{key}", ""))) for key in ("name", "path", "image_size")
    )
    for key in (mean, named):
        yield from grouped((key(trial), trial) for trial in trials).values()


def different_data(trials: list[Trial], provenances: dict[str, provenance.Provenance]) -> list[str]:
    """A line where the runs of these trials were trained on different data."""
    own = {trial.name: provenances[trial.name] for trial in trials if trial.name in provenances}
    return provenance.lines(provenance.mixed(own, lambda key: key == provenance.CONTENT))


def remarks(provenances: dict[str, provenance.Provenance]) -> list[str]:
    """A line for each other fact in which the complete runs differ: code, versions, threads."""
    return provenance.lines(provenance.mixed(provenances, lambda key: key != provenance.CONTENT))


def check_code(root: Path, trials: list[Trial]) -> None:
    """UsageError where complete runs are of different code."""
    found = provenance.lines(provenance.mixed(read(root, trials).provenances, provenance.is_code), rejected=True)
    if found:
        raise UsageError(f"--strict-code: {'; '.join(found)}")


def gaps(root: Path, summaries: dict[str, dict]) -> list[str]:
    """A line for each accuracy that is not a number in the summary of a complete trial, by name."""
    return [
        f"{root / name}: complete, but without a {goal} accuracy"
        for name, summary in summaries.items()
        for goal in GOALS
        if np.isnan(summary[COLUMNS[goal]])
    ]


def _costs(trials: list[Trial], root: Path, found: StudyRecords) -> list[str]:
    """Millions of parameters in memory while a client trains (About.parameters_held); seconds of its local training a
    round, mean over all clients and rounds; whether the scheme needs public images."""
    metrics = [
        table
        for trial in trials
        if trial.name in found.summaries and (table := _metrics(root / trial.name / "metrics.h5"))
    ]
    held = {table["parameters"]["held"] for table in metrics}
    seconds = [table["clients"]["train_s"].ravel() for table in metrics]
    mean_s = np.nanmean(np.concatenate(seconds)) if seconds else np.nan
    needed = any(schemes.get(trial.settings["scheme.name"]).needs_public for trial in trials)
    return [
        ", ".join(f"{count / 1e6:.3f}" for count in sorted(held)) or "–",
        "–" if np.isnan(mean_s) else f"{mean_s:.2f}",
        "yes" if needed else "no",
    ]


def _metrics(path: Path) -> dict | None:
    try:
        return load_tree(path, only=["clients/train_s", "parameters/held"])
    except BadFile:
        return None


def _labels(trial: Trial, axes: list[str]) -> tuple[str, ...]:
    return tuple(trial.labels.get(axis, _value(trial, axis) if "." in axis else "") for axis in axes)


def _mean(trials: list[Trial], found: StudyRecords, goal: str) -> Cell | str:
    return (
        "different data"
        if different_data(trials, found.provenances)
        else estimate(_values(trials, found.summaries, goal))
    )


def _by_seed(trials: list[Trial], summaries: dict, goal: str) -> dict[int, float]:
    own = {trial.settings[SEED]: summaries.get(trial.name) for trial in trials}
    return {seed: float(summary[COLUMNS[goal]]) for seed, summary in own.items() if summary}


def _values(trials: list[Trial], summaries: dict, goal: str) -> list[float]:
    return [float(summary[COLUMNS[goal]]) for trial in trials if (summary := summaries.get(trial.name))]
