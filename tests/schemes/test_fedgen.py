"""FedGen: the generator and its two losses, its optimiser against torch's, and the client's two terms by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import plain
import pytest
import torch
from federation import Federation, save_images
from torch import nn
from torch.nn import functional as F

from hkd_hpc.client import Batch
from hkd_hpc.common import rng
from hkd_hpc.common.errors import UsageError
from hkd_hpc.models.networks import Net
from hkd_hpc.schemes import fedgen
from hkd_hpc.schemes.base import RunInfo, SchemeServer
from hkd_hpc.schemes.fedgen import FedGen, FedGenSettings, diversity_loss, ensemble_loss, teacher_loss
from hkd_hpc.training import ClientRound

pytestmark = pytest.mark.kernels

LABELS = [0, 1, 2] * 4
PARTS = ("weight1", "bias1", "scale", "shift", "weight2", "bias2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "data.npz")


def scheme_of(classes: int = 3, latent: int = 4, **settings) -> FedGen:
    return FedGen(FedGenSettings(**settings), RunInfo(classes, latent, 3, 0, 0, 0))


def as_module(state: dict) -> nn.Sequential:
    """The generator as its paper's code builds it, with these parameters."""
    shapes = {name: tuple(state[name].shape) for name in PARTS}
    net = nn.Sequential(
        nn.Linear(*shapes["weight1"][::-1]),
        nn.BatchNorm1d(shapes["scale"][0]),
        nn.ReLU(),
        nn.Linear(*shapes["weight2"][::-1]),
    )
    with torch.no_grad():
        for parameter, name in zip(net.parameters(), PARTS):
            parameter.copy_(state[name])
    net[1].running_mean.copy_(state["mean"])
    net[1].running_var.copy_(state["variance"])
    return net


def some_reports(clients: int = 3, classes: int = 3, latent: int = 4) -> dict[str, torch.Tensor]:
    """Heads of all sizes; client 0 lacks class 1, nobody has the last class."""
    random = np.random.default_rng(3)
    count_MC = random.integers(1, 30, (clients, classes))
    count_MC[0, 1] = count_MC[:, -1] = 0
    made = {
        "count_C": count_MC,
        "head_CD": random.normal(size=(clients, classes, latent)),
        "head_bias_C": random.normal(size=(clients, classes)),
    }
    return {name: torch.as_tensor(array, dtype=torch.get_default_dtype()) for name, array in made.items()}


# ---- sizes and defaults


def test_defaults_are_the_papers():
    assert dataclasses.asdict(FedGenSettings()) == {
        "name": "fedgen",
        "alpha": 10.0,
        "beta": 10.0,
        "decay": 0.98,
        "form": "code",
        "noise_size": 64,
        "hidden": 512,
        "generator_epochs": 5,
        "generator_steps": 10,
        "generator_batch": 32,
        "generator_lr": 3e-4,
        "weight_decay": 0.01,
    }


@pytest.mark.parametrize("classes, latent, floats", [(10, 64, 72_256), (100, 64, 118_336), (10, 32, 55_840)])
def test_parameters_of_the_generator(classes, latent, floats):
    scheme = scheme_of(classes, latent)
    state = scheme._new_generator(rng.stream(0, "generator", 1))
    module = as_module(state)
    assert sum(p.numel() for p in module.parameters()) == floats == sum(state[name].numel() for name in PARTS)
    assert sum(b.numel() for b in module.buffers()) == 1024 + 1
    first = (64 + classes) ** -0.5
    for name, bound in (("weight1", first), ("bias1", first), ("weight2", 512**-0.5)):
        assert 0.95 * bound < float(state[name].abs().max()) <= bound  # torch's initial Linear
    assert (state["scale"] == 1).all()
    assert not state["shift"].any()


