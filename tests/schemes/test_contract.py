"""What every scheme of the registry owes the round loop, whatever its paper says."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import torch
import toy
from federation import OFF, Federation, same_model, save_images, settings

from hkd_hpc import config, schemes
from hkd_hpc.common import rng
from hkd_hpc.models import evaluate
from hkd_hpc.models.augmentation import augmentation
from hkd_hpc.models.images import normalise
from hkd_hpc.schemes.base import RunInfo
from hkd_hpc.training import batch_bounds

pytestmark = pytest.mark.slow

SCHEMES = tuple(schemes.REGISTRY)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "data.npz")


def test_every_scheme_is_held_to_the_contract():
    assert set(OFF) == set(SCHEMES)


# ---- what travels and what stays


def fields(record: np.void) -> dict[str, tuple[int, ...]]:
    names = record.dtype["tensors"].names if "tensors" in record.dtype.names else ()
    return {name: record["tensors"][name].shape for name in names}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_declared_is_what_travels_and_stays(data, scheme, monkeypatch):
    run = Federation(data, scheme)
    own, given = run.scheme, {"report": [], "combine": []}
    for name in given:

        def noted(*args, original=getattr(own, name), kept=given[name]):
            kept.append(original(*args))
            return kept[-1]

        monkeypatch.setattr(own, name, noted)
    assert all(not tensor.any() for tensor in run.message.values())  # round 1 begins with nothing known
    last = run.play(2)[-1]
    shapes = lambda tensors: {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert len(given["report"]) == 6
    assert len(given["combine"]) == 2
    assert all(shapes(report) == own.report_shapes() for report in given["report"])
    assert all(shapes(message) == own.message_shapes() for message in given["combine"])
    assert fields(last.reports[0]) == own.report_shapes()
    assert fields(run.part.message[0]) == own.message_shapes()
    for client in run.clients:
        assert shapes(client.state) == own.client_state_shapes() | run.part.trainer.own_shapes()
        assert not client.cache
        assert not any(tensor.requires_grad for tensor in client.state.values())
    tensors = [*run.message.values(), *run.part.server.scheme_server.state.values()]
    assert all(torch.isfinite(tensor).all() and not tensor.requires_grad for tensor in tensors)


# the paper's Table 1 for CIFAR10, by hand: a ResNet18 of 11,209,994 parameters; FedGen's generator of 512 x (64 + 10) +
# 512, twice 512 for its BatchNorm, and 64 x 512 + 64
HELD = {
    "fedavg": 11_209_994,
    "fedprox": 22_419_988,
    "moon": 33_629_982,
    "fedalign": 11_209_994,
    "fedgen": 11_282_250,
    "fedmd": 11_209_994,
    "fedproto": 11_209_994,
    "fedhkd": 11_209_994,
    "fedhkd_star": 11_209_994,
    "fedntd": 22_419_988,
    "fedbn": 11_209_994,
    "fedrep": 11_209_994,
    "ditto": 33_629_982,
    "scaffold": 44_839_976,
    "feddyn": 33_629_982,
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parameters_held_are_those_of_the_papers_table(scheme):
    info = RunInfo(classes=10, latent=64, clients=10, parameters=11_210_000, values=11_220_000, public=375)
    assert schemes.get(scheme)(schemes.settings_of(scheme)(), info).about.parameters_held(11_209_994) == HELD[scheme]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loss_gives_a_scalar_for_each_term(data, scheme):
    run = Federation(data, scheme)
    for played in run.play(2):
        assert played.reports["loss"].shape == (3, len(run.scheme.terms))
        assert np.isfinite(played.reports["loss"]).all()
        assert (played.reports["loss"][:, 0] > 0).all()
        assert run.scheme.terms[0] == "cross_entropy"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_forecast_counts_the_epochs_of_all_phases(data, scheme):
    run = Federation(data, scheme)
    client = run.clients[0]
    client.net = run.flat.activate("")
    phases = run.scheme.phases(client, 3)
    assert run.scheme.settings.local_epochs(3) == sum(phase.epochs for phase in phases)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_labels_are_smoothed_alike(data, scheme):
    """In round 1, one batch at the initial weights: .7 of its label and .3 of the mean of all, whatever the scheme."""
    run = Federation(data, scheme, "train.label_smoothing=0.3", "train.batch_size=1000", "train.lr=1e-12")
    x_BCHW, y_B = normalise(run.clients[0].x_train), run.clients[0].y_train
    run.net.train()
    with torch.no_grad():
        log_BC = run.net(x_BCHW)[1].log_softmax(1)
    expected = -(0.7 * log_BC[torch.arange(len(y_B)), y_B] + 0.3 * log_BC.mean(1)).mean()
    assert run.play(1)[0].reports["loss"][0, 0] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_schemes_get_the_same_augmented_images(data, scheme, monkeypatch):
    seen = []
    own, original = schemes.get(scheme), schemes.get(scheme).loss

    def loss(self, client, batch):
        seen.append((client.id, float(batch.x_BCHW.double().sum())))
        return original(self, client, batch)

    monkeypatch.setattr(own, "loss", loss)
    run = Federation(data, scheme, "train.augment=crop_flip", "train.epochs=2")
    run.play(1)
    rule = augmentation("crop_flip", 4)
    for client in run.clients:
        random, images = rng.stream(0, "augment", 1, client.id), len(client.y_train)
        steps, values = len(batch_bounds(images, 16)), [total for id, total in seen if id == client.id]
        epochs = [sum(values[start : start + steps]) for start in range(0, len(values), steps)]
        expected = [float(normalise(rule(client.x_train, rule.draw(random, images))).double().sum()) for _ in epochs]
        assert len(epochs) >= 2
        assert epochs == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_search_has_five_points_within_range_and_the_default_among_them(scheme):
    """Point i takes value i of every name."""
    tunes, defaults = schemes.get(scheme).about.tunes, schemes.settings_of(scheme)()
    assert bool(tunes) is (scheme not in ("fedavg", "fedbn", "scaffold"))  # these have nothing of their own to tune
    assert all(len(set(grid)) == 5 for grid in tunes.values())
    points = [dict(zip(tunes, values)) for values in zip(*tunes.values())]
    assert not tunes or {name: getattr(defaults, name) for name in tunes} in points
    for point in points:
        given = [f"scheme.{name}={value}" for name, value in point.items()]
        found = config.resolve(overrides=[f"scheme.name={scheme}", *given]).scheme
        assert {name: getattr(found, name) for name in point} == point


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_message_that_holds_something_is_nothing_to_warn_of(data, scheme):
    run = Federation(data, scheme)
    run.play(1)
    assert run.scheme.warning(run.message) == ""


def test_fedhkd_warns_of_a_message_without_any_class(data):
    run = Federation(data, "fedhkd", "scheme.nu=1")
    run.play(1)
    assert run.scheme.warning(run.message).startswith("no class reached scheme.nu=1.0 (absolute)")


# ---- FedAvg is a special case of all


@pytest.fixture(scope="module")
def fedavg(data):
    return Federation(data, "fedavg").play(3)


def variants():
    return [(name, off) for name, off in OFF.items() if off is not None] + [
        ("fedmd", (*OFF["fedmd"], "scheme.public_batchnorm=train")),
        ("fedhkd", ("scheme.nu=1",)),
    ]


@pytest.mark.kernels
@pytest.mark.parametrize("scheme, off", variants())
def test_without_its_terms_it_is_fedavg_bit_for_bit(data, fedavg, scheme, off):
    for own, reference in zip(Federation(data, scheme, *off).play(3), fedavg):
        assert same_model(own, reference)
        assert own.reports["test_correct"].tolist() == reference.reports["test_correct"].tolist()


@pytest.mark.kernels
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name not in ("fedavg", "ditto")])
def test_with_its_terms_it_is_not(data, fedavg, scheme):
    """Ditto's global model is FedAvg's."""
    own = Federation(data, scheme).play(2)
    first = scheme in ("fedprox", "fedalign", "fedntd", "fedrep", "feddyn")  # these need nothing from a round before
    assert same_model(own[0], fedavg[0]) is not first
    assert not same_model(own[1], fedavg[1])


def test_public_images_and_clients_are_the_same_for_every_scheme(data):
    runs = [Federation(data, scheme) for scheme in SCHEMES]
    assert len({run.part.server.static["partition"]["sha256"] for run in runs}) == 1
    assert {run.scheme.info.public for run in runs} == {45}  # 300 * .6 / 3 = 60 assigned, 15 of them for the local test
    for run in runs:
        assert all((client.x_public is not None) == (run.scheme.needs_public) for client in run.clients)


# ---- hard cases


def all_finite(run: Federation, played) -> bool:
    numbers = [played.reports["loss"], *(run.part.message[0]["tensors"][name] for name in run.scheme.message_shapes())]
    return bool(torch.isfinite(played.weights_V).all()) and all(np.isfinite(array).all() for array in numbers)


@pytest.mark.kernels
@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_of_ten_thousand(data, scheme):
    run = Federation(data, scheme)
    run.play(1)
    run.load()
    _, logits = evaluate.predict(run.net, run.clients[0].x_train)
    with torch.no_grad():
        for part in run.net.classifier.parameters():
            part.mul_(1e4 / float(logits.abs().max()))
    run.part.weights_V.copy_(run.flat.values_V)
    run.load()
    _, logits = evaluate.predict(run.net, run.clients[0].x_train)
    assert 9e3 < logits.abs().max() < 1.1e4
    for played in run.play(2):
        assert (played.reports["status"] == 0).all()
        assert all_finite(run, played)


@pytest.mark.kernels
@pytest.mark.parametrize("images", [2, 3, 17])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_clients_of_few_images_and_one_class(data, scheme, images):
    """Batches of 16: a client of 17 images has one batch of 17. Its images are all of one class."""
    run = Federation(data, scheme)
    for client in run.clients[:2]:
        label = client.y_train.mode().values
        index = torch.cat([torch.nonzero(client.y_train == label)[:, 0]] * 3)[:images]
        client.x_train, client.y_train = client.x_train[index], client.y_train[index]
    for played in run.play(3):
        assert (played.reports["status"] == 0).all()
        assert all_finite(run, played)
        assert played.reports["train_n"].tolist() == [images, images, 45]


@pytest.mark.kernels
@pytest.mark.parametrize("scheme", SCHEMES)
def test_clients_of_one_image_and_of_none(data, scheme):
    """Without BatchNorm one image is enough."""
    run = Federation(data, scheme, "model.norm=group")
    for count, client in enumerate(run.clients[:2]):
        client.x_train, client.y_train = client.x_train[:count], client.y_train[:count]
    for played in run.play(3):
        assert played.reports["status"].tolist() == [2, 0, 0]
        assert all_finite(run, played)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_clients_that_cannot_train_or_are_rejected(data, scheme):
    """One image is too few for BatchNorm, a training that ends in NaN is rejected; neither harms a later round."""
    run = Federation(data, scheme)
    alone, broken = run.clients[0], run.clients[1]
    alone.x_train, alone.y_train = alone.x_train[:1], alone.y_train[:1]
    run.play(1)
    original = run.scheme.loss

    def nonfinite(client, batch):
        terms = original(client, batch)
        return {name: value * float("nan") if client is broken else value for name, value in terms.items()}

    run.scheme.loss = nonfinite
    for played in run.play(2):
        assert played.reports["status"].tolist() == [2, 1, 0]
        assert torch.isfinite(played.weights_V).all()
        assert all(torch.isfinite(tensor).all() for tensor in run.message.values())
    run.scheme.loss = original
    assert run.play(1)[0].reports["status"].tolist() == [2, 0, 0]  # back in the next round


@pytest.mark.parametrize("classes", [2, 100])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_few_and_many_classes(tmp_path, scheme, classes):
    run = Federation(save_images(tmp_path / "data.npz", 200, 100, classes), scheme)
    assert all(all_finite(run, played) for played in run.play(2))


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_that_settings_choose(data, scheme, norm):
    run = Federation(data, scheme, f"model.norm={norm}", "model.latent_norm=batch", "train.clip_norm=1.1")
    assert all(all_finite(run, played) for played in run.play(2))


# ---- who computes it, and when


@pytest.mark.kernels
@pytest.mark.parametrize("scheme", SCHEMES)
def test_order_of_the_clients_does_not_matter(data, scheme):
    forward, backward = (Federation(data, scheme, "fed.participation=0.5", "fed.clients=4") for _ in range(2))
    backward.clients.reverse()
    for one, other in zip(forward.play(3), backward.play(3)):
        assert len(one.cohort) == 2
        assert same_model(one, other)
        assert forward.part.message.tobytes() == backward.part.message.tobytes()


SAMPLED = ("fed.clients=4", "fed.participation=0.5", "data.partition=iid")
SAVED_ONCE = "run.checkpoint_every=4"


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """whole(scheme): the folder of an uninterrupted run on one rank, 2 of 4 clients a round."""
    folders: dict = {}

    def run(scheme):
        if scheme not in folders:
            folders[scheme] = tmp_path_factory.mktemp(scheme) / "run"
            toy.train_ok(1, *settings(data, scheme, *SAMPLED, SAVED_ONCE), "--out", folders[scheme])
        return folders[scheme]

    return run


ON_RANKS = [
    *((scheme, ranks) for scheme in SCHEMES for ranks in ((2, 11) if scheme in schemes.PAPER else (11,))),
    *(pytest.param(scheme, 4, marks=pytest.mark.kernels) for scheme in schemes.PAPER),
]


@pytest.mark.parametrize("scheme, ranks", ON_RANKS)
def test_same_bits_on_any_number_of_ranks(data, tmp_path, whole, scheme, ranks):
    """Four clients: on eleven ranks most have none."""
    toy.train_ok(ranks, *settings(data, scheme, *SAMPLED, SAVED_ONCE), "--out", tmp_path / "run")
    assert toy.rows(tmp_path / "run") == toy.rows(whole(scheme))
    straight, again = (toy.checkpoint(folder, 4) for folder in (whole(scheme), tmp_path / "run"))
    for name, value in straight.items():
        if name.split("/")[0] in ("global", "message", "server", "server_optimizer", "client_states", "initial"):
            np.testing.assert_array_equal(again[name], value, err_msg=name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_killed_and_resumed_equals_straight(data, tmp_path, whole, scheme):
    """Three ranks die in round 4; one goes on from the checkpoint of round 2 or 3."""

    def die(rank):
        toy.note_pid(tmp_path / "pids", 3)
        if rank == 1:
            toy.on_place(4, "weights", lambda: toy.kill_all(tmp_path / "pids"))

    results = toy.train(3, *settings(data, scheme, *SAMPLED), "--out", tmp_path / "run", patch=die)
    assert [result.signal for result in results] == [signal.SIGKILL] * 3, results
    outputs = toy.train_ok(1, "--resume", "--out", tmp_path / "run")
    assert "resuming after round" in outputs[0]
    assert toy.rows(tmp_path / "run") == toy.rows(whole(scheme))
    straight, again = (toy.checkpoint(folder, 4) for folder in (whole(scheme), tmp_path / "run"))
    kept = [
        name for name in straight if name.split("/")[0] in ("server", "server_optimizer", "client_states", "initial")
    ]
    assert {
        name for name in again if name.split("/")[0] in ("server", "server_optimizer", "client_states", "initial")
    } == set(kept)
    for name in kept:
        np.testing.assert_array_equal(again[name], straight[name], err_msg=name)


# ---- what the paper counts


WEIGHTS = 760_336  # 2 clients x 4 bytes x (94,594 parameters + 448 BatchNorm statistics)
KEPT = {"fedbn": 8 * (448 + 448), "fedrep": 8 * (10 * 8 + 10)}  # of these, at home: BatchNorm; the head
BYTES = {  # 2 clients x 4 bytes x floats (up, down); all ten classes are with every client, latent 8
    "fedgen": (8 * 10, 8 * (14 * 16 + 16 + 32 + 16 * 8 + 8)),  # noise 4, hidden 16: 408 floats
    "fedmd": (8 * 34 * 10, 8 * 34 * 10),  # 34 public images
    "fedproto": (8 * 10 * 8, 8 * 10 * 8),
    "fedhkd": (8 * 10 * 19, 8 * 10 * 18),
    "fedhkd_star": (8 * 10 * 19, 8 * 10 * 18),
    "scaffold": (8 * 94_608, 8 * 94_608),  # the parameters with 14 floats of gaps
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_payload_bytes_of_every_round(whole, scheme):
    found = toy.metrics(whole(scheme))
    assert (found["partition/train_count"] > 0).all()
    assert found["partition/train_count"].sum(1).tolist() == [34] * 4
    ledger = {
        kind: found[f"rounds/payload_bytes/{kind}"].tolist()
        for kind in ("weights_up", "weights_down", "knowledge_up", "knowledge_down")
    }
    weights, (up, down) = WEIGHTS - KEPT.get(scheme, 0), BYTES.get(scheme, (0, 0))
    assert ledger == {
        "weights_up": [weights] * 4,
        "weights_down": [weights] * 4,
        "knowledge_up": [up] * 4,
        "knowledge_down": [down] * 4,
    }


BY_CLASS = ("fedgen", "fedproto", "fedhkd", "fedhkd_star")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_record_says_which_classes_were_shared_by_whom(whole, scheme):
    """All ten classes are with every client; two of four are sampled in a round."""
    found = toy.metrics(whole(scheme))
    assert ("clients/knowledge_classes" in found) is (scheme in BY_CLASS)
    if scheme in BY_CLASS:
        sampled = ~np.isnan(found["clients/status"])
        expected = np.where(sampled[:, :, None], np.ones((4, 4, 10)), np.nan)
        np.testing.assert_array_equal(found["clients/knowledge_classes"], expected)
    assert ("rounds/noise_std" in found) is (scheme in ("fedhkd", "fedhkd_star"))


PAPER = {  # floats (up, down): CIFAR10, CIFAR100, SVHN
    "fedavg": ((0, 0),) * 3,
    "fedprox": ((0, 0),) * 3,
    "moon": ((0, 0),) * 3,
    "fedalign": ((0, 0),) * 3,
    "fedgen": ((10, 72_256), (100, 118_336), (10, 55_840)),
    "fedmd": ((3_750, 3_750), (37_500, 37_500), (5_490, 5_490)),
    "fedproto": ((640, 640), (6_400, 6_400), (320, 320)),
    "fedhkd": ((750, 740), (16_500, 16_400), (430, 420)),
    "fedhkd_star": ((750, 740), (16_500, 16_400), (430, 420)),
}
SIZES = ((10, 64, 375), (100, 64, 375), (10, 32, 549))  # classes, latent, public images


@pytest.mark.parametrize("scheme", PAPER)
def test_floats_at_the_sizes_of_the_paper(scheme):
    for (classes, latent, public), expected in zip(SIZES, PAPER[scheme]):
        own = schemes.get(scheme)(schemes.settings_of(scheme)(), RunInfo(classes, latent, 10, 0, 0, public))
        report, message = (
            {name: torch.ones(shape) for name, shape in shapes.items()}
            for shapes in (own.report_shapes(), own.message_shapes())
        )
        assert (own.traffic(report, "up"), own.traffic(message, "down")) == expected


def test_classes_that_a_client_lacks_do_not_count():
    own = schemes.get("fedproto")(schemes.settings_of("fedproto")(), RunInfo(10, 64, 10, 0, 0, 0))
    tensors = {"count_C": torch.tensor([3.0, 0, 0, 1, 0, 0, 0, 0, 0, 9]), "feature_CD": torch.ones(10, 64)}
    assert own.traffic(tensors, "up") == own.traffic(tensors, "down") == 192
