"""Private updates: what a client sends of its weights is clipped and noised once, before the exact sum."""

from __future__ import annotations

import math
import signal

import numpy as np
import pytest
import torch
import toy
from federation import Federation, save_images

from hkd_hpc import config, quarantine
from hkd_hpc.aggregate import FixedPointSum
from hkd_hpc.common import rng
from hkd_hpc.common.errors import UsageError
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.privacy.releases import weights_mu
from hkd_hpc.privacy.settings import PrivacySettings
from hkd_hpc.privacy.updates import UpdatePrivacy, clip_factor

TINY, NORMED = "model.name=tiny_models:Tiny", "model.name=tiny_models:Normed"
CLIPPED = ("fed.average=uniform", "privacy.update_clip=0.05")
NOISED = (*CLIPPED, "privacy.update_multiplier=0.5")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "images.npz")


def played(data, scheme, *more, rounds=1):
    federation = Federation(data, scheme, *more)
    return federation, federation.play(rounds)


# ---- one client's weights


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


def test_a_client_that_did_not_change_has_factor_1():
    received_V = vector(1.0, -2.0, 0.0)
    sent = UpdatePrivacy(clip=0.5, multiplier=0.0, cohort=2).sent(received_V.clone(), received_V, None)
    assert clip_factor(0.0, 0.5) == 1.0
    assert sent.values_V.tolist() == [1.0, -2.0, 0.0]
    assert sent.norm == 0.0


def test_the_mean_is_of_clipped_changes_not_the_clipped_mean():
    """Changes (0, 20) of norm 10 S and (.2, 0) of norm .1 S, S = 2: (0, 2) and (.2, 0) enter, from (1, 1)."""
    updates, received_V = UpdatePrivacy(clip=2.0, multiplier=0.0, cohort=2), vector(1.0, 1.0)
    sent = [updates.sent(weights_V, received_V, None) for weights_V in (vector(1.0, 21.0), vector(1.2, 1.0))]
    assert mean_of([each.values_V for each in sent]) == pytest.approx([1.1, 2.0], abs=1e-6)
    assert [each.norm for each in sent] == pytest.approx([20.0, 0.2], abs=1e-6)


def mean_of(sent):
    total, out_V = FixedPointSum(len(sent[0]), len(sent)), torch.empty(len(sent[0]))
    for values_V in sent:
        total.add(values_V, 1)
        total.flush()
    total.mean_into(out_V, total.pieces(1 << 20))
    return out_V.tolist()


