"""Per-class means, clipping, which classes a client may share, the noise, and the distances with their gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hkd_hpc import rng
from hkd_hpc.schemes.knowledge import (
    SOFT_DISTANCES,
    class_means,
    clip_features,
    distance,
    feature_noise,
    gaussian_noise,
    noise_std,
    shared_classes,
    soft_distance,
)

pytestmark = pytest.mark.kernels


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


@pytest.mark.parametrize(
    "counts, nu, shared",
    [
        (
            [25, 24, 51, 0],
            0.25,
            [True, False, True, False],
        ),  # a class at exactly nu is shared: only those BELOW may not be
        ([1, 1, 1, 1], 0.25, [True, True, True, True]),
        ([30, 30, 40, 0], 0.3, [True, True, True, False]),  # .3 * 100 is not 30 in binary
        ([7, 13, 180, 0], 0.035, [True, True, True, False]),
        ([100, 0, 0, 0], 1.0, [True, False, False, False]),
        ([99, 1, 0, 0], 1.0, [False, False, False, False]),
        ([99, 1, 0, 0], 0.0, [True, True, False, False]),
        ([0, 0, 0, 0], 0.0, [False, False, False, False]),
    ],
)
def test_which_classes_are_shared(counts, nu, shared):
    assert shared_classes(torch.tensor(counts, dtype=torch.float32), nu).tolist() == shared


def test_at_a_quarter_nobody_shares_of_a_hundred_balanced_classes():
    assert not shared_classes(torch.full((100,), 3.75), 0.25).any()


def test_standard_deviation_is_twice_zeta_sigma_over_count():
    """zeta 3, sigma 7: 42 / N. Twice the images: half of it. An absent class divides by 1, not by 0."""
    assert noise_std("paper", torch.tensor([256.0, 512.0, 125.0, 1.0, 0.0]), 3.0, 7.0).tolist() == pytest.approx(
        [0.1640625, 0.08203125, 0.336, 42.0, 42.0], rel=1e-7
    )


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


# --- rules beside the paper's


@pytest.mark.parametrize(
    "counts, nu, shared",
    [
        ([25, 24, 51, 0], 1.0, [True, False, True, False]),  # at least as many as with equal classes: 100 / 4
        ([13, 12, 75, 0], 0.5, [True, False, True, False]),
        ([1, 0, 99, 0], 0.0, [True, False, True, False]),
    ],
)
def test_relative_rule(counts, nu, shared):
    assert shared_classes(torch.tensor(counts, dtype=torch.float32), nu, "relative").tolist() == shared


def test_relative_rule_shares_balanced_classes_of_any_number():
    assert shared_classes(torch.full((100,), 4.0), 1.0, "relative").all()
    assert shared_classes(torch.full((10,), 37.0), 1.0, "relative").all()  # 37 is not .1 * 370 in binary


@pytest.mark.parametrize(
    "nu, fewest, shared",
    [
        (0.0, 20, [True, False, True, False]),
        (0.0, 21, [False, False, True, False]),
        (0.25, 20, [False, False, True, False]),
        (0.0, 62, [False] * 4),
    ],
)
def test_fewest_images(nu, fewest, shared):
    counts = torch.tensor([20.0, 19.0, 61.0, 0.0])
    assert shared_classes(counts, nu, "absolute", fewest).tolist() == shared


def test_clip_by_hand():
    """zeta 2: coordinates into [-2, 2], or a norm of 5 to 2; what is inside stays as it is, 0 too."""
    feature_ND = torch.tensor([[3.0, -4.0], [1.0, -1.5], [0.0, 0.0], [0.0, -2.0]])
    assert clip_features("off", feature_ND, 2.0) is feature_ND
    assert clip_features("box", feature_ND, 2.0).tolist() == [[2.0, -2.0], [1.0, -1.5], [0.0, 0.0], [0.0, -2.0]]
    np.testing.assert_allclose(
        clip_features("l2", feature_ND, 2.0), [[1.2, -1.6], [1.0, -1.5], [0.0, 0.0], [0.0, -2.0]], rtol=1e-6
    )


@pytest.mark.parametrize("rule", ["box", "l2"])
def test_one_image_moves_a_clipped_mean_by_the_sensitivity_at_most(rule):
    """2 zeta / N: per coordinate with box, as a norm with l2; reached by opposite features."""
    random, labels = np.random.default_rng(0), torch.zeros(9, dtype=torch.int64)
    features = random.standard_normal((9, 5)).astype(np.float32) * 10
    other = features.copy()
    features[4], other[4] = 1e6, -1e6
    means = [class_means(clip_features(rule, torch.from_numpy(f), 3.0), labels, 1)[0][0] for f in (features, other)]
    moved = (means[0] - means[1]).double().numpy()
    assert (np.abs(moved).max() if rule == "box" else np.linalg.norm(moved)) == pytest.approx(6 / 9, rel=1e-5)


def kinds_of_noise(kind: str, latent: int = 100_000) -> np.ndarray:
    count_C = torch.tensor([256.0, 125.0, 0.0])
    return feature_noise(kind, count_C, latent, 3.0, 7.0, rng.stream(0, "noise", 1, 0)).double().numpy()


def test_kinds_of_noise():
    """paper: 42 / N; off: none; code: std 2 whatever the counts, the same vector for every class."""
    np.testing.assert_allclose(kinds_of_noise("paper").std(1), [42 / 256, 42 / 125, 42.0], rtol=0.01)
    assert kinds_of_noise("off").shape == (3, 100_000)
    assert not kinds_of_noise("off").any()
    code = kinds_of_noise("code")
    np.testing.assert_allclose(code.std(1), 2.0, rtol=0.01)
    assert np.array_equal(code[0], code[1])
    assert np.array_equal(code[0], code[2])


# --- distances

V, TARGET = [[3.0, 4.0, 0.0], [1.0, 1.0, 1.0]], [[0.0, 0.0, 0.0], [1.0, 1.0, 3.0]]


@pytest.mark.parametrize("form, expected", [("paper", [5.0, 2.0]), ("squared", [25.0, 4.0]), ("mse", [25 / 3, 4 / 3])])
def test_distances_by_hand(form, expected):
    found = distance(form, torch.tensor(V), torch.tensor(TARGET))
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


LOGITS = [[math.log(2), 0.0, 0.0], [0.0, 0.0, math.log(8)]]  # softmax (2,1,1) / 4, (1,1,8) / 10
SOFT = [[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]]


@pytest.mark.parametrize(
    "form, expected",
    [
        ("paper", [math.sqrt(2) / 4, 0.0]),
        ("squared", [1 / 8, 0.0]),
        ("mse", [1 / 24, 0.0]),
        ("kl", [(0.25 * math.log(0.5) + 0.5 * math.log(2)) / 3, 0.0]),
        (
            "kl_wrong_sign",
            [(0.3125 + math.log(4) / 2 + math.log(2) / 2) / 3, (0.66 + 0.2 * math.log(10) + 0.8 * math.log(1.25)) / 3],
        ),
    ],
)
def test_soft_distances_by_hand(form, expected):
    """p = (2,1,1) / 4 against t = (1,2,1) / 4: differences 1/4, -1/4, 0; t . p = 5/16. And p = t: t . p = .66."""
    found = soft_distance(form, torch.tensor(LOGITS), torch.tensor(SOFT))
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def random_distributions(seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.standard_normal((4, 10))), torch.from_numpy(random.dirichlet(np.ones(10), 4))


def numpy_soft_distance(form: str, z: np.ndarray, t: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return {
        "paper": np.sqrt(((p - t) ** 2).sum(1)),
        "squared": ((p - t) ** 2).sum(1),
        "mse": ((p - t) ** 2).mean(1),
        "kl": (t * np.log(t / p)).sum(1) / z.shape[1],
        "kl_wrong_sign": -(t * (np.log(t) - p)).sum(1) / z.shape[1],
    }[form]


@pytest.mark.parametrize("form", SOFT_DISTANCES)
def test_soft_distances_and_gradients_against_finite_differences(form):
    z, t = random_distributions()
    logits = z.clone().requires_grad_()
    found = soft_distance(form, logits, t)
    np.testing.assert_allclose(found.detach().numpy(), numpy_soft_distance(form, z.numpy(), t.numpy()), rtol=1e-10)
    found.sum().backward()
    for place in np.ndindex(*z.shape):
        up, down = (z.numpy().copy() for _ in range(2))
        up[place] += 1e-6
        down[place] -= 1e-6
        slope = (
            numpy_soft_distance(form, up, t.numpy()).sum() - numpy_soft_distance(form, down, t.numpy()).sum()
        ) / 2e-6
        assert logits.grad[place].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("form", SOFT_DISTANCES)
def test_a_step_down_raises_the_agreement_but_with_the_wrong_sign_lowers_it(form):
    """Agreement <t, p>, p near uniform: every true distance raises it, the code's slip does the opposite."""
    z, t = random_distributions()
    logits = (0.1 * z).requires_grad_()
    soft_distance(form, logits, t).sum().backward()
    before, after = ((t * torch.softmax(x, 1)).sum(1) for x in (logits.detach(), logits.detach() - 0.1 * logits.grad))
    assert (after < before).all() if form == "kl_wrong_sign" else (after > before).all()


def test_forms_differ_by_the_number_of_classes_alone():
    """kl is the divergence ("batchmean") / 10, mse is squared / 10."""
    z, t = random_distributions()
    whole = torch.nn.functional.kl_div(torch.log_softmax(z, 1), t, reduction="batchmean")
    assert soft_distance("kl", z, t).mean().item() == pytest.approx(whole.item() / 10, rel=1e-10)
    assert torch.allclose(soft_distance("mse", z, t) * 10, soft_distance("squared", z, t), rtol=1e-10)


@pytest.mark.parametrize("form", SOFT_DISTANCES)
@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_huge_logits_and_zero_targets_stay_finite(form, scale):
    logits = (scale * torch.eye(3)).requires_grad_()
    found = soft_distance(form, logits, torch.eye(3).flip(0))
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("form", ["paper", "squared", "mse"])
def test_no_distance_has_no_gradient(form):
    value = torch.ones(2, 3, requires_grad=True)
    found = distance(form, value, torch.ones(2, 3))
    found.sum().backward()
    assert not found.any()
    assert not value.grad.any()
