"""Toy nets, clients and local trainers: images of 3 x 2 x 2, three classes, all of it trained in milliseconds."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import submitit  # noqa: F401  (before absl, of dp-accounting, whose log handler it closes with all it writes to)
import torch
from gpus import masks_for
from torch import nn

from hkd_hpc import config, schemes
from hkd_hpc.client import Client
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.networks import Net
from hkd_hpc.schemes.base import RunInfo
from hkd_hpc.training import LocalTrainer

MARK_OF_FIXTURE = {"cluster": "slurm", "gpu": "gpu"}


def pytest_configure(config: pytest.Config) -> None:
    """Before CUDA looks: what it sees first holds for the whole process."""
    os.environ.update(masks_for(config.args, config.invocation_params.dir))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks by fixture. Slow files begin first, so that no worker sits alone over one at the end."""
    for item in items:
        for fixture in MARK_OF_FIXTURE.keys() & getattr(item, "fixturenames", ()):
            item.add_marker(MARK_OF_FIXTURE[fixture])
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    slow = [file for file in files.values() if any(map(is_slow, file))]
    slow = taking_turns([file for file in slow if waits(file)], [file for file in slow if not waits(file)])
    items[:] = itertools.chain(*slow, *(file for file in files.values() if not any(map(is_slow, file))))


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def waits(file: list[pytest.Item]) -> bool:
    """Rather than compute: for SLURM, for ranks that are started anew, for time to run out."""
    return any(item.get_closest_marker(mark) for item in file for mark in ("slurm", "mpi"))


def taking_turns(*groups: list) -> list:
    """The first of each group, the second of each, and so on."""
    return [member for turn in itertools.zip_longest(*groups) for member in turn if member is not None]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def interruptible():
    """A shell's background jobs ignore Ctrl-C, and what they start too; tests send it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="module")
def modules_of_its_own(tmp_path_factory):
    """Modules that a file's tests wrote and imported go with it: the next file may write others of the same names."""
    yield
    base = tmp_path_factory.getbasetemp()
    for name, module in list(sys.modules.items()):
        if base in Path(vars(module).get("__file__") or "/").parents:
            del sys.modules[name]


@contextmanager
def float64():
    """The product computes in float64, as oracles do (see hkd_hpc/models/precision.py)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture
def in_float64():
    with float64():
        yield


@pytest.fixture(scope="module")
def module_in_float64():
    with float64():
        yield


@pytest.fixture
def toy_net():
    """make(batch_norm, classes, latent, seed): Flatten, Linear, perhaps BatchNorm, ReLU, Linear; a classifier."""

    def make(batch_norm: bool = True, classes: int = 3, latent: int = 4, seed: int = 0) -> Net:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            norm = [nn.BatchNorm1d(8)] if batch_norm else []
            first = nn.Linear(12, 8, bias=not batch_norm)
            extractor = nn.Sequential(nn.Flatten(), first, *norm, nn.ReLU(), nn.Linear(8, latent))
            return Net(extractor, latent, classes)

    return make


@pytest.fixture
def toy_client():
    """make(labels, id, classes, seed): random images with these labels; two of them again as the local test."""

    def make(labels, id: int = 0, classes: int = 3, seed: int = 0) -> Client:
        labels = torch.as_tensor(labels, dtype=torch.int64)
        pixels = np.random.default_rng(100 + id).integers(0, 256, (len(labels), 3, 2, 2), dtype=np.uint8)
        images = torch.from_numpy(pixels)
        return Client(id, images, labels, images[:2], labels[:2], classes, seed)

    return make


@pytest.fixture
def toy_trainer():
    """make(net, scheme name, "section.key=value" ...): a local trainer as a rank has it."""

    def make(net: nn.Module, scheme: str = "fedavg", *overrides: str) -> LocalTrainer:
        settings = config.resolve(
            overrides=[f"scheme.name={scheme}", "train.epochs=2", "train.batch_size=8", *overrides]
        )
        flat = FlatModel(net)
        classes, latent = net.classifier.weight.shape
        told = {"label_smoothing": settings.train.label_smoothing, "augments": settings.train.augments}
        told |= {"privacy": settings.privacy, "batch_size": settings.train.batch_size}
        info = RunInfo(classes, latent, 1, len(flat.parameters_P), len(flat.values_V), 0, **told)
        return LocalTrainer(flat, schemes.get(scheme)(settings.scheme, info), settings)

    return make
