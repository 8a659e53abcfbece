"""The tables of a study: the layouts of the paper's Tables 1 and 2, differences from FedAvg, all readings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.analysis.tables import COLUMNS, NOTHING, Cell, Table, estimate
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.groups import grouped
from hkd_hpc.common.words import counted
from hkd_hpc.figures.groups import DATA
from hkd_hpc.jobs.results import grid
from hkd_hpc.report import paper
from hkd_hpc.report.trials import SCHEME, Trial, axes_of, label_of
from hkd_hpc.results.differences import AGAINST, GOALS, differences, method_text

ACROSS = {"fed.clients": "{} clients", "data.beta": "β {}"}  # the axes that stand across, as in the paper's tables


@dataclass(frozen=True)
class Tabled:
    """A table of the report, and lines about it."""

    name: str
    title: str
    table: Table
    notes: tuple[str, ...] = ()


def tables_of(trials: Sequence[Trial]) -> list[Tabled]:
    """All tables of trials that have complete runs, one data set after the other."""
    found = [trial for trial in trials if trial.complete]
    by_data = grouped((trial.settings[DATA], trial) for trial in found)
    return [
        table
        for place, (data, own) in enumerate(by_data.items())
        for table in (accuracy_table(f"accuracy-{place}", data, own), *difference_tables(place, data, own))
    ] + readings_tables(found)


# ---------------------------------------------------------------------------------------------- Tables 1 and 2


def accuracy_table(name: str, data: str, trials: Sequence[Trial]) -> Tabled:
    """Rows: schemes, and whatever else was varied; columns: clients and beta, once for local and once for global."""
    axes = axes_of(trials)
    across = [axis for axis in ACROSS if axis in axes]
    down = [axis for axis in axes if axis not in across]
    columns = sorted({label_of(trial, across) for trial in trials}, key=numbers_in)
    cells = {(label_of(trial, down), label_of(trial, across)): trial for trial in trials}
    rows = [
        [*row, *_row(cells, row, columns), *costs([cells[row, column] for column in columns if (row, column) in cells])]
        for row in dict.fromkeys(row for row, _ in cells)
    ]
    heads = [", ".join(ACROSS[axis].format(value) for axis, value in zip(across, column)) for column in columns]
    caption = f"Accuracy on {data} in the last round: {compare_text(trials)}"
    table = grid(list(map(short, down)), heads if across else [], rows, caption)
    return Tabled(name, f"Accuracy on {data}", table, (*notes_of(trials), *not_counted(trials)))


def _row(cells: dict[tuple, Trial], row: tuple[str, ...], columns: Sequence[tuple[str, ...]]) -> list[Cell | str]:
    own = [cells.get((row, column)) for column in columns]
    return [accuracy_cell(trial, goal) if trial else NOTHING for goal in GOALS for trial in own]


def accuracy_cell(trial: Trial, goal: str) -> Cell | str:
    """The mean over the seeds, beside the paper's where it has one."""
    if not trial.has_one_data():
        return "different data"
    ours, its = estimate(trial.accuracies(goal)), paper.published(trial)
    if its is None or not ours.count:
        return ours
    return paper.BesidePaper(ours.mean, ours.half, ours.count, its.accuracy[goal])


def costs(trials: Sequence[Trial]) -> list[Cell | str]:
    """COSTS of jobs.results, over the runs of a row, beside the paper's where it has them."""
    runs = [run for trial in trials for run in trial.complete.values()]
    held_M = sorted({f"{int(run.part('parameters')['held']) / 1e6:.3f}" for run in runs if run.part("parameters")})
    seconds = [run.client_columns["train_s"].ravel() for run in runs if "train_s" in run.client_columns]
    measured = np.concatenate(seconds) if seconds else np.array([])
    mean_s = f"{np.nanmean(measured):.2f}" if np.isfinite(measured).any() else NOTHING
    its = paper.published_costs(trials)
    return [
        paper.cost_cell(", ".join(held_M) or NOTHING, its.get("parameters_M")),
        paper.cost_cell(mean_s, its.get("train_s")),
        needs_public(trials[0].scheme),
    ]


def needs_public(scheme: str) -> str:
    try:
        return "yes" if schemes.get(scheme).needs_public else "no"
    except UsageError:  # one's own, which is not here
        return NOTHING


def notes_of(trials: Sequence[Trial]) -> list[str]:
    """What the reader of a table with the paper's figures must know."""
    found = [its for its in map(paper.published, trials) if its]
    if not found:
        return []
    names = " and ".join(dict.fromkeys(its.table for its in found))
    ours = f"“paper”: {names} of {paper.contents()['source']}; ↑ or ↓ where it lies above or below our interval."
    ours += " Its seconds are those of an AMD Vega20." if paper.published_costs(trials) else ""
    others = dict.fromkeys(filter(None, map(paper.other_settings_text, found)))
    return [ours, *(f"Not the paper's setting: {text}." for text in list(others)[:4])]


