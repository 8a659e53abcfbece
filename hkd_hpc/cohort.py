"""Which clients take part in a round, and on which rank each client lives. Pure functions."""
from __future__ import annotations

import numpy as np

from hkd_hpc import rng


def draw_cohort(clients: int, participation: float, seed: int, round: int) -> list[int]:
    """Sorted ids of the sampled clients: max(1, round(participation * clients)) of them, the same for every scheme."""
    size = max(1, round_half_up(participation * clients))
    if size == clients:
        return list(range(clients))
    return sorted(rng.stream(seed, "cohort", round).choice(clients, size, replace=False).tolist())


def round_half_up(value: float) -> int:
    return int(np.floor(value + 0.5))


def deal(images_M: list[int], ranks: int) -> list[int]:
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
        load[lightest] += max(images_M[client], 1)  # an empty client still takes a place
        rank_of[client] = lightest + 1
    return rank_of
