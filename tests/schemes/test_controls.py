"""The controls: every client for itself, and all data in one place; each against a plain loop in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import toy
from federation import Federation, save_images, settings
from plain import assert_same_model, double, train

from hkd_hpc import schemes

pytestmark = pytest.mark.kernels


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "data.npz")


def plain_rounds(run: Federation, client, rounds: int) -> torch.nn.Module:
    """The client's model after so many rounds on its own: Adam anew in each, batches of 16, one epoch."""
    net = double(run.net)
    for round in range(1, rounds + 1):
        train(net, client, lambda *_: 0.0, epochs=1, batch=16, round=round)
    return net


def loaded(run: Federation, values_V: torch.Tensor) -> torch.nn.Module:
    run.flat.load(values_V, run.part.counters)
    return copy.deepcopy(run.net)


@pytest.mark.usefixtures("in_float64")
def test_local_clients_never_hear_of_each_other(data):
    run = Federation(data, "local")
    expected = [plain_rounds(run, client, 2) for client in run.clients]
    run.play(2)
    for client, net in zip(run.clients, expected):
        own = loaded(run, client.state["model"])
        for module in (own, net):  # the counters are those of the last model in the local trainer
            for name, buffer in module.named_buffers():
                if name.endswith("num_batches_tracked"):
                    buffer.zero_()
        assert_same_model(own, net)
    mean = torch.stack([client.state["model"].double() for client in run.clients]).mean(0)
    np.testing.assert_allclose(run.part.weights_V.numpy(), mean.numpy(), rtol=1e-6, atol=1e-9)


def test_local_client_that_is_not_sampled_keeps_its_model(data):
    run = Federation(data, "local", "fed.clients=4", "fed.participation=0.5")
    before: dict[int, torch.Tensor] = {}
    for played in run.play(1) + run.play(1) + run.play(1):
        for client in run.clients:
            if client.id not in played.cohort and client.id in before:
                assert torch.equal(client.state["model"], before[client.id])
        before = {client.id: client.state["model"] for client in run.clients if "model" in client.state}


def test_a_local_client_that_is_rejected_at_first_begins_with_the_initial_weights_again(data):
    run, starts = Federation(data, "local", "fed.max_bad_fraction=1"), []
    initial_V, loss, begin = run.part.weights_V.clone(), run.scheme.loss, run.part.trainer.begin

    def watch(given):
        begin(given)
        starts.append((given.client.id, given.client.received_V.clone()))

    run.scheme.loss = lambda client, batch: {
        name: value * (float("nan") if client.id == 0 else 1) for name, value in loss(client, batch).items()
    }
    assert run.play(1)[0].reports["status"][0]
    run.scheme.loss, run.part.trainer.begin = loss, watch
    run.play(1)
    assert starts[0][0] == 0
    assert torch.equal(starts[0][1], initial_V)


@pytest.mark.usefixtures("in_float64")
def test_central_trains_on_exactly_the_images_of_the_federation(data):
    federation, central = Federation(data, "fedavg"), Federation(data, "central")
    (pool,) = central.clients
    for kind in ("train", "test"):
        assert _images(pool, kind) == sorted(pair for client in federation.clients for pair in _images(client, kind))
    expected = plain_rounds(central, pool, 2)
    central.play(2)
    central.load()
    assert_same_model(central.net, expected)


def _images(client, kind: str) -> list[tuple[int, bytes]]:
    return sorted(
        (int(y), x.numpy().tobytes()) for x, y in zip(getattr(client, f"x_{kind}"), getattr(client, f"y_{kind}"))
    )


def test_central_makes_no_round_of_part_of_its_data(data):
    """One client cannot be sampled by half."""
    run = Federation(data, "central", "fed.participation=0.1")
    assert [played.cohort for played in run.play(2)] == [[0], [0]]
    assert run.part.rank_of == [0]
    assert run.part.config.fed.clients == 1


def test_central_never_straggles(data):
    """4 epochs of the 9 batches of all 135 images."""
    run = Federation(data, "central", "train.epochs=4", "fed.straggler_rate=1", "fed.straggler_epochs=1")
    run.play(1)
    assert run.part.trainer.steps == 4 * 9


@pytest.mark.parametrize("control", list(schemes.CONTROLS))
def test_same_bits_on_three_ranks_killed_and_resumed(data, tmp_path, control):
    toy.train_ok(1, *settings(data, control), "--out", tmp_path / "straight")

    def stop(rank):
        toy.on_place(3, "training", lambda: (_ for _ in ()).throw(ArithmeticError("on purpose")))

    assert all(
        result.exit_code for result in toy.train(3, *settings(data, control), "--out", tmp_path / "run", patch=stop)
    )
    outputs = toy.train_ok(3, "--resume", *settings(data, control), "--out", tmp_path / "run")
    assert "resuming after round 2" in outputs[0]
    assert "remark: " in outputs[0]
    assert toy.rows(tmp_path / "run") == toy.rows(tmp_path / "straight")
    assert toy.checkpoint(tmp_path / "run", 4)["client_states/0/model"].tobytes() == (
        toy.checkpoint(tmp_path / "straight", 4)["client_states/0/model"].tobytes()
    )


@pytest.mark.parametrize("control", list(schemes.CONTROLS))
def test_nothing_travels(data, tmp_path, control):
    toy.train_ok(1, *settings(data, control, "fed.rounds=1"), "--out", tmp_path / "run")
    found = toy.metrics(tmp_path / "run")
    assert [
        found[f"rounds/payload_bytes/{kind}"].tolist()
        for kind in ("weights_up", "weights_down", "knowledge_up", "knowledge_down")
    ] == [[0]] * 4


def test_controls_are_no_schemes():
    assert not set(schemes.CONTROLS) & set(schemes.REGISTRY)
    assert len(schemes.PAPER) == 9
