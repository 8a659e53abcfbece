"""The cost model: each term by hand, the fit on times that the model itself made, and what the report says of
clusters.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hkd_hpc.jobs import cost
from hkd_hpc.jobs.cost import Load, Network
from tools.bench import scaling

# a barrier 1 ms a peer of rank 0, a step 100 us, a link 1 GB/s, sums 2 GB/s; the all-reduce in pieces of 1 MB
PLAIN = Network(barrier_s=1e-3, latency_s=1e-4, byte_s=1e-9, sum_byte_s=5e-10, piece_bytes=1e6)


@pytest.mark.parametrize(
    "collective, ranks, nbytes, expected_s",
    [
        ("agree", 5, 0, 4e-3),
        ("sum", 5, 4_000_000, 4e-3 + 4 * 4 * 1e-4 + 2 * 3 / 4 * 4e-3 + 2e-3),  # 4 pieces, 2 + 2 steps of 4 client ranks
        ("sum", 2, 4_000_000, 1e-3 + 2e-3),  # one client rank: nothing moves
        ("relay", 5, 4_000_000, 4e-3 + 1e-4 + 4e-3),
        ("gather", 5, 1_000, 4e-3 + 3e-4 + 4e-6),
        ("broadcast", 5, 1_000, 4e-3 + 3e-4 + 3e-6),
        ("sum", 1, 1_000, 0.0),
        ("gather", 1, 1_000, 0.0),
        ("broadcast", 1, 1_000, 0.0),
        ("agree", 1, 0, 0.0),
        ("relay", 1, 1_000, 0.0),
    ],
)
def test_collectives_by_hand(collective, ranks, nbytes, expected_s):
    assert cost.seconds(collective, ranks, nbytes, PLAIN) == pytest.approx(expected_s)


def test_ranks_beyond_the_cores_take_turns():
    """8 ranks on 2 cores: four times the steps (7 client ranks sum in 3 + 3), and four times the bytes where all move
    theirs at once.
    """
    shared = replace(PLAIN, cores=2)
    assert cost.seconds("sum", 8, 1_000_000, shared) == pytest.approx(7e-3 + 4 * (6e-4 + 2 * 6 / 7 * 1e-3 + 5e-4))
    assert cost.seconds("broadcast", 8, 1_000_000, shared) == pytest.approx(7e-3 + 4 * 3e-4 + 3e-3)
    assert cost.seconds("gather", 8, 1_000_000, shared) == pytest.approx(7e-3 + 4 * (3e-4 + 7e-3))
    assert cost.seconds("agree", 8, 0, shared) == pytest.approx(7e-3)


def test_barriers_grow_with_the_square_of_the_ranks_and_status_messages_with_the_ranks():
    """1,000 peers: 1 s of their own, 1 us for each of a million pairs; twice 10 us a peer. One rank meets nobody."""
    coordinator = replace(PLAIN, pair_s=1e-6, status_s=1e-5)
    assert cost.seconds("agree", 1_001, 0, coordinator) == pytest.approx(2.0)
    assert cost.status_messages_s(1_001, coordinator) == pytest.approx(0.02)
    assert cost.seconds("agree", 1, 0, coordinator) == cost.status_messages_s(1, coordinator) == 0.0
    assert scaling.barriers_s(1_001, coordinator) == pytest.approx(5 * 2.0 + 0.02)


@pytest.mark.parametrize("workers, expected", [(1, 0.0), (2, 0.564), (10, 1.539), (1000, 3.241)])
def test_the_slowest_of_many_is_the_largest_of_as_many_normal_numbers(workers, expected):
    """Expected values of normal order statistics (Harter 1961, table I), which Blom's formula meets to .03."""
    assert cost.straggle(workers, 1, 1.0) - 1 == pytest.approx(expected, abs=0.03)


def test_more_clients_on_a_worker_even_out():
    assert cost.straggle(2, 4, 0.1) - 1 == pytest.approx((cost.straggle(2, 1, 0.1) - 1) / 2)


def test_a_round_by_hand():
    """10 clients of 100 images, 1 ms each, on 4 client ranks: the busiest has 3. 500,000 numbers; blocks of 1 and 2
    kB.
    """
    load = Load(10, 100, 500_000, 1_000, 2_000, server_s=0.2, fixed_s=0.05)
    found = cost.round_cost(load, 5, 4, 1e-3, replace(PLAIN, status_s=1e-3), spread=0.0)
    assert found.train_s == pytest.approx(0.3)
    assert found.weights_s == pytest.approx((4e-3 + 16e-4 + 6e-3 + 2e-3) + (4e-3 + 1e-4 + 2e-3))
    assert found.knowledge_s == pytest.approx((4e-3 + 3e-4 + 12e-6) + (4e-3 + 3e-4 + 6e-6) + 4e-3 + 2 * 4e-3)
    assert found.round_s == pytest.approx(0.3 + found.weights_s + found.knowledge_s + 0.05)
    assert found.exchange_share == pytest.approx(1 - 0.35 / found.round_s)


