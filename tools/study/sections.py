"""What the page says of each table: how much of it is finished, what its runs say, and how they were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hkd_hpc import compare, schemes
from hkd_hpc.analysis import statistics
from hkd_hpc.analysis.metrics import NAN
from hkd_hpc.analysis.tables import NOTHING, Cell, Difference, Estimate, Table, estimate
from hkd_hpc.common.errors import UsageError
from hkd_hpc.figures import Lines
from hkd_hpc.results.differences import GOALS, differences, method_text
from hkd_hpc.runtime.machine import computed_as

from . import drawings
from .answers import LAST, LAST_SEEDS, MAIN, REFERENCE, STAR, count_text, interval_text, named, shown, without_controls
from .records import NOISE, Record
from .tables import ASKED, MEASURED, OURS, TRIAL, TUNED, Asked, Results, is_tuning

MEASURES = {
    "local": LAST["local"],
    "worst tenth": "local_test_accuracy_worst_tenth_last",
    "global": LAST["global"],
    "global model fine-tuned": "finetuned_on_local_test_accuracy",
}
READINGS = {"last round": "last", "mean of the last 5": "mean_last_5", "best round, chosen on the test set": "oracle"}
MIN_SEEDS = 5
IMAGES_PAGE = "docs/data.md#10000-images-of-cifar-10"  # from the README
TOLD_ROUNDS = (1, 2, 5, 10, 20, 30, 40, 50)
BY_CLASS = {"shared_classes": "classes a client shares", "known_classes": "classes anyone shares"}
NOISE_TITLES = {"signal_rms": "class mean, root mean square", "noise_std": "its noise"}
WINDOWS = ((1, 5), (6, 10), (11, 20), (21, 30), (31, 40), (41, 50))  # of rounds
AUTHORS, AUTHORS_FEDAVG = "the authors' code", "FedAvg, the authors' training"
DRAWN = (REFERENCE, STAR, OURS)

Columns = Mapping[str, Mapping[str, np.ndarray]]  # by row and measure, (S,)


def section(asked: Asked, results: Mapping[str, Results]) -> str:
    """All that the page has of a table, or the command that would make it."""
    own = untuned(results[asked.name])
    if not own.compared.seeds:
        return f"Not run yet: `{asked.command}`"
    figure = figure_of(asked, results[asked.name])
    tell = {**dict.fromkeys(MEASURED, gradients), "why": choices, "tuned": tuned}.get(asked.name, compared)
    parts = [state_text(asked, own), *tell(asked, results)]
    return "\n\n".join([*parts, *([f"![{figure.title}]({figure.name}.svg)"] if figure else []), made_text(asked, own)])


def summary(results: Mapping[str, Results]) -> str:
    """Of the README, in short: the table of the most seeds, of several the first."""
    paired = [asked for asked in ASKED if asked.name in MAIN and has_pairs(results[asked.name])]
    if not paired:
        return "No pairs of runs are finished yet."
    asked = max(paired, key=lambda asked: len(results[asked.name].compared.seeds))
    own = without_controls(results[asked.name].compared)
    rows = {row: {goal: own.values(row, LAST[goal]) for goal in GOALS} for row in own.rows}
    family = len(asked.schemes_asked) - 1
    head = (
        f"{asked.title}; beta .5, 10 clients with 500 images each of [10,000 of CIFAR-10]({IMAGES_PAGE}); last round. "
        f"{state_text(asked, results[asked.name])} `{asked.command}`"
    )
    against = difference_table(rows, family)
    cells = [
        [named(row), *(stable(estimate(values[goal])) for goal in GOALS), *against.get(row, ["", ""])]
        for row, values in rows.items()
    ]
    columns = ["scheme", *GOALS, *(f"{goal} – FedAvg" for goal in GOALS)]
    return f"{head}\n\n{Table(columns, cells)}"


def has_pairs(results: Results) -> bool:
    return len(results.compared.seeds) > 1 and {OURS, REFERENCE} <= set(results.rows)


def untuned(results: Results) -> Results:
    """Without trials, and without the runs of what they chose."""
    return results.only(row for row in results.rows if not is_tuning(row))


def state_text(asked: Asked, own: Results) -> str:
    """How much is finished, and what is compared."""
    seeds, there = own.compared.seeds, own.compared.rows
    lacking = [
        named(row) + (f" ({count_text(own.rows[row])} so far)" if row in own.rows else "")
        for row in dict.fromkeys(row for row, _ in asked.configs)
        if row not in there and not is_tuning(row)
    ]
    without = f" Not compared yet: {', '.join(lacking)}." if lacking else ""
    finished = f"{len(own.records)} of {len(asked.required)} runs are finished"
    return f"{finished}; {seeds_text(seeds, len({seed for _, seed in asked.required}))}{without}"


def seeds_text(seeds: Sequence[int], last: int) -> str:
    """Which are compared, and what so few are worth; `last`: how many there will be."""
    told = f"compared are the seeds that all rows here have: {', '.join(map(str, seeds))}."
    if len(seeds) < MIN_SEEDS:
        return f"{told} **Fewer than {MIN_SEEDS} seeds are no evidence.**"
    return told + (f" Provisional: the table ends at {last} seeds." if len(seeds) < last else "")


def figure_of(asked: Asked, results: Results) -> Lines | None:
    """The curves of the three schemes that the claims are about, if it has them."""
    own = untuned(results).compared
    if untuned(results).rows.keys() != results.rows.keys():  # of what was tuned, these curves say nothing
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
        ("", [cpu_text(run["cpu"]) for run in runs]),
    ]
    days, hours = sorted({run["finished"][:10] for run in runs}), sum(run["wall_s"] for run in runs) / 3600
    told = "; ".join(f"{name} {' and '.join(dict.fromkeys(values))}".strip() for name, values in facts)
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    return f"`{asked.command}`; {told}; {when}, {shown(hours, '.1f')} hours of rounds in all."


def cpu_text(cpu: Mapping[str, str]) -> str:
    """Its model and vectors, and those that it was told to take instead."""
    kind = computed_as(cpu)
    told = f" as {kind['vectors']}" if kind != cpu else ""
    named = {name: value for name, value in cpu.items() if name in ("model", "vectors") or name in kind}
    return " ".join(named.values()) + told or "CPU not recorded"


# ---------------------------------------------------------------------------------------------- comparisons


def compared(asked: Asked, results: Mapping[str, Results]) -> list[str]:
    """Accuracies, differences from FedAvg; of FedHKD other readings of the same runs, and what was shared."""
    own = results[asked.name].compared
    rows = {row: {name: own.values(row, measure) for name, measure in MEASURES.items()} for row in own.rows}
    parts = [accuracy_table(rows), *difference_parts(rows, len(asked.schemes_asked) - 1)]
    if {OURS, REFERENCE} <= set(own.rows):
        parts += [readings_table(own), windows_table(own), rounds_table([own.rows[OURS][seed] for seed in own.seeds])]
    return list(map(str, parts))


def accuracy_table(rows: Columns) -> Table:
    """Mean ± half of the 95 % interval over the seeds."""
    there = [name for name in MEASURES if not all(np.isnan(row[name]).all() for row in rows.values())]
    cells: list[list[Cell | str]] = [
        [named(name), *(stable(estimate(row[measure])) for measure in there)] for name, row in rows.items()
    ]
    return Table(["scheme", *there], cells)


def difference_parts(rows: Columns, schemes_asked: int) -> list[str | Table]:
    """As `hkd compare` tells it, for so many schemes beside FedAvg, of which some may not have run yet."""
    cells = [[named(name), *own] for name, own in difference_table(rows, schemes_asked).items()]
    head = ["scheme", *(f"{goal} – FedAvg" for goal in GOALS)]
    return [Table(head, cells), method_text(accuracies(rows), schemes_asked)]


def difference_table(rows: Columns, schemes_asked: int) -> dict[str, list[Cell | str]]:
    """By row, FedAvg aside: the difference in each goal."""
    against = [differences(accuracies(rows), goal, schemes_asked) for goal in GOALS]
    return {name: [stable(column[name]) for column in against] for name in rows if name != REFERENCE}


def accuracies(rows: Columns) -> dict[str, dict[str, list[float]]]:
    return {name: {goal: row[goal].tolist() for goal in GOALS} for name, row in rows.items()}


def stable(cell: Cell | str) -> Cell | str:
    """With numbers whose last bit, which depends on the machine, does not decide how they are rounded."""
    if isinstance(cell, Estimate | Difference):
        return replace(cell, mean=round(cell.mean, 9), half=round(cell.half, 9))
    return cell


def readings_table(own: Results) -> Table:
    """FedHKD – FedAvg by what is taken for the accuracy of a run, and the exact test of each reading by itself."""
    reading = lambda row, goal, way: own.values(row, f"{goal}_test_accuracy_{way}")
    rows = [
        [title, *(tested_text(reading(OURS, goal, way) - reading(REFERENCE, goal, way)) for goal in GOALS)]
        for title, way in READINGS.items()
    ]
    return Table(["FedHKD – FedAvg", *GOALS], rows)


def tested_text(difference_S: np.ndarray) -> str:
    """+0.0039 ± 0.0096, above 0 in 4 of 6, p .44"""
    if np.isnan(difference_S).any():
        return NOTHING
    positive, p = int((difference_S > 1e-9).sum()), statistics.sign_flip_p(difference_S)
    told = f"above 0 in {positive} of {len(difference_S)}, p {shown(p, '.3f').lstrip('0')}"
    return f"{interval_text(difference_S, '+.4f')}, {told}"


def windows_table(own: Results) -> Table:
    """FedAvg's accuracy, and FedHKD's above it, in means over windows of rounds: where in the training the two part."""
    rounds = min(len(record.rounds[f"{goal}_test_accuracy"]) for record in own.records for goal in GOALS)
    rows = []
    for first, last in [window for window in WINDOWS if window[1] <= rounds]:
        cells = []
        for goal in GOALS:
            its, ours = (window_S(own, row, goal, first, last) for row in (REFERENCE, OURS))
            cells += [shown(float(its.mean()), ".3f"), interval_text(ours - its, "+.4f")]
        rows.append([f"{first} to {last}", *cells])
    return Table(
        ["rounds", *(title for goal in GOALS for title in (f"{goal}, FedAvg", f"{goal}, FedHKD – FedAvg"))], rows
    )


def window_S(own: Results, row: str, goal: str, first: int, last: int) -> np.ndarray:
    """(S,) mean accuracy over these rounds; NaN where one was not measured."""
    values_SR = [own.rows[row][seed].rounds[f"{goal}_test_accuracy"][first - 1 : last] for seed in own.seeds]
    return np.array(values_SR, float).mean(1)


def rounds_table(runs: Sequence[Record]) -> Table:
    """Means over the runs: classes that are shared, terms of the loss."""
    terms = {name: name.removeprefix("loss/").replace("_", " ") for name in runs[0].rounds if name.startswith("loss/")}
    noise = {name: NOISE_TITLES[name] for name in NOISE if any(name in run.rounds for run in runs)}
    columns = {**BY_CLASS, **terms, **noise}
    told = [round for round in TOLD_ROUNDS if round <= min(len(run.rounds["known_classes"]) for run in runs)]
    rows = [[str(round), *(mean_text(runs, name, round) for name in columns)] for round in told]
    return Table(["FedHKD, round", *columns.values()], rows)


def mean_text(runs: Sequence[Record], column: str, round: int) -> str:
    of_round = (run.rounds[column][round - 1] for run in runs if column in run.rounds)
    values = [value for value in of_round if value is not None]
    return shown(float(np.mean(values)), ".4g") if values else NOTHING


# ---------------------------------------------------------------------------------------------- other tables


def choices(asked: Asked, results: Mapping[str, Results]) -> list[str]:
    """Each choice of FedHKD against FedAvg and against the paper's choices, in pairs with the runs of the small net."""
    own, beside = results[asked.name], results["small"].only((REFERENCE, OURS))
    seeds = min(own.seeds, beside.seeds, key=len)
    if not seeds or len(beside.rows) < 2:
        return ["The runs that these are paired with (small net, beta .5) are not there yet."]
    last = lambda table, row, goal: table.values(row, LAST[goal])[: len(seeds)]
    rows = [row for row in own.rows if row != AUTHORS_FEDAVG]
    columns = {}
    for goal in GOALS:
        bases = {row: last(*found, goal) for row in rows if (found := reference_of(row, own, beside))}
        papers = {row: last(beside, OURS, goal) for row in rows if not row.startswith(AUTHORS)}
        for title, base in (("FedAvg", bases), ("FedHKD", papers)):
            columns[f"{goal} – {title}"] = {row: interval_text(last(own, row, goal) - base[row]) for row in base}
    cells = [[row, *(column.get(row, NOTHING) for column in columns.values())] for row in rows]
    note = (
        "Intervals alone: so few seeds can call nothing, and nothing corrects for the number of choices. “– FedAvg” of "
        f"{AUTHORS} is – {AUTHORS_FEDAVG}; they divide the images in another way: no run of FedHKD is their pair."
    )
    return [str(Table(["choice", *columns], cells)), note]


