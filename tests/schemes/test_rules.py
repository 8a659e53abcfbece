"""The rules that all schemes share: BatchNorm, who counts how much, short batches, fine-tuning, and what is never
read.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import toy
from federation import Federation, same_model, save_images, settings
from plain import assert_same_model, double, images, train

from hkd_hpc import schemes
from hkd_hpc.aggregate import FixedPointSum
from hkd_hpc.analysis.metrics import spread, worst_tenth
from hkd_hpc.client import OWN_STATISTICS
from hkd_hpc.quarantine import OK
from hkd_hpc.schemes.base import Scheme
from hkd_hpc.training import LocalTrainer, batch_bounds

pytestmark = pytest.mark.slow

SCHEMES = tuple(schemes.REGISTRY)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "data.npz")


def seen_at(run: Federation, hook: str) -> list[torch.Tensor]:
    """A list that gets a copy of the model's values whenever a client comes to this hook of the scheme."""
    seen, original = [], getattr(run.scheme, hook)

    def noted(client):
        seen.append(run.flat.values_V.clone())
        return original(client)

    setattr(run.scheme, hook, noted)
    return seen


# ---- BatchNorm


@pytest.mark.kernels
def test_local_statistics_stay_with_the_client(data):
    """Round 2 begins with the global weights and the client's own running statistics of the end of round 1."""
    run = Federation(data, "fedavg", "train.batchnorm=local")
    begun, ended, parameters = seen_at(run, "begin"), seen_at(run, "report"), len(run.flat.parameters_P)
    played = run.play(2)
    for client in range(3):
        first, second = ended[client], begun[3 + client]
        assert torch.equal(second[:parameters], played[0].weights_V[:parameters])
        assert torch.equal(second[parameters:], first[parameters:])
        assert torch.equal(run.clients[client].state[OWN_STATISTICS], ended[3 + client][parameters:])
    assert not torch.equal(begun[3][parameters:], begun[4][parameters:])
    mean = torch.stack([values[parameters:].double() for values in ended[3:]]).mean(0)  # for the global test
    np.testing.assert_allclose(run.part.weights_V[parameters:].numpy(), mean.numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.kernels
def test_statistics_measured_anew_are_those_of_the_clients_with_the_new_weights(data):
    """By hand for the first BatchNorm layer: mean over the clients of the mean of its input over their images."""
    run = Federation(data, "fedavg", "train.batchnorm=reestimate")
    run.play(1)
    run.load()
    net = double(run.net)
    first = next(m for m in net.modules() if isinstance(m, torch.nn.BatchNorm2d))
    inputs = []
    first.register_forward_hook(lambda module, given, out: inputs.append(given[0]))
    net.eval()
    measured = []
    for client in run.clients:
        net(images(client.x_train))
        flat = inputs.pop().transpose(0, 1).flatten(1)
        measured.append(torch.stack([flat.mean(1), flat.var(1)]))
    mean, var = torch.stack(measured).mean(0).detach().numpy()  # 45 images each: one batch, equal weights
    own = next(m for m in run.net.modules() if isinstance(m, torch.nn.BatchNorm2d))
    np.testing.assert_allclose(own.running_mean.numpy(), mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(own.running_var.numpy(), var, rtol=1e-4, atol=1e-6)


@pytest.mark.kernels
def test_weights_are_averaged_alike_under_every_rule(data):
    """The rule touches what BatchNorm remembers, not what is trained in round 1."""
    runs = [Federation(data, "fedhkd", f"train.batchnorm={rule}") for rule in ("average", "local", "reestimate")]
    average, local, reestimate = (run.play(1)[0].weights_V for run in runs)
    parameters = len(runs[0].flat.parameters_P)
    assert torch.equal(average, local)  # in round 1 nobody has statistics of its own yet
    assert torch.equal(average[:parameters], reestimate[:parameters])
    assert not torch.equal(average, reestimate)


@pytest.mark.parametrize("rule", ["local", "reestimate"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_trains_under_every_rule(data, scheme, rule):
    for played in Federation(data, scheme, f"train.batchnorm={rule}").play(3):
        assert (played.reports["status"] == OK).all()
        assert torch.isfinite(played.weights_V).all()
        assert np.isfinite(played.reports["loss"]).all()


@pytest.mark.kernels
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("rule", ["local", "reestimate"])
def test_same_bits_on_three_ranks_and_after_a_resume(data, tmp_path, rule, norm):
    arguments = settings(
        data, "fedhkd", f"train.batchnorm={rule}", f"model.norm={norm}", "fed.clients=4", "fed.participation=0.5"
    )
    toy.train_ok(1, *arguments, "--out", tmp_path / "straight")

    def stop(rank):
        toy.on_place(3, "training", lambda: (_ for _ in ()).throw(ArithmeticError("on purpose")))

    assert all(result.exit_code for result in toy.train(3, *arguments, "--out", tmp_path / "run", patch=stop))
    toy.train_ok(3, "--resume", "--out", tmp_path / "run")
    assert toy.rows(tmp_path / "run") == toy.rows(tmp_path / "straight")


def test_local_statistics_do_not_count_as_traffic(data, tmp_path):
    """94,594 parameters a client each way; the 448 statistics stay at home."""
    toy.train_ok(1, *settings(data, "fedavg", "train.batchnorm=local", "fed.rounds=1"), "--out", tmp_path / "run")
    found = toy.metrics(tmp_path / "run")
    assert found["rounds/payload_bytes/weights_up"].tolist() == [3 * 4 * 94_594]
    assert found["clients/payload_bytes/weights_down"].tolist() == [[4 * 94_594] * 3]


# ---- who counts how much


@pytest.mark.kernels
@pytest.mark.parametrize("rule, bits", [("images", 29), ("uniform", 35)])
def test_the_exact_sum_has_the_bits_that_the_weights_leave(data, rule, bits):
    """53 - 16 for numbers up to 65,536, less 8 for the 135 images of all clients, or 2 for the 3 clients."""
    run = Federation(data, "fedavg", f"fed.average={rule}", "train.batchnorm=reestimate")
    assert sum(len(client.y_train) for client in run.clients) == 135
    worker = run.part.worker
    assert [total.bits for total in (*worker.sums.values(), *worker.statistics_sums.values())] == [bits, bits]


@pytest.mark.parametrize("rule, share", [("images", 0.75), ("uniform", 0.5)])
def test_weight_of_a_client_in_the_average(tmp_path, rule, share):
    """Clients of 20 and 60 images, of which they train on 20 and 60, since their tests are of the test split."""
    file = toy.save_natural(tmp_path / "data.npz", [20, 60])
    run = Federation(
        file, "fedavg", "data.partition=natural", "data.fraction=1", "fed.clients=2", f"fed.average={rule}"
    )
    ended = seen_at(run, "report")
    played = run.play(1)[0]
    expected = (1 - share) * ended[0].double() + share * ended[1].double()
    np.testing.assert_allclose(played.weights_V.numpy(), expected.numpy(), rtol=1e-6, atol=1e-9)
    assert played.reports["train_n"].tolist() == [20, 60]


@pytest.mark.parametrize(
    "count, size, bounds",
    [
        (375, 64, [(0, 64), (64, 128), (128, 192), (192, 256), (256, 320)]),
        (128, 64, [(0, 64), (64, 128)]),
        (129, 64, [(0, 64), (64, 128)]),
        (40, 64, [(0, 40)]),
        (64, 64, [(0, 64)]),
        (65, 64, [(0, 64)]),
    ],
)
def test_short_last_batch_is_dropped_unless_it_is_the_only_one(count, size, bounds):
    assert batch_bounds(count, size, drop_last=True) == bounds


@pytest.mark.kernels
def test_dropped_images_do_not_count_in_the_loss(data):
    """45 images in batches of 16: two steps; the loss is the mean over 32 images, here of the first step's values."""
    run = Federation(data, "fedavg", "train.drop_last=true")
    sizes, original = [], run.scheme.loss

    def constant(client, batch):
        sizes.append(len(batch.y_B))
        return {name: value * 0 + 2.0 for name, value in original(client, batch).items()}

    run.scheme.loss = constant
    assert run.play(1)[0].reports["loss"].tolist() == [[2.0]] * 3
    assert sizes == [16, 16] * 3


@pytest.mark.kernels
@pytest.mark.parametrize(
    "accuracy, worst, std",
    [
        ([0.5], 0.5, 0.0),
        ([0.2, 0.6], 0.2, 0.2),
        ([0.1 * k for k in range(10)], 0.0, 0.28722813),
        ([0.9] * 10 + [0.3, 0.1], 0.2, 0.26404966),
        ([0.4, float("nan"), 0.8], 0.4, 0.2),
    ],
)
def test_worst_tenth_and_spread(accuracy, worst, std):
    """One client at least, two of twelve; clients without a test do not count."""
    assert worst_tenth(np.array(accuracy)) == pytest.approx(worst, abs=1e-8)
    assert spread(np.array(accuracy)) == pytest.approx(std, abs=1e-8)


def test_nobody_tested_has_no_spread():
    assert np.isnan(worst_tenth(np.array([float("nan")])))
    assert np.isnan(spread(np.array([float("nan")])))


# ---- fine-tuning


@pytest.mark.kernels
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    "scheme, lr",
    [
        (("fedprox", "scheme.mu=3"), 1e-3),
        (("moon", "scheme.mu=3"), 1e-3),
        (("fedavg", "fed.finetune_lr=0.01"), 1e-2),
    ],
)
def test_fine_tuning_is_plain_training_from_the_final_global_model(data, scheme, lr):
    """Two epochs with the client's batches of the round after the last, whatever the scheme's own loss and memory."""
    run = Federation(data, *scheme, "fed.finetune_epochs=2")
    run.play(2)
    remembered = copy.deepcopy(run.clients[2].state)
    rows = run.part.worker.finetune(run.part.weights_V, run.part.counters, 3)
    assert all(torch.equal(tensor, remembered[name]) for name, tensor in run.clients[2].state.items())
    own = copy.deepcopy(run.net)  # the last client's model is still in the module
    run.load()
    client = run.clients[2]
    expected = train(double(run.net), client, lambda *_: 0.0, epochs=2, batch=16, round=3, lr=lr)
    assert_same_model(own, expected)
    expected.eval()
    with torch.no_grad():
        _, logits = expected(images(client.x_test))
    assert rows[2].tolist() == [2, 15, int((logits.argmax(1) == client.y_test).sum()), 0]


@pytest.mark.kernels
@pytest.mark.parametrize("scheme", ["fedavg", "fedrep"])
def test_fine_tuning_takes_a_clients_own_statistics_and_nothing_else(data, monkeypatch, scheme):
    """2 of 4 clients took part in the one round; those of the others are the initial ones."""
    sampled = ("fed.clients=4", "fed.participation=0.5", "train.batchnorm=local", "fed.finetune_epochs=1")
    run, seen, begin = Federation(data, scheme, *sampled), {}, LocalTrainer.begin
    size = len(run.flat.parameters_P)
    initial_S = run.part.weights_V[size:].clone()
    [played] = run.play(1)

    def watch(trainer, given):
        begin(trainer, given)
        seen[given.client.id] = given.client.received_V.clone(), set(given.client.state)

    monkeypatch.setattr(LocalTrainer, "begin", watch)
    run.part.worker.finetune(run.part.weights_V, run.part.counters, 2)
    assert sorted(seen) == [0, 1, 2, 3]
    for client in run.clients:
        start_V, kept = seen[client.id]
        took_part = client.id in played.cohort
        assert kept == ({"statistics"} if took_part else set())
        assert torch.equal(start_V[:size], run.part.weights_V[:size])
        assert torch.equal(start_V[size:], client.state["statistics"] if took_part else initial_S)


def test_fine_tuning_is_in_the_summary(data, tmp_path):
    outputs = toy.train_ok(
        3, *settings(data, "fedavg", "fed.finetune_epochs=1", "fed.rounds=1"), "--out", tmp_path / "run"
    )
    found = toy.metrics(tmp_path / "run")
    rows = found["summary/finetuned_on_local_test"]
    assert rows[:, :2].tolist() == [[0, 15], [1, 15], [2, 15]]
    assert found["summary/finetuned_on_local_test_accuracy"] == rows[:, 2].sum() / 45
    assert "global model fine-tuned by each client" in outputs[0]


# ---- labels that nobody may read


@pytest.mark.kernels
@pytest.mark.parametrize("scheme", SCHEMES)
def test_labels_of_local_tests_change_no_weight_and_no_message(data, scheme):
    honest, blind = Federation(data, scheme), Federation(data, scheme)
    for client in blind.clients:
        client.y_test = client.y_test.flip(0)
    for one, other in zip(honest.play(3), blind.play(3)):
        assert same_model(one, other)
        assert honest.part.message.tobytes() == blind.part.message.tobytes()


@pytest.mark.kernels
def test_labels_of_the_official_test_split_change_no_weight_and_no_choice(tmp_path):
    """All columns but the global test itself are equal, those on validation images included."""
    labels = np.arange(100) % 10
    for name, y_test in (("honest", labels), ("blind", labels[::-1].copy())):
        file = toy.save_data(tmp_path / f"{name}.npz", y_test=y_test)
        toy.train_ok(1, *toy.settings(file, "data.fraction=0.6", "data.val_fraction=0.2"), "--out", tmp_path / name)
    honest, blind = (toy.rows(tmp_path / name) for name in ("honest", "blind"))
    tested = {name for name in honest if honest[name] != blind[name]}
    measures = ("accuracy", "balanced_accuracy", "loss", "macro_auc", "macro_f1")
    assert {"rounds/global_test_loss"} <= tested <= {f"rounds/global_test_{name}" for name in measures}
    assert None not in honest["rounds/global_val_accuracy"] + honest["rounds/local_val_accuracy"]


# ---- what a scheme says about its message

WARNS = """
from hkd_hpc.schemes.base import About, Scheme
class Worried(Scheme):
    about = About(remark="only a test")
    def message_shapes(self):
        return {"round": ()}
    def combine(self, server, reports):
        import torch
        return {"round": torch.tensor(float(server.round))}
    def warning(self, message):
        return "even and empty" if message["round"] % 2 == 0 else ""
"""


def test_warnings_are_printed_each_round_and_in_the_summary(data, tmp_path, monkeypatch):
    toy.write_module(tmp_path, "worried", WARNS)
    monkeypatch.syspath_prepend(str(tmp_path))
    out, of_rank_1 = toy.train_ok(2, *settings(data, "worried:Worried"), "--out", tmp_path / "run")
    assert [line for line in out.splitlines() if line.startswith("hkd_hpc: ") and "even" in line] == [
        f"hkd_hpc: warning: round {round}: even and empty" for round in (2, 4)
    ]
    assert of_rank_1 == ""
    assert "WARNING in 2 of 4 rounds: even and empty" in out
    assert "remark: only a test" in out
    found = toy.metrics(tmp_path / "run")
    assert list(found["rounds/warning"]) == ["", "even and empty"] * 2
    assert found["summary/warnings"] == "in 2 of 4 rounds: even and empty"


@pytest.mark.kernels
def test_sums_of_nothing_are_nothing():
    """A model without BatchNorm has no statistics to average."""
    total, out = FixedPointSum(0, 10), torch.empty(0)
    assert total.add(torch.empty(0), 3) is None
    total.mean_into(out, total.pieces(5))


class Looks(Scheme):
    """Its message is what its server sees of the model."""

    def message_shapes(self):
        return {"first": (), "norm": ()}

    def combine(self, server, reports):
        weights = [weight.detach() for weight in server.net.parameters()]
        return {"first": weights[0].reshape(-1)[0], "norm": sum(weight.square().sum() for weight in weights).sqrt()}


def test_a_schemes_server_sees_the_new_global_weights(data):
    run = Federation(data, f"{__name__}:Looks")
    for _ in range(2):
        run.play(1)
        run.load()
        weights = [weight.detach() for weight in run.net.parameters()]
        assert run.message["first"] == weights[0].reshape(-1)[0]
        assert run.message["norm"] == pytest.approx(sum(weight.square().sum() for weight in weights).sqrt().item())
