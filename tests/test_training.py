"""Local training: batches, tiny clients, the step against a plain torch loop, and what a result may depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hkd_hpc.common import rng
from hkd_hpc.models.augmentation import augmentation
from hkd_hpc.models.images import normalise
from hkd_hpc.schemes.base import Scheme
from hkd_hpc.training import ClientRound, batch_bounds

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize(
    "count, bounds",
    [
        (0, []),
        (1, [(0, 1)]),
        (2, [(0, 2)]),
        (63, [(0, 63)]),
        (64, [(0, 64)]),
        (65, [(0, 65)]),
        (66, [(0, 64), (64, 66)]),
        (128, [(0, 64), (64, 128)]),
        (129, [(0, 64), (64, 129)]),
        (193, [(0, 64), (64, 128), (128, 193)]),
        (375, [(0, 64), (64, 128), (128, 192), (192, 256), (256, 320), (320, 375)]),
    ],
)
def test_batches_of_64(count, bounds):
    """The short last batch is kept; a last batch of one image joins the one before."""
    assert batch_bounds(count, 64) == bounds


@pytest.mark.parametrize("size", [2, 3, 64])
def test_every_image_once_and_never_a_last_batch_of_one(size):
    for count in range(2, 200):
        bounds = batch_bounds(count, size)
        assert [i for start, stop in bounds for i in range(start, stop)] == list(range(count))
        assert all(2 <= stop - start <= size + 1 for start, stop in bounds)


def run(trainer, client, message=None, round: int = 1):
    counters = [c.clone() for c in trainer.flat.counters]
    return trainer.run(ClientRound(client, trainer.flat.values_V.clone(), counters, message or {}, round))


def after(trainer, client, round: int = 1) -> torch.Tensor:
    run(trainer, client, round=round)
    return trainer.flat.values_V.clone()


@pytest.mark.parametrize(
    "batch_norm, images, can",
    [(True, 0, False), (True, 1, False), (True, 2, True), (False, 0, False), (False, 1, True)],
)
def test_who_can_train(toy_trainer, toy_net, toy_client, batch_norm, images, can):
    trainer = toy_trainer(toy_net(batch_norm=batch_norm))
    client = toy_client([0] * images)
    assert trainer.can_train(client) is can
    if can:
        result = run(trainer, client)
        assert np.isfinite(result.loss_by_term).all()
        assert torch.isfinite(trainer.flat.values_V).all()


def test_batch_norm_without_running_statistics_cannot_train_on_one_image_either(toy_trainer, toy_net, toy_client):
    net = toy_net(batch_norm=True)
    net.extractor[2] = nn.BatchNorm1d(8, track_running_stats=False)
    assert not toy_trainer(net).can_train(toy_client([0]))


@pytest.mark.parametrize("images", [1, 2, 7, 8, 9, 17])
@pytest.mark.parametrize("scheme", ["fedavg", "fedhkd", "fedhkd_star"])
def test_tiny_clients_train_with_batch_norm(toy_trainer, toy_net, toy_client, scheme, images):
    trainer = toy_trainer(
        toy_net(batch_norm=images > 1), scheme, "scheme.nu=0" if "hkd" in scheme else "train.epochs=2"
    )
    message = {name: torch.ones(shape) for name, shape in trainer.scheme.message_shapes().items()}
    result = run(trainer, toy_client([i % 3 for i in range(images)]), message)
    assert np.isfinite(result.loss_by_term).all()
    assert torch.isfinite(trainer.flat.values_V).all()
    assert all(torch.isfinite(tensor).all() for tensor in result.report.values())


def test_a_client_without_test_images(toy_trainer, toy_net, toy_client):
    client = toy_client([0, 1, 2])
    client.x_test, client.y_test = client.x_test[:0], client.y_test[:0]
    assert run(toy_trainer(toy_net()), client).test.correct == 0


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("round, lr", [(1, 1e-3), (11, 5e-4)])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_training_equals_a_plain_loop(toy_trainer, toy_net, toy_client, round, lr, clip):
    """torch.optim.Adam, a new permutation an epoch from the client's stream, batches of 8 and a last one of 9."""
    client, net = toy_client([i % 3 for i in range(17)], id=4, seed=6), toy_net()
    trainer = toy_trainer(toy_net(), "fedavg", "train.epochs=3", f"train.clip_norm={clip}")
    result = run(trainer, client, round=round)
    adam, stream = torch.optim.Adam(net.parameters(), lr=lr), rng.stream(6, "batches", round, 4)
    for _ in range(3):
        order, losses = stream.permutation(17), []
        for index in (order[:8], order[8:]):
            logits = net(normalise(client.x_train[index]))[1]
            loss = nn.functional.cross_entropy(logits, client.y_train[index])
            losses += [loss.item()] * len(index)
            adam.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            adam.step()
    own = trainer.flat.net.state_dict()
    for name, tensor in net.state_dict().items():
        np.testing.assert_allclose(own[name].numpy(), tensor.numpy(), rtol=0, atol=1e-12, err_msg=name)
    assert result.loss_by_term == pytest.approx([np.mean(losses)], rel=1e-12)  # over the images of the last epoch
    net.eval()
    correct = (net(normalise(client.x_test))[1].argmax(1) == client.y_test).sum().item()
    assert result.test.correct == correct


