"""FedProx: (mu / 2) ||w - w_received||^2, once, over what is trained; against autograd and a plain loop in float64."""

from __future__ import annotations

import numpy as np
import plain
import pytest
import torch

from hkd_hpc.client import Batch
from hkd_hpc.schemes import fedprox
from hkd_hpc.schemes.base import Scheme
from hkd_hpc.schemes.fedprox import FedProx, FedProxSettings

LABELS = [0, 1, 2] * 4


def whole_batch(client) -> Batch:
    return Batch(plain.images(client.x_train).float(), client.y_train, torch.arange(len(client.y_train)))


def moved(toy_bench, toy_net, toy_client, *overrides):
    """(bench, client) whose weights AND BatchNorm statistics have left the received ones."""
    bench, client = toy_bench(toy_net(), "fedprox", *overrides), toy_client(LABELS)
    plain.prepare(bench, client)
    with torch.no_grad():
        for parameter in bench.flat.net.parameters():
            parameter.view(-1).add_(torch.linspace(-0.5, 0.5, parameter.numel()))
    for buffer in (bench.flat.net.extractor[2].running_mean, bench.flat.net.extractor[2].running_var):
        buffer.add_(100.0)
    return bench, client


def test_default_is_the_papers():
    assert FedProxSettings().mu == 0.5


def test_penalty_by_hand(toy_bench, toy_net, toy_client):
    """Five weights moved by 1, 2, 2, 4, 10: (0.4 / 2) (1 + 4 + 4 + 16 + 100) = 25."""
    bench, client = toy_bench(toy_net(), "fedprox", "scheme.mu=0.4"), toy_client(LABELS)
    plain.prepare(bench, client)
    with torch.no_grad():
        bench.flat.net.classifier.weight.view(-1)[:5] += torch.tensor([1.0, -2.0, 2.0, 4.0, -10.0])
    assert bench.scheme.loss(client, whole_batch(client))["proximal"].item() == pytest.approx(25.0, rel=1e-5)


@pytest.mark.parametrize("chunk", [7, 1 << 18])
def test_penalty_is_over_parameters_only(toy_bench, toy_net, toy_client, monkeypatch, chunk):
    monkeypatch.setattr(fedprox, "CHUNK", chunk)
    bench, client = moved(toy_bench, toy_net, toy_client, "scheme.mu=0.3")
    names = [name for name, _ in bench.flat.net.named_parameters()]
    now = bench.flat.arrays(bench.flat.values_V, bench.flat.counters)
    before = bench.flat.arrays(client.received_V, bench.flat.counters)
    squares = sum(((now[name].astype("f8") - before[name].astype("f8")) ** 2).sum() for name in names)
    terms = bench.scheme.loss(client, whole_batch(client))
    assert tuple(terms) == bench.scheme.terms == ("cross_entropy", "proximal")
    assert terms["proximal"].item() == pytest.approx(0.15 * squares, rel=1e-5)
    assert 0.15 * squares < 100


@pytest.mark.parametrize("chunk", [7, 1 << 18])
def test_gradient_is_that_of_the_penalty_once(toy_bench, toy_net, toy_client, monkeypatch, chunk):
    monkeypatch.setattr(fedprox, "CHUNK", chunk)
    bench, client = moved(toy_bench, toy_net, toy_client, "scheme.mu=0.3")
    reference, before = plain.double(bench.flat.net), bench.flat.arrays(client.received_V, bench.flat.counters)
    bench.flat.grad_P.zero_()
    sum(bench.scheme.loss(client, whole_batch(client)).values()).backward()
    bench.scheme.adjust_gradient(client)
    _, logits = reference(plain.images(client.x_train))
    loss = torch.nn.functional.cross_entropy(logits, client.y_train)
    for name, parameter in reference.named_parameters():
        loss = loss + 0.15 * (parameter - torch.from_numpy(before[name]).double()).square().sum()
    for name, expected in plain.gradient(reference, loss).items():
        own = dict(bench.flat.net.named_parameters())[name].grad
        np.testing.assert_allclose(own.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


class Plain(FedProx):
    """A loss without the term: it sets no gradient, so somebody must zero it."""

    terms = ("cross_entropy",)

    def loss(self, client, batch):
        return Scheme.loss(self, client, batch)


def test_what_is_derived_from_it_finds_its_gradient_zeroed(toy_bench, toy_net, toy_client):
    client, ends = toy_client([0, 1, 2] * 5), []
    for scheme_class in (Scheme, Plain):
        bench = toy_bench(toy_net(), "fedprox", "train.epochs=3")  # 15 images: steps after the first would show it
        bench.scheme = scheme_class(bench.scheme.settings, bench.scheme.facts)
        bench.run(client, bench.flat.values_V.clone(), [torch.tensor(0)], {}, 1)
        ends.append(bench.flat.values_V.clone())
    assert torch.equal(*ends)


def test_first_step_feels_nothing(toy_bench, toy_net, toy_client):
    """At the received weights penalty and gradient are 0: one epoch of one batch is FedAvg's, to the bit."""
    weights = []
    for scheme, more in (("fedavg", ()), ("fedprox", ("scheme.mu=100",))):
        bench = toy_bench(toy_net(), scheme, "train.epochs=1", "train.batch_size=16", *more)
        result = bench.run(toy_client(LABELS), bench.flat.values_V.clone(), [torch.tensor(0)], {}, 1)
        weights.append(bench.flat.values_V.clone())
    assert torch.equal(*weights)
    assert result.loss_by_term[1] == 0.0


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("mu", [0.5, 20.0])
def test_local_training_equals_a_plain_loop(toy_bench, toy_net, toy_client, mu):
    bench, client = toy_bench(toy_net(), "fedprox", f"scheme.mu={mu}", "train.epochs=3"), toy_client(LABELS, id=2)
    reference = plain.double(bench.flat.net)
    start = [parameter.detach().clone() for parameter in reference.parameters()]

    def penalty(net, *_):
        return mu / 2 * sum(((p - p0) ** 2).sum() for p, p0 in zip(net.parameters(), start))

    plain.train(reference, client, penalty, epochs=3, batch=8)
    result = bench.run(client, bench.flat.values_V.clone(), [torch.tensor(0)], {}, 1)
    plain.assert_same_model(bench.flat.net, reference)
    assert result.loss_by_term[1] > 0


def test_a_large_mu_keeps_the_weights_near(toy_bench, toy_net, toy_client):
    def drift(mu):
        bench = toy_bench(toy_net(), "fedprox", f"scheme.mu={mu}", "train.epochs=40", "train.lr=0.01")
        client = toy_client(LABELS)
        start_V = bench.flat.values_V.clone()
        bench.run(client, start_V, [torch.tensor(0)], {}, 1)
        return float((bench.flat.parameters_P - start_V[: len(bench.flat.parameters_P)]).norm())

    assert drift(1000) < drift(1) < drift(0)
