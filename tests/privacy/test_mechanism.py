"""Clips, sensitivities and standard deviations by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hkd_hpc.privacy import mechanism
from hkd_hpc.privacy.mechanism import Mechanism, clip_features, l2_sensitivity, of_features, std
from hkd_hpc.privacy.settings import PrivacySettings
from hkd_hpc.schemes.knowledge import class_counts, class_means

pytestmark = pytest.mark.kernels


def test_standard_deviation_is_twice_zeta_sigma_over_count():
    """zeta 3, sigma 7: 42 / N. Twice the images: half of it. An absent class divides by 1, not by 0."""
    paper = Mechanism("paper", "box", 3.0, 7.0)
    assert std("paper", 6.0, 7.0, 256.0) == 0.1640625
    assert std("paper", 6.0, 7.0, 512.0) == 0.08203125
    assert paper.std(256.0, 64) == 0.1640625
    count_C = torch.tensor([256.0, 512.0, 125.0, 1.0, 0.0])
    assert paper.std(count_C, 64).tolist() == pytest.approx([0.1640625, 0.08203125, 0.336, 42.0, 42.0], rel=1e-7)


def test_the_whole_vector_has_its_own_sensitivity():
    """A ball of 3: any two points are 6 apart; a box of 3 with 64 sides: 6 * 8."""
    assert Mechanism("vector", "l2", 3.0, 7.0).std(256.0, 64) == 0.1640625
    assert Mechanism("vector", "box", 3.0, 7.0).std(256.0, 64) == 1.3125
    assert Mechanism("paper", "box", 3.0, 7.0).std(256.0, 64) == 0.1640625  # of one coordinate
    assert l2_sensitivity("l2", 3.0, 64) == 6.0
    assert l2_sensitivity("box", 3.0, 64) == 48.0
    assert l2_sensitivity("off", 3.0, 64) == math.inf


def test_forms_of_the_noise():
    count_C = torch.tensor([256.0, 0.0])
    assert Mechanism("off", "box", 3.0, 7.0).std(count_C, 64).tolist() == [0.0, 0.0]
    assert Mechanism("code", "off", 3.0, 7.0).std(count_C, 64).tolist() == [2.0, 2.0]
    assert Mechanism("vector", "l2", 3.0, 0.0).std(count_C, 64).tolist() == [0.0, 0.0]


def test_predictions_and_counts_move_by_the_root_of_two():
    privacy = PrivacySettings(predictions=True, multiplier=7.0, counts=3.0)
    assert mechanism.std_of_predictions(privacy, 50.0) == pytest.approx(7 * 1.4142135623730951 / 50, rel=1e-15)
    assert mechanism.std_of_counts(privacy) == pytest.approx(4.242640687119286, rel=1e-15)
    assert mechanism.std_of_predictions(PrivacySettings(), 50.0) == 0.0
    assert mechanism.std_of_counts(PrivacySettings()) == 0.0


def test_more_images_or_a_smaller_multiplier_mean_less_noise():
    by_count = [Mechanism("vector", "l2", 3.0, 7.0).std(float(count), 64) for count in (1, 2, 10, 1000)]
    assert by_count == sorted(by_count, reverse=True)
    by_multiplier = [Mechanism("vector", "l2", 3.0, multiplier).std(9.0, 64) for multiplier in (0.0, 0.1, 1.0, 7.0)]
    assert by_multiplier == sorted(by_multiplier)


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
    count_C = class_counts(labels, 1)
    means = [class_means(clip_features(rule, torch.from_numpy(f), 3.0), labels, count_C)[0] for f in (features, other)]
    moved = (means[0] - means[1]).double().numpy()
    assert (np.abs(moved).max() if rule == "box" else np.linalg.norm(moved)) == pytest.approx(6 / 9, rel=1e-5)


@pytest.mark.parametrize("rule", ["box", "l2"])
def test_an_image_with_features_a_million_times_larger_moves_no_further(rule):
    random, labels = np.random.default_rng(1), torch.zeros(7, dtype=torch.int64)
    feature_ND = torch.from_numpy(random.standard_normal((7, 64)).astype(np.float32))
    other_ND = feature_ND.clone()
    other_ND[3] *= 1e6
    count_C = class_counts(labels, 1)
    means = [class_means(clip_features(rule, each, 3.0), labels, count_C)[0] for each in (feature_ND, other_ND)]
    moved = (means[0] - means[1]).double().numpy()
    assert (np.abs(moved).max() if rule == "box" else np.linalg.norm(moved)) <= 6 / 7 * (1 + 1e-6)


OWN = Mechanism("paper", "off", 4.0, 2.0)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, OWN),
        ({"bound": 1.0, "multiplier": 5.0}, OWN),
        ({"mechanism": "off"}, Mechanism("off", "off", 3.0, 7.0)),
        ({"mechanism": "off", "clip": "l2"}, Mechanism("off", "l2", 3.0, 7.0)),
        ({"mechanism": "paper"}, Mechanism("paper", "box", 3.0, 7.0)),
        ({"mechanism": "vector", "bound": 1.0, "multiplier": 5.0}, Mechanism("vector", "l2", 1.0, 5.0)),
        ({"mechanism": "vector", "clip": "off"}, Mechanism("vector", "off", 3.0, 7.0)),
    ],
)
def test_who_says_what_is_done_to_features(settings, expected):
    assert of_features(PrivacySettings(**settings), OWN) == expected