def test_a_replaced_client_moves_the_mean_by_2_S_over_M_at_most():
    updates, random = UpdatePrivacy(clip=1.5, multiplier=0.0, cohort=4), np.random.default_rng(0)
    received_V = torch.zeros(50)
    others = [torch.from_numpy(random.normal(0, 10, 50).astype(np.float32)) for _ in range(3)]
    direction_V = others[0]
    moved = []
    for first, second in ((direction_V * 1e6, -direction_V), (others[1], others[2]), (direction_V, torch.zeros(50))):
        means = [
            np.array(mean_of([updates.sent(each, received_V, None).values_V for each in [own, *others]]))
            for own in (first, second)
        ]
        moved.append(float(np.linalg.norm(means[0] - means[1])))
    assert moved[0] == pytest.approx(2 * 1.5 / 4, rel=1e-5)  # the worst case, reached
    assert max(moved[1:]) < moved[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_stay_so(bad):
    sent = UpdatePrivacy(clip=1.0, multiplier=1.0, cohort=1).sent(vector(bad, 0.0), vector(0.0, 0.0), torch.ones(2))
    assert FixedPointSum.rejects(sent.values_V) is not None


def test_the_sum_has_the_noise_of_those_that_delivered():
    """S = .25, z = 3: 2 S z = 1.5 of all 10; of 7 of them 1.5 sqrt(.7) = 1.25499."""
    updates, nothing_V = UpdatePrivacy(clip=0.25, multiplier=3.0, cohort=10), torch.zeros(100_000)
    units = [
        torch.from_numpy(rng.stream(0, "noise weights", 1, client).standard_normal(100_000)) for client in range(10)
    ]
    sent = [updates.sent(nothing_V, nothing_V, unit_V).values_V.double() for unit_V in units]
    assert float(sum(sent).std()) == pytest.approx(1.5, rel=0.02)
    assert float(sum(sent[:7]).std()) == pytest.approx(1.25499, rel=0.02)
    assert updates.summed_std(10) == pytest.approx(1.5)
    assert updates.summed_std(7) == pytest.approx(1.25499, rel=1e-5)
    settings = PrivacySettings(update_clip=0.25, update_multiplier=3.0)
    assert weights_mu(settings, delivered=7, cohort=10) == pytest.approx(updates.sensitivity / updates.summed_std(7))
    assert updates.share_std == pytest.approx(1.5 / math.sqrt(10))
    assert abs(float(torch.corrcoef(torch.stack(sent[:2]))[0, 1])) < 0.02


# ---- rounds


def test_the_round_adds_each_share_once_and_nothing_else(data):
    """Mean with noise - mean without = mean of the shares, drawn again here; their std is .05 * .5 * 2 / sqrt(3)."""
    (_, [plain]), (noisy, [round]) = (played(data, "fedhkd", TINY, *settings) for settings in (CLIPPED, NOISED))
    shares = [
        rng.stream(0, "noise weights", 1, client).standard_normal(len(plain.weights_V)) * 0.05 / math.sqrt(3)
        for client in range(3)
    ]
    wanted_V = np.mean(shares, axis=0) * noisy.flat.filled_V.numpy()
    np.testing.assert_allclose((round.weights_V - plain.weights_V).numpy(), wanted_V, atol=1e-6)
    assert round.reports["test_correct"].tolist() == plain.reports["test_correct"].tolist()
    np.testing.assert_array_equal(round.reports["loss"], plain.reports["loss"])
    np.testing.assert_array_equal(round.reports["tensors"], plain.reports["tensors"])
    np.testing.assert_array_equal(round.reports["update_norm"], plain.reports["update_norm"])


def test_what_a_client_keeps_and_tests_is_its_own_model(data):
    federation = Federation(data, "fedavg", TINY, *NOISED)
    part = federation.part
    part.worker.train(1, [0, 1, 2], part.weights_V, part.counters, federation.message, True)
    kept = [client.state["model"] for client in federation.clients]
    plain = Federation(data, "fedavg", TINY)
    plain.part.worker.train(1, [0, 1, 2], part.weights_V, part.counters, plain.message, True)
    assert all(torch.equal(own, client.state["model"]) for own, client in zip(kept, plain.clients))


def test_gaps_between_tensors_get_no_noise(data):
    federation, rounds = played(data, "fedavg", TINY, *NOISED, rounds=2)
    filled_V = federation.flat.filled_V
    assert int(filled_V.sum()) == federation.flat.payload_floats
    assert int((filled_V == 0).sum()) > 0
    assert torch.count_nonzero(rounds[-1].weights_V[filled_V == 0]) == 0


def test_the_change_of_the_global_weights_is_the_clip_at_most(data):
    federation = Federation(data, "fedavg", TINY, *CLIPPED)
    before_V = federation.part.weights_V.clone()
    [round] = federation.play(1)
    assert float((round.weights_V - before_V).norm()) <= 0.05 * (1 + 1e-5)
    assert round.reports["clipped"].tolist() == [1, 1, 1]
    assert (round.reports["update_norm"] > 0.05).all()


def test_clipping_alone_keeps_the_variances_of_batchnorm_and_whole_numbers(data):
    federation, rounds = played(data, "fedavg", NORMED, *CLIPPED, rounds=5)
    federation.load()
    state = federation.net.state_dict()
    assert bool((state["extractor.3.running_var"] >= 0).all())
    assert state["extractor.3.num_batches_tracked"].dtype == torch.int64
    assert bool(torch.isfinite(rounds[-1].weights_V).all())


def test_noise_that_makes_weights_too_large_is_told(data):
    federation = Federation(data, "fedavg", TINY, *NOISED)
    worker = federation.part.worker
    worker.updates = UpdatePrivacy(clip=1e6, multiplier=1.0, cohort=3)
    part = federation.part
    reports = worker.train(1, [0], part.weights_V, part.counters, federation.message, False)
    assert worker.names[reports[0]["invalid_tensor"]] == quarantine.NOISED
    assert abs(reports[0]["invalid_value"]) > 65536
    assert reports[0]["train_n"] == 0
    assert quarantine.describe(quarantine.NOISED, 7e4) == (
        "weights with the noise of privacy.update_multiplier has 70000"
    )


def test_the_report_of_a_received_model_does_not_depend_on_this_rounds_training(data):
    knowledge = ("privacy.mechanism=vector", "privacy.predictions=true")
    reports = {
        (extractor, epochs): played(
            data, "fedhkd", TINY, *NOISED, *knowledge, f"privacy.extractor={extractor}", f"train.epochs={epochs}"
        )[1][0].reports["tensors"]
        for extractor in ("received", "trained")
        for epochs in (1, 3)
    }
    np.testing.assert_array_equal(reports["received", 1], reports["received", 3])
    assert (reports["trained", 1]["feature_CD"] != reports["trained", 3]["feature_CD"]).any()


def test_weights_that_stay_at_home_are_neither_clipped_nor_noised(data):
    noised, plain = (
        played(data, "fedproto", TINY, "scheme.weights=none", *more)[1][0]
        for more in (NOISED, ("fed.average=uniform",))
    )
    assert torch.equal(noised.weights_V, plain.weights_V)


# ---- ranks and resume


def test_the_noise_is_the_same_on_any_ranks_and_after_a_resume(tmp_path):
    data, alone, killed = toy.save_data(tmp_path / "data.npz", side=8), tmp_path / "alone", tmp_path / "killed"
    more = ("fed.clients=5", "fed.rounds=2", "fed.participation=0.8", "fed.drop_rate=0.3", "data.as_stored=true")
    asked = toy.settings(data, TINY, *NOISED, *more, "scheme.name=fedhkd", "scheme.nu=0")
    toy.train_ok(1, *asked, "--out", alone)

    def kill_in_round_2(rank):
        toy.note_pid(tmp_path / "pids", 3)
        if rank == 1:
            toy.on_place(2, "weights", lambda: toy.kill_all(tmp_path / "pids"))

    results = toy.train(3, *asked, "--out", killed, patch=kill_in_round_2)
    assert [result.signal for result in results] == [signal.SIGKILL] * 3
    toy.train_ok(4, "--resume", "--out", killed)
    assert toy.rows(killed) == toy.rows(alone)
    assert set(toy.metrics(alone)["rounds/clients_clipped"].tolist()) <= {2, 3, 4}


# ---- what is rejected

HOLES = {
    "fed.average=images": "fed.average=images weighs a client by its data: give fed.average=uniform",
    "fed.max_norm=9": "fed.max_norm=9 rejects clients by their data: leave it at 0, privacy.update_clip is enough",
    "model.names=small,moon_cnn": "model.names=small,moon_cnn: the sum of one architecture has fewer clients: give "
    "model.name",
    "model.norm=batch": "BatchNorm's statistics would travel, and with noise its variances be negative: give "
    "model.norm=group and model.latent_norm=none",
    "model.latent_norm=batch": "BatchNorm's statistics would travel, and with noise its variances be negative: give "
    "model.norm=group and model.latent_norm=none",
    "data.normalise=measured": "data.normalise=measured is by mean and deviation of everybody's images: give data.mean "
    "and data.std",
    "privacy.update_clip=0": "needs privacy.update_clip above 0, since no noise covers changes of any size",
}
GOOD = ("fed.average=uniform", "model.norm=group", "privacy.update_clip=1", "privacy.update_multiplier=2")


@pytest.mark.parametrize("setting", HOLES)
def test_settings_with_which_the_noise_would_not_hold_are_rejected(setting):
    assert config.resolve(overrides=GOOD).privacy.update_multiplier == 2
    with pytest.raises(UsageError) as caught:
        config.resolve(overrides=[*GOOD, setting])
    assert str(caught.value) == f"privacy.update_multiplier=2: {HOLES[setting]}"


def test_all_of_them_are_told_in_one_line():
    with pytest.raises(UsageError) as caught:
        config.resolve(overrides=["privacy.update_clip=1", "privacy.update_multiplier=2", "run.stop_patience=3"])
    assert str(caught.value).count("; ") == 2
    assert "run.stop_patience=3 ends the run by accuracies without noise: leave it at 0" in str(caught.value)


@pytest.mark.parametrize(
    "scheme, more, said",
    [
        ("fedavg", (NORMED,), "has buffers (extractor.3.running_mean)"),
        ("fedavg", (TINY, "data.partition=heuristic"), "data.partition=heuristic gives an image to its client several"),
        ("fedrep", (TINY,), "scheme.name=fedrep keeps some weights with each client"),
        (
            "fedavg",
            (TINY, "privacy.update_clip=1e5"),
            "standard deviation of 5.77e+04, and the exact sum holds weights",
        ),
    ],
)
def test_networks_and_schemes_for_which_it_would_not_hold_are_rejected(data, scheme, more, said):
    with pytest.raises(UsageError) as caught:
        Federation(data, scheme, *NOISED, *more)
    assert said in str(caught.value)
    assert str(caught.value).startswith("privacy.update_multiplier=0.5: ")
    assert "\n" not in str(caught.value)


def test_what_changes_nothing_is_told():
    from hkd_hpc.config.effects import without_effect

    asked = ["privacy.update_clip=1", "scheme.name=local"]
    found = without_effect(config.resolve(overrides=asked), ["privacy.update_clip"])
    assert found == [
        "privacy.update_clip=1.0 has no effect with scheme.name=local, whose clients' weights stay at home"
    ]


def test_a_model_without_buffers_has_its_parameters_alone():
    net = torch.nn.Linear(3, 2)
    flat = FlatModel(net)
    assert flat.filled_V.tolist() == [1.0] * 6 + [0.0] * 10 + [1.0] * 2 + [0.0] * 14
