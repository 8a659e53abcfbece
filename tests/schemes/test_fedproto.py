"""FedProto: prototypes weighted by counts, and an elementwise mean square that a missing class does not shrink."""

from __future__ import annotations

import dataclasses

import numpy as np
import plain
import pytest
import torch
from federation import Federation, same_model, save_images
from torch import nn

from hkd_hpc.client import Batch
from hkd_hpc.models.networks import Net
from hkd_hpc.schemes.base import SchemeServer
from hkd_hpc.schemes.fedproto import FedProtoSettings
from hkd_hpc.training import ClientRound

pytestmark = pytest.mark.kernels

LABELS = [0, 1, 2] * 4
PROTOTYPES = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [7.0, 7.0, 7.0]])
TWO_OF_THREE = torch.tensor([3.0, 5.0, 0.0])


def identity_net() -> Net:
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(3, 3)), 3, 3)
    for layer in (net.extractor[1], net.classifier):
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    return net


def prepared(toy_trainer, toy_client, count_C=TWO_OF_THREE, *overrides):
    trainer, client = toy_trainer(identity_net(), "fedproto", "scheme.lam=0.3", *overrides), toy_client(LABELS)
    plain.prepare(trainer, client, {"count_C": count_C, "feature_CD": PROTOTYPES.clone()})
    trainer.scheme.begin(client)
    return trainer.scheme, client


X = torch.tensor([[4.0, 4, 0], [0, 2, 2], [9, 9, 9], [1, 0, 1]])
FOUR = Batch(X.reshape(4, 3, 1, 1), torch.tensor([0, 1, 2, 0]), torch.arange(4))


def test_defaults_are_the_papers():
    assert dataclasses.asdict(FedProtoSettings()) == {
        "name": "fedproto",
        "lam": 0.05,
        "weights": "average",
        "aggregation": "count",
    }


@pytest.mark.parametrize("weights, shares", [("average", True), ("none", False)])
def test_whether_the_weights_are_exchanged(toy_trainer, toy_net, weights, shares):
    assert toy_trainer(toy_net(), "fedproto", f"scheme.weights={weights}").scheme.shares_weights is shares


def test_term_by_hand(toy_trainer, toy_client):
    """Squares 9 + 16 = 25, 4, none (class 2 has no prototype), 1; over B D = 4 x 3 all the same: .3 * 30 / 12."""
    scheme, client = prepared(toy_trainer, toy_client)
    terms = scheme.loss(client, FOUR)
    assert tuple(terms) == scheme.terms == ("cross_entropy", "prototype")
    assert terms["prototype"].item() == pytest.approx(0.75, rel=1e-6)


def test_with_all_classes_it_is_torchs_mean_square_error(toy_trainer, toy_client):
    scheme, client = prepared(toy_trainer, toy_client, torch.ones(3))
    expected = nn.functional.mse_loss(FOUR.x_BCHW.reshape(4, 3), PROTOTYPES[FOUR.y_B])
    assert scheme.loss(client, FOUR)["prototype"].item() == pytest.approx(0.3 * expected.item(), rel=1e-6)


def test_gradient_reaches_the_extractor_alone_and_not_from_missing_classes(toy_trainer, toy_client):
    """d / d bias = .3 * 2 / 12 * sum of (3,4,0), (0,0,2), (0,0,1)."""
    scheme, client = prepared(toy_trainer, toy_client)
    found = plain.gradient(client.net, scheme.loss(client, FOUR)["prototype"])
    assert not found["classifier.weight"].any()
    assert not found["classifier.bias"].any()
    np.testing.assert_allclose(found["extractor.1.bias"].numpy(), [0.15, 0.2, 0.15], rtol=1e-5)


def test_round_one_is_unassisted(toy_trainer, toy_client):
    scheme, client = prepared(toy_trainer, toy_client, torch.zeros(3))
    term = scheme.loss(client, FOUR)["prototype"]
    assert term.item() == 0.0
    assert not term.requires_grad


