"""MOON: the contrastive term by hand, whose features it compares, and which previous model a client keeps."""

from __future__ import annotations

import math

import numpy as np
import plain
import pytest
import torch
from federation import Federation, same_model, save_images
from torch import nn
from torch.nn import functional as F

from hkd_hpc.client import Batch
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.networks import Net
from hkd_hpc.schemes.moon import MoonSettings
from hkd_hpc.training import ClientRound

pytestmark = pytest.mark.kernels

LABELS = [0, 1, 2] * 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "data.npz")


def identity_net() -> Net:
    """x (B,3,1,1) -> feature = x -> logits = x."""
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(3, 3)), 3, 3)
    for layer in (net.extractor[1], net.classifier):
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    return net


def test_defaults_are_the_papers():
    assert (MoonSettings().mu, MoonSettings().tau) == (1.0, 0.5)


def prepared(toy_trainer, toy_client, *overrides):
    """Cosines with (global, previous) features: (1, 0), (.6, .8), (0, -1); the features in another order and length."""
    trainer, client = toy_trainer(identity_net(), "moon", *overrides), toy_client([0, 1, 2])
    plain.prepare(trainer, client)
    client.cache = {
        "contrast": True,
        "global_ND": torch.tensor([[0.0, 9, 0], [3, 0, 0], [5, 0, 0]]),
        "previous_ND": torch.tensor([[0.0, -2, 0], [0, 4, 0], [0, 7, 0]]),
    }
    x_BD = torch.tensor([[2.0, 0, 0], [3, 4, 0], [0, 6, 0]])
    client.cache["global_ND"][0] = torch.tensor([1.0, 0, 0])  # image 0 is the third of the batch
    return trainer.scheme, client, Batch(x_BD.reshape(3, 3, 1, 1), torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]))


def test_term_by_hand(toy_trainer, toy_client):
    """-log of e^{s_g / tau} / (e^{s_g / tau} + e^{s_p / tau}), written out for tau = .5."""
    scheme, client, batch = prepared(toy_trainer, toy_client, "scheme.mu=3")
    e = math.exp
    expected = -(math.log(e(2) / (e(2) + 1)) + math.log(e(1.2) / (e(1.2) + e(1.6))) + math.log(1 / (1 + e(-2)))) / 3
    terms = scheme.loss(client, batch)
    assert tuple(terms) == scheme.terms == ("cross_entropy", "contrastive")
    assert terms["contrastive"].item() == pytest.approx(3 * expected, rel=1e-6)
    assert expected == pytest.approx(0.3889571, abs=1e-6)


def test_temperature(toy_trainer, toy_client):
    scheme, client, batch = prepared(toy_trainer, toy_client, "scheme.tau=0.1")
    expected = np.mean([np.log1p(np.exp((p - g) / 0.1)) for g, p in ((1, 0), (0.6, 0.8), (0, -1))])
    assert scheme.loss(client, batch)["contrastive"].item() == pytest.approx(expected, rel=1e-5)


def test_gradient_pulls_towards_the_global_features_and_reaches_no_classifier(toy_trainer, toy_client):
    scheme, client, batch = prepared(toy_trainer, toy_client)
    found = plain.gradient(client.net, scheme.loss(client, batch)["contrastive"])
    assert not found["classifier.weight"].any()
    assert not found["classifier.bias"].any()
    before = scheme.loss(client, batch)["contrastive"].item()
    with torch.no_grad():
        for name, parameter in client.net.named_parameters():
            parameter -= 0.01 * found[name]
    assert scheme.loss(client, batch)["contrastive"].item() < before
    weight = client.net.extractor[1].weight

    def value(step):
        with torch.no_grad():
            weight[0, 1] += step
            found = scheme.loss(client, batch)["contrastive"].item()
            weight[0, 1] -= step
        return found

    expected = plain.gradient(client.net, scheme.loss(client, batch)["contrastive"])["extractor.1.weight"][0, 1]
    assert (value(1e-2) - value(-1e-2)) / 2e-2 == pytest.approx(expected.item(), rel=1e-2)


def test_a_zero_feature_has_a_finite_gradient(toy_trainer, toy_client):
    scheme, client, batch = prepared(toy_trainer, toy_client)
    batch.x_BCHW.zero_()
    client.cache["previous_ND"][1] = 0
    terms = scheme.loss(client, batch)
    assert all(torch.isfinite(g).all() for g in plain.gradient(client.net, sum(terms.values())).values())


def test_round_one_has_no_previous_model_and_is_fedavg(data):
    moon, fedavg = Federation(data, "moon"), Federation(data, "fedavg")
    first = moon.play(1)[0]
    assert same_model(first, fedavg.play(1)[0])
    assert first.reports["loss"][:, 1].tolist() == [0.0, 0.0, 0.0]
    assert (moon.play(1)[0].reports["loss"][:, 1] > 0).all()