@pytest.mark.parametrize("training", [False, True])
def test_generator_equals_torchs_layers(training):
    scheme = scheme_of(hidden=16, noise_size=5)
    state = scheme._new_generator(rng.stream(0, "generator", 1))
    state["mean"], state["variance"], state["scale"] = torch.rand(16), torch.rand(16) + 0.5, torch.rand(16) + 0.5
    module, noise_BN, y_B = as_module(state).train(training), torch.rand(6, 5), torch.tensor([0, 1, 2, 2, 1, 0])
    expected = module(torch.cat([noise_BN, torch.eye(3)[y_B]], 1))
    own = fedgen.generate(state, noise_BN, y_B, 3, training)
    np.testing.assert_allclose(own.detach().numpy(), expected.detach().numpy(), atol=1e-6)
    np.testing.assert_allclose(state["mean"].numpy(), module[1].running_mean.numpy(), atol=1e-6)
    np.testing.assert_allclose(state["variance"].numpy(), module[1].running_var.numpy(), atol=1e-6)


# ---- the server's losses


def test_teacher_loss_weighs_every_vector_by_its_own_label():
    reports, y_B, total = some_reports(), [0, 1, 1, 0, 1], 0.0
    latent_BD = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    head_MCD, bias_MC = reports["head_CD"].double().numpy(), reports["head_bias_C"].double().numpy()
    for k, y in enumerate(y_B):
        for i in range(3):
            z = head_MCD[i] @ latent_BD[k].double().numpy() + bias_MC[i]
            share = float(reports["count_C"][i, y] / reports["count_C"][:, y].sum())
            total += share * (np.log(np.exp(z).sum()) - z[y])
    assert teacher_loss(latent_BD, torch.tensor(y_B), reports).item() == pytest.approx(total / 5, rel=1e-5)


def test_teacher_loss_of_one_owner_is_its_cross_entropy():
    """Classes with one owner each: a label weight that acted on the mean alone would mix them."""
    reports = some_reports(2)
    reports["count_C"] = torch.tensor([[5.0, 0, 0], [0, 9, 0]])
    latent_BD = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    logits = [latent_BD[k] @ reports["head_CD"][k].T + reports["head_bias_C"][k] for k in (0, 1)]
    expected = sum(F.cross_entropy(z[None], torch.tensor([k])).item() for k, z in enumerate(logits)) / 2
    assert teacher_loss(latent_BD, torch.tensor([0, 1]), reports).item() == pytest.approx(expected, rel=1e-5)


def test_diversity_loss_by_hand():
    """Noise distance (1 + 9) / 2 = 5, latent distance (2 + 1 + 0) / 3 = 1; two of the four pairs: exp(-2 * 5 / 4)."""
    noise_BN, latent_BD = torch.tensor([[0.0, 1.0], [1.0, 4.0]]), torch.tensor([[1.0, 1.0, 3.0], [3.0, 0.0, 3.0]])
    assert diversity_loss(noise_BN, latent_BD).item() == pytest.approx(math.exp(-2.5), rel=1e-6)
    assert diversity_loss(noise_BN, latent_BD[:1].expand(2, 3)).item() == 1.0


# ---- the server's training


def train_plainly(scheme, state, reports, random, steps: int, lr: float) -> nn.Sequential:
    """torch's modules, torch.optim.Adam with weight_decay, both losses in plain torch, the same draws."""
    s, net = scheme.settings, as_module(state)
    adam = torch.optim.Adam(net.parameters(), lr=lr, weight_decay=s.weight_decay)
    labels = [c for c in range(3) if reports["count_C"][:, c].sum() > 0]
    for _ in range(steps):
        y_B = random.choice(labels, s.generator_batch).tolist()
        noise = torch.from_numpy(random.random((len(y_B), s.noise_size), "float32")).double()
        latent = net(torch.cat([noise, torch.eye(3)[y_B]], 1))
        share = reports["count_C"] / reports["count_C"].sum(0).clamp(min=1)
        teacher = sum(
            (
                share[i, y_B]
                * F.cross_entropy(
                    latent @ reports["head_CD"][i].T + reports["head_bias_C"][i], torch.tensor(y_B), reduction="none"
                )
            ).mean()
            for i in range(3)
        )
        pairs = [
            ((noise[a] - noise[b]) ** 2).mean() * (latent[a] - latent[b]).abs().mean()
            for a in range(len(y_B))
            for b in range(len(y_B))
        ]
        adam.zero_grad()
        (teacher + torch.exp(-sum(pairs) / len(pairs))).backward()
        adam.step()
    return net


