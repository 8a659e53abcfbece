"""Draws for noise: their distribution, that no two are alike, and what a release cannot repeat."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from hkd_hpc.client import Client
from hkd_hpc.common import rng
from hkd_hpc.privacy import random
from hkd_hpc.schemes.knowledge import noisy

NO_IMAGES, NO_LABELS = torch.zeros(0, 3, 2, 2, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
WIDE = 100_000


def client(mode: str, id: int = 0, round: int = 1, seed: int = 0) -> Client:
    return Client(id, NO_IMAGES, NO_LABELS, NO_IMAGES, NO_LABELS, 3, seed, round=round, noise_from=mode)


def noise(std_C: list[float], of: Client, quantity: str = "features", width: int = WIDE) -> np.ndarray:
    """What the client adds to means of 0."""
    return noisy(of, quantity, torch.zeros(len(std_C), width), torch.tensor(std_C)).double().numpy()


@pytest.mark.parametrize("mode", ["simulation", "release"])
def test_measured_noise_has_the_stated_standard_deviation(mode):
    noise_CD = noise([42 / 256, 42 / 512, 42 / 125], client(mode))
    np.testing.assert_allclose(noise_CD.std(1), [0.1640625, 0.08203125, 0.336], rtol=0.01)
    assert np.all(np.abs(noise_CD.mean(1)) < 5 * np.array([0.164, 0.082, 0.336]) / np.sqrt(WIDE))


@pytest.mark.parametrize("mode", ["simulation", "release"])
def test_no_two_draws_are_alike(mode):
    """Classes, clients, rounds, seeds, quantities; standard error of a correlation: .003."""
    rows = [
        *noise([1.0, 1.0], client(mode)),
        *noise([1.0], client(mode, id=1)),
        *noise([1.0], client(mode, round=2)),
        *noise([1.0], client(mode, seed=1)),
        *noise([1.0], client(mode), "predictions"),
        *noise([1.0], client(mode), "counts"),
        *noise([1.0], client(mode), "weights"),
    ]
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 0.02


@pytest.mark.parametrize("mode", ["simulation", "release"])
def test_no_two_coordinates_are_alike(mode):
    """100,000 classes of 6 coordinates."""
    unit_CD = client(mode).normal("features", (WIDE, 6))
    assert np.abs(np.corrcoef(unit_CD.T) - np.eye(6)).max() < 0.02


def test_the_noise_of_a_simulation_is_a_named_stream():
    drawn = client("simulation", id=3, round=2, seed=5).normal("features", (2, 7))
    assert np.array_equal(drawn, rng.stream(5, "noise", 2, 3).standard_normal((2, 7)))
    predictions = client("simulation", id=3, round=2, seed=5).normal("predictions", (4,))
    assert np.array_equal(predictions, rng.stream(5, "noise predictions", 2, 3).standard_normal(4))


def test_only_the_noise_of_a_simulation_comes_again():
    simulated, released = client("simulation"), client("release")
    assert np.array_equal(simulated.normal("features", (5,)), simulated.normal("features", (5,)))
    assert not np.isin(released.normal("features", (5,)), released.normal("features", (5,))).any()


def test_noise_of_a_class_does_not_depend_on_the_other_classes_scale():
    one, other = (noise([1.0, std], client("simulation"), width=50) for std in (5.0, 0.25))
    assert np.array_equal(one[0], other[0])


def test_at_standard_deviation_zero_everything_stays_as_it_is():
    mean_CX = torch.tensor([[0.5, -0.0], [1e-30, 2.0]])
    assert noisy(client("release"), "features", mean_CX, torch.zeros(2)) is mean_CX


@pytest.mark.parametrize("std", [0.75, 3.14025])
def test_noise_is_added_in_float64_and_rounded_once(std):
    mean_CX = torch.from_numpy(np.random.default_rng(1).standard_normal((2, 500)).astype(np.float32))
    unit_CX = rng.stream(0, "noise", 1, 0).standard_normal((2, 500))
    expected = (mean_CX.numpy().astype(np.float64) + unit_CX * np.float64(np.float32(std))).astype(np.float32)
    sent_CX = noisy(client("simulation"), "features", mean_CX, torch.full((2,), std))
    assert np.array_equal(sent_CX.numpy(), expected)


def test_one_draw_for_all_classes():
    mean_CX = torch.zeros(3, 1000)
    noise_CX = noisy(client("simulation"), "features", mean_CX, torch.full((3,), 2.0), one_draw=True)
    np.testing.assert_allclose(noise_CX[0].std(), 2.0, rtol=0.1)
    assert torch.equal(noise_CX, noise_CX[:1].expand(3, 1000))


def test_a_release_is_normal():
    """Shares within 1, 2 and 3 standard deviations, and the fourth moment; of 400,000 draws."""
    unit = random.of_entropy((400_000,))
    shares = [float((np.abs(unit) < bound).mean()) for bound in (1, 2, 3)]
    assert shares == pytest.approx([0.6826895, 0.9544997, 0.9973002], abs=0.005)
    assert (unit**4).mean() == pytest.approx(3.0, abs=0.15)
    assert len(np.unique(unit)) == len(unit)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (7, 3), (20,), (21,)])
def test_a_release_of_any_shape(monkeypatch, shape):
    monkeypatch.setattr(random, "PIECE", 10)
    unit = random.of_entropy(shape)
    assert unit.shape == shape
    assert unit.dtype == np.float64
    assert len(np.unique(unit)) == unit.size


@pytest.mark.parametrize("byte, largest", [(b"\0", 8.5717), (b"\xff", 1e-7)])
def test_the_ends_of_the_uniform_numbers_are_finite(monkeypatch, byte, largest):
    """u is 2^-53, whose radius is sqrt(106 log 2), or 1, whose radius is 0."""
    monkeypatch.setattr(os, "urandom", lambda count: byte * count)
    assert np.abs(random.of_entropy((4,))).max() == pytest.approx(largest, abs=1e-4)