def test_report_is_the_mean_feature_in_eval_mode(toy_trainer, toy_net, toy_client):
    trainer, client = toy_trainer(toy_net(), "fedproto"), toy_client([0, 0, 0, 2, 2])
    trainer.flat.net.extractor[2].running_mean.fill_(0.3)
    plain.prepare(trainer, client)
    report = trainer.scheme.report(client)
    with torch.no_grad():
        feature = plain.double(trainer.flat.net).eval()(plain.images(client.x_train))[0].numpy()
    expected = np.stack([feature[:3].mean(0), np.zeros(4), feature[3:].mean(0)])
    assert report["count_C"].tolist() == [3.0, 0.0, 2.0]
    np.testing.assert_allclose(report["feature_CD"].numpy(), expected, atol=1e-6)


def test_the_server_weights_by_counts(toy_trainer, toy_net):
    """Class 0: counts 1 and 3, .25 * 8 + .75 * 4; class 1: the second client alone; class 2: nobody."""
    scheme = toy_trainer(toy_net(), "fedproto").scheme
    feature_MCD = torch.zeros(2, 3, 4)
    feature_MCD[0, 0], feature_MCD[1, 0], feature_MCD[1, 1] = 8.0, 4.0, 6.0
    reports = {"count_C": torch.tensor([[1.0, 0, 0], [3, 2, 0]]), "feature_CD": feature_MCD}
    message = scheme.combine(SchemeServer(None, 0), reports)
    assert message["count_C"].tolist() == [4.0, 2.0, 0.0]
    assert message["feature_CD"].tolist() == [[5.0] * 4, [6.0] * 4, [0.0] * 4]


def test_without_weights_and_without_its_term_every_client_is_on_its_own(tmp_path):
    """weights=none, lam=0: the models of the control `local`, bit for bit; with lam they are not."""
    data, none = save_images(tmp_path / "data.npz"), "scheme.weights=none"
    local, alone, proto = (
        Federation(data, *more)
        for more in (("local",), ("fedproto", none, "scheme.lam=0"), ("fedproto", none, "scheme.lam=1"))
    )
    rounds = [run.play(3) for run in (local, alone, proto)]
    assert all(map(same_model, rounds[0], rounds[1]))
    assert same_model(rounds[0][0], rounds[2][0])
    assert not same_model(rounds[0][1], rounds[2][1])


@pytest.mark.parametrize("rule, expected", [("uniform", [6.0, 6.0, 0.0]), ("last", [4.0, 6.0, 0.0])])
def test_other_means_of_the_prototypes(toy_trainer, toy_net, rule, expected):
    scheme, server = toy_trainer(toy_net(), "fedproto", f"scheme.aggregation={rule}").scheme, SchemeServer(None, 0)
    feature_MCD = torch.zeros(2, 3, 4)
    feature_MCD[0, 0], feature_MCD[1, 0], feature_MCD[1, 1] = 8.0, 4.0, 6.0
    reports = {"count_C": torch.tensor([[1.0, 0, 0], [3, 2, 0]]), "feature_CD": feature_MCD}
    message = scheme.combine(server, reports)
    assert message["feature_CD"][:, 0].tolist() == expected
    assert message["count_C"].tolist() == [4.0, 2.0, 0.0]


@pytest.mark.usefixtures("in_float64")
def test_local_training_equals_a_plain_loop(toy_trainer, toy_net, toy_client):
    trainer, client = toy_trainer(toy_net(), "fedproto", "scheme.lam=3", "train.epochs=3"), toy_client(LABELS, id=2)
    prototype_CD = torch.arange(12.0).reshape(3, 4) / 5
    message = {"count_C": torch.tensor([1.0, 0.0, 4.0]), "feature_CD": prototype_CD}

    def distance(net, feature, logits, labels, index):
        known = [(k, y) for k, y in enumerate(labels.tolist()) if y != 1]
        squares = [((feature[k] - prototype_CD[y].double()) ** 2).sum() for k, y in known]
        return 3 * sum(squares) / (len(labels) * 4)

    reference = plain.train(plain.double(trainer.flat.net), client, distance, epochs=3, batch=8, round=2)
    trainer.run(ClientRound(client, trainer.flat.values_V.clone(), [torch.tensor(0)], message, 2))
    plain.assert_same_model(trainer.flat.net, reference)