def test_previous_model_is_the_clients_own_however_long_it_rests(data):
    """2 of 4 clients a round: a client that was away still contrasts with what it trained last, not with the global."""
    run = Federation(data, "moon", "fed.clients=4", "fed.participation=0.5")
    trained, used, original = {}, [], run.part.trainer.run

    def watch(given):
        client = given.client
        held = client.state.get("previous")
        assert (held is None) == (client.id not in trained)
        if held is not None:
            assert torch.equal(held, trained[client.id][1])
            used.append(run.part.done + 1 - trained[client.id][0])
        result = original(given)
        trained[client.id] = (run.part.done + 1, run.flat.values_V.clone())
        assert (result.loss_by_term[1] > 0) == (held is not None)
        return result

    run.part.trainer.run = watch
    run.play(8)
    assert max(used) > 1
    assert len(trained) == 4


def test_a_model_that_diverged_is_not_kept(toy_trainer, toy_net, toy_client):
    trainer, client = toy_trainer(toy_net(), "moon"), toy_client(LABELS)
    trainer.scheme.report(plain.prepare(trainer, client))
    kept = client.state["previous"].clone()
    trainer.flat.values_V[3] = float("nan")
    assert trainer.scheme.report(client) == {}
    assert torch.equal(client.state["previous"], kept)


def test_begin_uses_both_models_in_eval_mode_and_leaves_no_trace(toy_trainer, toy_net, toy_client):
    trainer, client = toy_trainer(toy_net(), "moon"), toy_client(LABELS)
    previous = toy_trainer(toy_net(seed=1), "moon").flat
    previous.net.extractor[2].running_mean.fill_(0.7)  # its own statistics count too
    client.state["previous"] = previous.values_V.clone()
    plain.prepare(trainer, client)
    counters = [c.clone() for c in trainer.flat.counters]
    trainer.scheme.begin(client)
    assert torch.equal(trainer.flat.values_V, client.received_V)
    assert trainer.flat.net.training
    assert all(map(torch.equal, counters, trainer.flat.counters))
    x = plain.images(client.x_train)
    for name, net in (("global_ND", trainer.flat.net), ("previous_ND", previous.net)):
        expected = plain.double(net).eval()(x)[0].detach()
        np.testing.assert_allclose(client.cache[name].numpy(), expected.numpy(), atol=1e-5)
        assert not client.cache[name].requires_grad
    assert not torch.allclose(client.cache["global_ND"], client.cache["previous_ND"])


@pytest.mark.usefixtures("in_float64")
def test_local_training_equals_a_plain_loop(toy_trainer, toy_net, toy_client):
    trainer, client = toy_trainer(toy_net(), "moon", "scheme.mu=2", "train.epochs=3"), toy_client(LABELS, id=2)
    previous = toy_trainer(toy_net(seed=1), "moon").flat
    client.state["previous"] = previous.values_V.clone()
    reference = plain.double(trainer.flat.net)
    frozen, x = [plain.double(net).eval() for net in (trainer.flat.net, previous.net)], plain.images(client.x_train)

    def contrast(net, feature, logits, labels, index):
        with torch.no_grad():
            anchors = [each(x[index])[0] for each in frozen]
        cosines = [(feature * a).sum(1) / feature.norm(dim=1) / a.norm(dim=1) for a in anchors]
        return 2 * F.cross_entropy(torch.stack(cosines, 1) / 0.5, torch.zeros(len(index), dtype=torch.int64))

    plain.train(reference, client, contrast, epochs=3, batch=8, round=2)
    trainer.run(ClientRound(client, trainer.flat.values_V.clone(), [torch.tensor(0)], {}, 2))
    plain.assert_same_model(trainer.flat.net, reference)
    assert torch.equal(client.state["previous"], trainer.flat.values_V)


def test_augmented_images_are_contrasted_as_the_model_sees_them(toy_trainer, toy_net, toy_client):
    """z of the received and of the previous model, in eval mode, of the batch itself."""
    received, previous = toy_net(seed=1), toy_net(seed=2)
    trainer, client = toy_trainer(toy_net(seed=1), "moon", "train.augment=flip", "train.epochs=1"), toy_client(LABELS)
    client.state["previous"] = FlatModel(previous).values_V.clone()
    seen, original = [], trainer.scheme._contrast

    def contrast(client, batch, feature_BD):
        term = original(client, batch, feature_BD)
        with torch.no_grad():
            pull_B, push_B = (
                F.cosine_similarity(feature_BD, net.eval()(batch.x_BCHW)[0]) for net in (received, previous)
            )
        seen.append((term.item(), F.softplus((push_B - pull_B) / 0.5).mean().item()))
        return term

    trainer.scheme._contrast = contrast
    counters = [counter.clone() for counter in trainer.flat.counters]
    trainer.run(ClientRound(client, trainer.flat.values_V.clone(), counters, {}, 2))
    assert len(seen) == 2
    assert [own for own, _ in seen] == pytest.approx([expected for _, expected in seen], rel=1e-5)
    assert trainer.flat.net.training
