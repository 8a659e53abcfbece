"""Bytes of a trial, in memory and on the disk, from those of its real model and scheme."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hkd_hpc.jobs.probe import SchemeSizes
from hkd_hpc.jobs.work import Work

HDF5 = 1.02  # a file / its arrays, measured on a ResNet18's checkpoint
FILE_BYTES = 60_000  # of an HDF5 file beside its arrays, and of log and settings: roughly
ROW_BYTES, CLIENT_ROW_BYTES = 500, 150  # of a round in metrics.h5, and of each client in it: roughly
HEAD_BYTES = 9_000  # of a round in a file that grows (store/head.py), until it is made anew at the latest half way


@dataclass(frozen=True)
class Disk:
    """Bytes. usual: a checkpoint but the last; last: the last checkpoint; running: the folder at most; finished: at the
    end."""

    usual: float
    last: float
    running: float
    finished: float


def disk_bytes(work: Work, sizes: SchemeSizes, keep_state: bool) -> Disk:
    """While it runs: two checkpoints and a temporary one, both files of rows and one that is made anew. When it is
    finished: final weights and metrics, or with keep_state all of it."""
    rounds, clients = work.config.fed.rounds, work.clients
    rows = rounds * (ROW_BYTES + CLIENT_ROW_BYTES * clients)
    partition = 8 * clients * (work.images + work.tests) + 8 * clients * work.sizes.classes
    metrics = FILE_BYTES + rows + partition
    growing = metrics + HEAD_BYTES * rounds / 2
    vectors = (1 + work.config.fed.server_vectors) * sizes["weights_bytes"]
    without = FILE_BYTES + partition + vectors + 4 * sizes["message_bytes"] + sizes["initial_bytes"]
    usual, last = without + clients * sizes["state_bytes"], without + clients * sizes["last_state_bytes"] + rows
    kept = usual * (rounds > 1) + last if keep_state else sizes["weights_bytes"] + FILE_BYTES
    return Disk(HDF5 * usual, HDF5 * last, HDF5 * (2 * growing + metrics + 2 * usual + last), HDF5 * (metrics + kept))


def memory_bytes(work: Work, sizes: SchemeSizes, ranks: int, nodes: int, gpus: int, rss_bytes: int) -> float:
    """Host memory of the node with rank 0: torch, model and activations of each rank as the probe had them, the images,
    and all clients' states, which rank 0 gathers to save them beside those that its node's clients hold."""
    image_bytes = math.prod(work.sizes.shape) * np.dtype(work.sizes.dtype).itemsize
    here, clients = math.ceil(ranks / nodes), math.ceil(work.clients / nodes)
    states = work.clients * sizes["last_state_bytes"]  # the largest
    held = 0 if gpus else clients * (work.images + work.tests) * image_bytes + states * clients / work.clients
    data = (work.sizes.train + 2 * work.sizes.test) * image_bytes
    kept = here * work.config.fed.server_vectors * sizes["flat_bytes"]
    return here * rss_bytes + data + held + kept + 2 * states + 3 * sizes["flat_bytes"]
