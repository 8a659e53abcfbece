"""From settings and labels to which images each client has; the same as a tree of arrays, for files and figures."""

from __future__ import annotations

from typing import Any

import numpy as np

from hkd_hpc.data import partition_file, public
from hkd_hpc.data.partition import Labels, Partition, Rule, make_partition, repeats
from hkd_hpc.data.settings import DataSettings
from hkd_hpc.data.sources import DataSet


def labels_of(dataset: DataSet) -> Labels:
    """What a partition sees of a data set."""
    return Labels(
        dataset.y_train,
        dataset.y_test,
        dataset.classes,
        dataset.client_train,
        dataset.client_test,
        dataset.client_names,
    )


def partition_of(data: DataSettings, clients: int, seed: int, dataset: DataSet) -> Partition:
    """Which images each client has, the same for all schemes.

    Args:
        data: section `data`.
        clients: fed.clients.
        seed: of the partition.
        dataset: whose labels are partitioned.

    Returns:
        The partition, a pure function of the arguments.

    Raises:
        UsageError: settings that cannot be met.
    """
    if data.partition == "file":
        return partition_file.read(data.partition_file, labels_of(dataset), clients)
    rule = Rule(
        clients=clients,
        kind=data.partition,
        seed=seed,
        fraction=data.fraction,
        public_fraction=public.fraction(data, clients, len(dataset.y_train)),
        beta=data.beta,
        classes_per_client=data.classes_per_client,
        val_fraction=data.val_fraction,
        min_images=data.min_images,
    )
    return make_partition(labels_of(dataset), rule)


def exported(config_json: str, partition: Partition, dataset: DataSet) -> dict[str, Any]:
    """What a file of the partition holds: `as_tree`, the hash of the labels, and the settings that made it."""
    return as_tree(partition, dataset) | {
        "labels_sha256": partition_file.labels_sha256(labels_of(dataset)),
        "repeats_images": repeats((*partition.train, *partition.test)),
        "client_name": np.array(partition.names, str),
        "settings_json": config_json,
    }


def as_tree(partition: Partition, dataset: DataSet) -> dict[str, Any]:
    """Client i's images are train_index[train_offset[i]:train_offset[i + 1]], counting into the official split."""
    offsets = lambda parts: np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    return {
        "train_index": np.concatenate(partition.train),
        "train_offset": offsets(partition.train),
        "val_index": np.concatenate(partition.val),
        "val_offset": offsets(partition.val),
        "test_index": np.concatenate(partition.test),
        "test_offset": offsets(partition.test),
        "test_split": partition.test_split,
        "public_index": partition.public,
        "sha256": partition.sha256,
        "images": np.array([len(dataset.y_train), len(dataset.y_test)], np.int64),
        "train_count": partition.train_count_MC(dataset.y_train),
        "global_test_count": np.bincount(dataset.y_test, minlength=dataset.classes),
    } | ({"class_name": np.array(dataset.class_names)} if dataset.class_names else {})
