"""Per-class means, which classes a client may share, and the distances with their gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hkd_hpc.schemes.knowledge import (
    SOFT_DISTANCES,
    class_counts,
    class_means,
    distance,
    shared_classes,
    soft_distance,
)

pytestmark = pytest.mark.kernels


def test_class_means_by_hand():
    value = torch.tensor([[1.0, 10.0], [5.0, 0.0], [3.0, 20.0]])
    labels = torch.tensor([2, 0, 2])
    count_C = class_counts(labels, 4)
    mean_CX = class_means(value, labels, count_C)
    assert mean_CX.tolist() == [[5.0, 0.0], [0.0, 0.0], [2.0, 15.0], [0.0, 0.0]]
    assert count_C.tolist() == [1.0, 0.0, 2.0, 0.0]
    assert mean_CX.dtype == count_C.dtype == torch.float32


def test_the_sum_is_divided_by_the_count_that_is_given():
    """Sums 5, 0 and 4 by 10, 0 (as if 1) and 2."""
    value, labels = torch.tensor([[1.0], [5.0], [3.0]]), torch.tensor([2, 0, 2])
    assert class_means(value, labels, torch.tensor([10.0, 0.0, 2.0])).tolist() == [[0.5], [0.0], [2.0]]


def test_class_means_against_float64_numpy():
    random = np.random.default_rng(0)
    value, labels = random.standard_normal((375, 64)).astype(np.float32) * 100, random.integers(0, 10, 375)
    count_C = class_counts(torch.from_numpy(labels), 10)
    mean_CX = class_means(torch.from_numpy(value), torch.from_numpy(labels), count_C)
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
    "nu, min_count, shared",
    [
        (0.0, 20, [True, False, True, False]),
        (0.0, 21, [False, False, True, False]),
        (0.25, 20, [False, False, True, False]),
        (0.0, 62, [False] * 4),
    ],
)
def test_classes_of_too_few_images_are_not_shared(nu, min_count, shared):
    counts = torch.tensor([20.0, 19.0, 61.0, 0.0])
    assert shared_classes(counts, nu, "absolute", min_count).tolist() == shared


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


@pytest.mark.parametrize("form", ["kl", "kl_wrong_sign"])
def test_a_target_that_noise_made_negative_counts_as_0(form):
    logits = torch.tensor([[0.5, -0.5, 0.0]])
    found = soft_distance(form, logits, torch.tensor([[1.1, -0.3, 0.2]]))
    assert torch.equal(found, soft_distance(form, logits, torch.tensor([[1.1, 0.0, 0.2]])))
