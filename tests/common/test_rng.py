"""Named streams: a function of (seed, purpose, round, client) and of nothing else."""

from __future__ import annotations

import hashlib
import random as python_random

import numpy as np
import torch

from hkd_hpc.common import rng


def test_the_key_is_a_hash_of_the_name():
    expected = int.from_bytes(hashlib.sha256(b"7/batches/3/12").digest()[:16], "little")
    assert rng.derive(7, "batches", 3, 12) == expected < 2**128
    assert rng.torch_seed(7, "batches", 3, 12) == expected >> 65 < 2**63


def test_numbers_are_the_same_on_every_machine():
    """Philox with the key above, drawn here by numpy's own generator."""
    key = int.from_bytes(hashlib.sha256(b"0/cohort/1/0").digest()[:16], "little")
    expected = np.random.Generator(np.random.Philox(key=key)).permutation(20)
    assert rng.stream(0, "cohort", 1).permutation(20).tolist() == expected.tolist()


def test_streams_start_anew_and_do_not_touch_each_other():
    first = rng.stream(1, "batches", 2, 3).random(5)
    rng.stream(1, "noise", 2, 3).random(1000)
    np.random.random(3), python_random.random(), torch.rand(3)
    assert np.array_equal(rng.stream(1, "batches", 2, 3).random(5), first)


def test_different_names_give_different_streams():
    names = [
        (0, "a", 0, 0),
        (1, "a", 0, 0),
        (0, "b", 0, 0),
        (0, "a", 1, 0),
        (0, "a", 0, 1),
        (1, "a", 1, 0),
        (11, "a", 0, 0),
        (0, "a", 11, 0),
        (0, "a", 1, 1),
        (0, "a", 0, 11),
    ]
    assert len({rng.derive(*name) for name in names}) == len(names)
    assert len({float(rng.stream(*name).random()) for name in names}) == len(names)


def test_global_generators_are_left_alone():
    np.random.seed(4), torch.manual_seed(4)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    rng.stream(0, "noise").standard_normal(100)
    assert np.array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
