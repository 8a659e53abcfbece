"""FedProx: (mu / 2) ||w - w_received||^2, once, over what is trained; against autograd and a plain loop in float64."""

from __future__ import annotations

import numpy as np
import plain
import pytest
import torch

from hkd_hpc.client import Batch
from hkd_hpc.schemes import proximal
from hkd_hpc.schemes.base import Scheme
from hkd_hpc.schemes.fedprox import FedProx, FedProxSettings
from hkd_hpc.training import ClientRound

pytestmark = pytest.mark.kernels

LABELS = [0, 1, 2] * 4


def whole_batch(client) -> Batch:
    return Batch(plain.images(client.x_train).float(), client.y_train, torch.arange(len(client.y_train)))


def moved(toy_trainer, toy_net, toy_client, *overrides):
    """(trainer, client) whose weights AND BatchNorm statistics have left the received ones."""
    trainer, client = toy_trainer(toy_net(), "fedprox", *overrides), toy_client(LABELS)
    plain.prepare(trainer, client)
    with torch.no_grad():
        for parameter in trainer.flat.net.parameters():
            parameter.view(-1).add_(torch.linspace(-0.5, 0.5, parameter.numel()))
    for buffer in (trainer.flat.net.extractor[2].running_mean, trainer.flat.net.extractor[2].running_var):
        buffer.add_(100.0)
    return trainer, client


def test_default_is_the_papers():
    assert FedProxSettings().mu == 0.5


def test_penalty_by_hand(toy_trainer, toy_net, toy_client):
    """Five weights moved by 1, 2, 2, 4, 10: (0.4 / 2) (1 + 4 + 4 + 16 + 100) = 25."""
    trainer, client = toy_trainer(toy_net(), "fedprox", "scheme.mu=0.4"), toy_client(LABELS)
    plain.prepare(trainer, client)
    with torch.no_grad():
        trainer.flat.net.classifier.weight.view(-1)[:5] += torch.tensor([1.0, -2.0, 2.0, 4.0, -10.0])
    assert trainer.scheme.loss(client, whole_batch(client))["proximal"].item() == pytest.approx(25.0, rel=1e-5)


@pytest.mark.parametrize("chunk", [7, 1 << 18])
def test_penalty_is_over_parameters_only(toy_trainer, toy_net, toy_client, monkeypatch, chunk):
    monkeypatch.setattr(proximal, "CHUNK", chunk)
    trainer, client = moved(toy_trainer, toy_net, toy_client, "scheme.mu=0.3")
    names = [name for name, _ in trainer.flat.net.named_parameters()]
    now = trainer.flat.arrays(trainer.flat.values_V, trainer.flat.counters)
    before = trainer.flat.arrays(client.received_V, trainer.flat.counters)
    squares = sum(((now[name].astype("f8") - before[name].astype("f8")) ** 2).sum() for name in names)
    terms = trainer.scheme.loss(client, whole_batch(client))
    assert tuple(terms) == trainer.scheme.terms == ("cross_entropy", "proximal")
    assert terms["proximal"].item() == pytest.approx(0.15 * squares, rel=1e-5)
    assert 0.15 * squares < 100


@pytest.mark.parametrize("chunk", [7, 1 << 18])
def test_gradient_is_that_of_the_penalty_once(toy_trainer, toy_net, toy_client, monkeypatch, chunk):
    monkeypatch.setattr(proximal, "CHUNK", chunk)
    trainer, client = moved(toy_trainer, toy_net, toy_client, "scheme.mu=0.3")
    reference, before = plain.double(trainer.flat.net), trainer.flat.arrays(client.received_V, trainer.flat.counters)
    trainer.flat.grad_P.zero_()
    sum(trainer.scheme.loss(client, whole_batch(client)).values()).backward()
    trainer.scheme.adjust_gradient(client)
    _, logits = reference(plain.images(client.x_train))
    loss = torch.nn.functional.cross_entropy(logits, client.y_train)
    for name, parameter in reference.named_parameters():
        loss = loss + 0.15 * (parameter - torch.from_numpy(before[name]).double()).square().sum()
    for name, expected in plain.gradient(reference, loss).items():
        own = dict(trainer.flat.net.named_parameters())[name].grad
        np.testing.assert_allclose(own.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


class Plain(FedProx):
    """A loss without the term: it sets no gradient, so somebody must zero it."""

    terms = ("cross_entropy",)

    def loss(self, client, batch):
        return Scheme.loss(self, client, batch)


def test_what_is_derived_from_it_finds_its_gradient_zeroed(toy_trainer, toy_net, toy_client):
    client, ends = toy_client([0, 1, 2] * 5), []
    for scheme_class in (Scheme, Plain):
        trainer = toy_trainer(toy_net(), "fedprox", "train.epochs=3")  # 15 images: steps after the first would show it
        trainer.scheme = scheme_class(trainer.scheme.settings, trainer.scheme.info)
        trainer.run(ClientRound(client, trainer.flat.values_V.clone(), [torch.tensor(0)], {}, 1))
        ends.append(trainer.flat.values_V.clone())
    assert torch.equal(*ends)


def test_first_step_feels_nothing(toy_trainer, toy_net, toy_client):
    """At the received weights penalty and gradient are 0: one epoch of one batch is FedAvg's, to the bit."""
    weights = []
    for scheme, more in (("fedavg", ()), ("fedprox", ("scheme.mu=100",))):
        trainer = toy_trainer(toy_net(), scheme, "train.epochs=1", "train.batch_size=16", *more)
        result = trainer.run(ClientRound(toy_client(LABELS), trainer.flat.values_V.clone(), [torch.tensor(0)], {}, 1))
        weights.append(trainer.flat.values_V.clone())
    assert torch.equal(*weights)
    assert result.loss_by_term[1] == 0.0


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("mu", [0.5, 20.0])
def test_local_training_equals_a_plain_loop(toy_trainer, toy_net, toy_client, mu):
    trainer, client = toy_trainer(toy_net(), "fedprox", f"scheme.mu={mu}", "train.epochs=3"), toy_client(LABELS, id=2)
    reference = plain.double(trainer.flat.net)
    start = [parameter.detach().clone() for parameter in reference.parameters()]

    def penalty(net, *_):
        return mu / 2 * sum(((p - p0) ** 2).sum() for p, p0 in zip(net.parameters(), start))

    plain.train(reference, client, penalty, epochs=3, batch=8)
    result = trainer.run(ClientRound(client, trainer.flat.values_V.clone(), [torch.tensor(0)], {}, 1))
    plain.assert_same_model(trainer.flat.net, reference)
    assert result.loss_by_term[1] > 0


def test_a_large_mu_keeps_the_weights_near(toy_trainer, toy_net, toy_client):
    def drift(mu):
        trainer = toy_trainer(toy_net(), "fedprox", f"scheme.mu={mu}", "train.epochs=40", "train.lr=0.01")
        client = toy_client(LABELS)
        start_V = trainer.flat.values_V.clone()
        trainer.run(ClientRound(client, start_V, [torch.tensor(0)], {}, 1))
        return float((trainer.flat.parameters_P - start_V[: len(trainer.flat.parameters_P)]).norm())

    assert drift(1000) < drift(1) < drift(0)
