"""When a target is reached and when patience ends, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hkd_hpc.analysis.milestones import Reached, last_round, patience_ends, reached

NAN = math.nan
ROUNDS = {
    "round": [1, 2, 3, 4],
    "wall_s": [1.0, 2.0, 4.0, 8.0],
    "payload_bytes/weights_up": [10, 10, 10, 10],
    "payload_bytes/knowledge_down": [0, 1, 1, 1],
    "wire_bytes/weights": [1000, 1000, 1000, 1000],
    "accuracy": [0.25, NAN, 0.5, 0.75],
}


@pytest.mark.parametrize(
    "target, expected",
    [
        (0.25, Reached(1, 10, 1.0)),
        (0.3, Reached(3, 32, 7.0)),  # not tested in round 2
        (0.5, Reached(3, 32, 7.0)),
        (0.51, Reached(4, 43, 15.0)),
    ],
)
def test_the_first_round_that_is_not_below_the_target(target, expected):
    assert reached(ROUNDS, "accuracy", target) == expected


@pytest.mark.parametrize("column", ["accuracy", "absent"])
def test_a_target_that_no_round_reached(column):
    found = reached(ROUNDS, column, 0.8)
    assert all(map(math.isnan, (found.round, found.payload_bytes, found.wall_s)))


@pytest.mark.parametrize(
    "values, patience, ended",
    [
        ([0.1, 0.2, 0.3], 1, None),
        ([0.1, 0.1], 1, 2),  # as good is not better
        ([0.3, 0.2, 0.4, 0.4, 0.1], 2, 5),
        ([0.3, NAN, NAN, 0.2], 1, 4),  # rounds without a test do not count
        ([NAN, 0.3], 1, None),
        ([], 1, None),
    ],
)
def test_the_round_in_which_patience_ends(values, patience, ended):
    assert patience_ends(np.array(values, float), patience) == ended


@pytest.mark.parametrize("rounds, last", [(10, 4), (4, 4), (3, 3)])
def test_the_round_after_the_next_is_the_last(rounds, last):
    """Patience ended in round 2; what comes later changes nothing."""
    assert last_round(np.array([0.5, 0.4]), 1, rounds) == last
    assert last_round(np.array([0.5, 0.4, 0.6, 0.7]), 1, rounds) == last
