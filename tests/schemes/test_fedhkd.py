"""FedHKD by hand: its three terms and their gradients, the report, the mean on the server, and when it is FedAvg."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from hkd_hpc import schemes
from hkd_hpc.client import Batch
from hkd_hpc.common import rng
from hkd_hpc.common.errors import UsageError
from hkd_hpc.models.images import normalise
from hkd_hpc.models.networks import Net
from hkd_hpc.schemes.base import RunInfo, Scheme, SchemeServer
from hkd_hpc.schemes.fedhkd import FedHKD, FedHKDSettings, FedHKDStar, FedHKDStarSettings
from hkd_hpc.schemes.knowledge import SOFT_DISTANCES
from hkd_hpc.training import ClientRound

pytestmark = pytest.mark.kernels

LATENT = CLASSES = 3
H = torch.tensor([[0.0, 0.0, 0.0], [math.log(2) / 2, 0.0, 0.0], [0.0, 0.0, 0.0]])
Q = torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.5, 0.25], [0.0, 0.0, 0.0]])
COUNT = torch.tensor([30.0, 50.0, 0.0])  # nobody shared class 2
SERVER = SchemeServer(None, seed=0)  # no rule but "last" writes into its state


def identity_net() -> Net:
    """x (B,3,1,1) -> feature = x -> logits = x, so that everything below can be computed by hand."""
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(3, 3)), 3, 3)
    for layer in (net.extractor[1], net.classifier):
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    return net


def prepared(toy_trainer, toy_client, *overrides, message=None, net=None):
    """(scheme, client) after `begin`, with the knowledge above."""
    trainer = toy_trainer(net or identity_net(), "fedhkd", *overrides)
    client = toy_client([0, 1, 2, 0])
    client.net, client.flat = trainer.flat.net, trainer.flat
    client.message = message or {"count_C": COUNT, "feature_CD": H, "soft_CC": Q}
    trainer.scheme.begin(client)
    return trainer.scheme, client


def batch(features, labels) -> Batch:
    x_BCHW = torch.tensor(features).reshape(-1, 3, 1, 1)
    return Batch(x_BCHW, torch.tensor(labels), torch.arange(len(labels)))


FOUR = batch([[3.0, 4.0, 0.0], [math.log(2) / 2, 0.0, 2.0], [9.0, 9.0, 9.0], [0.0, 0.0, 0.0]], [0, 1, 2, 0])


def test_three_terms_by_hand(toy_trainer, toy_client):
    """Term 2: softmax(2 H) is (1,1,1)/3 and (2,1,1)/4; distances sqrt(6)/3 and sqrt(1/8); mean over 2 known classes.
    Term 3: distances 5, 2, none (class 2 is unknown), 0; mean over all 4 images."""
    scheme, client = prepared(toy_trainer, toy_client, "scheme.lam=0.2", "scheme.gamma=0.3")
    terms = scheme.loss(client, FOUR)
    features = FOUR.x_BCHW.reshape(4, 3).double().numpy()
    log_softmax = features - np.log(np.exp(features).sum(1, keepdims=True))
    assert tuple(terms) == scheme.terms == ("cross_entropy", "soft", "feature")
    assert terms["cross_entropy"].item() == pytest.approx(-log_softmax[range(4), [0, 1, 2, 0]].mean(), rel=1e-6)
    assert terms["soft"].item() == pytest.approx(0.2 * (math.sqrt(6) / 3 + math.sqrt(1 / 8)) / 2, rel=1e-6)
    assert terms["feature"].item() == pytest.approx(0.3 * 7 / 4, rel=1e-6)


def test_defaults_are_the_papers():
    star = {
        "name": "fedhkd_star",
        "lam": 0.05,
        "temperature": 0.5,
        "nu": 0.25,
        "nu_rule": "absolute",
        "min_count": 1,
        "zeta": 3.0,
        "sigma": 7.0,
        "noise": "paper",
        "clip": "off",
        "aggregation": "count",
        "weights": "average",
        "soft_loss": "paper",
    }
    assert dataclasses.asdict(FedHKDStarSettings()) == star
    assert dataclasses.asdict(FedHKDSettings()) == star | {"name": "fedhkd", "gamma": 0.05, "feature_loss": "paper"}


def test_temperature_divides_the_logits(toy_trainer, toy_client):
    """T = 1: softmax(H1) = (sqrt 2, 1, 1) / (2 + sqrt 2)."""
    scheme, client = prepared(toy_trainer, toy_client, "scheme.lam=1", "scheme.temperature=1")
    p = np.array([math.sqrt(2), 1, 1]) / (2 + math.sqrt(2))
    distances = [math.sqrt(6) / 3, np.linalg.norm(p - [0.25, 0.5, 0.25])]
    assert scheme.loss(client, FOUR)["soft"].item() == pytest.approx(np.mean(distances), rel=1e-6)


@pytest.mark.parametrize(
    "form, soft",
    [
        ("squared", (6 / 9 + 1 / 8) / 2),
        ("mse", (6 / 27 + 1 / 24) / 2),
        ("kl", (math.log(3) + 0.25 * math.log(0.5) + 0.5 * math.log(2)) / 6),
        ("kl_wrong_sign", (1 / 3 + 5 / 16 + math.log(4) / 2 + math.log(2) / 2) / 6),
    ],
)
def test_other_forms_of_the_soft_term(toy_trainer, toy_client, form, soft):
    """Predictions (1,1,1)/3 for Q = (1,0,0), (2,1,1)/4 for Q = (1,2,1)/4; kl: elementwise mean over 2 x 3."""
    scheme, client = prepared(toy_trainer, toy_client, "scheme.lam=0.2", f"scheme.soft_loss={form}")
    assert scheme.loss(client, FOUR)["soft"].item() == pytest.approx(0.2 * soft, rel=1e-5)


@pytest.mark.parametrize("form, feature", [("squared", 29 / 4), ("mse", 29 / 12)])
def test_other_forms_of_the_feature_term(toy_trainer, toy_client, form, feature):
    """Squares 25, 4, none, 0; mse: over B D = 4 x 3, the image without a target included (as the authors' code
    does).
    """
    scheme, client = prepared(toy_trainer, toy_client, "scheme.gamma=0.3", f"scheme.feature_loss={form}")
    assert scheme.loss(client, FOUR)["feature"].item() == pytest.approx(0.3 * feature, rel=1e-6)


def gradients(scheme, client, term: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(of the extractor, of the classifier), each flattened, of one term alone."""
    client.flat.grad_P.zero_()
    scheme.loss(client, FOUR)[term].backward()
    return tuple(
        torch.cat([p.grad.reshape(-1) for p in part.parameters()])
        for part in (client.net.extractor, client.net.classifier)
    )


