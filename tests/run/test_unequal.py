"""Unequal models: averaged within each architecture, knowledge across them, equal bits on any number of ranks."""

import numpy as np
import pytest
import torch
import toy
from federation import Federation, save_images

import hkd_hpc
from hkd_hpc import averaging, export, rounds
from hkd_hpc.models.family import member
from hkd_hpc.store.tree import load_tree

pytestmark = pytest.mark.kernels

TINY, NORMED = "tiny_models:Tiny", "tiny_models:Normed"
NAMES = f"model.names={TINY},{NORMED},small"
WITHOUT_WEIGHTS = {
    "fedproto": ("scheme.weights=none",),
    "fedmd": ("scheme.weights=none", "data.fraction=0.6"),
    "fedhkd": ("scheme.weights=none", "scheme.nu=0"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "data.npz")


def federation(data, scheme, *more):
    return Federation(data, scheme, "fed.clients=4", *more)


def weights_of(run, name=""):
    """The float tensors of the global model, or of one member, by its own names."""
    run.load()
    return {key: value.clone() for key, value in member(run.net, name).state_dict().items()}


def play_some(run, clients, count):
    """Rounds in which these clients alone take part."""
    part = run.part
    for round in range(part.done + 1, part.done + count + 1):
        reports = part.worker.train(round, clients, part.weights_V, part.counters, run.message, False)
        gathered = rounds.gather_reports(part, round, reports)
        averaging.update_global_weights(part, round, gathered)
        rounds.send_message(part, round, gathered)
        part.done = round


@pytest.mark.parametrize(
    "scheme, more",
    [
        ("fedavg", ("train.optimizer=sgd", "train.momentum=0.9", "train.weight_decay=0.1")),
        ("fedavg", ("fed.server_optimizer=yogi",)),
        ("fedprox", ()),
        ("moon", ("train.augment=crop_flip",)),
        ("fedbn", ()),
        ("fedrep", ()),
        ("ditto", ()),
        ("fedntd", ("train.augment=crop_flip",)),
    ],
)
def test_each_architecture_is_a_federation_by_itself(data, scheme, more):
    """Clients 0 and 2 have one, 1 and 3 the other: bit for bit what these two alone come to with it."""
    run = federation(data, scheme, f"model.names={TINY},{NORMED}", *more)
    run.play(3)
    for name, clients in ((TINY, [0, 2]), (NORMED, [1, 3])):
        alone = federation(data, scheme, f"model.name={name}", *more)
        play_some(alone, clients, 3)
        found, expected = weights_of(run, name), weights_of(alone)
        assert list(found) == list(expected)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_an_architecture_without_a_client_in_the_cohort_stays_as_it_is(data):
    run = federation(data, "fedavg", f"model.names={TINY},{NORMED}")
    before = weights_of(run, NORMED), weights_of(run, TINY)
    play_some(run, [0, 2], 1)
    after = weights_of(run, NORMED), weights_of(run, TINY)
    assert all(torch.equal(before[0][key], after[0][key]) for key in before[0])
    assert not torch.equal(before[1]["classifier.weight"], after[1]["classifier.weight"])


@pytest.mark.parametrize("optimizer", ["avgm", "yogi"])
def test_nor_does_the_servers_momentum_move_it(data, optimizer):
    run = federation(data, "fedavg", f"model.names={TINY},{NORMED}", f"fed.server_optimizer={optimizer}")
    play_some(run, [0, 1, 2, 3], 1)
    spans, rule = run.flat.parameter_spans_of(NORMED), run.part.server_optimizer
    held = lambda: [
        vector[start:stop].clone() for vector in (run.part.weights_V, *rule.state.values()) for start, stop in spans
    ]
    before, other = held(), weights_of(run, TINY)
    play_some(run, [0, 2], 2)
    assert all(map(torch.equal, before, held()))
    assert not torch.equal(other["classifier.weight"], weights_of(run, TINY)["classifier.weight"])
    assert bool(before[-1].any())


def test_batch_norm_is_measured_anew_within_an_architecture(data):
    run = federation(data, "fedavg", f"model.names={TINY},{NORMED}", "train.batchnorm=reestimate")
    run.play(2)
    alone = federation(data, "fedavg", f"model.name={NORMED}", "train.batchnorm=reestimate")
    play_some(alone, [1, 3], 2)
    found, expected = weights_of(run, NORMED), weights_of(alone)
    assert torch.equal(found["extractor.3.running_var"], expected["extractor.3.running_var"])


def test_prototypes_cross_the_architectures_and_weights_do_not(data):
    """The message is the mean over all four clients by counts; each goes on from its own model."""
    run = federation(data, "fedproto", f"model.names={TINY},{NORMED}", "scheme.weights=none")
    [first] = run.play(1)
    tensors = first.reports["tensors"]
    count_MC, feature_MCD = tensors["count_C"].astype(float), tensors["feature_CD"].astype(float)
    total_C = np.maximum(count_MC.sum(0), 1)
    expected_CD = (count_MC[..., None] * feature_MCD).sum(0) / total_C[:, None]
    np.testing.assert_allclose(run.message["feature_CD"].numpy(), expected_CD, rtol=1e-6, atol=1e-7)
    own = [client.state["model"].clone() for client in run.clients]
    started = []
    original = run.part.trainer.start_of
    run.part.trainer.start_of = lambda given: started.append(original(given)) or started[-1]
    run.play(1)
    assert all(map(torch.equal, started, own))


@pytest.mark.parametrize("scheme", WITHOUT_WEIGHTS)
def test_a_client_trains_as_it_would_alone_with_the_same_message(data, scheme):
    """Round 2 of client 1: the same bits as in a federation where all have its architecture, given its state."""
    more = WITHOUT_WEIGHTS[scheme]
    run = federation(data, scheme, f"model.names={TINY},{NORMED}", *more)
    run.play(1)
    alone = federation(data, scheme, f"model.name={NORMED}", *more)
    alone.part.message, alone.part.done = run.part.message, 1
    spans = run.flat._spans_of_member(NORMED)
    own_V = torch.cat([run.clients[1].state["model"][start:stop] for start, stop in spans])
    alone.clients[1].state["model"] = own_V
    report = run.part.worker.train(2, [1], run.part.weights_V, run.part.counters, run.message, False)[0]
    expected = alone.part.worker.train(2, [1], alone.part.weights_V, alone.part.counters, run.message, False)[0]
    assert report["loss"].tolist() == expected["loss"].tolist()
    for name in report["tensors"].dtype.names:
        assert np.array_equal(report["tensors"][name], expected["tensors"][name])


@pytest.mark.parametrize("scheme", ["fedgen", "fedalign", "fedhkd_star"])
def test_the_other_schemes_go_across_too(data, scheme):
    names = "small,moon_cnn" if scheme == "fedalign" else f"{TINY},{NORMED}"  # which wants a last stage
    run = federation(data, scheme, f"model.names={names}")
    [last] = run.play(2)[-1:]
    assert last.reports["status"].tolist() == [0, 0, 0, 0]


# --- whole runs


def arguments(data, scheme, out, *more):
    own = (*WITHOUT_WEIGHTS.get(scheme, ()), *more)
    return [*toy.settings(data, f"scheme.name={scheme}", "fed.clients=5", NAMES, *own), "--out", out]


def last_hash(folder):
    return load_tree(folder / "metrics.h5")["rounds"]["weights_sha256"][-1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data):
    """Each scheme in one process."""
    folder = tmp_path_factory.mktemp("alone")
    for scheme in ("fedavg", *WITHOUT_WEIGHTS):
        toy.train_ok(1, *arguments(data, scheme, folder / scheme, "run.checkpoint_every=1"))
    return folder


@pytest.mark.parametrize("scheme, ranks", [("fedavg", 2), *((scheme, 4) for scheme in WITHOUT_WEIGHTS)])
def test_equal_bits_on_any_number_of_ranks(tmp_path, data, alone, scheme, ranks):
    toy.train_ok(ranks, *arguments(data, scheme, tmp_path / "run"))
    assert last_hash(tmp_path / "run") == last_hash(alone / scheme)


def test_a_resumed_run_has_the_same_bits(tmp_path, data, alone):
    out = tmp_path / "run"
    toy.train_ok(1, *arguments(data, "fedproto", out, "fed.rounds=1"))
    toy.train_ok(3, "--resume", "--allow-change", "--out", out, "fed.rounds=2")
    assert last_hash(out) == last_hash(alone / "fedproto")


def test_each_architecture_has_a_line_and_a_row(alone, capsys):
    run = hkd_hpc.load(alone / "fedproto")
    table = run.summary["architectures"]
    assert list(table["name"]) == [TINY, NORMED, "small"]
    assert table["clients"].tolist() == [2, 2, 1]
    n_M = run.client_columns["local_test_n"][-1]
    accuracy_M = run.client_columns["local_test_accuracy"][-1]
    expected = (accuracy_M[0] * n_M[0] + accuracy_M[3] * n_M[3]) / (n_M[0] + n_M[3])
    assert table["local_test_accuracy"][0] == pytest.approx(expected)
    assert table["global_test_accuracy"].mean() == pytest.approx(run.round_columns["global_test_accuracy"][-1])
    assert f"{NORMED}: 2 clients, " in (alone / "fedproto" / "log.txt").read_text()


def test_payload_is_that_of_the_clients_own_architecture(alone):
    sent_M = hkd_hpc.load(alone / "fedavg").client_columns["payload_bytes/weights_up"][-1]
    tiny = 4 * (48 * 8 + 8 + 8 * 10 + 10)
    assert sent_M[[0, 3]].tolist() == [tiny, tiny]
    assert hkd_hpc.load(alone / "fedproto").client_columns["payload_bytes/weights_up"][-1].tolist() == [0] * 5


def test_models_of_a_run(alone, data, tmp_path, capsys):
    run = hkd_hpc.load(alone / "fedproto")
    images = torch.from_numpy(np.load(data)["x_test"][:2])
    assert run.model(client=1)(images).shape == (2, 10)
    assert run.model(architecture="small")(images).shape == (2, 10)
    assert export.main([str(run.path), "--out", str(tmp_path / "one.pt"), "--client", "0"]) == 0
    assert list(torch.load(tmp_path / "one.pt", weights_only=True)) == [
        "extractor.2.weight",
        "extractor.2.bias",
        "classifier.weight",
        "classifier.bias",
    ]
    assert export.main([str(run.path), "--out", str(tmp_path / "all.pt")]) == 2
    assert f"name a client, or one of {TINY}, {NORMED}, small" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, line",
    [
        (("model.names=small,nothing",), "model.names=small,nothing: nothing: not allowed"),
        (("model.names=small,",), "model.names=small,: an empty name: not allowed"),
        (("model.names=small,small",), "is one model for all; give model.name=small"),
        (("model.names=small,resnet18,small", "fed.clients=2"), "has 3 names for fed.clients=2"),
        (("model.names=small,resnet18", "scheme.name=central"), "scheme.name=central has one client; give model.name"),
        ((f"model.names={TINY},{NORMED}", "scheme.name=scaffold"), "scaffold sends tensors of the model's size"),
        ((f"model.names={TINY},{NORMED}", "scheme.name=feddyn"), "feddyn steps the global weights by the share"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, data, more, line):
    [result] = toy.train(1, *toy.settings(data, *more), "--out", tmp_path / "run")
    assert result[0] == 2
    assert line in result.output
