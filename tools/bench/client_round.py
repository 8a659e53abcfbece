"""Our side of the training rows of tools.bench: the work of a client rank in a round, one process, one thread.

`python -m tools.bench.client_round WORKLOAD IMAGES`. Each line "SCHEME 0,1 EPOCHS [AUGMENT]" on stdin runs one round of
those clients and answers with the seconds of CPU: weights loaded, local epochs, report, exact sum and its mean. The
local test sets are empty; there are as many public images as a client trains on. "SCHEME combine M" answers with the
seconds in which the server makes its message from M reports. Clients and server keep their state from one line to the
next.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np
import torch

from hkd_hpc import config as config_module
from hkd_hpc import schemes
from hkd_hpc.aggregate import CHUNK
from hkd_hpc.client import Client
from hkd_hpc.comm.control.base import NullControl
from hkd_hpc.comm.transports.base import RankInfo
from hkd_hpc.comm.transports.local import LocalComm
from hkd_hpc.models import networks
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.schemes.base import RunInfo, SchemeServer
from hkd_hpc.training import LocalTrainer
from hkd_hpc.worker import Worker

from .bare_loop import make_images

CLASSES, CLIENTS, ROUND = 10, 10, 2  # round 2: the server has sent something
PUBLIC = CLIENTS  # seed of the public images
MODEL = {"J": ["model.name=resnet18", "model.latent=64"], "S": ["model.name=shufflenet_v2", "model.latent=32"]}


def settings(workload: str, scheme: str, augment: str = "none") -> config_module.Config:
    return config_module.resolve(overrides=[f"scheme.name={scheme}", f"train.augment={augment}", *MODEL[workload]])


def make_client(client: int, images: int) -> Client:
    (x, y), (x_public, _) = make_images(client, images), make_images(PUBLIC, images)
    return Client(client, x, y, x[:0], y[:0], CLASSES, seed=0, x_public=x_public)


def known(shapes: dict[str, tuple[int, ...]], *first: int) -> dict[str, torch.Tensor]:
    """A message, or so many reports, in which every class is known: any positive numbers will do."""
    random = np.random.default_rng(0)
    return {
        name: torch.from_numpy(random.uniform(0.1, 1.0, (*first, *shape)).astype("f4"))
        for name, shape in shapes.items()
    }


class Round:
    """One scheme's round on a given model."""

    def __init__(self, flat: FlatModel, config: config_module.Config, images: int):
        info = RunInfo(
            CLASSES,
            config.model.latent,
            CLIENTS,
            len(flat.parameters_P),
            len(flat.values_V),
            images,
            label_smoothing=config.train.label_smoothing,
            augments=config.train.augments,
            batch_size=config.train.batch_size,
        )
        self.scheme = schemes.get(config.scheme.name)(config.scheme, info)
        self.flat, self.trainer, self.images = flat, LocalTrainer(flat, self.scheme, config), images
        self.weights_V, self.counters = flat.values_V.clone(), [counter.clone() for counter in flat.counters]
        self.clients: dict[int, Client] = {}
        self.comm = LocalComm(NullControl(), RankInfo(0, ["here"], 0, 1, torch.device("cpu"), "one process"))
        self.server = SchemeServer(flat.net, seed=0, round=ROUND)

    def run(self, clients: list[int], epochs: int) -> float:
        """Seconds of CPU of a round of these clients. RuntimeError when one of them was rejected."""
        hosted = [self.clients.setdefault(client, make_client(client, self.images)) for client in clients]
        self.trainer.config = replace(self.trainer.config, train=replace(self.trainer.config.train, epochs=epochs))
        worker = Worker(self.comm, self.trainer, hosted, len(hosted), [self.images] * CLIENTS)
        message = known(self.scheme.message_shapes())
        start_s = time.process_time()
        reports = worker.train(ROUND, clients, self.weights_V, self.counters, message, False)
        [total] = worker.sums.values()
        total.mean_into(self.weights_V, total.pieces(CHUNK))
        cpu_s = time.process_time() - start_s
        if reports["status"].any():
            raise RuntimeError(f"a client was rejected: status {reports['status'].tolist()}")
        return cpu_s

    def combine(self, clients: int) -> float:
        """Seconds of CPU of the server's work on the reports of so many clients."""
        reports = known(self.scheme.report_shapes(), clients)
        self.server.client_ids = list(range(clients))
        start_s = time.process_time()
        self.scheme.combine(self.server, reports)
        return time.process_time() - start_s


def main(workload: str, images: int) -> None:
    torch.set_num_threads(1)
    rounds: dict[tuple[str, ...], Round] = {}
    flat = FlatModel(networks.build(settings(workload, schemes.REFERENCE).model, CLASSES, (3, 32, 32), seed=0))
    for line in sys.stdin:
        scheme, what, count, *augment = line.split()
        key = scheme, *augment
        if key not in rounds:
            rounds[key] = Round(flat, settings(workload, *key), images)
        round = rounds[key]
        cpu_s = (
            round.combine(int(count))
            if what == "combine"
            else round.run([int(client) for client in what.split(",")], int(count))
        )
        print(cpu_s, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
