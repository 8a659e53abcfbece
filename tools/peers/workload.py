"""Workloads J and S as a user of any of the systems writes them: what the scripts beside this one share.

`python -m tools.peers.workload WORKLOAD IMAGES ROUNDS` trains one in a single process without any system and prints
what the others print too, one line of JSON: what it must come to. Of ours it uses the bare loop's nets and images
alone.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bench.bare_loop import build, make_images

CLIENTS, WORKERS, BATCH, LR = 10, 2, 64, 1e-3


def build_net(workload: str) -> nn.Module:
    """The initial global model, the same in every system."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return build(workload)


@functools.cache
def load(client: int, images: int) -> tuple[Tensor, Tensor]:
    """A client's images, float32 N x 3 x 32 x 32 in [-1, 1], and its labels N; normalised once and kept in memory."""
    x, y = make_images(client, images)
    return (x.float() / 255 - 0.5) / 0.5, y


def order(client: int, images: int, round: int) -> Tensor:
    """In which order a client takes its images in a round (1, 2, ...): the same in every system."""
    return torch.randperm(images, generator=torch.Generator().manual_seed(CLIENTS * round + client))


def batches(client: int, images: int, round: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One shuffled epoch; the short last batch is kept."""
    x, y = load(client, images)
    for index in order(client, images, round).split(BATCH):
        yield x[index], y[index]


def new_optimizer(parameters, lr: float = LR) -> torch.optim.Optimizer:
    """Adam in one pass over the parameters, the quickest that torch has on CPUs."""
    return torch.optim.Adam(parameters, lr=lr, fused=True)


def train(net: nn.Module, client: int, images: int, round: int) -> list[float]:
    """One local epoch; the loss of each step."""
    optimizer, losses = new_optimizer(net.parameters()), []
    net.train()
    for x, y in batches(client, images, round):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def averaged(net: nn.Module) -> dict[str, Tensor]:
    """What a round averages: parameters and BatchNorm's running statistics, by name."""
    return {name: tensor for name, tensor in net.state_dict().items() if tensor.is_floating_point()}


def norms(net: nn.Module) -> tuple[float, float]:
    """Euclidean norms of all parameters and of all running statistics."""
    buffers = [buffer for buffer in net.buffers() if buffer.is_floating_point()]
    return tuple(
        sum(float(tensor.detach().double().square().sum()) for tensor in tensors) ** 0.5
        for tensors in (list(net.parameters()), buffers)
    )


def result(net: nn.Module, losses: list[list[float]], end_s: list[float], *packages: str) -> str:
    """The line that a script prints, from the final global model, the losses of each round's steps, all clients
    together, and the moment at which each round ended."""
    parameter_norm, buffer_norm = norms(net)
    return json.dumps(
        {
            "round_s": [after - before for before, after in itertools.pairwise(end_s)],
            "steps": [len(of_round) for of_round in losses],
            "loss": [sum(of_round) / len(of_round) for of_round in losses],
            "parameters": sum(parameter.numel() for parameter in net.parameters()),
            "parameter_norm": parameter_norm,
            "buffer_norm": buffer_norm,
            "versions": {package: version(package) for package in ("torch", *packages)},
        }
    )


def average_round(net: nn.Module, images: int, round: int) -> list[float]:
    """One round of all clients; the losses of its steps."""
    start = {name: tensor.clone() for name, tensor in averaged(net).items()}
    total = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in start.items()}
    losses = []
    for client in range(CLIENTS):
        net.load_state_dict(start, strict=False)
        losses += train(net, client, images, round)
        for name, tensor in averaged(net).items():
            total[name] += tensor
    net.load_state_dict({name: tensor / CLIENTS for name, tensor in total.items()}, strict=False)
    return losses


def main(workload: str, images: int, rounds: int) -> None:
    net, losses, end_s = build_net(workload), [], []
    for round in range(1, rounds + 1):
        losses.append(average_round(net, images, round))
        end_s.append(time.monotonic())
    print(result(net, losses, end_s))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