def reference_of(row: str, own: Results, beside: Results) -> tuple[Results, str] | None:
    """Whose FedAvg a choice is compared with: the authors' code trains and divides the images in its own way. None
    where that has not run."""
    if not row.startswith(AUTHORS):
        return beside, REFERENCE
    return (own, AUTHORS_FEDAVG) if AUTHORS_FEDAVG in own.rows else None


def tuned(asked: Asked, results: Mapping[str, Results]) -> list[str]:
    """What each scheme's validation images chose, on the seeds of the study."""
    own = results[asked.name]
    trials = {row for row, _ in asked.configs if TRIAL in row}
    if lacking := sorted({row.partition(TRIAL)[0] for row in trials - set(own.rows)}):
        return [f"Not all trials have come to their end; of {', '.join(map(named, lacking))} some are missing."]
    chosen = {scheme: chosen_rows(own, scheme) for scheme in asked.schemes_asked}
    compared = own.only(row for rows in chosen.values() for row in rows.values())
    if not compared.seeds or not {row for rows in chosen.values() for row in rows.values()} <= set(compared.rows):
        return ["The settings that the trials chose have not run yet."]
    nothing = dict.fromkeys(MEASURES, np.full(len(compared.seeds), NAN))
    last = lambda goal, row: compared.values(row, LAST[goal])
    rows = {scheme: nothing | {goal: last(goal, row) for goal, row in of.items()} for scheme, of in chosen.items()}
    state = f"Of what was chosen {seeds_text(compared.seeds, LAST_SEEDS)}"
    how = Table(
        ["scheme", *(f"chosen for {goal}" for goal in GOALS)], [[named(s), *of.values()] for s, of in chosen.items()]
    )
    return list(map(str, [state, accuracy_table(rows), *difference_parts(rows, len(schemes.PAPER) - 1), how]))


