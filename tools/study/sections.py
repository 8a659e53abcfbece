"""What the page says of each table: how much of it is finished, what its runs say, and how they were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hkd_hpc import compare, schemes
from hkd_hpc.analysis import statistics
from hkd_hpc.analysis.metrics import NAN
from hkd_hpc.analysis.tables import Cell, Difference, Estimate, Table, estimate
from hkd_hpc.figures import Lines
from hkd_hpc.results.differences import GOALS, differences, method_text

from . import drawings
from .answers import LAST, OURS, REFERENCE, STAR, interval_text, named, shown
from .records import Record
from .tables import Asked, Results

MEASURES = {
    "local": LAST["local"],
    "worst tenth": "local_test_accuracy_worst_tenth_last",
    "global": LAST["global"],
    "global model fine-tuned": "finetuned_on_local_test_accuracy",
}
READINGS = {"last round": "last", "mean of the last 5": "mean_last_5", "best round, chosen on the test set": "oracle"}
FEWEST_SEEDS, LAST_SEEDS = 5, 10
TOLD_ROUNDS = (1, 2, 5, 10, 20, 30, 40, 50)
BY_CLASS = {"shared_classes": "classes a client shares", "known_classes": "classes anyone shares"}
AUTHORS, AUTHORS_FEDAVG = "the authors' code", "FedAvg, the authors' training"
DRAWN = (REFERENCE, STAR, OURS)
TRIAL, TUNED = "-trial", "-tuned"  # in the rows of a comparison that tunes

Columns = Mapping[str, Mapping[str, np.ndarray]]  # by row and measure, (S,)


def section(asked: Asked, results: Mapping[str, Results]) -> str:
    """All that the page has of a table, or the command that would make it."""
    own = untuned(results[asked.name])
    if not own.seeds:
        return f"Not run yet: `{asked.command}`"
    figure = figure_of(asked, results[asked.name])
    tell = {"why": choices, "gradients": gradients, "tuned": tuned}.get(asked.name, compared)
    parts = [state_text(asked, own), *tell(results[asked.name], results)]
    return "\n\n".join([*parts, *([f"![{figure.title}]({figure.name}.svg)"] if figure else []), made_text(asked, own)])


def untuned(results: Results) -> Results:
    """Without trials, and without the runs of what they chose."""
    return results.only(row for row in results.rows if TRIAL not in row and TUNED not in row)


def state_text(asked: Asked, own: Results) -> str:
    """How much is finished, and what is compared."""
    finished = {(record.row, record.seed) for record in own.records}
    more = f", and {len(finished - asked.places)} beyond them" if finished - asked.places else ""
    return (
        f"{len(finished & asked.places)} of {len(asked.places)} runs are finished{more}; compared are the seeds that "
        f"all rows have: {', '.join(map(str, own.seeds))}.{worth(len(own.seeds))}"
    )


def worth(seeds: int) -> str:
    """What so few seeds are worth."""
    if seeds < FEWEST_SEEDS:
        return f" **Fewer than {FEWEST_SEEDS} seeds are no evidence.**"
    return f" Provisional: the study ends at {LAST_SEEDS} seeds." if seeds < LAST_SEEDS else ""


def figure_of(asked: Asked, results: Results) -> Lines | None:
    """The curves of the three schemes that the claims are about, if it has them."""
    own = untuned(results)
    if own.rows.keys() != results.rows.keys():  # of what was tuned, these curves say nothing
        return None
    runs = [own.rows[row][seed] for row in DRAWN if row in own.rows for seed in own.seeds]
    return drawings.curves(asked.name, asked.title, runs) if runs and set(DRAWN) <= set(own.rows) else None


def made_text(asked: Asked, own: Results) -> str:
    """Command, code, versions, machine, time; each value that any run has."""
    runs = [record.made for record in own.records]
    facts = [
        ("commit", [run["revision"] for run in runs]),
        ("code", [run["code_sha256"][:12] for run in runs]),
        ("images", [run["data_sha256"][:12] for run in runs]),
        ("", [", ".join(f"{name} {version}" for name, version in run["versions"].items()) for run in runs]),
        ("", [" ".join(run["cpu"].values()) or "CPU not recorded" for run in runs]),
    ]
    days, hours = sorted({run["finished"][:10] for run in runs}), sum(run["wall_s"] for run in runs) / 3600
    told = "; ".join(f"{name} {' and '.join(dict.fromkeys(values))}".strip() for name, values in facts)
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    return f"`{asked.command}`; {told}; {when}, {shown(hours, '.1f')} hours of rounds in all."


# ---------------------------------------------------------------------------------------------- comparisons


def compared(own: Results, results: Mapping[str, Results]) -> list[str]:
    """Accuracies, differences from FedAvg; of FedHKD other readings of the same runs, and what was shared."""
    rows = {row: {name: own.values(row, measure) for name, measure in MEASURES.items()} for row in own.rows}
    parts = [accuracy_table(rows), *difference_parts(rows)]
    if {OURS, REFERENCE} <= set(own.rows):
        parts += [readings_table(own), rounds_table([own.rows[OURS][seed] for seed in own.seeds])]
    return list(map(str, parts))


def accuracy_table(rows: Columns) -> Table:
    """Mean ± half of the 95 % interval over the seeds."""
    there = [name for name in MEASURES if not all(np.isnan(row[name]).all() for row in rows.values())]
    cells: list[list[Cell | str]] = [
        [named(name), *(stable(estimate(row[measure])) for measure in there)] for name, row in rows.items()
    ]
    return Table(["scheme", *there], cells)


def difference_parts(rows: Columns) -> list[str | Table]:
    """As `hkd compare` tells it."""
    found = {name: {goal: row[goal].tolist() for goal in GOALS} for name, row in rows.items()}
    against = {goal: differences(found, goal) for goal in GOALS}
    cells: list[list[Cell | str]] = [
        [named(name), *(stable(against[goal][name]) for goal in GOALS)] for name in found if name != REFERENCE
    ]
    return [Table(["scheme", *(f"{goal} – FedAvg" for goal in GOALS)], cells), method_text(found)]


def stable(cell: Cell | str) -> Cell | str:
    """With numbers whose last bit, which depends on the machine, does not decide how they are rounded."""
    if isinstance(cell, Estimate | Difference):
        return replace(cell, mean=round(cell.mean, 9), half=round(cell.half, 9))
    return cell


def readings_table(own: Results) -> Table:
    """FedHKD – FedAvg by what is taken for the accuracy of a run."""
    reading = lambda row, goal, way: own.values(row, f"{goal}_test_accuracy_{way}")
    rows = [
        [title, *(interval_text(reading(OURS, goal, way) - reading(REFERENCE, goal, way)) for goal in GOALS)]
        for title, way in READINGS.items()
    ]
    return Table(["FedHKD – FedAvg", *GOALS], rows)


def rounds_table(runs: Sequence[Record]) -> Table:
    """Means over the runs: classes that are shared, terms of the loss."""
    terms = {name: name.removeprefix("loss/").replace("_", " ") for name in runs[0].rounds if name.startswith("loss/")}
    columns = {**BY_CLASS, **terms}
    told = [round for round in TOLD_ROUNDS if round <= min(len(run.rounds["known_classes"]) for run in runs)]
    rows = [[str(round), *(mean_text(runs, name, round) for name in columns)] for round in told]
    return Table(["FedHKD, round", *columns.values()], rows)


def mean_text(runs: Sequence[Record], column: str, round: int) -> str:
    return shown(float(np.mean([run.rounds[column][round - 1] or 0.0 for run in runs])), ".4g")


# ---------------------------------------------------------------------------------------------- other tables


def choices(own: Results, results: Mapping[str, Results]) -> list[str]:
    """Each choice of FedHKD against FedAvg and against the paper's choices, in pairs with the runs of the small net."""
    beside = results["small"]
    seeds = sorted(set(own.seeds) & set(beside.seeds))
    if not seeds:
        return ["The runs that these are paired with (small net, beta .5) are not there yet."]
    last = lambda table, row, goal: np.array([table.rows[row][seed].summary[LAST[goal]] for seed in seeds])
    rows = [row for row in own.rows if row != AUTHORS_FEDAVG]
    columns = {}
    for goal in GOALS:
        bases = {row: last(*reference_of(row, own, beside), goal) for row in rows}
        for title, base in (("FedAvg", bases), ("FedHKD", dict.fromkeys(rows, last(beside, OURS, goal)))):
            gaps = {row: last(own, row, goal) - base[row] for row in rows}
            columns[f"{goal} – {title}"] = told(gaps)
    table = Table(["choice", *columns], [[row, *(column[row] for column in columns.values())] for row in rows])
    return [str(table), f"Each column is a family of the correction. “– FedAvg” of {AUTHORS}: – {AUTHORS_FEDAVG}."]


