"""When a run has reached a target, and when it ends early: from the numbers of its rounds alone, so that a run that is
resumed comes to the same as one that never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hkd_hpc.analysis.classification import NAN

# The test of a round runs beside the next one, and a round must know before it begins that it is the last.
ROUNDS_TO_ACT = 2
TARGETS = {"local": "local_test_accuracy", "global": "global_test_accuracy"}

Columns = Mapping[str, Any]  # of /rounds by name, each a sequence


@dataclass(frozen=True)
class Reached:
    """The first round whose accuracy is not below a target; all NaN where none is.

    Attributes:
        round: its number.
        payload_bytes: what the paper counts as traffic, of all clients, up to its end.
        wall_s: from the start of each round to the end of its exchange, up to its end.
    """

    round: float = NAN
    payload_bytes: float = NAN
    wall_s: float = NAN


def reached(rounds: Columns, column: str, target: float) -> Reached:
    """When an accuracy reached the target; NaN (not tested) reaches nothing.

    Args:
        rounds: the columns of a run's rounds.
        column: that of the accuracy.
        target: in [0, 1].
    """
    there = np.flatnonzero(np.asarray(rounds.get(column, ()), float) >= target)
    if not len(there):
        return Reached()
    until = slice(there[0] + 1)
    payload = [np.asarray(values, float) for name, values in rounds.items() if name.startswith("payload_bytes/")]
    return Reached(
        float(rounds["round"][there[0]]),
        float(sum(kind_R[until].sum() for kind_R in payload)),
        float(np.asarray(rounds["wall_s"], float)[until].sum()),
    )


def patience_ends(value_R: np.ndarray, patience: int) -> int | None:
    """The round (from 1) whose test was the `patience`-th in a row that is not above the best before; None: none was.

    Args:
        value_R: (rounds,) validation accuracies, NaN where nothing was tested: such a round counts for nothing.
        patience: tests, at least 1.
    """
    best, waited = -np.inf, 0
    for place in np.flatnonzero(~np.isnan(value_R)):
        waited = 0 if value_R[place] > best else waited + 1
        best = max(best, value_R[place])
        if waited == patience:
            return int(place) + 1
    return None


def last_round(value_R: np.ndarray, patience: int, rounds: int) -> int:
    """The last of a run, as far as these values tell it: `rounds`, or earlier where patience has ended.

    Args:
        value_R: as of patience_ends.
        patience: the same.
        rounds: that were asked for.
    """
    ended = patience_ends(value_R, patience)
    return rounds if ended is None else min(rounds, ended + ROUNDS_TO_ACT)
