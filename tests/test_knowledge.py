"""Per-class means, which classes a client may share, and the paper's noise."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from hkd_hpc import rng
from hkd_hpc.knowledge import class_means, gaussian_noise, noise_std, shared_classes


def test_class_means_by_hand():
    value = torch.tensor([[1.0, 10.0], [5.0, 0.0], [3.0, 20.0]])
    mean_CX, count_C = class_means(value, torch.tensor([2, 0, 2]), 4)
    assert mean_CX.tolist() == [[5.0, 0.0], [0.0, 0.0], [2.0, 15.0], [0.0, 0.0]]
    assert count_C.tolist() == [1.0, 0.0, 2.0, 0.0]
    assert mean_CX.dtype == count_C.dtype == torch.float32


def test_class_means_against_float64_numpy():
    random = np.random.default_rng(0)
    value, labels = random.standard_normal((375, 64)).astype(np.float32) * 100, random.integers(0, 10, 375)
    mean_CX, count_C = class_means(torch.from_numpy(value), torch.from_numpy(labels), 10)
    for j in range(10):
        true = value[labels == j].astype(np.float64).mean(0)
        np.testing.assert_allclose(mean_CX[j].numpy(), true, rtol=1e-6, atol=1e-6)
        assert count_C[j] == (labels == j).sum()


@pytest.mark.parametrize("counts, nu, shared", [
    ([25, 24, 51, 0], 0.25, [True, False, True, False]),  # a class at exactly nu is shared: only those BELOW may not be
    ([1, 1, 1, 1], 0.25, [True, True, True, True]),
    ([30, 30, 40, 0], 0.3, [True, True, True, False]),  # .3 * 100 is not 30 in binary
    ([7, 13, 180, 0], 0.035, [True, True, True, False]),
    ([100, 0, 0, 0], 1.0, [True, False, False, False]),
    ([99, 1, 0, 0], 1.0, [False, False, False, False]),
    ([99, 1, 0, 0], 0.0, [True, True, False, False]),
    ([0, 0, 0, 0], 0.0, [False, False, False, False]),
])
def test_which_classes_are_shared(counts, nu, shared):
    assert shared_classes(torch.tensor(counts, dtype=torch.float32), nu).tolist() == shared


def test_at_a_quarter_nobody_shares_of_a_hundred_balanced_classes():
    assert not shared_classes(torch.full((100,), 3.75), 0.25).any()


def test_standard_deviation_is_twice_zeta_sigma_over_count():
    """zeta 3, sigma 7: 42 / N. Twice the images: half of it. An absent class divides by 1, not by 0."""
    assert noise_std(torch.tensor([256.0, 512.0, 125.0, 1.0, 0.0]), 3.0, 7.0).tolist() == pytest.approx(
        [0.1640625, 0.08203125, 0.336, 42.0, 42.0], rel=1e-7)


def draw(std, latent: int = 100_000, seed: int = 0, round: int = 1, client: int = 0) -> np.ndarray:
    return gaussian_noise(torch.tensor(std), latent, rng.stream(seed, "noise", round, client)).double().numpy()


def test_measured_noise_has_the_stated_standard_deviation():
    noise_CD = draw([42 / 256, 42 / 512, 42 / 125])
    np.testing.assert_allclose(noise_CD.std(1), [0.1640625, 0.08203125, 0.336], rtol=0.01)
    assert np.all(np.abs(noise_CD.mean(1)) < 5 * np.array([0.164, 0.082, 0.336]) / np.sqrt(100_000))


def test_noise_is_independent_between_classes_clients_rounds_and_seeds():
    rows = [*draw([1.0, 1.0]), draw([1.0], client=1)[0], draw([1.0], round=2)[0], draw([1.0], seed=1)[0]]
    correlation = np.corrcoef(rows) - np.eye(5)
    assert np.abs(correlation).max() < 0.02  # standard error .003


def test_noise_of_a_class_does_not_depend_on_the_other_classes_scale():
    assert np.array_equal(draw([1.0, 5.0], 50)[0], draw([1.0, 0.25], 50)[0])


def test_no_noise_at_standard_deviation_zero():
    assert not gaussian_noise(torch.zeros(3), 5, rng.stream(0, "noise")).any()