@pytest.mark.parametrize("form", SOFT_DISTANCES)
def test_soft_term_reaches_the_classifier_alone(toy_trainer, toy_client, form):
    extractor, classifier = gradients(*prepared(toy_trainer, toy_client, f"scheme.soft_loss={form}"), "soft")
    assert torch.count_nonzero(extractor) == 0
    assert torch.count_nonzero(classifier) > 0


def test_feature_term_reaches_the_extractor_alone(toy_trainer, toy_client):
    """Weight gradient: gamma / B sum_k u_k x_k^T with unit vectors u; image 0: (.6,.8,0), image 1: (0,0,1)."""
    extractor, classifier = gradients(*prepared(toy_trainer, toy_client, "scheme.gamma=0.4"), "feature")
    assert torch.count_nonzero(classifier) == 0
    x = FOUR.x_BCHW.reshape(4, 3).double().numpy()
    units = np.array([[0.6, 0.8, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    expected = np.concatenate([(0.1 * units.T @ x).reshape(-1), 0.1 * units.sum(0)])
    np.testing.assert_allclose(extractor.numpy(), expected, atol=1e-6)


def test_knowledge_carries_no_gradient(toy_trainer, toy_client):
    scheme, client = prepared(toy_trainer, toy_client)
    sum(scheme.loss(client, FOUR).values()).backward()
    for tensor in (*client.message.values(), *client.cache.values()):
        assert isinstance(tensor, bool) or (tensor.grad is None and not tensor.requires_grad)


def test_zero_distance_gives_zero_and_a_finite_gradient(toy_trainer, toy_client):
    message = {"count_C": torch.tensor([0.0, 8.0, 0.0]), "feature_CD": H, "soft_CC": torch.softmax(2 * H, dim=1)}
    scheme, client = prepared(toy_trainer, toy_client, message=message)
    same = batch([H[1].tolist(), H[1].tolist()], [1, 1])
    terms = scheme.loss(client, same)
    assert abs(terms["soft"].item()) < 1e-6
    assert terms["feature"].item() == 0.0
    (terms["soft"] + terms["feature"]).backward()
    assert torch.isfinite(client.flat.grad_P).all()


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_huge_logits_give_finite_losses_and_gradients(toy_trainer, toy_client, scale):
    scheme, client = prepared(toy_trainer, toy_client)
    with torch.no_grad():
        client.net.classifier.weight.mul_(scale)
    client.message["feature_CD"][:] = torch.eye(3)
    client.message["soft_CC"][:] = torch.eye(3).flip(0)
    scheme.begin(client)
    terms = scheme.loss(client, FOUR)
    assert all(math.isfinite(value.item()) for value in terms.values())
    assert 0 <= terms["soft"].item() <= 0.05 * math.sqrt(2) + 1e-6  # two points of the simplex
    sum(terms.values()).backward()
    assert torch.isfinite(client.flat.grad_P).all()


@pytest.mark.parametrize("form", SOFT_DISTANCES)
def test_a_small_step_on_the_soft_term_raises_agreement(toy_trainer, toy_client, form):
    """Every form lowers its own value; kl_wrong_sign does so by LOWERING the agreement, as code S did."""
    scheme, client = prepared(toy_trainer, toy_client, f"scheme.soft_loss={form}")

    def agreement_and_distance():
        with torch.no_grad():
            soft_KC = torch.softmax(client.net.classifier(H[:2]) / 0.5, dim=1)
        return float((soft_KC * Q[:2]).sum()), scheme.loss(client, FOUR)["soft"].item()

    before = agreement_and_distance()
    gradients(scheme, client, "soft")
    client.flat.parameters_P.sub_(client.flat.grad_P)
    after = agreement_and_distance()
    sign = -1 if form == "kl_wrong_sign" else 1
    assert sign * (after[0] - before[0]) > 1e-4
    assert after[1] < before[1] - 1e-6


# --- when it is FedAvg


def no_knowledge(classes: int = 3, latent: int = 4) -> dict[str, torch.Tensor]:
    return {
        "count_C": torch.zeros(classes),
        "feature_CD": torch.zeros(classes, latent),
        "soft_CC": torch.zeros(classes, classes),
    }


def some_knowledge() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "count_C": torch.tensor([5.0, 0.0, 9.0]),
        "feature_CD": torch.randn(3, 4, generator=generator),
        "soft_CC": torch.softmax(torch.randn(3, 3, generator=generator), dim=1),
    }


LABELS = [0, 1, 2, 2, 1, 0, 0, 1, 2, 0, 1, 1, 2, 0, 0, 1, 2]  # 17 images: batches of 8 and 9


def trained(toy_trainer, toy_net, client, scheme, message, *overrides, **net) -> torch.Tensor:
    """Weights after one round; the message is copied, so that a scheme that changes it is no advantage."""
    trainer = toy_trainer(toy_net(**net), scheme, *overrides)
    start_V = trainer.flat.values_V.clone()
    message = {name: tensor.clone() for name, tensor in message.items()}
    trainer.run(ClientRound(client, start_V, [c.clone() for c in trainer.flat.counters], message, round=2))
    assert not torch.equal(trainer.flat.values_V, start_V)
    return trainer.flat.values_V.clone()


@pytest.mark.parametrize("scheme", ["fedhkd", "fedhkd_star"])
@pytest.mark.parametrize("batch_norm", [True, False])
def test_without_knowledge_it_is_fedavg_bit_for_bit(toy_trainer, toy_net, toy_client, scheme, batch_norm):
    client = toy_client(LABELS)
    fedavg = trained(toy_trainer, toy_net, client, "fedavg", {}, batch_norm=batch_norm)
    assert torch.equal(trained(toy_trainer, toy_net, client, scheme, no_knowledge(), batch_norm=batch_norm), fedavg)


def test_lam_and_gamma_zero_is_fedavg_bit_for_bit(toy_trainer, toy_net, toy_client):
    client = toy_client(LABELS)
    fedavg = trained(toy_trainer, toy_net, client, "fedavg", {})
    fedhkd = trained(toy_trainer, toy_net, client, "fedhkd", some_knowledge(), "scheme.lam=0", "scheme.gamma=0")
    assert torch.equal(fedhkd, fedavg)


def test_each_term_changes_the_training(toy_trainer, toy_net, toy_client):
    client = toy_client(LABELS)
    results = [
        trained(toy_trainer, toy_net, client, "fedhkd", some_knowledge(), f"scheme.lam={lam}", f"scheme.gamma={gamma}")
        for lam, gamma in ((0, 0), (0.05, 0), (0, 0.05), (0.05, 0.05))
    ]
    assert not any(torch.equal(results[i], results[j]) for i in range(4) for j in range(i))


def test_star_is_fedhkd_with_gamma_zero(toy_trainer, toy_net, toy_client):
    client = toy_client(LABELS)
    star = trained(toy_trainer, toy_net, client, "fedhkd_star", some_knowledge())
    assert torch.equal(star, trained(toy_trainer, toy_net, client, "fedhkd", some_knowledge(), "scheme.gamma=0"))
    assert not torch.equal(star, trained(toy_trainer, toy_net, client, "fedavg", {}))


def test_gamma_of_star_cannot_be_set(toy_trainer, toy_net):
    with pytest.raises(UsageError, match="scheme.gamma: no such setting"):
        toy_trainer(toy_net(), "fedhkd_star", "scheme.gamma=0.05")


def test_a_hundred_balanced_classes_share_nothing_at_a_quarter(toy_trainer, toy_net, toy_client):
    """375 images of 100 classes: the report is empty, so is the message, so the next round is FedAvg's."""
    client = toy_client([i % 100 for i in range(375)], classes=100)
    net = {"classes": 100, "latent": 4}
    trainer = toy_trainer(toy_net(**net), "fedhkd")
    report = trainer.run(
        ClientRound(client, trainer.flat.values_V.clone(), trainer.flat.counters, no_knowledge(100), 1)
    ).report
    message = trainer.scheme.combine(SERVER, {name: torch.stack([tensor] * 2) for name, tensor in report.items()})
    assert not any(tensor.any() for tensor in (*report.values(), *message.values()))
    assert torch.equal(
        trained(toy_trainer, toy_net, client, "fedhkd", message, **net),
        trained(toy_trainer, toy_net, client, "fedavg", {}, **net),
    )


# --- the report


def report_of(toy_trainer, toy_net, client, *overrides, round: int = 1, latent: int = 4) -> dict[str, torch.Tensor]:
    trainer = toy_trainer(toy_net(latent=latent), "fedhkd", *overrides)
    message = no_knowledge(latent=latent)
    return trainer.run(ClientRound(client, trainer.flat.values_V.clone(), trainer.flat.counters, message, round)).report


def test_report_against_a_plain_float64_loop(toy_trainer, toy_net, toy_client):
    """Means per class over ALL training images, by the trained model in eval mode; predictions at T = .5; no noise."""
    trainer = toy_trainer(toy_net(), "fedhkd", "scheme.sigma=0", "scheme.nu=0")
    client = toy_client([0, 0, 2, 2, 2, 0, 2, 2, 2])
    report = trainer.run(
        ClientRound(client, trainer.flat.values_V.clone(), trainer.flat.counters, no_knowledge(), 1)
    ).report
    trainer.flat.net.eval()
    with torch.no_grad():
        feature, logits = trainer.flat.net(normalise(client.x_train))
    soft = np.exp(2 * logits.double().numpy())
    soft /= soft.sum(1, keepdims=True)
    labels = client.y_train.numpy()
    assert report["count_C"].tolist() == [3.0, 0.0, 6.0]
    for j in (0, 2):
        np.testing.assert_allclose(report["feature_CD"][j], feature.double().numpy()[labels == j].mean(0), atol=1e-6)
        np.testing.assert_allclose(report["soft_CC"][j], soft[labels == j].mean(0), atol=1e-6)
        assert report["soft_CC"][j].sum().item() == pytest.approx(1.0, abs=1e-6)
    assert not report["feature_CD"][1].any()
    assert not report["soft_CC"][1].any()


@pytest.mark.parametrize(
    "labels, nu, counts",
    [
        ([0] * 6 + [1] * 2, 0.25, [6.0, 2.0, 0.0]),
        ([0] * 6 + [1], 0.25, [6.0, 0.0, 0.0]),
        ([0] * 6 + [1], 0.0, [6.0, 1.0, 0.0]),
        ([0] * 6 + [1], 1.0, [0.0, 0.0, 0.0]),
        ([2] * 7, 1.0, [0.0, 0.0, 7.0]),
    ],
)
def test_only_large_enough_classes_leave_the_client(toy_trainer, toy_net, toy_client, labels, nu, counts):
    report = report_of(toy_trainer, toy_net, toy_client(labels), f"scheme.nu={nu}")
    assert report["count_C"].tolist() == counts
    for name in ("feature_CD", "soft_CC"):
        assert report[name].any(1).tolist() == [count > 0 for count in counts]


def noise_of(toy_trainer, toy_net, client, round: int = 1) -> np.ndarray:
    """What sigma = 7 adds to the reported features."""
    noisy, clean = (
        report_of(toy_trainer, toy_net, client, "scheme.nu=0", f"scheme.sigma={sigma}", round=round, latent=5000)
        for sigma in (7, 0)
    )
    assert torch.equal(noisy["soft_CC"], clean["soft_CC"])
    assert torch.equal(noisy["count_C"], clean["count_C"])
    return (noisy["feature_CD"].double() - clean["feature_CD"].double()).numpy()


def test_noise_of_the_report(toy_trainer, toy_net, toy_client):
    """42 / N per class and coordinate, independent between classes, clients and rounds, none for absent classes."""
    labels = [0] * 20 + [1] * 40
    noise = noise_of(toy_trainer, toy_net, toy_client(labels))
    other = noise_of(toy_trainer, toy_net, toy_client(labels, id=1))
    later = noise_of(toy_trainer, toy_net, toy_client(labels), round=2)
    np.testing.assert_allclose(noise[:2].std(1), [2.1, 1.05], rtol=0.04)  # standard error 1 %
    assert not noise[2].any()
    drawn = rng.stream(0, "noise", 1, 0).standard_normal((3, 5000))  # a stream of its own
    np.testing.assert_allclose(noise[:2], drawn[:2] * [[2.1], [1.05]], atol=1e-5)
    correlation = np.corrcoef([noise[0], noise[1], other[0], later[0]]) - np.eye(4)
    assert np.abs(correlation).max() < 0.07  # standard error .014


def test_noise_does_not_disturb_training(toy_trainer, toy_net, toy_client):
    results = []
    for sigma in (0, 7):
        trainer, client = toy_trainer(toy_net(), "fedhkd", f"scheme.sigma={sigma}", "scheme.nu=0"), toy_client(LABELS)
        start_V, counters = trainer.flat.values_V.clone(), [c.clone() for c in trainer.flat.counters]
        first = trainer.run(ClientRound(client, start_V, counters, no_knowledge(), 1))
        after_first = trainer.flat.values_V.clone()
        second = trainer.run(ClientRound(client, after_first, counters, no_knowledge(), 2))
        results.append((after_first, trainer.flat.values_V.clone(), first.loss_by_term, second.loss_by_term))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2:] == results[1][2:]


@pytest.mark.parametrize("scheme", ["fedhkd", "fedhkd_star"])
def test_kinds_of_noise_in_the_report(toy_trainer, toy_net, toy_client, scheme):
    """off is sigma = 0; code adds one draw of std 2 to every class that is shared, whatever its count."""

    def feature(*overrides):
        trainer, client = (
            toy_trainer(toy_net(latent=5000), scheme, "scheme.nu=0", *overrides),
            toy_client([0] * 9 + [1] * 3),
        )
        return (
            trainer.run(
                ClientRound(client, trainer.flat.values_V.clone(), trainer.flat.counters, no_knowledge(latent=5000), 1)
            )
            .report["feature_CD"]
            .double()
            .numpy()
        )

    clean = feature("scheme.sigma=0")
    assert np.array_equal(feature("scheme.noise=off"), clean)
    noise = feature("scheme.noise=code", "scheme.sigma=0") - clean
    assert noise[0].std() == pytest.approx(2.0, rel=0.04)
    assert not noise[2].any()
    np.testing.assert_allclose(noise[0], noise[1], atol=1e-5)
    np.testing.assert_allclose(noise[0], 2 * rng.stream(0, "noise", 1, 0).standard_normal((1, 5000))[0], atol=1e-5)


@pytest.mark.parametrize("rule", ["box", "l2"])
def test_features_are_clipped_before_they_are_averaged(toy_trainer, toy_net, toy_client, rule):
    trainer = toy_trainer(
        toy_net(), "fedhkd", "scheme.sigma=0", "scheme.nu=0", f"scheme.clip={rule}", "scheme.zeta=0.1"
    )
    client = toy_client([0, 0, 2, 2, 2, 0])
    report = trainer.run(
        ClientRound(client, trainer.flat.values_V.clone(), trainer.flat.counters, no_knowledge(), 1)
    ).report
    trainer.flat.net.eval()
    with torch.no_grad():
        h = trainer.flat.net(normalise(client.x_train))[0].double().numpy()
    norm = np.linalg.norm(h, axis=1, keepdims=True)
    clipped = np.clip(h, -0.1, 0.1) if rule == "box" else h * np.minimum(1, 0.1 / norm)
    assert (np.abs(h - clipped).max(1) > 1e-3).all()  # every image is clipped
    for j in (0, 2):
        expected = clipped[client.y_train.numpy() == j].mean(0)
        np.testing.assert_allclose(report["feature_CD"][j].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(
    "overrides, counts",
    [
        (("scheme.nu=1", "scheme.nu_rule=relative"), [6.0, 4.0, 0.0]),  # 12 images, 3 classes: 4 or more
        (("scheme.nu=0.5", "scheme.nu_rule=relative"), [6.0, 4.0, 2.0]),
        (("scheme.nu=0", "scheme.min_count=3"), [6.0, 4.0, 0.0]),
        (("scheme.nu=0.25", "scheme.min_count=5"), [6.0, 0.0, 0.0]),
    ],
)
def test_other_rules_of_what_is_shared(toy_trainer, toy_net, toy_client, overrides, counts):
    client = toy_client([0] * 6 + [1] * 4 + [2] * 2)
    assert report_of(toy_trainer, toy_net, client, *overrides)["count_C"].tolist() == counts


def test_the_relative_rule_fills_the_knowledge_of_a_hundred_classes(toy_trainer, toy_net, toy_client):
    client, net = toy_client([i % 100 for i in range(375)], classes=100), {"classes": 100, "latent": 4}
    trainer = toy_trainer(toy_net(**net), "fedhkd", "scheme.nu_rule=relative", "scheme.nu=1")
    report = trainer.run(
        ClientRound(client, trainer.flat.values_V.clone(), trainer.flat.counters, no_knowledge(100), 1)
    ).report
    assert report["count_C"].tolist() == [4.0] * 75 + [0.0] * 25  # 3 images are below 375 / 100


# --- the server, and the traffic

REPORTS = {
    "count_C": torch.tensor([[1.0, 0.0, 0.0], [3.0, 5.0, 0.0]]),
    "feature_CD": torch.tensor([[[0.0, 4.0], [0.0, 0.0], [0.0, 0.0]], [[4.0, 0.0], [1.0, 1.0], [0.0, 0.0]]]),
    "soft_CC": torch.tensor([[[1.0, 0.0, 0.0], [0.0] * 3, [0.0] * 3], [[0.0, 1.0, 0.0], [0.5, 0.25, 0.25], [0.0] * 3]]),
}


def test_combine_weights_by_counts():
    """Counts 1 and 3: .25 and .75, for features and predictions; class 1 is the second client's alone."""
    scheme = FedHKD(FedHKDSettings(), RunInfo(3, 2, 2, 0, 0, 0))
    message = scheme.combine(SERVER, REPORTS)
    assert message["count_C"].tolist() == [4.0, 5.0, 0.0]
    assert message["feature_CD"].tolist() == [[3.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    assert message["soft_CC"].tolist() == [[0.25, 0.75, 0.0], [0.5, 0.25, 0.25], [0.0, 0.0, 0.0]]
    backwards = scheme.combine(SERVER, {name: tensor.flip(0) for name, tensor in REPORTS.items()})
    assert all(torch.equal(backwards[name], message[name]) for name in message)


@pytest.mark.parametrize(
    "rule, feature, soft", [("uniform", [2.0, 2.0], [0.5, 0.5, 0.0]), ("last", [4.0, 0.0], [0.0, 1.0, 0.0])]
)
@pytest.mark.parametrize("star", [False, True])
def test_combine_by_other_rules(star, rule, feature, soft):
    settings = (FedHKDStarSettings if star else FedHKDSettings)(aggregation=rule)
    scheme, server = (FedHKDStar if star else FedHKD)(settings, RunInfo(3, 2, 2, 0, 0, 0)), SchemeServer(None, seed=0)
    message = scheme.combine(server, REPORTS)
    assert message["count_C"].tolist() == [4.0, 5.0, 0.0]
    assert message["feature_CD"].tolist() == [feature, [1.0, 1.0], [0.0, 0.0]]
    assert message["soft_CC"].tolist() == [soft, [0.5, 0.25, 0.25], [0.0, 0.0, 0.0]]
    nobody = {name: torch.zeros_like(tensor) for name, tensor in REPORTS.items()}
    again = scheme.combine(server, nobody)
    assert all(torch.equal(again[name], message[name] if rule == "last" else nobody[name][0]) for name in message)


@pytest.mark.parametrize("weights, without", [("average", "FedAvg's"), ("none", "that of scheme.name=local")])
def test_empty_knowledge_is_told(weights, without):
    scheme = FedHKD(FedHKDSettings(weights=weights), RunInfo(3, 2, 2, 0, 0, 0))
    message = scheme.combine(SERVER, REPORTS)
    assert scheme.warning(message) == ""
    assert scheme.warning({"count_C": torch.zeros(3)}) == (
        "no class reached scheme.nu=0.25 (absolute) and scheme.min_count=1 at any client, so the hyper-knowledge is "
        f"empty, and training with it is {without}"
    )


@pytest.mark.parametrize(
    "classes, latent, shared, up, down",
    [
        (10, 64, 10, 750, 740),
        (10, 32, 10, 430, 420),
        (100, 64, 100, 16_500, 16_400),
        (10, 64, 1, 75, 74),
        (10, 64, 0, 0, 0),
    ],
)
@pytest.mark.parametrize("name", ["fedhkd", "fedhkd_star"])
def test_floats_as_the_paper_counts_them(name, classes, latent, shared, up, down):
    """Up n (d + n) + n, down n (d + n) for n shared classes: CIFAR10, SVHN, CIFAR100, one class, none."""
    scheme = schemes.get(name)(schemes.settings_of(name)(), RunInfo(classes, latent, 10, 0, 0, 0))
    tensors = {key: torch.zeros(shape) for key, shape in scheme.report_shapes().items()}
    tensors["count_C"][:shared] = 9.0
    assert scheme.traffic(tensors, "up") == up
    assert scheme.traffic(tensors, "down") == down
    assert scheme.message_shapes() == scheme.report_shapes()


def test_fedavg_sends_nothing_beside_the_weights():
    scheme = schemes.get("fedavg")(schemes.settings_of("fedavg")(), RunInfo(10, 64, 10, 0, 0, 0))
    assert scheme.report_shapes() == scheme.message_shapes() == scheme.client_state_shapes() == {}
    assert scheme.traffic({}, "up") == scheme.traffic({}, "down") == 0
    assert type(scheme).loss is Scheme.loss
    assert scheme.terms == ("cross_entropy",)
