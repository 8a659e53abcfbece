"""Server optimizers: against NumPy in float64, on any number of ranks, killed and resumed."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import toy
from federation import Federation, save_images

from hkd_hpc import averaging
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import FedSettings
from hkd_hpc.server_optimizer import ServerOptimizer

NAMES = ("avgm", "adam", "yogi")


@pytest.mark.parametrize(
    "name, steps",
    [
        # m = 2, then .5 * 2 - 1 = 0
        ("avgm", [1.2, 1.2]),
        # m = 1, v = .25 + .25 * 3.75 = 1.1875; m = 0, v = 1.1875 - .25 * .1875
        ("adam", [1 + 0.1 / (1.1875**0.5 + 0.5), 1 + 0.1 / (1.1875**0.5 + 0.5)]),
        # m = 1, v = .25 + .25 * 4 = 1.25; m = 0, v = 1.25 - .25
        ("yogi", [1 + 0.1 / (1.25**0.5 + 0.5), 1 + 0.1 / (1.25**0.5 + 0.5)]),
    ],
)
def test_two_steps_by_hand(name, steps):
    """From 1, updates 2 and -1; rate .1, beta .5, beta2 .75, tau .5."""
    fed = FedSettings(server_optimizer=name, server_lr=0.1, server_momentum=0.5, server_beta2=0.75, server_epsilon=0.5)
    own, weights_P, seen = ServerOptimizer(fed, 1), torch.tensor([1.0]), []
    for update in (2.0, -1.0):
        received_P = weights_P.clone()
        weights_P += update
        own.step(received_P, weights_P)
        seen.append(weights_P.item())
    assert seen == pytest.approx(steps, rel=1e-6)
    assert len(own.state) == fed.server_vectors
    if name != "avgm":
        assert own.state["square"].item() == pytest.approx({"adam": 1.140625, "yogi": 1.0}[name], rel=1e-6)


def algorithm_2(name: str, updates: list[np.ndarray], x: np.ndarray) -> list[np.ndarray]:
    """The global weights after each round, as Reddi et al. print it; rate .05, beta .6, beta2 .7, tau .01."""
    m, v, found = np.zeros_like(x), np.full_like(x, 0.01**2), []
    for delta in updates:
        m = 0.6 * m + (delta if name == "avgm" else 0.4 * delta)
        if name == "adam":
            v = 0.7 * v + 0.3 * delta**2
        if name == "yogi":
            v = v - 0.3 * delta**2 * np.sign(v - delta**2)
        x = x + 0.05 * (m if name == "avgm" else m / (np.sqrt(v) + 0.01))
        found.append(x)
    return found


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", NAMES)
def test_three_rounds_equal_algorithm_2(tmp_path, monkeypatch, name):
    """The clients train from the weights that it made; BatchNorm's statistics are their mean alone."""
    data = save_images(tmp_path / "data.npz", train=60, test=20, side=8)
    rates = ("fed.server_lr=0.05", "fed.server_momentum=0.6", "fed.server_beta2=0.7", "fed.server_epsilon=0.01")
    run = Federation(data, "fedavg", f"fed.server_optimizer={name}", *rates if name != "avgm" else rates[:2])
    parameters, updates, means = len(run.flat.parameters_P), [], []
    start = run.part.weights_V[:parameters].numpy().copy()

    def noted(*given, original=averaging.mean_into):
        received = run.part.weights_V.clone()
        weight = original(*given)
        updates.append((run.part.weights_V - received)[:parameters].numpy())
        means.append(run.part.weights_V.clone())
        return weight

    monkeypatch.setattr(averaging, "mean_into", noted)
    played = run.play(3)
    for one, mean_V, expected in zip(played, means, algorithm_2(name, updates, start)):
        np.testing.assert_allclose(one.weights_V[:parameters].numpy(), expected, rtol=0, atol=1e-12)
        assert torch.equal(one.weights_V[parameters:], mean_V[parameters:])
    assert np.abs(updates[0]).max() > 1e-4


def test_without_one_the_average_is_the_model(tmp_path):
    data = save_images(tmp_path / "data.npz", train=60, test=20, side=8)
    assert Federation(data, "fedavg").part.server_optimizer is None


# ---- whole runs


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz", 120, 40)


def arguments(data, folder, *more):
    """Everything of a training setting at once; ten clients, half of them a round."""
    return [
        *toy.settings(
            data, "fed.clients=10", "fed.participation=0.5", "fed.rounds=3", "train.augment=crop_flip_reflect"
        ),
        *("fed.server_optimizer=yogi", "train.optimizer=sgd", "train.momentum=0.9", "train.lr_schedule=cosine"),
        *("scheme.name=moon", "train.label_smoothing=0.1", "train.lr=0.05", *more, "--out", folder),
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, data):
    """A run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    toy.train_ok(1, *arguments(data, folder))
    return folder


@pytest.mark.parametrize("size", [2, 11])
def test_any_number_of_ranks_gives_the_same_bits(tmp_path, data, alone, size):
    toy.train_ok(size, *arguments(data, tmp_path / "run"))
    assert toy.rows(tmp_path / "run") == toy.rows(alone)


def test_killed_and_resumed_on_other_ranks(tmp_path, data, alone):
    kill = lambda rank: toy.on_place(3, "training", lambda: os.kill(os.getpid(), signal.SIGKILL))
    [result] = toy.train(1, *arguments(data, tmp_path / "run"), patch=kill)
    assert result.signal == signal.SIGKILL
    kept = toy.checkpoint(tmp_path / "run", 2)
    assert {"server_optimizer/momentum", "server_optimizer/square"} < set(kept)
    toy.train_ok(4, "--resume", "--out", tmp_path / "run")
    assert toy.rows(tmp_path / "run") == toy.rows(alone)


def test_where_no_client_gets_the_average_a_line_says_so(data, tmp_path, capsys):
    Federation(data, "local", "fed.server_optimizer=avgm")
    assert "fed.server_optimizer=avgm reaches no client: with scheme.name=local" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, told",
    [
        (
            ["train.augment=crop_flip", "train.augment_padding=32"],
            "train.augment_padding=32: must be less than the sides of the images, 32 x 32 pixels",
        ),
        (["train.augment=flip", "train.augment_padding=32"], ""),
    ],
)
def test_a_border_fits_the_images(data, given, told):
    with pytest.raises(UsageError, match=told) if told else nullcontext():
        Federation(data, "fedavg", *given)