def assert_same_generator(state: dict, module: nn.Module, atol: float) -> None:
    expected = [p.detach() for p in module.parameters()] + [module[1].running_mean, module[1].running_var]
    for name, tensor in zip((*PARTS, "mean", "variance"), expected):
        np.testing.assert_allclose(state[name].detach().numpy(), tensor.numpy(), rtol=0, atol=atol, err_msg=name)


@pytest.mark.usefixtures("in_float64")
def test_ten_steps_equal_torchs_adam():
    scheme = scheme_of(
        hidden=12,
        noise_size=3,
        generator_batch=6,
        weight_decay=0.5,
        generator_epochs=2,
        generator_steps=5,
        generator_lr=0.01,
    )
    reports, server = some_reports(), SchemeServer(None, seed=4, client_ids=[0, 1, 2])
    server.state.update(scheme._new_generator(rng.stream(4, "a start")))
    before, server.round = {name: tensor.clone() for name, tensor in server.state.items()}, 1
    message = scheme.combine(server, reports)
    expected = train_plainly(scheme, before, reports, rng.stream(4, "generator", 1), 10, 0.01)
    assert_same_generator(message, expected, 1e-12)
    assert float((message["weight1"] - before["weight1"]).abs().max()) > 0.05
    assert server.state["adam_steps"] == 10
    assert message["count_C"].tolist() == reports["count_C"].sum(0).tolist()


@pytest.mark.usefixtures("in_float64")
def test_adam_against_torch_on_given_gradients():
    random = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(7, generator=random), torch.randn(10, 7, generator=random)
    parameter = nn.Parameter(start.clone())
    adam = torch.optim.Adam([parameter], lr=0.03, weight_decay=0.2)
    state = {
        "p": start.clone(),
        "adam_mean_p": torch.zeros(7),
        "adam_square_p": torch.zeros(7),
        "adam_steps": torch.zeros(()),
    }
    for gradient in gradients:
        parameter.grad = gradient
        adam.step()
        state["adam_steps"] += 1
        fedgen.adam_step(state, {"p": gradient}, 0.03, 0.2)
        np.testing.assert_allclose(state["p"].numpy(), parameter.detach().numpy(), rtol=0, atol=1e-12)


def test_learning_rate_and_weights_of_the_terms_decay_each_round(monkeypatch, toy_trainer, toy_net, toy_client):
    rates = []
    monkeypatch.setattr(fedgen, "adam_step", lambda state, gradients, lr, weight_decay: rates.append(lr))
    scheme, server = (
        scheme_of(hidden=4, noise_size=2, generator_epochs=1, generator_steps=1),
        SchemeServer(None, seed=0, client_ids=[0, 1, 2]),
    )
    for server.round in (1, 2, 3, 51):
        scheme.combine(server, some_reports())
    assert rates == pytest.approx([3e-4, 2.94e-4, 2.8812e-4, 3e-4 * 0.364170], rel=1e-5)
    trainer, client = toy_trainer(toy_net(), "fedgen"), toy_client(LABELS)
    message = {name: torch.zeros(shape) for name, shape in trainer.scheme.message_shapes().items()}
    factors = []
    for round in (2, 3, 51):
        trainer.scheme.begin(plain.prepare(trainer, client, message, round))
        factors.append(client.cache["factor"])
    assert factors == pytest.approx([0.98, 0.9604, 0.364170], rel=1e-5)


def test_labels_are_drawn_among_those_that_exist(monkeypatch):
    """Server: the classes of the reporting clients, evenly, whatever their counts."""
    seen, original = [], fedgen.generate

    def watched(parameters, noise_BN, y_B, *rest, **more):
        seen.extend(y_B.tolist())
        return original(parameters, noise_BN, y_B, *rest, **more)

    monkeypatch.setattr(fedgen, "generate", watched)
    scheme, server = scheme_of(hidden=4, noise_size=2), SchemeServer(None, 0, round=1, client_ids=[0, 1, 2])
    scheme.combine(server, some_reports())
    assert len(seen) == 50 * 32
    assert set(seen) == {0, 1}
    assert 700 < seen.count(0) < 900


