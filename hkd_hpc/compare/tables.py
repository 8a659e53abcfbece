"""What a comparison has found, as tables and lines about them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.analysis.tables import COLUMNS, Cell, Table, estimate
from hkd_hpc.common.words import counted
from hkd_hpc.compare.runs import Run, Runs, chained, check_origin, paper_runs, summary_of
from hkd_hpc.compare.spec import Spec, Tuning
from hkd_hpc.compare.tuning import choices, chosen_text, tuned_runs, unmeasured
from hkd_hpc.compare.waves import all_trials, chosen_runs
from hkd_hpc.results.differences import AGAINST, GOALS, differences, method_text
from hkd_hpc.runtime.machine import header

Parts = list[str | Table]  # for analysis.tables.document
Accuracies = dict[str, dict[str, list[float]]]  # by scheme and column, one a seed


def tables_of(spec: Spec, root: Path, strict_code: bool = False) -> tuple[Parts, list[str]]:
    """The tables, and a line for each thing that could not be chosen. Raises UsageError as `check_origin`."""
    papers = paper_runs(spec)
    title = (
        "Settings as given, where not those of a scheme's paper or its own defaults, last round, "
        f"{interval_text(spec.seeds)}"
    )
    parts, runs = table(title, accuracies(papers, root)), chained(papers)
    faults: list[str] = []
    if spec.tuning:
        trials = all_trials(spec, spec.tuning, root)
        own, faults = tuned(spec, spec.tuning, trials, root)
        parts += ["", *own]
        runs += [*chained(trials), *chosen_runs(spec, trials, root)]
    for line in [*gaps(chained(papers), root), *check_origin(runs, root, strict_code, {})]:
        parts += ["", f"Remark: {line}."]
    return [*parts, "", header()], faults


def gaps(runs: list[Run], root: Path) -> list[str]:
    """A line for each accuracy that a finished run does not have: the mean is over those that did not diverge."""
    return [
        f"{run.name} came to its end without a {goal} accuracy, and is in no mean of it"
        for run in runs
        if (summary := summary_of(run, root))
        for goal in GOALS
        if np.isnan(summary.get(COLUMNS[goal], np.nan))
    ]


def interval_text(seeds: tuple[int, ...]) -> str:
    told = counted(len(seeds), "seed") + ", so a smoke test, no evidence" * (len(seeds) < 5)
    return f"mean ± half of the 95 % interval over {told} (their number)"


def tuned(spec: Spec, tuning: Tuning, trials: Runs, root: Path) -> tuple[Parts, list[str]]:
    """Of the chosen settings on the spec's seeds, the table and what they are; what could not be chosen."""
    chosen, without = choices(trials, root)
    final = tuned_runs(spec, trials, chosen)
    title = f"Tuned: {tuning.trials} trials a scheme, chosen on validation images, {interval_text(spec.seeds)}"
    notes = [chosen_text(scheme, best, trials[scheme]) for scheme, best in chosen.items()]
    rows = {scheme: tuned_row(goals, root, len(spec.seeds)) for scheme, goals in final.items()}
    faults = [line for own in trials.values() for line in unmeasured(own, root)]
    return [*table(title, rows), "", "Chosen:", "", *notes], faults + without


def tuned_row(goals: Runs, root: Path, seeds: int) -> dict[str, list[float]]:
    """The accuracy of each goal, from the runs that were chosen for it; NaN in the other columns."""
    by_goal = accuracies(goals, root)
    return {**{name: [np.nan] * seeds for name in COLUMNS}, **{goal: by_goal[goal][goal] for goal in goals}}


def accuracies(runs: Runs, root: Path) -> Accuracies:
    """By scheme and column, over the seeds; NaN for a run that is not finished."""
    found = {}
    for scheme, own in runs.items():
        summaries = [summary_of(run, root) or {} for run in own]
        found[scheme] = {
            name: [float(summary.get(key, np.nan)) for summary in summaries] for name, key in COLUMNS.items()
        }
    return found


def table(title: str, found: Accuracies) -> Parts:
    """Title, table, and how it was told; found: accuracies by scheme and column, one a seed, in the order of the
    seeds.
    """
    shown = [name for name in COLUMNS if any(value == value for row in found.values() for value in row[name])]
    is_compared = schemes.REFERENCE in found
    against = {AGAINST[goal]: differences(found, goal) for goal in GOALS} if is_compared else {}
    rows: list[list[Cell | str]] = [
        [
            scheme,
            *(estimate(row[name]) for name in shown),
            *(texts.get(scheme, "") for texts in against.values()),
        ]
        for scheme, row in found.items()
    ]
    told = method_text(found) if is_compared else ""
    return [title, "", Table(["scheme", *shown, *against], rows, title), *(["", told] if told else [])]
