"""Data, and which client has which of them, the same on every rank."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.assembly.agreement import inequality, require_equal
from hkd_hpc.cohort import assign_clients
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import Config
from hkd_hpc.console import messages
from hkd_hpc.data import assigned, content, public, share, sources
from hkd_hpc.data.partition import Partition, pooled
from hkd_hpc.data.skew import FeatureSkew, skew_of


@dataclass(frozen=True)
class Federation:
    """Data and who has which of them, the same on every rank.

    Attributes:
        asked: the settings as they were given.
        config: the same, but one client where the scheme pools all data.
        dataset: both splits of the data.
        assigned: which images each client has, of `asked`.
        partition: the same of `config`.
        rank_of: the rank of each client.
        skew: what is done to the images of each client of `assigned`, if anything.
    """

    asked: Config
    config: Config
    dataset: sources.DataSet
    assigned: Partition
    partition: Partition
    rank_of: list[int]
    skew: FeatureSkew | None

    @property
    def names(self) -> tuple[str, ...]:
        """Of natural clients; empty where these are their numbers."""
        return self.partition.names

    def images(self, split: str, index: np.ndarray) -> np.ndarray:
        """(n,3,H,W) uint8: images of a split as the clients that own them have them."""
        x_NCHW = self.dataset.x_test if split == "test" else self.dataset.x_train
        return self.skew.changed(x_NCHW, split, index) if self.skew else x_NCHW[index]


def federation_of(config: Config, comm: Comm) -> Federation:
    """Read the data and partition them."""
    dataset = node_copy(config, comm)
    require_same_data(comm, config, dataset)  # before anything is made that one rank alone could fail at
    require_augmentable(config, dataset)
    if comm.rank == 0 and dataset.remarks:
        messages.say(f"data: {'; '.join(dataset.remarks)}")
    scheme_class = schemes.get(config.scheme.name)
    asked, of_clients = config, partition_of(config, dataset, scheme_class.needs_public)
    if comm.rank == 0 and of_clients.remark:
        messages.say(f"data: {of_clients.remark}")
    skew = skew_of(config.data, config.partition_seed, of_clients, {"train": dataset.x_train, "test": dataset.x_test})
    partition = of_clients
    if scheme_class.pools_data:
        partition = pooled(of_clients)
        config = replace(config, fed=replace(config.fed, clients=1, participation=1.0, straggler_rate=0.0))
    rank_of = assign_clients([len(index) for index in partition.train], comm.size)
    return Federation(asked, config, dataset, of_clients, partition, rank_of, skew)


def require_same_data(comm: Comm, config: Config, dataset: sources.DataSet) -> None:
    """RunError unless the arrays of all ranks have the same shapes; of a loader of one's own, UsageError unless they
    are the same."""
    if not sources.source_of(config.data.name).is_loader:
        return require_equal(comm, {"data": dataset.shapes()})
    problem = inequality(comm, {"data": {**dataset.shapes(), "content": dataset.sha256[:16]}})
    if problem:
        raise UsageError(f"data.name={config.data.name}: {problem}; a loader gives the same on every node")


def require_augmentable(config: Config, dataset: sources.DataSet) -> None:
    """UsageError unless train.augment is none, or fits the images."""
    train, shape = config.train, dataset.x_train.shape[1:]
    if train.augment != "none" and len(shape) != 3:
        raise UsageError(f"train.augment={train.augment}: needs images; data.name={config.data.name} has shape {shape}")
    if train.augment.startswith("crop") and train.augment_padding >= min(shape[1:]):
        raise UsageError(
            f"train.augment_padding={train.augment_padding}: must be less than the sides of the images, "
            f"{' x '.join(map(str, shape[1:]))} pixels"
        )


def node_copy(config: Config, comm: Comm) -> sources.DataSet:
    """The data, read once per node and mapped by its other ranks; the file has no name any more when this returns."""
    data = config.data
    if comm.size == 1:
        return content.load(data)
    path = share.publish(content.load(data)) if comm.local_rank == 0 else ""
    try:
        with comm.removed_at_failure(path) if path else nullcontext():
            told = comm.gather_text(json.dumps([comm.hosts[comm.rank], path]))
            made = json.dumps({host: path for host, path in map(json.loads, told) if path})
            paths = comm.share_text(made if comm.rank == 0 else None)
            dataset = share.attach(json.loads(paths)[comm.hosts[comm.rank]])
            comm.agree()
    finally:
        if path:
            os.unlink(path)
    return dataset


def partition_of(config: Config, dataset: sources.DataSet, needs_public: bool = False) -> Partition:
    """The public set depends on settings alone, so that partitions are the same for all schemes."""
    data, images = config.data, len(dataset.y_train)
    if needs_public and data.partition != "file":
        public.check(config.scheme.name, config.data, config.fed.clients, images)
    made = assigned.partition_of(data, config.fed.clients, config.partition_seed, dataset)
    if needs_public and not len(made.public):
        raise UsageError(
            f"scheme.name={config.scheme.name}: needs public images, and data.partition_file={data.partition_file} has "
            "none; make it anew with data.public_fraction"
        )
    return made