def test_the_labels_of_the_federation_are_those_of_all_that_have_reported():
    """Each client's newest counts; the generator itself learns from the heads of the cohort alone."""
    scheme, server = scheme_of(hidden=4, noise_size=2), SchemeServer(None, seed=0)
    reports = some_reports(3)
    told = []
    for server.round, ids, count_MC in [
        (1, [0, 1], [[4.0, 0, 0], [0, 2, 0]]),
        (2, [2], [[0.0, 0, 7]]),
        (3, [1, 2], [[0.0, 3, 1], [0, 0, 5]]),
    ]:
        server.client_ids = ids
        cohort = {name: tensor[: len(ids)] for name, tensor in reports.items()}
        told.append(scheme.combine(server, cohort | {"count_C": torch.tensor(count_MC)})["count_C"].tolist())
    assert told == [[4, 2, 0], [4, 2, 7], [4, 3, 6]]
    assert server.state["count_MC"].tolist() == [[4, 0, 0], [0, 3, 1], [0, 0, 5]]


def test_clients_of_one_class_each_learn_of_all_classes_that_took_part(data):
    """1 of 6 clients a round, so that a cohort holds one class or two."""
    more = ("fed.clients=6", "fed.participation=0.17", "data.partition=shards", "data.classes_per_client=1")
    run, seen_C = Federation(data, "fedgen", *more), torch.zeros(10, dtype=torch.bool)
    for _ in range(4):
        [played] = run.play(1)
        for client in played.cohort:
            seen_C[run.clients[client].y_train] = True
        assert torch.equal(run.message["count_C"] > 0, seen_C)
    assert int(seen_C.sum()) > 1


def test_training_lowers_the_teacher_loss(data):
    run = Federation(data, "fedgen", "scheme.hidden=32", "scheme.generator_epochs=10", "scheme.generator_lr=0.003")
    y_B, noise_BN, losses = torch.arange(40) % 10, torch.rand(40, 4, generator=torch.Generator().manual_seed(0)), []
    for _ in range(4):
        reports = run.play(1)[0].reports["tensors"]
        reports = {name: torch.from_numpy(reports[name].copy()) for name in ("count_C", "head_CD", "head_bias_C")}
        losses.append(teacher_loss(fedgen.generate(run.message, noise_BN, y_B, 10, False), y_B, reports).item())
    assert losses[-1] < losses[0] < 2.4
    assert losses[-1] < 0.8 * losses[0]


def test_state_is_complete(data):
    """A server that forgets its optimiser, or its generator, goes another way."""

    def play(forget=()):
        run = Federation(data, "fedgen")
        run.play(1)
        state = run.part.server.scheme_server.state
        for name in [name for name in state if name.startswith(tuple(forget))] if forget else []:
            state[name] = torch.zeros_like(state[name])
        run.play(1)
        return run.message["weight1"]

    assert torch.equal(play(), play())
    assert not torch.equal(play(), play(("adam_mean",)))
    assert not torch.equal(play(), play(("adam_square",)))
    assert not torch.equal(play(), play(("adam_steps",)))
    assert not torch.equal(play(), play(("weight2",)))


# ---- the client's terms


def constant_generator(scheme, vector: list[float]) -> dict[str, torch.Tensor]:
    """A message whose generator gives this latent vector for every label and noise."""
    message = {name: torch.zeros(shape) for name, shape in scheme.message_shapes().items()}
    message.update(
        bias2=torch.tensor(vector),
        variance=torch.ones(scheme.settings.hidden),
        count_C=torch.ones(scheme.info.classes),
    )
    return message


def identity_net() -> Net:
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(3, 3)), 3, 3)
    for layer in (net.extractor[1], net.classifier):
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    return net


