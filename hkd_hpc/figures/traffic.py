"""What travelled, as it was counted, beside the formulas of the papers (letters: schemes/traffic.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.common.groups import grouped
from hkd_hpc.figures import bars
from hkd_hpc.figures.figure import Bars, Figure, Lines, Series
from hkd_hpc.figures.groups import Group, column
from hkd_hpc.figures.kind import Kind, Words, adding, in_unit
from hkd_hpc.figures.run import Run
from hkd_hpc.figures.units import BYTES, with_unit
from hkd_hpc.schemes.traffic import Formula, RunTraffic
from hkd_hpc.store.history import PAYLOAD_KINDS

FLOAT_BYTES = 4
KNOWLEDGE = ("knowledge_up", "knowledge_down")
LETTERS = "n_i: classes that client i shares, n: that any client shares, C: classes, D: latent size, A: public images."
Y_LABEL = "payload of a round"


def formula_of(run: Run) -> Formula | None:
    """The paper's, of a scheme that is built in and sends something beside the weights."""
    name = run.settings["scheme.name"]
    return schemes.get(name).about.formula if name in schemes.REGISTRY else None


def by_formula(kind: str, run: Run) -> np.ndarray:
    """(rounds,) bytes of knowledge; NaN of a scheme without a formula."""
    formula = formula_of(run)
    if formula is None:
        return np.full(len(run.round_columns["round"]), np.nan)
    floats_R = (formula.up if kind == "knowledge_up" else formula.down)(traffic_of(run))
    return FLOAT_BYTES * floats_R.astype(float)


def formulas(groups: Sequence[Group]) -> Iterator[str]:
    """A sentence with the formulas of all their schemes, where there are any; and what its letters are."""
    run_of = {str(run.settings["scheme.name"]): run for group in groups for run in group.runs}
    schemes_of = grouped((formula.words, name) for name, run in run_of.items() if (formula := formula_of(run)))
    if schemes_of:
        told = "; ".join(f"{', '.join(names)}: {words}" for words, names in schemes_of.items())
        yield f"The papers' formulas, in floats: {told}. {LETTERS}"


def traffic_of(run: Run) -> RunTraffic:
    """Of the shared classes what the run recorded; of an older run what the scheme's rule says of the partition."""
    status_RM, count_MC = run.client_columns["status"], np.asarray(run.partition["train_count"])
    delivers_RM = status_RM == 0
    shares_RMC = delivers_RM[:, :, None] & shared_by_rule(run.settings, count_MC)
    known_RMC = column(run, "clients/knowledge_classes")
    if known_RMC is not None:  # not of the rounds that an older version trained
        shares_RMC = np.where(np.isnan(known_RMC).all((1, 2), keepdims=True), shares_RMC, known_RMC == 1)
    return RunTraffic(
        run.settings,
        count_MC.shape[1],
        int(run.settings["model.latent"]),
        len(run.partition.get("public_index", ())),
        shares_RMC,
        delivers_RM,
        (~np.isnan(status_RM)).sum(1),
    )


def shared_by_rule(settings: Mapping[str, Any], count_MC: np.ndarray) -> np.ndarray:
    """(clients, classes) bool: N_ij >= scheme.min_count and N_ij / N_i >= scheme.nu; a scheme without them shares each
    class that a client has.
    """
    nu, least = float(settings.get("scheme.nu", 0.0)), max(1, int(settings.get("scheme.min_count", 1)))
    share = nu / count_MC.shape[1] if settings.get("scheme.nu_rule") == "relative" else nu
    return (count_MC >= least) & (count_MC >= share * count_MC.sum(1, keepdims=True) - 1e-9)


def payload(words: Words, groups: Sequence[Group]) -> Figure | str:
    """By kind, each in a panel and a unit of its own, beside the paper's formula: by round of one run, the mean of a
    round of several.
    """
    alone = len(groups) == 1 and groups[0].seeds == 1
    panel_of = _by_round if alone else _of_groups
    series = tuple(one for kind in PAYLOAD_KINDS for one in _with_unit(kind, panel_of(kind, groups)))
    words = adding(words, *formulas(groups))
    if not series:
        return "nothing travelled: the clients exchange nothing"
    if not alone:
        return Bars(**words, x_label="", y_label=Y_LABEL, series=series, stacked=False)
    return Lines(**words, x_label="round", y_label=Y_LABEL, series=series)


def _by_round(kind: str, groups: Sequence[Group]) -> Iterator[Series]:
    run = groups[0].runs[0]
    counted_R = column(run, f"rounds/payload_bytes/{kind}")
    if counted_R is None or not counted_R.any():
        return
    rounds = np.arange(1, len(counted_R) + 1)
    yield Series("counted", rounds, counted_R.astype(float))
    if kind in KNOWLEDGE and formula_of(run):
        yield Series("formula", rounds, by_formula(kind, run))


def _of_groups(kind: str, groups: Sequence[Group]) -> Iterator[Series]:
    mean = lambda run: float(np.mean(run.round_columns[f"payload_bytes/{kind}"]))
    counted = bars.of_groups(groups, "counted", mean)
    if np.nansum(counted.y):
        yield counted
        if kind in KNOWLEDGE and any(formula_of(run) for group in groups for run in group.runs):
            yield bars.of_groups(groups, "formula", lambda run: float(np.mean(by_formula(kind, run))))


def _with_unit(kind: str, series: Iterator[Series]) -> Iterator[Series]:
    found, unit = in_unit(list(series), BYTES, "y")
    yield from (replace(one, panel=with_unit(kind.replace("_", ", "), unit)) for one in found)


KINDS = (
    Kind(
        "payload",
        "Payload by kind",
        "What the clients of a round sent and received, as the paper counts it: 4 bytes a float, without absent "
        "classes.",
        ("rounds/payload_bytes/", "clients/status", "partition"),
        payload,
    ),
)
