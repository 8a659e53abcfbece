"""Which clients take part in a round, and on which rank each client lives. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hkd_hpc.common import rng
from hkd_hpc.config import FedSettings


def draw_cohort(clients: int, participation: float, seed: int, round: int, eligible: Sequence[int] = ()) -> list[int]:
    """Sorted ids of the sampled clients, `cohort_size` of them, the same for every scheme.

    eligible: who has images enough to train. If nobody of those drawn has, one who has is drawn in the place of one of
    them.
    """
    size = cohort_size(clients, participation)
    if size == clients:
        return list(range(clients))
    random = rng.stream(seed, "cohort", round)
    drawn = random.choice(clients, size, replace=False).tolist()
    if len(eligible) and not set(eligible) & set(drawn):
        drawn[0] = int(random.choice(eligible))
    return sorted(drawn)


def cohort_size(clients: int, participation: float) -> int:
    """Clients of a round: max(1, round(participation * clients))."""
    return max(1, round_half_up(participation * clients))


def draw_failures(fed: FedSettings, seed: int, round: int, cohort: list[int]) -> tuple[set[int], set[int]]:
    """(those of these clients that drop out, the stragglers), the same for every scheme; one at least
    delivers.
    """
    drop_M, straggle_M = rng.stream(seed, "failures", round).random((2, fed.clients))
    dropped_out = {client for client in cohort if drop_M[client] < fed.drop_rate}
    stragglers = {client for client in cohort if straggle_M[client] < fed.straggler_rate} - dropped_out
    if cohort and len(dropped_out | (set() if fed.straggler_epochs else stragglers)) == len(cohort):
        spared = max(cohort, key=lambda client: drop_M[client])
        dropped_out, stragglers = dropped_out - {spared}, stragglers - {spared}
    return dropped_out, stragglers


def round_half_up(value: float) -> int:
    return int(np.floor(value + 0.5))


def assign_clients(images_M: list[int], ranks: int) -> list[int]:
    """The rank of each client, by its number of images: rank 0 is the server, the others share the work evenly.

    Largest client first to the rank with the least work so far (lowest number on a tie); with equal clients and m + 1
    ranks client i lives on rank i + 1. One rank alone hosts everything.
    """
    if ranks == 1:
        return [0] * len(images_M)
    load = [0] * (ranks - 1)
    rank_of = [0] * len(images_M)
    for client in sorted(range(len(images_M)), key=lambda c: (-images_M[c], c)):
        lightest = load.index(min(load))
        load[lightest] += max(images_M[client], 1)  # an empty client still takes a slot
        rank_of[client] = lightest + 1
    return rank_of