PAPERS = ["train.optimizer=sgd", "train.momentum=0.9", "train.nesterov=true", "train.weight_decay=0.1", "train.lr=0.05"]


@pytest.mark.usefixtures("in_float64")
def test_sgd_smoothed_labels_and_warm_up_equal_a_plain_loop(toy_trainer, toy_net, toy_client):
    """Round 1 of a warm-up of four rounds: a fifth of the rate; a tenth of a label goes to the three classes."""
    client, net = toy_client([i % 3 for i in range(16)], id=4, seed=6), toy_net()
    smooth = ("train.label_smoothing=0.1", "train.lr_warmup=4")
    trainer = toy_trainer(toy_net(), "fedavg", "train.epochs=3", *PAPERS, *smooth)
    result = run(trainer, client)
    sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1)
    stream = rng.stream(6, "batches", 1, 4)
    for _ in range(3):
        order, losses = stream.permutation(16), []
        for index in (order[:8], order[8:]):
            log_BC = net(normalise(client.x_train[index]))[1].log_softmax(1)
            of_label_B = log_BC[torch.arange(8), client.y_train[index]]
            loss = -(0.9 * of_label_B + 0.1 * log_BC.mean(1)).mean()
            losses.append(loss.item())
            sgd.zero_grad()
            loss.backward()
            sgd.step()
    own = trainer.flat.net.state_dict()
    for name, tensor in net.state_dict().items():
        np.testing.assert_allclose(own[name].numpy(), tensor.numpy(), rtol=0, atol=1e-12, err_msg=name)
    assert result.loss_by_term == pytest.approx([np.mean(losses)], rel=1e-12)
    net.eval()
    plain = nn.functional.cross_entropy(net(normalise(client.x_test))[1], client.y_test, reduction="sum")
    assert result.test.loss == pytest.approx(plain.item(), rel=1e-10)  # a test smooths nothing


class Album(Scheme):
    """Keeps what it is shown: for each batch its images, and where they are in the client's training set."""

    def begin(self, client):
        self.seen = []

    def loss(self, client, batch):
        self.seen.append((batch.x_BCHW.clone(), batch.index_B))
        return super().loss(client, batch)

    def report(self, client):
        self.known = client.predict_train()[1]
        return {}


