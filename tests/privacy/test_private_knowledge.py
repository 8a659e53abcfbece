"""What rank 0 receives of FedHKD, FedHKD* and FedProto: the clean means and one draw of noise, from the client alone.

Whole federations of three clients; each of them is played once.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import federation
import numpy as np
import pytest
import torch
import toy
from federation import Federation, Round, save_images

from hkd_hpc import payload
from hkd_hpc.aggregate import combine_by_class
from hkd_hpc.common import rng
from hkd_hpc.common.errors import UsageError
from hkd_hpc.models import evaluate

pytestmark = pytest.mark.kernels

SCHEMES = ["fedhkd", "fedhkd_star", "fedproto"]
VECTOR = ("privacy.mechanism=vector", "privacy.predictions=true")
CLEAN = ("privacy.mechanism=off", "privacy.clip=l2")
ALL = (*VECTOR, "privacy.counts=1.5")
RELEASE = ("privacy.mode=release", "run.client_models=false")
UNUSED = ("scheme.lam=0", "scheme.gamma=0", "fed.participation=0.67")  # two of three clients; knowledge has no weight
LATENT, CLASSES = 8, 10


class Played(NamedTuple):
    """The rounds of a federation, and the message after them."""

    rounds: list[Round]
    message: dict[str, torch.Tensor]

    @property
    def reports(self) -> dict[str, np.ndarray]:
        """Of the last round: by name, clients first."""
        return {name: tensor.double().numpy() for name, tensor in payload.tensors_of(self.rounds[-1].reports).items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "images.npz", train=100, test=20)


@pytest.fixture(scope="module")
def played(data):
    """play(scheme, "section.key=value" ..., rounds=1, run=0): the same federation is played once for each `run`."""

    @functools.cache
    def play(scheme: str, *settings: str, rounds: int = 1, run: int = 0) -> Played:
        made = Federation(data, scheme, *settings)
        return Played(made.play(rounds), made.message)

    return play


def drawn(quantity: str, width: int) -> np.ndarray:
    """The draws of the three clients in round 1, replayed."""
    shape = (CLASSES, width)
    return np.stack([rng.stream(0, quantity, 1, client).standard_normal(shape) for client in range(3)])


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return np.allclose(found, expected, rtol=1e-4, atol=1e-4)


# ---- noise is added once


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rank_0_receives_the_clean_means_and_one_draw(played, scheme):
    """Ball of 3, multiplier 7: std 42 / N of features, 7 sqrt(2) / N of predictions."""
    clean, noisy = (played(scheme, *settings).reports for settings in (CLEAN, VECTOR))
    count_MC1 = clean["count_C"][:, :, None]
    shared, divisor = count_MC1 > 0, count_MC1.clip(min=1)
    assert np.array_equal(noisy["count_C"], clean["count_C"])
    assert close(noisy["feature_CD"], (clean["feature_CD"] + drawn("noise", LATENT) * 42 / divisor) * shared)
    if scheme != "fedproto":
        soft = clean["soft_CC"] + drawn("noise predictions", CLASSES) * 9.8994949 / divisor
        assert close(noisy["soft_CC"], soft * shared)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_server_adds_none(played, scheme):
    """Its message is the mean of what it received."""
    found = played(scheme, *VECTOR)
    expected = combine_by_class("count", payload.tensors_of(found.rounds[-1].reports), {})
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.message.items())


@pytest.mark.parametrize("scheme", ["fedhkd", "fedproto"])
def test_noisy_counts_decide_what_is_shared_and_divide_the_sums(played, scheme):
    """Counts: whole, from 0 on; 1.5 sqrt(2) of noise. A class without images may be shared, one with some may not."""
    clean, noisy = (played(scheme, *settings).reports for settings in (CLEAN, ALL))
    true_MC = clean["count_C"]
    count_MC = np.round(true_MC + drawn("noise counts", 1)[:, :, 0] * 1.5 * np.sqrt(2)).clip(min=0)
    sum_MCD = clean["feature_CD"] * true_MC[:, :, None]
    expected = (sum_MCD + drawn("noise", LATENT) * 42) / count_MC.clip(min=1)[:, :, None]
    assert np.array_equal(noisy["count_C"], count_MC)
    assert ((count_MC > 0) != (true_MC > 0)).any()
    assert close(noisy["feature_CD"], expected * (count_MC > 0)[:, :, None])


def test_a_rank_for_each_part_of_the_clients_gives_the_same_bits(tmp_path, data, played):
    """Three processes, of which rank 0 is the server alone; its reports are what one process has."""
    settings = federation.settings(data, "fedhkd", *ALL, "fed.rounds=1")

    def keep_reports(rank):
        from hkd_hpc import rounds

        original = rounds.gather_reports

        def gather_reports(run, round, reports):
            gathered = original(run, round, reports)
            if rank == 0:
                np.save(tmp_path / "reports.npy", gathered["tensors"])
            return gathered

        rounds.gather_reports = gather_reports

    toy.train_ok(3, *settings, "--out", tmp_path / "run", patch=keep_reports)
    found, alone = np.load(tmp_path / "reports.npy"), played("fedhkd", *ALL).rounds[0].reports["tensors"]
    assert [name for name in found.dtype.names if not np.array_equal(found[name], alone[name])] == []


# ---- what the noise leaves alone


@pytest.mark.parametrize("settings", [VECTOR, ALL, (*ALL, *RELEASE)], ids=["vector", "counts too", "release"])
def test_noise_moves_no_other_stream(played, settings):
    """Cohorts, batches and initial weights: where knowledge has no weight, all weights are those without noise."""
    quiet = played("fedhkd", *CLEAN, *UNUSED, rounds=2)
    noisy = played("fedhkd", *settings, *UNUSED, rounds=2)
    assert [round.cohort for round in noisy.rounds] == [round.cohort for round in quiet.rounds]
    assert all(map(federation.same_model, noisy.rounds, quiet.rounds))


def test_two_releases_of_one_seed_have_the_same_batches_and_other_noise(played):
    one, two = (played("fedhkd", *ALL, *RELEASE, *UNUSED, rounds=2, run=run) for run in (0, 1))
    assert all(map(federation.same_model, one.rounds, two.rounds))
    both = (one.reports["count_C"] > 0) & (two.reports["count_C"] > 0)
    for name in ("feature_CD", "soft_CC"):
        assert not (one.reports[name] == two.reports[name])[both].any()


def test_the_papers_mechanism_without_a_clip_has_the_bits_of_the_scheme(played):
    default, paper = (
        played("fedhkd", *settings, rounds=2) for settings in ((), ("privacy.mechanism=paper", "privacy.clip=off"))
    )
    assert all(map(federation.same_model, default.rounds, paper.rounds))
    assert all(torch.equal(tensor, paper.message[name]) for name, tensor in default.message.items())


def test_noise_on_all_knowledge_leaves_a_healthy_model(played):
    """BatchNorm's variances stay positive and its counters whole, and the Kullback-Leibler form takes noisy targets."""
    settings = (*ALL, "scheme.soft_loss=kl", "model.latent_norm=batch", "privacy.multiplier=100")
    found = played("fedhkd", *settings, rounds=2)
    assert all((round.reports["status"] == 0).all() for round in found.rounds)
    assert torch.isfinite(found.rounds[-1].weights_V).all()
    assert {counter.dtype for counter in found.rounds[-1].counters} == {torch.int64}