def test_the_server_works_beside_the_training_or_after_it():
    load = Load(1, 100, 0, server_s=0.3)
    several, alone = (cost.round_cost(load, ranks, 1, 1e-3, Network(0, 0, 0, 0)) for ranks in (2, 1))
    assert several.round_s == pytest.approx(0.3)
    assert alone.round_s == pytest.approx(0.4)


def test_workers_beyond_the_cores_take_turns():
    """8 clients of .1 s and .4 s of the server's on 2 cores."""
    found = cost.round_cost(Load(8, 100, 0, server_s=0.4), 9, 8, 1e-3, replace(PLAIN, cores=2), spread=0.0)
    assert found.train_s == pytest.approx(0.6)


def made(network: Network) -> list[scaling.Point]:
    """Times that the model itself says."""
    return [
        scaling.Point(name, ranks, nbytes, cost.seconds(name, ranks, nbytes, network))
        for ranks in (2, 3, 5, 11)
        for name in ("agree", "sum", "relay", "gather", "broadcast")
        for nbytes in ((0,) if name == "agree" else (1_000, 100_000, 10_000_000))
    ]


@pytest.mark.parametrize("network", [PLAIN, replace(PLAIN, latency_s=0.0, cores=2)])
def test_the_fit_finds_the_constants_that_made_the_times(network):
    fitted = scaling.fit(made(network), network)
    assert fitted.constants == pytest.approx(network.constants, rel=1e-6, abs=1e-12)
    assert scaling.left_out(made(network), network) == pytest.approx([1.0] * len(made(network)))


def test_the_fit_finds_the_constants_of_rank_0():
    coordinator = Network(5e-5, 0, 0, 0, pair_s=2e-7, status_s=3e-5)
    points = [
        scaling.Point(name, peers + 1, 0, 5e-5 * peers + 2e-7 * peers**2 + 3e-5 * peers * (name == "status"))
        for name in ("agree", "status")
        for peers in (8, 64, 256, 1_024)
    ]
    fitted = scaling.fit_coordinator(points, Network(0, 0, 0, 0))
    assert (fitted.barrier_s, fitted.pair_s, fitted.status_s) == pytest.approx(
        (coordinator.barrier_s, coordinator.pair_s, coordinator.status_s)
    )
    assert scaling.left_out(points, Network(0, 0, 0, 0), scaling.fit_coordinator) == pytest.approx([1.0] * 8)


def test_a_client_and_the_fixed_part_are_the_line_through_two_numbers_of_clients():
    """2 clients 1.3 s, 10 clients 4.5 s, 5 barriers with one peer 5 ms: .4 s a client and .495 s a round."""
    run = lambda clients, wall_s: scaling.Run(
        2, clients, [wall_s, 9.0, wall_s - 1], [0.2, 0.4], np.full((3, clients), 0.4)
    )
    rank = scaling.learn(run(2, 1.3), run(10, 4.5), Network(1e-3, 0, 0, 0))
    assert (rank.client_s, rank.fixed_s, rank.spread, rank.server_s) == pytest.approx((0.4, 0.495, 0.0, 0.3))
    assert rank.cost(2, 10, Network(1e-3, 0, 0, 0)).round_s == pytest.approx(4.5)
    # 4 client ranks with 2 of 8 clients each, on a core each; on 2 cores all 8 clients and the server's .3 s take turns
    assert rank.cost(5, 8, Network(0, 0, 0, 0)).round_s == pytest.approx(0.8 + 0.495)
    assert rank.cost(5, 8, Network(0, 0, 0, 0, cores=2)).round_s == pytest.approx((3.2 + 0.3) / 2 + 0.495)


def test_no_constant_is_negative():
    """The best fit of 2 x + y = 1, (x + y) / 2 = 1 is x = -1; of those that are not negative x = 0, y = 1.2."""
    points = [scaling.Point("agree", 2, 0, 1.0)] * 2
    assert scaling.best([(2.0, 1.0), (0.5, 0.5)], points) == [0.0, pytest.approx(1.2)]


def test_a_point_that_does_not_fit_is_noticed_when_it_is_left_out():
    points = made(PLAIN)
    points[3] = replace(points[3], seconds=3 * points[3].seconds)
    ratios = scaling.left_out(points, PLAIN)
    assert ratios[3] == pytest.approx(1 / 3)
    assert scaling.error(ratios[3]) == pytest.approx(2.0)


def test_where_the_exchange_starts_to_matter():
    """Without a network it never does; with one that is slow enough always."""
    assert scaling.where_it_matters(1_000, 0.05, Network(0, 0, 0, 0)) == "never"
    assert scaling.where_it_matters(1_000, 0.05, replace(PLAIN, byte_s=1.0)) == "from 2 GPUs on"
    assert math.isclose(
        scaling.cluster_cost(1_000, 8, Network(0, 0, 0, 0)).train_s, 125 * 3.5 / 10 * cost.straggle(8, 125, cost.SPREAD)
    )