def not_counted(trials: Sequence[Trial]) -> list[str]:
    """A line for each complete run that is in no table of results."""
    return [f"Not in the table: {line}." for trial in trials for line in trial.copies]


def compare_text(trials: Sequence[Trial]) -> str:
    """What the numbers are, and what few seeds mean."""
    counts = sorted({len(trial.complete) for trial in trials})
    if counts == [1]:
        return "one seed, so there is no interval and nothing can be told from it"
    few = "; fewer than 5 seeds are a smoke test, no evidence" if counts[0] < 5 else ""
    return f"mean ± half of the 95 % interval over the seeds (their number){few}"


# ---------------------------------------------------------------------------------------------- differences


def difference_tables(place: int, data: str, trials: Sequence[Trial]) -> list[Tabled]:
    """One for each setting in which the reference scheme and another were run."""
    axes = axes_of(trials)
    shared = [axis for axis in axes if not axis.startswith("scheme.")]
    groups = grouped((label_of(trial, shared), trial) for trial in trials)
    return [
        difference_table(f"differences-{place}-{number}", ", ".join([data, *said(shared, labels)]), named(own, axes))
        for number, (labels, own) in enumerate(groups.items())
        if len(own) > 1 and schemes.REFERENCE in named(own, axes)
    ]


def named(trials: Sequence[Trial], axes: Sequence[str]) -> dict[str, Trial]:
    """By scheme; where it has several trials, its own settings are added."""
    own = [axis for axis in axes if axis.startswith("scheme.") and axis != SCHEME]
    count = [trial.scheme for trial in trials].count
    return {
        " ".join([trial.scheme, *said(own, label_of(trial, own))]) if count(trial.scheme) > 1 else trial.scheme: trial
        for trial in trials
    }


def difference_table(name: str, setting: str, trials: dict[str, Trial]) -> Tabled:
    """As `hkd compare` tells it: pairs of one seed, interval, exact test, Holm's correction."""
    seeds = sorted({seed for trial in trials.values() for seed in trial.complete})
    paired = {key: pairs_with(trials[schemes.REFERENCE], trial, seeds) for key, trial in trials.items()}
    found = {key: {goal: trial.accuracies(goal, paired[key]) for goal in GOALS} for key, trial in trials.items()}
    against = {goal: differences(found, goal) for goal in GOALS}
    rows: list[list[Cell | str]] = [
        [key, *(against[goal][key] for goal in GOALS)] for key in found if key != schemes.REFERENCE
    ]
    head = ["scheme", *AGAINST.values()]
    title = f"ifferences from {schemes.REFERENCE} on {setting}"
    over = counted(len(seeds), "seed")
    table = Table(head, rows, f"Paired d{title}: mean over {over} ± half of the 95 % interval")
    notes = [method_text(found)] if len(seeds) > 1 else ["One seed: there is no interval."]
    return Tabled(name, f"D{title}", table, tuple(notes))


def pairs_with(reference: Trial, trial: Trial, seeds: Sequence[int]) -> list[int | None]:
    """The seeds; None in place of one whose two runs are known to be of different images."""
    known = {seed: {trial.data_of(seed), reference.data_of(seed)} - {""} for seed in seeds}
    return [seed if len(known[seed]) < 2 else None for seed in seeds]


# ---------------------------------------------------------------------------------------------- all readings


def readings_tables(trials: Sequence[Trial]) -> list[Tabled]:
    """Everything that the summaries have, one row a trial; nothing where that is no more than GOALS."""
    axes = axes_of(trials)
    shown = [name for name in COLUMNS if any(value == value for trial in trials for value in trial.accuracies(name))]
    if not set(shown) - set(GOALS):
        return []
    rows: list[list[Cell | str]] = [
        [*label_of(trial, axes), *(estimate(trial.accuracies(column)) for column in shown)] for trial in trials
    ]
    table = Table(
        [*map(short, axes), *shown], rows, f"Accuracies after the last round: {compare_text(trials)}", len(axes)
    )
    return [Tabled("readings", "All accuracies", table)]


def said(axes: Sequence[str], labels: Sequence[str]) -> list[str]:
    """clients 10, beta 0.5; what has no value is not said."""
    return [f"{short(axis)} {label}" for axis, label in zip(axes, labels) if label != NOTHING]


def short(axis: str) -> str:
    """scheme of scheme.name, clients of fed.clients."""
    return "scheme" if axis == SCHEME else axis.rpartition(".")[2]


def numbers_in(labels: tuple[str, ...]) -> list[tuple[float, str]]:
    """Sorts 5 before 10, and words after numbers."""
    return [(float(label), "") if label.replace(".", "", 1).isdigit() else (np.inf, label) for label in labels]
