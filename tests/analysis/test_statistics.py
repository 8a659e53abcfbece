"""Paired statistics: literals worked out by hand, and what they promise, on 1,000 synthetic studies."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hkd_hpc.analysis.statistics import NOT_SEPARATED, holm, interval, seeds_needed, sign_flip_p, verdicts

STUDIES = 1000
SPREAD = 0.02  # standard deviation of a paired difference between two seeds
CALLED = ("better", "worse")


def test_interval_of_three_values_by_hand():
    mean, half = interval([1.0, 2.0, 3.0])  # t of .975 with 2 degrees of freedom is 4.302653; deviation 1
    assert mean == 2.0
    assert half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_one_value_has_no_interval():
    mean, half = interval([0.5])
    assert mean == 0.5
    assert math.isnan(half)


@pytest.mark.parametrize(
    "differences, p",
    [
        ([1, 1], 2 / 4),
        ([1, 2, 3], 2 / 8),
        ([1, 2, -3], 8 / 8),
        ([1, 2, -1], 6 / 8),
        ([3, 2, -1], 4 / 8),
        ([1] * 5, 2 / 32),
        ([1] * 6, 2 / 64),
        ([-2, -1, -3, -4, -5, -6], 2 / 64),
        ([0, 0, 0], 1),
        ([1] * 10, 2 / 1024),
    ],
)
def test_sign_flips_counted_by_hand(differences, p):
    assert sign_flip_p(differences) == p
    assert sign_flip_p([-value for value in differences]) == p


def test_rounding_makes_no_two_sums_of_equal_terms():
    assert sign_flip_p([0.1, 0.2, 0.3]) == sign_flip_p([0.3, 0.1, 0.2]) == 2 / 8
    assert sign_flip_p([0.1, 0.2, -0.3]) == 1  # .1 + .2 - .3 is 5.6e-17


def test_more_seeds_than_can_be_counted_are_drawn_and_repeat():
    values = np.linspace(-0.5, 1.0, 20)
    assert sign_flip_p(values) == sign_flip_p(values)
    assert 0.005 < sign_flip_p(values) < 0.05
    assert sign_flip_p(np.ones(20)) == pytest.approx(2 / 2**16, abs=2 / 2**16)


def test_holm_by_hand():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert holm({"a": 0.4, "b": 0.6}) == {"a": 0.8, "b": 0.8}
    assert holm({}) == {}


def test_seeds_that_a_family_needs():
    assert [seeds_needed(family) for family in (1, 2, 3, 8, 10)] == [6, 7, 7, 9, 9]


@pytest.mark.parametrize(
    "seeds, family, verdict",
    [
        (3, 1, "cannot be told with 3 seeds"),
        (5, 1, "cannot be told with 5 seeds"),
        (6, 1, "better"),
        (8, 8, "cannot be told with 8 seeds"),
        (9, 8, "better"),
        (1, 1, "cannot be told with 1 seed"),
    ],
)
def test_too_few_seeds_tell_nothing_however_clear_they_are(seeds, family, verdict):
    found = verdicts({f"scheme{i}": np.full(seeds, 0.1) for i in range(family)})
    assert set(found.values()) == {verdict}


def test_a_clear_loss_is_worse_and_noise_is_not_separated():
    noise = np.array([1, -1, 1, -1, 1, -1, 1, -1, 1, -1]) / 100
    assert verdicts({"a": -1 + noise, "b": noise}) == {"a": "worse", "b": NOT_SEPARATED}


def studies(seeds: int, schemes: int, true_difference: float, rng: np.random.Generator) -> np.ndarray:
    """(STUDIES, schemes, seeds) differences from a reference that all share, as paired runs have."""
    reference = rng.normal(0, SPREAD / math.sqrt(2), (STUDIES, 1, seeds))
    own = rng.normal(true_difference, SPREAD / math.sqrt(2), (STUDIES, schemes, seeds))
    return own - reference


@pytest.mark.parametrize("true_difference", [0.0, 0.01])
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_a_95_percent_interval_covers_93_to_97_percent(seeds, true_difference):
    found = [interval(study[0]) for study in studies(seeds, 1, true_difference, np.random.default_rng(seeds))]
    covered = np.mean([abs(mean - true_difference) <= half for mean, half in found])
    assert 0.93 <= covered <= 0.97


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_at_most_5_percent_of_families_without_a_difference_call_one(seeds):
    rng = np.random.default_rng(100 + seeds)
    families = [verdicts(dict(enumerate(study))) for study in studies(seeds, 8, 0.0, rng)]
    assert np.mean([any(verdict in CALLED for verdict in family.values()) for family in families]) <= 0.05


def test_a_point_of_difference_is_found_with_enough_seeds():
    rng = np.random.default_rng(7)
    called = [verdicts(dict(enumerate(study)))[0] for study in studies(10, 1, 0.03, rng)]
    assert np.mean([verdict == "better" for verdict in called]) > 0.9
    assert "worse" not in called


def test_a_family_of_which_some_are_not_there_yet_is_corrected_for_as_a_whole():
    """By hand: .005 x 8 = .04, then .007 x 7 = .049."""
    assert holm({"a": 0.005, "b": 0.007}, family=8) == pytest.approx({"a": 0.04, "b": 0.049})
    found = verdicts({"a": np.full(8, 0.1)}, family=8)
    assert found == {"a": "cannot be told with 8 seeds"}


def test_of_what_was_not_measured_there_is_no_verdict():
    with pytest.raises(ValueError, match="is NaN"):
        verdicts({"a": np.array([0.1, np.nan])})