def prepared(toy_trainer, toy_client, vector, *overrides, round: int = 2):
    trainer, client = toy_trainer(identity_net(), "fedgen", *overrides), toy_client(LABELS)
    plain.prepare(trainer, client, constant_generator(trainer.scheme, vector), round)
    trainer.scheme.begin(client)
    return trainer.scheme, client


TWO = Batch(torch.tensor([[0.0, 0, 0], [math.log(4), 0, 0]]).reshape(2, 3, 1, 1), torch.tensor([0, 2]), torch.arange(2))


def test_terms_by_hand(toy_trainer, toy_client):
    """Generated vector (log 2, 0, 0): prediction t = (2,1,1) / 4. Own predictions (1,1,1) / 3 and (4,1,1) / 6.

    Divergence: sum t log(t / p), mean of the two, times beta .98. Only label 0 exists: cross-entropy log 2 on 6
    vectors, so times alpha .98 (6 / 8), however few images the batch has.
    """
    more = ("scheme.alpha=0.5", "scheme.beta=0.7", "scheme.generator_batch=6")
    scheme, client = prepared(toy_trainer, toy_client, [math.log(2), 0, 0], *more)
    client.message["count_C"] = torch.tensor([9.0, 0, 0])
    scheme.begin(client)
    terms = scheme.loss(client, TWO)
    first = 0.5 * math.log(1.5) + 0.5 * math.log(0.75)
    second = 0.5 * math.log(0.75) + 0.5 * math.log(1.5)
    assert tuple(terms) == scheme.terms == ("cross_entropy", "generated", "divergence")
    assert terms["cross_entropy"].item() == pytest.approx((math.log(3) + math.log(6)) / 2, rel=1e-6)
    assert terms["generated"].item() == pytest.approx(0.5 * 0.98 * 0.75 * math.log(2), rel=1e-5)
    assert terms["divergence"].item() == pytest.approx(0.7 * 0.98 * (first + second) / 2, rel=1e-5)


def test_direction_of_the_divergence(toy_trainer, toy_client):
    """t = (98,1,1) / 100 against p = (1,1,1) / 3: .98 log 2.94 + .02 log .03; the other direction gives 1.98."""
    scheme, client = prepared(toy_trainer, toy_client, [math.log(98), 0, 0], "scheme.beta=1", "scheme.decay=1")
    batch = Batch(torch.zeros(1, 3, 1, 1), torch.tensor([0]), torch.arange(1))
    expected = 0.98 * math.log(2.94) + 0.02 * math.log(0.03)
    assert scheme.loss(client, batch)["divergence"].item() == pytest.approx(expected, rel=1e-5)


