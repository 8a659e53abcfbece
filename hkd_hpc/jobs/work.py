"""What a trial does in a round, and what rounds of a study have cost so far: the ground of the forecast. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.cohort import cohort_size
from hkd_hpc.config import Config
from hkd_hpc.data.partition import floor
from hkd_hpc.data.registry import Sizes
from hkd_hpc.data.sizes import sizes_of
from hkd_hpc.jobs.sweep import Trial
from hkd_hpc.schemes.base import SchemeSettings
from hkd_hpc.store.tree import BadFile, load_tree

# ---- the work of a trial


@dataclass(frozen=True)
class Work:
    """What a trial does in a round. `images`: each client's training images; `tests`: those of its local test."""

    config: Config
    sizes: Sizes

    @cached_property
    def _pools(self) -> bool:
        return schemes.get(self.config.scheme.name).pools_data

    @property
    def clients(self) -> int:
        return 1 if self._pools else self.config.fed.clients

    @property
    def cohort(self) -> int:
        return cohort_size(self.clients, self.config.fed.participation)

    @property
    def images(self) -> int:
        assigned = self._assigned
        kept = assigned - floor(0.25 * assigned)
        return max(1, (kept - floor(self.config.data.val_fraction * kept)) * self._times)

    @property
    def tests(self) -> int:
        return floor(0.25 * self._assigned) * self._times

    @property
    def _assigned(self) -> int:
        return floor(self.config.data.fraction * self.sizes.train / self.config.fed.clients)

    @property
    def _times(self) -> int:
        return self.config.fed.clients if self._pools else 1

    @property
    def used(self) -> int:
        """Training images of a client, each as often as a round uses it; a pass that leaves weights alone, as those of
        FedRep's head, counts as a whole one."""
        scheme, epochs = self.config.scheme, self.config.train.epochs
        return self.images * (scheme.local_epochs(epochs) if isinstance(scheme, SchemeSettings) else epochs)

    def trained(self, workers: int) -> int:
        """Images that the busiest of so many workers trains on in a round, each as often as it is used."""
        return math.ceil(self.cohort / workers) * self.used

    def tested(self, workers: int, ranks: int) -> float:
        """Images that it tests in a round; in one process the global test is no other rank's."""
        every = self.config.run.evaluate_every
        return math.ceil(self.cohort / workers) * self.tests + (self.sizes.test / every if ranks == 1 else 0)


def workers_of(ranks: int, gpus: int) -> int:
    """Who trains at the same time: client ranks, or the GPUs that they share."""
    return max(1, min(ranks - 1, gpus) if gpus else ranks - 1)


def slowdown(scheme: str) -> float:
    """A round / the reference's: what the scheme is to reach, else what its paper says, else 1."""
    to_reach, paper = schemes.get(scheme).about.slowdown
    return to_reach or paper or 1.0


# ---- rounds of this study


@dataclass(frozen=True)
class Measured:
    """Seconds of one image in a round of a finished or running trial, everything that a round does included."""

    scheme: str
    data: tuple
    on_gpu: bool
    image_s: float
    rounds: int


def measured(root: Path, trials: Iterable[Trial]) -> list[Measured]:
    """What the trials of a study have shown so far."""
    return [found for trial in trials if (found := _measured(root / trial.name / "metrics.h5", trial))]


def _measured(path: Path, trial: Trial) -> Measured | None:
    config = trial.config()
    sizes = data_sizes(config)
    try:
        tree = load_tree(path, only=["rounds/wall_s", "rounds/seconds/evaluate_and_save", "world"])
    except BadFile:
        return None
    if sizes is None or not len(tree["rounds"]["wall_s"]):
        return None
    ranks, devices = int(tree["world"]["ranks"]), tree["world"]["plan"].partition("devices: ")[2].split("; ")
    gpus = sum("cpu" not in device for device in devices)
    trained = Work(config, sizes).trained(workers_of(ranks, gpus))
    return Measured(
        config.scheme.name,
        data_key(config),
        gpus > 0,
        float(np.median(seconds_of_rounds(tree["rounds"]))) / trained,
        len(tree["rounds"]["wall_s"]),
    )


def seconds_of_rounds(rounds: Mapping[str, Any]) -> np.ndarray:
    """(R,) from the start of a round to that of the next: rank 0 tests and saves before it begins another."""
    return np.asarray(rounds["wall_s"]) + np.asarray(rounds["seconds"]["evaluate_and_save"])


def data_sizes(config: Config) -> Sizes | None:
    return sizes_of(config.data)


def data_key(config: Config) -> tuple:
    """What rounds have in common that differ by the number of images alone: a round's test does not grow with them, so
    that other fractions, epochs, batches or precisions are no measure."""
    data, train, model = config.data, config.train, json.dumps(asdict(config.model), sort_keys=True)
    of_train = train.epochs, train.batch_size, train.precision
    return data.name, os.path.basename(data.path), data.fraction, *of_train, model


def from_measured(found: list[Measured], scheme: str, key: tuple, on_gpu: bool) -> tuple[float, str] | None:
    """(seconds an image, where they come from)."""
    fitting = [m for m in found if m.data == key and m.on_gpu == on_gpu]
    same = [m for m in fitting if m.scheme == scheme]
    image_s = [m.image_s * (1 if same else slowdown(scheme) / slowdown(m.scheme)) for m in same or fitting]
    if not image_s:
        return None
    basis = "from rounds of this study" if same else "from rounds of another scheme in this study"
    return float(np.median(image_s)), basis