def reference_of(row: str, own: Results, beside: Results) -> tuple[Results, str]:
    """Whose FedAvg a choice is compared with: the authors' code trains and divides the images in its own way."""
    return (own, AUTHORS_FEDAVG) if row.startswith(AUTHORS) else (beside, REFERENCE)


def told(gaps: dict[str, np.ndarray]) -> dict[str, str]:
    """Interval and verdict of each."""
    verdicts = statistics.verdicts(gaps)
    return {row: f"{interval_text(values)}, {verdicts[row]}" for row, values in gaps.items()}


def tuned(own: Results, results: Mapping[str, Results]) -> list[str]:
    """What each scheme's validation images chose, on the seeds of the study."""
    chosen = {scheme: chosen_rows(own, scheme) for scheme in schemes.PAPER if f"{scheme}{TRIAL}0" in own.rows}
    of_row = [set(own.rows.get(row, {})) for rows in chosen.values() for row in rows.values()]
    seeds = sorted(set.intersection(*of_row)) if of_row else []
    if not seeds:
        return ["The settings that the trials chose have not run yet."]
    nothing = dict.fromkeys(MEASURES, np.full(len(seeds), NAN))
    last = lambda goal, row: np.array([own.rows[row][seed].summary[LAST[goal]] for seed in seeds])
    rows = {scheme: nothing | {goal: last(goal, row) for goal, row in of.items()} for scheme, of in chosen.items()}
    how = Table(
        ["scheme", *(f"chosen for {goal}" for goal in GOALS)], [[named(s), *of.values()] for s, of in chosen.items()]
    )
    return list(map(str, [accuracy_table(rows), *difference_parts(rows), how]))


def gradients(own: Results, results: Mapping[str, Results]) -> list[str]:
    """Means over the seeds: each term of FedHKD's loss, and the norm of its gradient."""
    return [str(rounds_table(own.records))]


def chosen_rows(own: Results, scheme: str) -> dict[str, str]:
    """By goal, the row of the trial with the best accuracy on validation images, as `hkd compare` chooses."""
    trials = sorted(row for row in own.rows if row.startswith(f"{scheme}{TRIAL}"))
    summaries = [next(iter(own.rows[row].values())).summary for row in trials]
    nothing = dict.fromkeys(compare.CHOSEN_BY.values(), NAN)
    best = {goal: compare.choose([nothing | dict(one) for one in summaries], goal) for goal in GOALS}
    return {goal: f"{scheme}{TUNED}{place}" if place else scheme for goal, place in best.items()}