def gradients(asked: Asked, results: Mapping[str, Results]) -> list[str]:
    """Means over the seeds: each term of FedHKD's loss, and the norm of its gradient."""
    own = results[asked.name]
    told = f"Seeds {', '.join(map(str, own.seeds))}" if own.seeds[1:] else "Seed 0"
    return [str(rounds_table(own.records)), f"{told}; the weights are those of FedHKD's runs above, to the bit."]


def chosen_rows(own: Results, scheme: str) -> dict[str, str]:
    """By goal, the row of the trial with the best accuracy on validation images, as `hkd compare` chooses. UsageError
    where none has one."""
    numbers = [int(row.removeprefix(f"{scheme}{TRIAL}")) for row in own.rows if row.startswith(f"{scheme}{TRIAL}")]
    nothing = dict.fromkeys(compare.CHOSEN_BY.values(), NAN)
    summaries = [
        nothing | dict(next(iter(own.rows[row].values())).summary)
        if (row := f"{scheme}{TRIAL}{n}") in own.rows
        else None
        for n in range(max(numbers) + 1)
    ]
    best = {goal: compare.choose(summaries, goal) for goal in GOALS}
    if None in best.values():
        raise UsageError(f"{scheme}: no trial has an accuracy on validation images")
    return {goal: f"{scheme}{TUNED}{place}" if place else scheme for goal, place in best.items()}
