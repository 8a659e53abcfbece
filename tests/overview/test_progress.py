"""The line within a round: counted by hand from where the ranks were last seen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hkd_hpc import config
from hkd_hpc.overview.progress import Progress, is_past, trained

RANK_OF = [1, 2, 1, 2, 1, 2]  # clients 0 2 4 on rank 1, 1 3 5 on rank 2
SETTINGS = config.resolve(overrides=["fed.clients=6", "fed.rounds=9"])


def line(places, seconds=(0.0, 7.4)):
    """The text of one look; `seconds`: of the clock, after it was made."""
    clock = iter((0.0, *seconds))
    comm = SimpleNamespace(places=lambda: places)
    return Progress(SETTINGS, comm, RANK_OF, [], lambda: next(clock)).text()


@pytest.mark.parametrize(
    "places, text",
    [
        ({0: (3, "reports", None), 1: (3, "training", 4), 2: (3, "training", 3)}, "3 of 6 clients trained"),
        ({0: (3, "reports", None), 1: (3, "reports", None), 2: (3, "training", 5)}, "5 of 6 clients trained"),
        ({0: (2, "evaluation", None), 1: (3, "training", 0), 2: (2, "message", None)}, "0 of 6 clients trained"),
        ({0: (3, "evaluation", None), 1: (3, "message", None), 2: (3, "message", None)}, "evaluation"),
        ({0: (3, "reports", None), 1: (3, "training", None), 2: (3, "training", None)}, "training"),
    ],
)
def test_what_is_told_of_a_round(places, text):
    assert line(places) == f"round 3/9: {text}, 7 s"


def test_one_process_hosts_all_clients():
    places = {0: (1, "training", 4)}
    assert trained(1, [0, 2, 3, 4, 5], [0] * 6, places) == 3


def test_before_the_first_round_the_phase_is_told():
    assert (
        line({0: (None, "start", None), 1: (None, "start-up", None), 2: (None, "start", None)}, (7.4,))
        == "round 0/9: start, 7 s"
    )


@pytest.mark.parametrize(
    "place, expected",
    [
        ((2, "training", 3), False),
        ((2, "training", 4), True),
        ((2, "weights", None), True),
        ((1, "message", None), False),
        ((None, "start", None), False),
    ],
)
def test_a_client_is_past_once_its_rank_has_left_it(place, expected):
    assert is_past(2, 3, place) is expected