def test_a_small_step_lowers_the_divergence_and_its_target_is_constant(toy_trainer, toy_client):
    scheme, client = prepared(toy_trainer, toy_client, [1.0, -1.0, 0.5])
    before = scheme.loss(client, TWO)["divergence"]
    found = plain.gradient(client.net, before)
    p = torch.softmax(TWO.x_BCHW.reshape(2, 3), 1)
    t = torch.softmax(torch.tensor([1.0, -1.0, 0.5]), 0)
    np.testing.assert_allclose(found["classifier.bias"].numpy(), 9.8 * (p - t).mean(0).numpy(), rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        for name, parameter in client.net.named_parameters():
            parameter -= 1e-3 * found[name]
    assert scheme.loss(client, TWO)["divergence"].item() < before.item()
    assert found["extractor.1.weight"].any()


def test_generated_term_reaches_the_classifier_alone_and_the_generator_is_constant(toy_trainer, toy_client):
    scheme, client = prepared(toy_trainer, toy_client, [1.0, -1.0, 0.5])
    found = plain.gradient(client.net, scheme.loss(client, TWO)["generated"])
    assert found["classifier.weight"].any()
    assert not found["extractor.1.weight"].any()
    assert not any(tensor.requires_grad for tensor in client.message.values())


def test_clients_draw_labels_of_the_federation_and_their_own(monkeypatch, toy_trainer, toy_client):
    """y' evenly among the classes of the message, held by this client or not; y are the labels of the batch."""
    scheme, client = prepared(toy_trainer, toy_client, [0.0, 0, 0], "scheme.generator_batch=300")
    client.message["count_C"] = torch.tensor([0.0, 1.0, 500.0])
    scheme.begin(client)
    asked, original = [], scheme._generate_for

    def watched(client, y_B):
        asked.append(y_B.tolist())
        return original(client, y_B)

    monkeypatch.setattr(scheme, "_generate_for", watched)
    scheme.loss(client, TWO)
    assert asked[1] == [0, 2]
    assert set(asked[0]) == {1, 2}
    assert 110 < asked[0].count(1) < 190


def test_round_one_is_unassisted(toy_trainer, toy_client):
    scheme, client = prepared(toy_trainer, toy_client, [0.0, 0, 0], round=1)
    client.message = {name: torch.zeros(shape) for name, shape in scheme.message_shapes().items()}
    scheme.begin(client)
    terms = scheme.loss(client, TWO)
    assert terms["generated"].item() == terms["divergence"].item() == 0.0


def test_report_is_the_head_and_the_label_counts(toy_trainer, toy_net, toy_client):
    trainer, client = toy_trainer(toy_net(), "fedgen"), toy_client([0, 0, 2, 2, 2])
    report = trainer.scheme.report(plain.prepare(trainer, client))
    trainer.flat.values_V.zero_()
    assert report["count_C"].tolist() == [2.0, 0.0, 3.0]
    assert report["head_CD"].any()
    assert report["head_bias_C"].any()


@pytest.mark.parametrize("change", ["no bias", "not linear"])
def test_a_head_that_is_no_matrix_and_bias_is_rejected(toy_trainer, toy_net, change):
    """The server trains its generator against the heads of the clients."""
    net = toy_net()
    scheme = toy_trainer(net, "fedgen").scheme
    net.classifier = nn.Linear(4, 3, bias=False) if change == "no bias" else nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(UsageError, match="fedgen.*classifier") as caught:
        scheme.check_net(net)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("in_float64")
def test_local_training_equals_a_plain_loop(toy_trainer, toy_net, toy_client):
    more = ("scheme.noise_size=3", "scheme.hidden=6", "scheme.generator_batch=5", "train.epochs=3", "scheme.alpha=0.5")
    trainer, client = toy_trainer(toy_net(), "fedgen", *more), toy_client(LABELS, id=2)
    scheme = trainer.scheme
    state = scheme._new_generator(rng.stream(0, "some generator"))
    state["mean"], state["variance"] = torch.rand(6), torch.rand(6) + 0.5
    message = {name: state[name] for name in scheme.message_shapes() if name != "count_C"}
    message["count_C"] = torch.tensor([3.0, 0.0, 4.0])
    random, generator = rng.stream(0, "generated vectors", 3, 2), as_module(state).double().eval()

    def vectors(labels):
        noise = torch.from_numpy(random.random((len(labels), 3), "float32")).double()
        with torch.no_grad():
            return generator(torch.cat([noise, torch.eye(3, dtype=torch.float64)[labels]], 1))

    def terms(net, feature, logits, labels, index):
        drawn = torch.from_numpy(random.choice([0, 2], 5))
        generated = F.cross_entropy(net.classifier(vectors(drawn)), drawn)
        t = torch.softmax(net.classifier(vectors(labels)), 1).detach()
        divergence = (t * (t.log() - torch.log_softmax(logits, 1))).sum(1).mean()
        return 0.9604 * (0.5 * 5 / 8 * generated + 10 * divergence)

    reference = plain.train(plain.double(trainer.flat.net), client, terms, epochs=3, batch=8, round=3)
    trainer.run(ClientRound(client, trainer.flat.values_V.clone(), [torch.tensor(0)], message, 3))
    plain.assert_same_model(trainer.flat.net, reference)


# ---- the form of FedGen's paper

PAPER = ("scheme.form=paper", "scheme.alpha=1", "scheme.beta=0", "scheme.decay=1")


def test_ensemble_loss_against_float64():
    """Cross-entropy of the mean over heads of W_i h + b_i, whatever their counts."""
    reports, y_B = some_reports(), [0, 1, 1, 2]
    latent_BD = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    head_MCD, bias_MC = reports["head_CD"].double().numpy(), reports["head_bias_C"].double().numpy()
    total = 0.0
    for h, y in zip(latent_BD.double().numpy(), y_B):
        z = sum(head_MCD[i] @ h + bias_MC[i] for i in range(3)) / 3
        total += np.log(np.exp(z).sum()) - z[y]
    assert ensemble_loss(latent_BD, torch.tensor(y_B), reports).item() == pytest.approx(total / 4, rel=1e-5)


def test_with_one_head_both_forms_of_the_loss_agree():
    reports = {name: tensor[1:2] for name, tensor in some_reports().items()}
    latent_BD, y_B = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0])
    assert ensemble_loss(latent_BD, y_B, reports).item() == pytest.approx(
        teacher_loss(latent_BD, y_B, reports).item(), rel=1e-5
    )


