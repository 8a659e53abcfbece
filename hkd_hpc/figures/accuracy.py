"""Accuracy against rounds, against time and against what travelled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from hkd_hpc.figures.figure import Figure, Lines
from hkd_hpc.figures.groups import Group, column, parts
from hkd_hpc.figures.kind import Growing, Kind, Rows, Words, adding, in_unit, lines, with_seeds
from hkd_hpc.figures.run import Run
from hkd_hpc.figures.units import BYTES, SECONDS, Units

MEASURES: dict[str, Rows] = {
    "local": partial(column, name="rounds/local_test_accuracy"),
    "worst tenth": partial(column, name="rounds/local_test_accuracy_worst_tenth"),
    "global": partial(column, name="rounds/global_test_accuracy"),
}
WHOSE = (
    "local: each client's own model on its own test images, before aggregation; worst tenth: mean of the tenth of the "
    "clients with the lowest; global: the new global model on the official test split"
)
RESUMED = "resumed after this round"
GRID = "Seeds are interpolated linearly on one grid, from where the last has begun to where the first ends."


def elapsed_s(run: Run) -> np.ndarray:
    """(rounds,) seconds of computing up to the test after each round, on rank 0; pauses between sessions left out."""
    of_round_s = run.round_columns["wall_s"]
    return np.cumsum(of_round_s + run.round_columns.get("seconds/evaluate_and_save", 0.0))


def payload_bytes(run: Run) -> np.ndarray:
    """(rounds,) what all clients sent and received up to each round, as the paper counts."""
    return np.cumsum(sum(parts(run, "payload_bytes").values()))


def against_rounds(words: Words, groups: Sequence[Group]) -> Figure:
    """Accuracy by round."""
    return Lines(
        **with_seeds(words, groups),
        x_label="round",
        y_label="accuracy",
        are_shares=True,
        series=tuple(lines(groups, MEASURES)),
        marks=tuple(float(round) for round in restarts(groups)),
        mark_label=RESUMED,
    )


def against(x: Growing, label: str, units: Units, words: Words, groups: Sequence[Group]) -> Figure:
    """Accuracy by something that grows from round to round."""
    series, unit = in_unit(list(lines(groups, MEASURES, x)), units, "x")
    words = adding(words, GRID) if any(group.seeds > 1 for group in groups) else words
    return Lines(
        **with_seeds(words, groups),
        x_label=f"{label} ({unit})",
        y_label="accuracy",
        are_shares=True,
        series=series,
    )


def restarts(groups: Sequence[Group]) -> list[int]:
    """Of a single run the rounds after which it was resumed, as far as its sessions are known."""
    if len(groups) > 1 or groups[0].seeds > 1:
        return []
    after = {int(session.get("after_round", 0)) for session in groups[0].runs[0].sessions}
    return sorted(after - {0})


KINDS = (
    Kind(
        "accuracy_rounds",
        "Accuracy against rounds",
        f"Accuracy after each round ({WHOSE}).",
        ("rounds/global_test_accuracy",),
        against_rounds,
    ),
    Kind(
        "accuracy_time",
        "Accuracy against wall time",
        "Accuracy against the computing time of rank 0 up to the test after the round, pauses left out.",
        ("rounds/global_test_accuracy", "rounds/wall_s"),
        partial(against, elapsed_s, "wall time", SECONDS),
    ),
    Kind(
        "accuracy_bytes",
        "Accuracy against payload",
        "Accuracy against what all clients sent and received so far, as the paper counts it.",
        ("rounds/global_test_accuracy", "rounds/payload_bytes/"),
        partial(against, payload_bytes, "payload", BYTES),
    ),
)
