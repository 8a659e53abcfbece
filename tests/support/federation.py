"""A whole federation in this process: the product's own job on one rank, round by round, without files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hkd_hpc import assemble, averaging, config, payload, rounds
from hkd_hpc.cohort import draw_cohort
from hkd_hpc.comm.control.base import NullControl
from hkd_hpc.comm.transports.base import RankInfo
from hkd_hpc.comm.transports.local import LocalComm

SMALL = (
    "fed.clients=3",
    "fed.rounds=4",
    "train.epochs=1",
    "train.batch_size=16",
    "model.latent=8",
    "data.fraction=0.6",
)
SHORT_GENERATOR = (
    "scheme.hidden=16",
    "scheme.noise_size=4",
    "scheme.generator_epochs=2",
    "scheme.generator_steps=2",
    "scheme.generator_batch=8",
)
OFF = {  # None: no setting of it is FedAvg
    "fedavg": (),
    "fedprox": ("scheme.mu=0",),
    "moon": ("scheme.mu=0",),
    "fedalign": ("scheme.mu=0",),
    "fedgen": ("scheme.alpha=0", "scheme.beta=0"),
    "fedmd": ("scheme.lam=0",),
    "fedproto": ("scheme.lam=0",),
    "fedhkd": ("scheme.lam=0", "scheme.gamma=0"),
    "fedhkd_star": ("scheme.lam=0",),
    "fedntd": ("scheme.beta=0",),
    "fedbn": None,
    "fedrep": None,
    "ditto": None,
    "scaffold": None,
    "feddyn": None,
}


def save_images(path: Path, train: int = 300, test: int = 60, classes: int = 10, side: int = 32) -> Path:
    """An .npz of noisy images around one random pattern per class."""
    random = np.random.default_rng(0)
    pattern = random.uniform(60, 200, (classes, 3, side, side))
    arrays = {}
    for split, count in (("train", train), ("test", test)):
        labels = np.arange(count) % classes
        noise = random.normal(0, 40, (count, 3, side, side))
        arrays |= {f"x_{split}": np.clip(pattern[labels] + noise, 0, 255).astype(np.uint8), f"y_{split}": labels}
    np.savez(path, **arrays)
    return path


def settings(data: Path, scheme: str, *more: str) -> list[str]:
    """Settings of a small run of a scheme; FedGen's generator is small, and FedHKD shares whatever there is."""
    own = {"fedgen": SHORT_GENERATOR, "fedrep": ("scheme.head_epochs=1",)}.get(scheme, ())
    own = ("scheme.nu=0",) if "hkd" in scheme else own
    return ["data.name=file", f"data.path={data}", *SMALL, f"scheme.name={scheme}", *own, *more]


class Round(NamedTuple):
    """What one round left: who took part, their reports, and the model after it."""

    cohort: list[int]
    reports: np.ndarray
    weights_V: torch.Tensor
    counters: list[torch.Tensor]


class Federation:
    """`part` is the product's; `play` goes on for some rounds."""

    def __init__(self, data: Path, scheme: str, *more: str, device: str = "cpu"):
        comm = LocalComm(NullControl(), RankInfo(0, ["here"], 0, 1, torch.device(device), "one process"))
        self.part = assemble.build(config.resolve(overrides=settings(data, scheme, *more)), comm, None)
        self.scheme, self.clients = self.part.trainer.scheme, self.part.worker.clients
        self.net, self.flat = self.part.trainer.flat.net, self.part.trainer.flat

    @property
    def message(self) -> dict[str, torch.Tensor]:
        return payload.tensors_of(self.part.message[0], self.part.comm.device)

    def play(self, count: int) -> list[Round]:
        return [self._round() for _ in range(count)]

    def _round(self) -> Round:
        part, round = self.part, self.part.done + 1
        cohort = draw_cohort(
            part.config.fed.clients, part.config.fed.participation, part.config.run.seed, round, part.worker.eligible
        )
        reports = part.worker.train(round, cohort, part.weights_V, part.counters, self.message, False)
        gathered = rounds.gather_reports(part, round, reports)
        averaging.update_global_weights(part, round, gathered)
        rounds.send_message(part, round, gathered)
        part.done = round
        return Round(cohort, gathered, part.weights_V.clone(), [counter.clone() for counter in part.counters])

    def load(self) -> None:
        """The module gets the present global weights."""
        self.flat.load(self.part.weights_V, self.part.counters)


def same_model(a: Round, b: Round) -> bool:
    return torch.equal(a.weights_V, b.weights_V) and all(map(torch.equal, a.counters, b.counters))
