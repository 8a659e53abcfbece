"""Our side of the training rows of tools.bench: the work of a client rank in a round, one process, one thread.

`python -m tools.bench_client JOB IMAGES`. Each line "SCHEME 0,1 EPOCHS" on stdin runs one round of those clients and
answers with the seconds: weights loaded, local epochs, report, exact sum and its mean. The local test sets are empty.
"""
from __future__ import annotations

import sys
import time

import numpy as np
import torch

from hkd_hpc import config as config_module, models, schemes
from hkd_hpc.aggregate import CHUNK
from hkd_hpc.client import Client, Workbench
from hkd_hpc.flat import FlatModel
from hkd_hpc.schemes.base import Facts
from hkd_hpc.worker import Worker
from tools.bare_loop import make_images

CLASSES, CLIENTS, ROUND = 10, 10, 2  # round 2: hyper-knowledge is there
MODEL = {"J": ["model.name=resnet18", "model.latent=64"], "S": ["model.name=shufflenet_v2", "model.latent=32"]}


class Nobody:
    """Stands where a worker tells the other ranks its place."""

    def at(self, round: int, phase: str, client: int | None = None) -> None:
        pass


def settings(job: str, scheme: str, epochs: int) -> config_module.Config:
    return config_module.resolve(overrides=[f"scheme.name={scheme}", f"train.epochs={epochs}", *MODEL[job]])


def make_client(client: int, images: int) -> Client:
    x, y = make_images(client, images)
    return Client(client, x, y, x[:0], y[:0], CLASSES, seed=0)


def known_message(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """A message in which every class is known: any positive numbers will do."""
    random = np.random.default_rng(0)
    return {name: torch.from_numpy(random.uniform(0.1, 1.0, shape).astype("f4")) for name, shape in shapes.items()}


class Round:
    """One scheme's round on a given model."""

    def __init__(self, flat: FlatModel, config: config_module.Config, images: int):
        facts = Facts(CLASSES, config.model.latent, CLIENTS, len(flat.parameters_P), len(flat.values_V), 0)
        self.scheme = schemes.get(config.scheme.name)(config.scheme, facts)
        self.flat, self.bench, self.images = flat, Workbench(flat, self.scheme, config), images
        self.weights_V, self.counters = flat.values_V.clone(), [counter.clone() for counter in flat.counters]

    def run(self, clients: list[int]) -> float:
        """Seconds of a round of these clients. RuntimeError when one of them was refused."""
        hosted = [make_client(client, self.images) for client in clients]
        worker = Worker(Nobody(), self.bench, hosted, len(hosted), self.images * CLIENTS)
        message = known_message(self.scheme.message_shapes())
        start_s = time.perf_counter()
        reports = worker.train(ROUND, clients, self.weights_V, self.counters, message, False)
        worker.sum.mean_into(self.weights_V, worker.sum.pieces(CHUNK))
        wall_s = time.perf_counter() - start_s
        if reports["status"].any():
            raise RuntimeError(f"a client was refused: status {reports['status'].tolist()}")
        return wall_s


def main(job: str, images: int) -> None:
    torch.set_num_threads(1)
    rounds: dict[tuple[str, int], Round] = {}
    flat = FlatModel(models.build(settings(job, "fedavg", 1).model, CLASSES, (3, 32, 32), seed=0))
    for line in sys.stdin:
        scheme, clients, epochs = line.split()
        key = (scheme, int(epochs))
        if key not in rounds:
            rounds[key] = Round(flat, settings(job, *key), images)
        print(rounds[key].run([int(client) for client in clients.split(",")]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
