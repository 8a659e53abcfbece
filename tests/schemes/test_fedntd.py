"""FedNTD: the classes that it compares, the divergence by hand, and that the true class feels nothing of it."""

from __future__ import annotations

import dataclasses
import math

import plain
import pytest
import torch

from hkd_hpc.client import Batch
from hkd_hpc.schemes.fedntd import FedNTDSettings, not_true

pytestmark = pytest.mark.kernels

LABELS = [0, 1, 2] * 4


def test_defaults_are_the_papers():
    assert (FedNTDSettings().beta, FedNTDSettings().tau) == (1.0, 1.0)


def test_the_true_class_is_left_out():
    logits_BC = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert not_true(logits_BC, torch.tensor([0, 1, 2])).tolist() == [[2, 3], [4, 6], [7, 8]]


def prepared(toy_trainer, toy_net, toy_client, *overrides):
    trainer, client = toy_trainer(toy_net(), "fedntd", *overrides), toy_client(LABELS)
    plain.prepare(trainer, client)
    batch = Batch(plain.images(client.x_train).float(), client.y_train, torch.arange(len(LABELS)))
    return trainer, client, batch


@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_term_by_hand(toy_trainer, toy_net, toy_client, tau):
    """Of two classes left, the received model gives 3 : 1 and the own one 1 : 1, for each image; beta is 2."""
    trainer, client, batch = prepared(toy_trainer, toy_net, toy_client, "scheme.beta=2", f"scheme.tau={tau}")
    client.cache["received_NC"] = tau * math.log(3) * torch.tensor([[5.0, 1, 0], [1, 5, 0], [1, 0, 5]]).repeat(4, 1)
    with torch.no_grad():
        trainer.flat.net.classifier.weight.zero_()
        trainer.flat.net.classifier.bias.copy_(torch.tensor([0.5, 0.5, 0.5]))
    expected = 2 * (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5))
    terms = trainer.scheme.loss(client, batch)
    assert tuple(terms) == trainer.scheme.terms == ("cross_entropy", "not_true")
    assert terms["not_true"].item() == pytest.approx(expected, rel=1e-5)


def test_what_an_image_shows_feels_nothing(toy_trainer, toy_net, toy_client):
    """All images are of class 1: its row of the classifier has no gradient, the others have."""
    trainer, client, batch = prepared(toy_trainer, toy_net, toy_client)
    batch.y_B.fill_(1)
    client.cache["received_NC"] = torch.randn(len(LABELS), 3, generator=torch.Generator().manual_seed(0))
    found = plain.gradient(client.net, trainer.scheme.loss(client, batch)["not_true"])["classifier.weight"]
    assert not found[1].any()
    assert found[0].any()


def test_of_two_classes_one_is_left_and_there_is_nothing_to_learn():
    assert not_true(torch.randn(3, 2), torch.tensor([0, 1, 1])).shape == (3, 1)


@pytest.mark.usefixtures("in_float64")
def test_with_augmentation_the_teacher_sees_the_images_of_the_batch(toy_trainer, toy_net, toy_client):
    """Where the own model is still the received one, in eval mode, there is nothing to learn of any images."""
    trainer, client = toy_trainer(toy_net(batch_norm=False), "fedntd"), toy_client(LABELS)
    trainer.scheme.info = dataclasses.replace(trainer.scheme.info, augments=True)
    plain.prepare(trainer, client)
    trainer.scheme.begin(client)
    assert client.cache == {}
    batch = Batch(torch.randn(12, 3, 2, 2, generator=torch.Generator().manual_seed(0)), client.y_train, client.y_train)
    assert trainer.scheme.loss(client, batch)["not_true"].item() == pytest.approx(0, abs=1e-12)
    trainer.flat.values_V.mul_(1.5)
    assert trainer.scheme.loss(client, batch)["not_true"].item() > 1e-6
