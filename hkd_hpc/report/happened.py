"""What happened in each run: how it stands, who was rejected, straggled or dropped out, restarts, warnings, changes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from hkd_hpc.analysis.milestones import TARGETS
from hkd_hpc.analysis.tables import NOTHING, Table
from hkd_hpc.common.errors import printable
from hkd_hpc.common.groups import grouped
from hkd_hpc.figures.groups import data_set
from hkd_hpc.report.study_tables import Tabled
from hkd_hpc.report.trials import SCHEME
from hkd_hpc.results import Run
from hkd_hpc.results.seeds import SEED
from hkd_hpc.runtime import provenance

# what a client did in a round, by the numbers of /clients/status in metrics.h5
ABSENCES = {"rejected": (1, 3, 4, 7), "too few images": (2,), "dropped out": (5,), "stragglers": (6,)}
NOT_SAMPLED = "not sampled"
KINDS = (*ABSENCES, NOT_SAMPLED)
MOST_EVENTS = 200  # rows of the table of rejected clients


def names_of(runs: Sequence[Run]) -> dict[Run, str]:
    """Each run's path, as short as it tells the runs apart."""
    paths = [run.path for run in runs]
    if len(paths) < 2:
        return {run: printable(run.path.resolve().name or str(run.path)) for run in runs}
    above = os.path.commonpath([path.absolute().parent for path in paths])
    return {run: printable(str(path.absolute().relative_to(above))) for run, path in zip(runs, paths)}


def runs_table(names: dict[Run, str]) -> Table:
    """One row a run; columns in which no run has anything are left out."""
    found = [{"run": name, **standing(run), **counts(run)} for run, name in names.items()]
    head = [name for name in found[0] if any(cells[name] != NOTHING for cells in found)]
    caption = (
        "All runs; measures of the last round that is recorded, balanced accuracy, F1 and AUC of the global model; "
        "counts over all rounds and clients"
    )
    return Table(head, [[cells[name] for name in head] for cells in found], caption)


def standing(run: Run) -> dict[str, str]:
    """What a run is, and how far."""
    settings = run.settings
    return {
        "state": run.state,
        "scheme": str(settings.get(SCHEME, NOTHING)),
        "data": data_set(settings) or NOTHING,
        "seed": str(settings.get(SEED, NOTHING)),
        "rounds": f"{len(run)} of {settings.get('fed.rounds', '?')}"
        + ", early" * bool(run.summary.get("stopped_early")),
        "local": last(run, "local_test_accuracy"),
        "global": last(run, "global_test_accuracy"),
        "balanced": last(run, "global_test_balanced_accuracy"),
        "macro F1": last(run, "global_test_macro_f1"),
        "macro AUC": last(run, "global_test_macro_auc"),
        **to_target(run),
    }


def to_target(run: Run) -> dict[str, str]:
    """run.target_accuracy, and the rounds that each accuracy took to reach it."""
    target = run.settings.get("run.target_accuracy") or 0
    rounds = {kind: each.round for kind, each in run.reached(target).items()} if target else dict.fromkeys(TARGETS, 0)
    told = {
        f"rounds to it, {kind}": f"{round:.0f}" if round == round else "not reached" for kind, round in rounds.items()
    }
    return {"target": f"{target:g}", **told} if target else dict.fromkeys(["target", *told], NOTHING)


def counts(run: Run) -> dict[str, str]:
    """Restarts, and how often clients did not enter the average, by kind; – for never."""
    absences = absences_of(run)
    found = {"restarts": max(0, len(run.sessions) - 1)} | {kind: absences.get(kind, 0) for kind in KINDS}
    return {name: str(count or NOTHING) for name, count in found.items()}


def last(run: Run, column: str) -> str:
    """The last number of a column of rounds."""
    values = run.round_columns.get(column, np.array([]))
    return f"{values[-1]:.3f}" if len(values) and values[-1] == values[-1] else NOTHING


def absences_of(run: Run) -> dict[str, int]:
    """How often clients did not enter the average, by kind, over all rounds."""
    if "status" not in run.client_columns:
        return {}
    status_RM = run.client_columns["status"]
    found = {kind: int(np.isin(status_RM, codes).sum()) for kind, codes in ABSENCES.items()}
    return {**found, NOT_SAMPLED: int(np.isnan(status_RM).sum())}


def events_table(names: dict[Run, str]) -> Table | None:
    """Rejected clients, the first MOST_EVENTS; None where there are none."""
    found = [(name, event) for run, name in names.items() for event in events_of(run)]
    rows = [[name, *event] for name, event in found[:MOST_EVENTS]]
    more = f"; the first {len(rows)} of {len(found)}" if len(found) > len(rows) else ""
    head = ["run", "round", "client", "what", "tensor", "number"]
    return Table(head, rows, f"Rejected clients{more}") if rows else None


def events_of(run: Run) -> list[list[str]]:
    """[round, client, what, tensor, number] of each."""
    events = run.events
    if not events:
        return []
    said = zip(*(map(str, events[name]) for name in ("round", "client", "what", "tensor")))
    return [[*event, f"{float(value):.4g}"] for event, value in zip(said, events["value"])]


def privacy_table(names: dict[Run, str]) -> Tabled | None:
    """Of one run by kind of release, of several a row each; None where no run has a ledger."""
    ledgers = {name: run.privacy for run, name in names.items() if run.state != "broken" and run.privacy}
    if not ledgers:
        return None
    if len(names) == 1:
        (ledger,) = ledgers.values()
        return Tabled("privacy", "Privacy", ledger.table, tuple(ledger.conclusions()))
    head = ["run", "noise", "neighbours differ in", "delta", "features alone, fixed extractor", "whole release"]
    rows = [[name, *ledger.figures()] for name, ledger in ledgers.items()]
    notes = tuple(f"{name}: {line}" for name, ledger in ledgers.items() for line in ledger.begun_lines())
    caption = "Epsilon of the client that paid most; not comparable where neighbours differ in other things"
    return Tabled("privacy", "Privacy", Table(head, rows, caption), notes)


def remarks_of(run: Run) -> list[str]:
    """Warnings, remarks, changes on the way: a line each."""
    summary = run.summary
    warned = [str(text) for text in run.round_columns.get("warning", ()) if text]
    unfinished = [f"in {len(warned)} of {len(run)} rounds: {warned[-1]}"] if warned and not summary else []
    changes = [
        f"changed after round {change.get('after_round', '?')}: "
        + provenance.text_of({key: pair for key, pair in change.items() if key != "after_round"})
        for change in run.changes
    ]
    told = [
        *unfinished,
        summary.get("stopped_early"),
        summary.get("warnings"),
        summary.get("remark"),
        summary.get("reproducible"),
        *changes,
    ]
    return [str(line) for line in told if line]


def remarks(names: dict[Run, str]) -> dict[str, list[str]]:
    """Each remark once, with the names of the runs that have it."""
    return grouped((line, name) for run, name in names.items() for line in remarks_of(run))
