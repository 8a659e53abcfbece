"""Who takes part, and on which rank each client lives."""

from __future__ import annotations

import numpy as np
import pytest

from hkd_hpc.cohort import assign_clients, draw_cohort


@pytest.mark.parametrize(
    "clients, participation, size",
    [
        (10, 1.0, 10),
        (10, 0.2, 2),
        (10, 0.25, 3),
        (5, 0.5, 3),
        (10, 0.01, 1),
        (1, 0.5, 1),
        (100, 0.999, 100),
        (20, 0.1, 2),
    ],
)
def test_size(clients, participation, size):
    cohort = draw_cohort(clients, participation, seed=0, round=1)
    assert len(cohort) == len(set(cohort)) == size
    assert cohort == sorted(cohort)
    assert min(cohort) >= 0
    assert max(cohort) < clients


def test_full_participation_is_everybody():
    assert draw_cohort(4, 1.0, seed=9, round=3) == [0, 1, 2, 3]


def test_pure_function_of_seed_and_round():
    rounds = [draw_cohort(50, 0.1, 0, round) for round in range(1, 21)]
    assert rounds == [draw_cohort(50, 0.1, 0, round) for round in range(1, 21)]
    assert len({tuple(cohort) for cohort in rounds}) > 15
    assert draw_cohort(50, 0.1, 1, 1) != rounds[0]


def test_somebody_who_can_train_is_always_drawn():
    """Of 20 clients two have images; where one of two drawn has some, the draw is that of 20 clients with images."""
    cohorts = [draw_cohort(20, 0.1, 0, round, eligible=[3, 17]) for round in range(1, 101)]
    usual = [draw_cohort(20, 0.1, 0, round) for round in range(1, 101)]
    assert all(len(set(cohort)) == 2 and {3, 17} & set(cohort) for cohort in cohorts)
    assert [cohort for cohort, other in zip(cohorts, usual) if {3, 17} & set(other)] == [
        other for other in usual if {3, 17} & set(other)
    ]
    replaced = [cohort for cohort, other in zip(cohorts, usual) if not {3, 17} & set(other)]
    assert any(3 in cohort for cohort in replaced)
    assert any(17 in cohort for cohort in replaced)
    assert all(sorted(cohort) == cohort for cohort in cohorts)


def test_everybody_is_drawn_equally_often():
    counts = np.bincount(np.concatenate([draw_cohort(10, 0.3, 0, round) for round in range(2000)]), minlength=10)
    assert counts.sum() == 6000
    assert abs(counts - 600).max() < 5 * np.sqrt(2000 * 0.3 * 0.7)


@pytest.mark.parametrize(
    "images, ranks, rank_of",
    [
        ([450] * 10, 11, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ([450] * 3, 1, [0, 0, 0]),
        ([450] * 3, 2, [1, 1, 1]),
        ([450] * 4, 3, [1, 2, 1, 2]),
        ([10, 20, 70, 40], 3, [2, 2, 1, 2]),  # 70 | 40 + 20 + 10
        ([5, 5], 6, [1, 2]),  # more ranks than clients
        ([0, 0, 0, 0], 3, [1, 2, 1, 2]),  # empty clients still take a place
    ],
)
def test_clients_are_assigned_to_the_ranks(images, ranks, rank_of):
    assert assign_clients(images, ranks) == rank_of


def test_every_client_lives_once_and_the_work_is_even():
    images = np.random.default_rng(0).integers(0, 800, 57).tolist()
    for ranks in (2, 3, 5, 9):
        rank_of = assign_clients(images, ranks)
        load = np.bincount(rank_of, weights=images, minlength=ranks)
        assert load[0] == 0
        assert set(rank_of) == set(range(1, ranks))
        assert load.max() - load[1:].min() <= max(images)