def shown(toy_trainer, net, client, *overrides, round: int = 1) -> tuple[Album, list[torch.Tensor]]:
    """The scheme, and each epoch's images in the order of the training set."""
    trainer = toy_trainer(net, "fedavg", "train.lr=1e-9", *overrides)
    trainer.scheme = Album(trainer.scheme.settings, trainer.scheme.info)
    run(trainer, client, round=round)
    seen, batches = trainer.scheme.seen, -(-len(client.y_train) // 8)
    epochs = [seen[start : start + batches] for start in range(0, len(seen), batches)]
    return trainer.scheme, [torch.cat([x for x, _ in e])[torch.cat([i for _, i in e]).argsort()] for e in epochs]


def test_images_are_augmented_from_the_clients_own_stream(toy_trainer, toy_net, toy_client):
    """Each epoch draws anew; what is reported is of the images as they are."""
    client = toy_client([0, 1, 2] * 8, id=3, seed=5)
    rule, stream = augmentation("crop_flip", 1), rng.stream(5, "augment", 2, 3)
    asked, net = ("train.augment=crop_flip", "train.augment_padding=1"), toy_net(batch_norm=False)
    album, epochs = shown(toy_trainer, net, client, *asked, round=2)
    for seen_NCHW in epochs:
        assert torch.equal(seen_NCHW, normalise(rule(client.x_train, rule.draw(stream, 24))))
    assert not torch.equal(*epochs)
    plain, _ = shown(toy_trainer, toy_net(batch_norm=False), client, round=2)
    torch.testing.assert_close(album.known, plain.known, rtol=0, atol=1e-5)


def test_augmentation_moves_no_other_stream(toy_trainer, toy_net, toy_client):
    orders = []
    for name in ("none", "crop_flip_reflect"):
        more = ("train.augment_padding=1",) if name != "none" else ()
        album, _ = shown(toy_trainer, toy_net(), toy_client([0, 1, 2] * 8), f"train.augment={name}", *more)
        orders.append([index_B.tolist() for _, index_B in album.seen])
    assert orders[0] == orders[1]


def test_same_bits_whatever_happened_before(toy_trainer, toy_net, toy_client):
    """Another client, another round, a draw from the global generator: none of them leaves a trace."""
    trainer, client, other = toy_trainer(toy_net()), toy_client([0, 1, 2] * 5), toy_client([2, 1] * 6, id=1)
    start_V, counters = trainer.flat.values_V.clone(), [c.clone() for c in trainer.flat.counters]
    first = (
        trainer.run(ClientRound(client, start_V, counters, {}, 1)),
        trainer.flat.values_V.clone(),
        trainer.flat.counters[0].item(),
    )
    trainer.run(ClientRound(other, start_V, counters, {}, 1))
    trainer.run(ClientRound(client, start_V, counters, {}, 2))
    torch.rand(100), np.random.random(5)
    again = (
        trainer.run(ClientRound(client, start_V, counters, {}, 1)),
        trainer.flat.values_V.clone(),
        trainer.flat.counters[0].item(),
    )
    assert torch.equal(first[1], again[1])
    assert first[0].loss_by_term == again[0].loss_by_term
    assert first[2] == again[2] == 4  # 2 epochs of 2 batches
    assert [c.item() for c in counters] == [0]
    assert not torch.equal(first[1], start_V)


def test_dropout_is_a_function_of_seed_round_and_client(toy_trainer, toy_net, toy_client):
    def with_dropout():
        net = toy_net(batch_norm=False)
        net.extractor.insert(2, nn.Dropout(0.5))
        return toy_trainer(net)

    client = toy_client([0, 1, 2] * 4)
    torch.manual_seed(1)
    first = after(with_dropout(), client)
    torch.manual_seed(2)
    assert torch.equal(after(with_dropout(), client), first)


def test_batches_differ_by_seed_round_and_client_but_not_by_scheme(toy_client):
    def order(seed: int = 0, id: int = 0, round: int = 1) -> tuple:
        client = toy_client([0, 1], id=id, seed=seed)
        client.round = round
        client.random("noise").standard_normal(10)
        return tuple(client.random("batches").permutation(20))

    assert len({order(), order(seed=1), order(id=1), order(round=2)}) == 4
    assert order() == order()


class Watcher(Scheme):
    """Notes what a scheme is shown."""

    def begin(self, client):
        self.seen, self.mode = [], client.net.training
        client.cache["mine"] = 1

    def loss(self, client, batch):
        assert client.cache == {"mine": 1}
        torch.testing.assert_close(batch.x_BCHW, normalise(client.x_train[batch.index_B]))
        assert torch.equal(batch.y_B, client.y_train[batch.index_B])
        self.seen.append(batch.index_B.tolist())
        return super().loss(client, batch)

    def adjust_gradient(self, client):
        self.gradient = client.flat.grad_P.clone()
        client.flat.grad_P.zero_()


def test_hooks_of_a_scheme(toy_trainer, toy_net, toy_client):
    trainer, client = toy_trainer(toy_net(batch_norm=False), "fedavg", "train.epochs=1"), toy_client([0, 1, 2] * 3)
    trainer.scheme = Watcher(trainer.scheme.settings, trainer.scheme.info)
    start_V = trainer.flat.values_V.clone()
    run(trainer, client)
    assert sorted(i for batch in trainer.scheme.seen for i in batch) == list(range(9))
    assert trainer.scheme.mode
    assert [len(batch) for batch in trainer.scheme.seen] == [9]
    assert trainer.scheme.gradient.any()
    assert torch.equal(trainer.flat.values_V, start_V)
    assert client.cache == {}
