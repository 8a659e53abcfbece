"""Local training by a plain torch loop in float64, for the product in float64 (fixture in_float64) to be compared
with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from hkd_hpc.common import rng

TOLERANCE = 1e-10  # of a weight after a few steps of Adam at 1e-3, both sides in float64


def images(x_uint8: torch.Tensor) -> torch.Tensor:
    return (x_uint8.double() / 255 - 0.5) / 0.5


def double(net: nn.Module) -> nn.Module:
    """A copy of the module in float64, with memory of its own."""
    return copy.deepcopy(net).double()


def train(
    net: nn.Module, client, extra: Callable, epochs: int, batch: int, round: int = 1, lr: float = 1e-3
) -> nn.Module:
    """Adam on cross-entropy + extra(net, feature, logits, labels, index); the batches are the client's own stream."""
    adam, stream = torch.optim.Adam(net.parameters(), lr=lr), rng.stream(client.seed, "batches", round, client.id)
    for _ in range(epochs):
        order = stream.permutation(len(client.y_train))
        for start in range(0, len(order), batch):
            index = torch.from_numpy(order[start : start + batch])
            feature, logits = net(images(client.x_train[index]))
            labels = client.y_train[index]
            adam.zero_grad()
            (F.cross_entropy(logits, labels) + extra(net, feature, logits, labels, index)).backward()
            adam.step()
    return net


def assert_same_model(net: nn.Module, expected: nn.Module) -> None:
    own = net.state_dict()
    for name, tensor in expected.state_dict().items():
        np.testing.assert_allclose(own[name].numpy(), tensor.numpy(), rtol=0, atol=TOLERANCE, err_msg=name)


def prepare(trainer, client, message=None, round: int = 2):
    """The client at the start of a round on this trainer, as LocalTrainer.run has it when it calls `begin`."""
    weights_V = trainer.flat.values_V.clone()
    client.net, client.flat, client.received_V = trainer.flat.net, trainer.flat, weights_V
    client.message, client.round, client.cache = message or {}, round, {}
    trainer.flat.net.train()
    return client


def gradient(net: nn.Module, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """{parameter: gradient of value}, zeros where it does not reach."""
    names, parameters = zip(*net.named_parameters())
    found = torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=True)
    return {name: torch.zeros_like(p) if g is None else g for name, p, g in zip(names, parameters, found)}
