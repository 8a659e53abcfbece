"""mu of what leaves a client, worked out by hand: two clients with 3 and 4, or 12 and 0 images of two classes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hkd_hpc.privacy import releases
from hkd_hpc.privacy.mechanism import Mechanism, std_of_predictions
from hkd_hpc.privacy.settings import PrivacySettings
from hkd_hpc.schemes.knowledge import class_means

COUNT_MC = np.array([[3, 4], [12, 0]])
KINDS = ("features", "predictions", "counts")


def found(mechanism=None, is_private=False, **settings):
    privacy = PrivacySettings(**settings)
    return releases.knowledge(
        privacy, mechanism or Mechanism("vector", "l2", 3.0, 4.0), KINDS, 64, COUNT_MC, is_private
    )


@pytest.mark.parametrize(
    "mechanism, mu",
    [
        (Mechanism("vector", "l2", 3.0, 4.0), 1 / 4),
        (Mechanism("vector", "box", 3.0, 4.0), 1 / 4),  # its noise is for the whole box
        (Mechanism("paper", "l2", 3.0, 4.0), 1 / 4),
        (Mechanism("paper", "box", 3.0, 7.0), 8 / 7),  # sqrt(64) coordinates
        (Mechanism("paper", "off", 3.0, 7.0), math.inf),
        (Mechanism("code", "l2", 3.0, 7.0), math.inf),  # one draw for all classes
        (Mechanism("off", "l2", 3.0, 7.0), math.inf),
        (Mechanism("vector", "l2", 3.0, 0.0), math.inf),
    ],
)
def test_features_of_a_fixed_extractor(mechanism, mu):
    assert found(mechanism)["features"].fixed_M.tolist() == pytest.approx([mu, mu])


def test_one_image_moves_all_means_of_a_trained_extractor():
    """Each of N_j images moves by 2 C: N_j times the figure, sqrt(3^2 + 4^2) = 5 over both classes."""
    assert found()["features"].whole_M.tolist() == [5 / 4, 12 / 4]


@pytest.mark.parametrize("is_private, whole", [(True, [1 / 4, 1 / 4]), (False, [5 / 4, 12 / 4])])
def test_a_received_extractor_counts_as_fixed_where_the_weights_are_private(is_private, whole):
    assert found(is_private=is_private, extractor="received")["features"].whole_M.tolist() == whole


def test_predictions_have_the_multiplier_of_the_section():
    assert found(predictions=True, multiplier=2.0)["predictions"].fixed_M.tolist() == pytest.approx([0.5, 0.5])


def test_predictions_without_noise_have_no_bound():
    release = found()["predictions"]
    assert (release.fixed_M.tolist(), release.mend) == ([math.inf, math.inf], "privacy.predictions=true")


@pytest.mark.parametrize(
    "adjacency, counts, mu_counts, mu_presence",
    [
        ("image", 0.0, 0, 0),
        ("label", 0.0, math.inf, math.inf),
        ("label", 8.0, 1 / 8, 0),  # presence is decided on the noisy ones
        ("client", 8.0, math.inf, math.inf),
    ],
)
def test_counts_and_presence(adjacency, counts, mu_counts, mu_presence):
    release = found(adjacency=adjacency, counts=counts)
    assert [release[kind].whole_M[0] for kind in ("counts", "presence")] == [mu_counts, mu_presence]


@pytest.mark.parametrize("kind", ["features", "predictions"])
def test_of_an_image_and_its_label_divided_by_noisy_counts(kind):
    """The worst is an image that keeps its label: no more than with public labels."""
    settings = {"predictions": True, "multiplier": 4.0, "adjacency": "label", "counts": 8.0, "extractor": "received"}
    assert found(is_private=True, **settings)[kind].whole_M.tolist() == pytest.approx([1 / 4] * 2)


# the norm of what two neighbours' means differ in, over the noise: clip 3, multiplier 4, images of classes 0 0 1
@pytest.mark.parametrize(
    "label, features, predictions",
    [
        (0, 6 / 24, math.sqrt(2) / (4 * math.sqrt(2))),  # the sum of one class, from one side of the ball to the other
        (1, math.sqrt(18) / 24, math.sqrt(2) / (4 * math.sqrt(2))),  # class 0 loses a vector, class 1 gains one
    ],
)
@pytest.mark.parametrize("count_C", [[2.0, 1.0], [1.0, 5.0], [0.0, 3.0]])  # with noise: any
def test_no_replaced_image_moves_the_means_further(label, features, predictions, count_C):
    mechanism, count_C = Mechanism("vector", "l2", 3.0, 4.0), torch.tensor(count_C)
    privacy = PrivacySettings(predictions=True, multiplier=4.0)
    one_ND, other_ND = torch.tensor([[9.0, 0], [1, 1], [2, 0]]), torch.tensor([[-9.0, 0], [1, 1], [2, 0]])
    one_NC, other_NC = torch.tensor([[1.0, 0], [0.5, 0.5], [0, 1]]), torch.tensor([[0.0, 1], [0.5, 0.5], [0, 1]])
    sides = [(one_ND, one_NC, torch.tensor([0, 0, 1])), (other_ND, other_NC, torch.tensor([label, 0, 1]))]
    feature_SCD = [class_means(mechanism.clipped(x_ND), y_N, count_C) for x_ND, _, y_N in sides]
    soft_SCC = [class_means(soft_NC, y_N, count_C) for _, soft_NC, y_N in sides]
    stds_C = mechanism.std(count_C, 2), std_of_predictions(privacy, count_C)
    moved = [
        torch.linalg.vector_norm((one - other) / std_C[:, None]).item()
        for (one, other), std_C in zip((feature_SCD, soft_SCC), stds_C)
    ]
    assert moved == pytest.approx([features, predictions])


@pytest.mark.parametrize("settings", [{"adjacency": "client"}, {"adjacency": "label", "extractor": "received"}])
def test_noise_scaled_by_counts_that_are_not_public_has_no_bound(settings):
    assert found(is_private=True, **settings)["features"].whole_M.tolist() == [math.inf, math.inf]


def test_nor_has_it_for_a_fixed_extractor():
    assert found(adjacency="label")["features"].fixed_M.tolist() == [math.inf, math.inf]


@pytest.mark.parametrize("delivered, mu", [(9, 1 / 2), (4, 3 / 4), (0, math.inf)])
def test_weights_have_the_noise_of_those_that_delivered(delivered, mu):
    """2 S over 2 S z sqrt(delivered / cohort)."""
    settings = PrivacySettings(update_clip=5.0, update_multiplier=2.0)
    assert releases.weights_mu(settings, delivered, 9) == pytest.approx(mu)


@pytest.mark.parametrize("settings", [{}, {"update_clip": 1.0}, {"update_multiplier": 1.0}])
def test_weights_without_clip_or_noise_have_no_bound(settings):
    assert releases.weights_mu(PrivacySettings(**settings), 3, 3) == math.inf
