"""FedMD: the teacher, the divergence by hand, and the public images: whose they are, their order, and BatchNorm."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import plain
import pytest
import torch
import toy
from federation import Federation, save_images, settings
from torch import nn

from hkd_hpc.client import Batch
from hkd_hpc.common import rng
from hkd_hpc.common.errors import UsageError
from hkd_hpc.models.images import normalise
from hkd_hpc.models.networks import Net
from hkd_hpc.schemes.fedmd import FedMDSettings, running_statistics_kept
from hkd_hpc.training import ClientRound

pytestmark = pytest.mark.kernels

LABELS = [0, 1, 2] * 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "data.npz")


def identity_net() -> Net:
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(3, 3)), 3, 3)
    for layer in (net.extractor[1], net.classifier):
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    return net


@pytest.fixture
def prepared(toy_trainer, toy_client):
    """make(net, public images, soft_AC, overrides...): (trainer, client) in round 2 after `begin`."""

    def make(net, x_public, soft_AC, *overrides):
        trainer, client = toy_trainer(net, "fedmd", *overrides), toy_client(LABELS, id=2)
        trainer.scheme.info = dataclasses.replace(trainer.scheme.info, public=len(x_public))
        client.x_public = x_public
        plain.prepare(trainer, client, {"soft_AC": soft_AC})
        trainer.scheme.begin(client)
        return trainer, client

    return make


def public_images(count: int, side: int = 2) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(7).integers(0, 256, (count, 3, side, side), dtype=np.uint8))


def batch_of(client, count: int = 4) -> Batch:
    return Batch(normalise(client.x_train[:count]), client.y_train[:count], torch.arange(count))


def test_defaults_are_the_papers():
    assert dataclasses.asdict(FedMDSettings()) == {
        "name": "fedmd",
        "lam": 0.05,
        "temperature": 0.5,
        "weights": "average",
        "public_batchnorm": "keep",
    }


# ---- the term


def test_divergence_by_hand(prepared):
    """Logits 0 on both public images: student (1,1,1)/3. KL(teacher || student): log 3, and log 3 - log 2."""
    net = identity_net()
    nn.init.zeros_(net.classifier.weight)
    soft_AC = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    trainer, client = prepared(net, public_images(2, side=1), soft_AC, "scheme.lam=0.4")
    terms = trainer.scheme.loss(client, Batch(torch.zeros(2, 3, 1, 1), torch.tensor([0, 1]), torch.arange(2)))
    assert tuple(terms) == trainer.scheme.terms == ("cross_entropy", "distillation")
    assert terms["distillation"].item() == pytest.approx(0.4 * (math.log(3) + math.log(1.5)) / 2, rel=1e-6)


def test_temperature_divides_the_logits(prepared):
    """Pixels 255 and 0 are logits 1 and -1: at T = .5 softmax(2, -2, -2); at T = 2 softmax(.5, -.5, -.5)."""
    x_public = torch.tensor([[255, 0, 0], [255, 0, 0]], dtype=torch.uint8).reshape(2, 3, 1, 1)
    soft_AC = torch.tensor([[0.2, 0.8, 0.0]] * 2)
    for temperature in (0.5, 2.0):
        trainer, client = prepared(
            identity_net(), x_public, soft_AC, "scheme.lam=1", f"scheme.temperature={temperature}"
        )
        z = np.array([1.0, -1.0, -1.0]) / temperature
        student = np.exp(z) / np.exp(z).sum()
        expected = 0.2 * np.log(0.2 / student[0]) + 0.8 * np.log(0.8 / student[1])
        assert trainer.scheme._distil(client, 2).item() == pytest.approx(expected, rel=1e-5)


def test_a_small_step_lowers_the_divergence(prepared, toy_net):
    soft_AC = torch.softmax(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), 1)
    trainer, client = prepared(toy_net(), public_images(8), soft_AC)
    before = trainer.scheme._distil(client, 8)
    found = plain.gradient(client.net, before)
    with torch.no_grad():
        for name, parameter in client.net.named_parameters():
            parameter -= 0.1 * found[name]
    assert trainer.scheme._distil(client, 8).item() < before.item()
    assert all(found[name].any() for name in ("extractor.1.weight", "classifier.weight"))


def test_round_one_is_unassisted(prepared, toy_net):
    trainer, client = prepared(toy_net(), public_images(8), torch.zeros(8, 3))
    client.round = 1
    trainer.scheme.begin(client)
    assert trainer.scheme.loss(client, batch_of(client))["distillation"].item() == 0.0


# ---- the teacher


def test_report_is_the_soft_prediction_in_eval_mode(prepared, toy_net):
    trainer, client = prepared(toy_net(), public_images(5), torch.zeros(5, 3))
    trainer.flat.net.extractor[2].running_mean.fill_(0.3)
    with torch.no_grad():
        logits = plain.double(trainer.flat.net).eval()(plain.images(client.x_public))[1]
    expected = torch.softmax(2 * logits, 1).numpy()  # T = .5
    np.testing.assert_allclose(trainer.scheme.report(client)["soft_AC"].numpy(), expected, atol=1e-6)


def test_teacher_is_the_plain_mean(toy_trainer, toy_net):
    soft_MAC = torch.tensor([[[1.0, 0, 0]], [[0.0, 1, 0]], [[0.0, 0.5, 0.5]], [[0.0, 0.5, 0.5]]])
    message = toy_trainer(toy_net(), "fedmd").scheme.combine(None, {"soft_AC": soft_MAC})
    assert message["soft_AC"].tolist() == [[0.25, 0.5, 0.25]]


def test_teacher_does_not_weigh_clients_by_size(data):
    run = Federation(data, "fedmd")
    small = run.clients[0]
    small.x_train, small.y_train = small.x_train[:4], small.y_train[:4]
    reports = run.play(1)[0].reports
    assert reports["train_n"].tolist() == [4, 45, 45]
    expected = reports["tensors"]["soft_AC"].astype("f8").mean(0)
    np.testing.assert_allclose(run.message["soft_AC"].numpy(), expected, atol=1e-7)
    np.testing.assert_allclose(expected.sum(1), 1, atol=1e-6)


# ---- the public images


def test_public_images_are_the_same_for_all_and_nobodys(data):
    run = Federation(data, "fedmd")
    partition = run.part.server.static["partition"]
    public, x_train = partition["public_index"], np.load(data)["x_train"]
    assigned = np.concatenate([partition["train_index"], partition["test_index"]])
    assert partition["test_split"] == "train"
    assert len(public) == len(set(public)) == 45 == run.scheme.info.public
    assert len(set(assigned)) == 180
    assert not set(public) & set(assigned)
    for client in run.clients:
        np.testing.assert_array_equal(client.x_public.numpy(), x_train[public])


@pytest.mark.parametrize("more", ["data.beta=5", "data.partition=iid", "scheme.temperature=2", "train.epochs=2"])
def test_public_images_do_not_depend_on_how_the_others_are_assigned(data, more):
    runs = Federation(data, "fedmd"), Federation(data, "fedmd", more)
    np.testing.assert_array_equal(*(run.part.server.static["partition"]["public_index"] for run in runs))


def drawn(prepared, toy_net, images: int, sizes: list[int]) -> list[list[int]]:
    trainer, client = prepared(toy_net(), public_images(images), torch.zeros(images, 3))
    return [trainer.scheme._next_public(client, size).tolist() for size in sizes]


@pytest.mark.parametrize(
    "images, sizes",
    [
        (12, [4] * 9),
        (10, [4] * 12),
        (11, [8, 3, 8, 3, 8, 3]),
        (7, [3] * 20),
        (375, [64] * 5 + [55] + [64] * 5 + [55]),
        (13, [5, 5, 2] * 6),
        (5, [5, 5]),
        (2, [2, 2, 2]),
    ],
)
def test_every_public_image_is_used_once_before_any_is_used_twice(prepared, toy_net, images, sizes):
    batches = drawn(prepared, toy_net, images, sizes)
    assert [len(batch) for batch in batches] == sizes
    used = [i for batch in batches for i in batch]
    for start in range(0, len(used) - images + 1, images):
        assert sorted(used[start : start + images]) == list(range(images))
    assert len({tuple(used[start : start + images]) for start in range(0, images * 2, images)}) == 2 or images <= 2


def test_fewer_public_images_than_a_batch_are_all_used(prepared, toy_net):
    assert [sorted(batch) for batch in drawn(prepared, toy_net, 3, [8, 8, 5])] == [[0, 1, 2]] * 3


def test_order_is_the_clients_own_in_this_round(prepared, toy_net):
    trainer, client = prepared(toy_net(), public_images(20), torch.zeros(20, 3))
    expected = rng.stream(0, "public batches", 2, 2).permutation(20).tolist()
    assert trainer.scheme._next_public(client, 20).tolist() == expected


@pytest.mark.parametrize("rule", ["keep", "train"])
def test_whether_public_images_enter_the_batch_norm_statistics(prepared, toy_net, rule):
    trainer, client = prepared(
        toy_net(), public_images(8), torch.full((8, 3), 1 / 3), f"scheme.public_batchnorm={rule}"
    )
    reference, batch = plain.double(trainer.flat.net), batch_of(client)
    with torch.no_grad():
        reference(batch.x_BCHW.double())
        if rule == "train":
            index = rng.stream(0, "public batches", 2, 2).permutation(8)[:4]
            reference(plain.images(client.x_public[index]))
    trainer.scheme.loss(client, batch)
    own, expected = trainer.flat.net.extractor[2], reference.extractor[2]
    assert own.num_batches_tracked.item() == expected.num_batches_tracked.item() == (1 if rule == "keep" else 2)
    np.testing.assert_allclose(own.running_mean.numpy(), expected.running_mean.numpy(), atol=1e-6)
    np.testing.assert_allclose(own.running_var.numpy(), expected.running_var.numpy(), atol=1e-6)
    assert trainer.flat.net.training


@pytest.mark.parametrize("rule", ["keep", "train"])
def test_public_batches_are_normalised_by_their_own_statistics(prepared, toy_net, rule):
    """Running statistics that fit nothing change nothing; the term is that of a plain net in train mode."""
    soft_AC = torch.softmax(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), 1)
    trainer, client = prepared(toy_net(), public_images(8), soft_AC, f"scheme.public_batchnorm={rule}", "scheme.lam=1")
    index = rng.stream(0, "public batches", 2, 2).permutation(8)[:4]
    with torch.no_grad():
        logits = plain.double(trainer.flat.net).train()(plain.images(client.x_public[index]))[1]
    p, q = soft_AC[index].double().numpy(), torch.softmax(logits / 0.5, 1).numpy()
    trainer.flat.net.extractor[2].running_mean.fill_(50.0)
    trainer.flat.net.extractor[2].running_var.fill_(1e-4)
    assert trainer.scheme._distil(client, 4).item() == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-5)


@pytest.mark.parametrize("keep", [True, False])
def test_statistics_are_tracked_again_after_the_public_pass(toy_net, keep):
    net = toy_net().train()
    with pytest.raises(ZeroDivisionError), running_statistics_kept(net, keep):
        net(torch.randn(4, 3, 2, 2))
        assert net.extractor[2].num_batches_tracked.item() == (0 if keep else 1)
        raise ZeroDivisionError
    net(torch.randn(4, 3, 2, 2))
    assert net.extractor[2].num_batches_tracked.item() == (1 if keep else 2)


def test_a_layer_that_never_tracked_statistics_stays_so():
    net = nn.BatchNorm1d(2, track_running_stats=False)
    with running_statistics_kept(net):
        net(torch.randn(4, 2))
    assert not net.track_running_stats
    assert net.running_mean is None


@pytest.mark.parametrize("rule", ["keep", "train"])
def test_one_public_image(data, rule):
    """Statistics of one image are none (at 1 x 1 maps BatchNorm raises): rejected before the first round."""
    with pytest.raises(
        UsageError, match="fedmd: needs 2 public images or more, there is 1; raise data.public_fraction"
    ):
        Federation(data, "fedmd", "data.public_fraction=0.004", f"scheme.public_batchnorm={rule}")


@pytest.mark.usefixtures("in_float64")
def test_local_training_equals_a_plain_loop(toy_trainer, toy_net, toy_client):
    """public_batchnorm=keep: the public pass in train mode, on copies of the running statistics."""
    trainer, client = toy_trainer(toy_net(), "fedmd", "scheme.lam=2", "train.epochs=3"), toy_client(LABELS, id=2)
    trainer.scheme.info = dataclasses.replace(trainer.scheme.info, public=12)
    client.x_public = public_images(12)
    soft_AC = torch.softmax(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), 1)
    stream = rng.stream(0, "public batches", 2, 2)
    order = np.concatenate([stream.permutation(12) for _ in range(3)]).tolist()

    def distil(net, feature, logits, labels, index):
        public = [order.pop(0) for _ in index]
        copies = {name: buffer.clone() for name, buffer in net.named_buffers()}
        _, student = torch.func.functional_call(net, copies, plain.images(client.x_public[public]))
        p, q = soft_AC[public].double(), torch.softmax(student / 0.5, 1)
        return 2 * (p * (p / q).log()).sum(1).mean()

    reference = plain.train(plain.double(trainer.flat.net), client, distil, epochs=3, batch=8, round=2)
    trainer.run(ClientRound(client, trainer.flat.values_V.clone(), [torch.tensor(0)], {"soft_AC": soft_AC}, 2))
    plain.assert_same_model(trainer.flat.net, reference)
    assert not order


# ---- too few images


def test_no_space_for_public_images_ends_with_the_largest_fraction(data, tmp_path):
    """3 clients of n = floor(100 f) images and .75 n more for the public set are at most 300 for n = 80, so f < .81."""
    results = toy.train(1, *settings(data, "fedmd", "data.fraction=1"), "--out", tmp_path / "run")
    lines = toy.our_lines([results[0].output])
    assert results[0].exit_code == 2
    assert len(lines) == 1
    assert "data.fraction of at most 0.8099 " in lines[0]
    for fraction in ("0.8", "0.8099"):
        assert Federation(data, "fedmd", f"data.fraction={fraction}").scheme.info.public == 60
    with pytest.raises(UsageError, match="needs public images"):
        Federation(data, "fedmd", "data.fraction=0.81")
    assert not (tmp_path / "run").exists()