def test_running_variances_stay_positive(data):
    made = Federation(data, "fedhkd", *ALL, "model.latent_norm=batch", "privacy.multiplier=100")
    made.play(2)
    made.load()
    variances = [buffer for name, buffer in made.net.named_buffers() if name.endswith("running_var")]
    assert variances
    assert all((variance > 0).all() for variance in variances)


# ---- whose features


def means_of(made: Federation) -> np.ndarray:
    """(M, C, D): of each client's training images, by the model that is loaded."""
    means_MCD = np.zeros((3, CLASSES, LATENT))
    for client in made.clients:
        feature_ND, labels_N = evaluate.predict(made.net, client.x_train)[0].double(), client.y_train
        for j in labels_N.unique().tolist():
            means_MCD[client.id, j] = feature_ND[labels_N == j].mean(0)
    return means_MCD


def test_features_of_the_received_model(data, played):
    """Those of the initial weights in round 1; by default, those of the trained ones."""
    made = Federation(data, "fedproto")
    made.load()
    expected = means_of(made)
    received = played("fedproto", "privacy.extractor=received").reports["feature_CD"]
    assert np.allclose(received, expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(played("fedproto").reports["feature_CD"], expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("settings, own", [("scheme.weights=none", "model"), ("train.batchnorm=local", "statistics")])
def test_no_features_of_a_received_model_where_clients_go_on_from_their_own(data, settings, own):
    with pytest.raises(UsageError, match=f"privacy.extractor=received: clients go on from their own {own} here"):
        Federation(data, "fedproto", "privacy.extractor=received", settings)


# ---- what a release rejects


@pytest.mark.parametrize(
    "scheme, settings, kept",
    [
        ("moon", (), "previous"),
        ("fedproto", ("scheme.weights=none",), "model"),
        ("fedhkd", ("train.batchnorm=local",), "statistics"),
    ],
)
def test_no_release_of_what_clients_keep(data, scheme, settings, kept):
    with pytest.raises(UsageError) as caught:
        Federation(data, scheme, *RELEASE, *settings)
    assert f"clients keep {kept}, which goes to the checkpoints of rank 0 without noise" in str(caught.value)


def test_a_release_says_so_and_resumes(tmp_path, data):
    """Of its rounds 1 and 2 the second is trained by another process."""
    settings = federation.settings(data, "fedhkd", *VECTOR, *RELEASE)
    [begun] = toy.train_ok(1, *settings, "fed.rounds=1", "--out", tmp_path / "run")
    toy.train_ok(1, "--resume", "--allow-change", "fed.rounds=2", "--out", tmp_path / "run")
    assert "release: noise is of the operating system's entropy" in begun
    assert toy.rounds_done(tmp_path / "run") == 2