def test_the_server_draws_normal_noise_and_labels_by_their_counts(monkeypatch):
    """Counts 10, 0 and 30 in all: label 2 three times as often as 0."""
    seen, noise, original = [], [], fedgen.generate

    def watched(parameters, noise_BN, y_B, *rest, **more):
        seen.extend(y_B.tolist())
        noise.append(noise_BN)
        return original(parameters, noise_BN, y_B, *rest, **more)

    monkeypatch.setattr(fedgen, "generate", watched)
    scheme = scheme_of(hidden=4, noise_size=2, form="paper")
    server = SchemeServer(None, seed=0, round=1, client_ids=[0, 1])
    reports = some_reports(2) | {"count_C": torch.tensor([[10.0, 0, 5], [0, 0, 25]])}
    message = scheme.combine(server, reports)
    assert len(seen) == 1600
    assert set(seen) == {0, 2}
    assert 0.72 < seen.count(2) / 1600 < 0.78
    drawn = torch.cat(noise)
    assert abs(drawn.mean()) < 0.06
    assert drawn.std().item() == pytest.approx(1, rel=0.05)
    assert drawn.min() < -2
    assert all(torch.isfinite(tensor).all() for tensor in message.values())


def test_the_client_of_the_paper_has_one_term_of_weight_one(monkeypatch, toy_trainer, toy_client):
    """Only label 0 exists; the generated vector gives it probability 1/2: log 2 at any round, for any batch size."""
    scheme, client = prepared(toy_trainer, toy_client, [math.log(2), 0, 0], *PAPER, round=40)
    client.message["count_C"] = torch.tensor([9.0, 0, 0])
    scheme.begin(client)
    asked, original = [], scheme._generate_for
    monkeypatch.setattr(scheme, "_generate_for", lambda client, y_B: asked.append(len(y_B)) or original(client, y_B))
    terms = scheme.loss(client, TWO)
    assert terms["generated"].item() == pytest.approx(math.log(2), rel=1e-5)
    assert terms["divergence"].item() == 0.0
    assert not terms["divergence"].requires_grad
    assert asked == [2]


def test_the_client_draws_labels_by_their_counts(monkeypatch, toy_trainer, toy_client):
    scheme, client = prepared(toy_trainer, toy_client, [0.0, 0, 0], *PAPER)
    client.message["count_C"] = torch.tensor([0.0, 100.0, 300.0])
    scheme.begin(client)
    asked, original = [], scheme._generate_for
    monkeypatch.setattr(
        scheme, "_generate_for", lambda client, y_B: asked.extend(y_B.tolist()) or original(client, y_B)
    )
    for _ in range(600):
        scheme._generated_term(client, 2)
    assert set(asked) == {1, 2}
    assert 0.70 < asked.count(2) / 1200 < 0.80


def test_a_federation_in_the_form_of_the_paper(data):
    run = Federation(data, "fedgen", *PAPER)
    last = run.play(3)[-1]
    assert (last.reports["loss"][:, 1] > 0).all()
    assert not last.reports["loss"][:, 2].any()
    assert torch.isfinite(last.weights_V).all()
