"""A partition as a file, for other frameworks and back: .npz or .json, with the keys that metrics.h5 has in /partition.

Client i's training images are train_index[train_offset[i]:train_offset[i + 1]], counting into the training split; val
and test likewise. `labels_sha256` ties the file to the data it divides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc.common.errors import UsageError
from hkd_hpc.data.partition import Labels, Partition, partition_sha256
from hkd_hpc.store.atomic import replace_file, replace_text

PARTS = ("train", "val", "test")
ARRAYS = (*(f"{part}_{what}" for part in PARTS for what in ("index", "offset")), "public_index", "images")
TEXTS = ("test_split", "sha256", "labels_sha256", "repeats_images")
KINDS = (".npz", ".json")
ANEW = "make it anew: python -m hkd_hpc.data partition ... --out FILE"


def labels_sha256(labels: Labels) -> str:
    """64 hex digits over the labels of the training split and then of the test split, as little-endian int64."""
    return hashlib.sha256(labels.train.astype("<i8").tobytes() + labels.test.astype("<i8").tobytes()).hexdigest()


def write(path: Path, tree: Mapping[str, Any]) -> None:
    """Make the file, complete or not at all.

    Args:
        path: ends in .npz or .json.
        tree: `assigned.as_tree` and what else is to be told, arrays and texts.

    Raises:
        UsageError: another ending.
        RunError: the system fails to write.
    """
    check_ending(path, "--out ")
    if path.suffix == ".json":
        plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in tree.items()}
        return replace_text(path, json.dumps(plain) + "\n")
    return replace_file(path, partial(_save_npz, tree))


def _save_npz(tree: Mapping[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **tree)


def check_ending(path: Path, what: str) -> None:
    """UsageError, which begins with `what`, for a name that is of neither kind."""
    if path.suffix not in KINDS:
        raise UsageError(f"{what}{path}: found the ending {path.suffix!r}, allowed are {' and '.join(KINDS)}")


def clients_of(path: str, wanted: int | None = None) -> int:
    """How many clients a file has. UsageError where it cannot be read, or has not as many as are wanted."""
    return _count(_read(Path(path), where := f"data.partition_file={path}"), wanted, where)


def _count(found: Mapping[str, Any], wanted: int | None, where: str) -> int:
    clients = len(found["train_offset"]) - 1
    if wanted not in (None, clients):
        raise UsageError(f"{where}: it has {clients} clients; set fed.clients={clients}")
    return clients


def read(path: str, labels: Labels, clients: int) -> Partition:
    """The partition in a file.

    Args:
        path: of the file.
        labels: of the data that it must divide.
        clients: fed.clients.

    Returns:
        The same partition as the one that was written.

    Raises:
        UsageError: it cannot be read, is of other data or of other clients, or gives an image twice.
    """
    where = f"data.partition_file={path}"
    found = _read(Path(path), where)
    _count(found, clients, where)
    _check_labels(found, labels, where)
    try:
        parts = {part: _cut(found[f"{part}_index"], found[f"{part}_offset"], clients) for part in PARTS}
    except ValueError as error:
        raise UsageError(f"{where}: {error}; {ANEW}") from None
    _check_owners(found, parts, where)
    made = Partition(
        parts["train"],
        parts["test"],
        found["test_split"],
        found["public_index"],
        labels.classes,
        partition_sha256(parts["train"], parts["val"], parts["test"], found["public_index"]),
        parts["val"],
        tuple(found["client_name"]),
    )
    if made.sha256 != found["sha256"]:
        raise UsageError(f"{where}: its indices have hash {made.sha256[:16]}, not {found['sha256'][:16]}; {ANEW}")
    return made


def _read(path: Path, where: str) -> dict[str, Any]:
    """Arrays of int64, texts as str. UsageError for what is no file of `write`."""
    check_ending(path, "data.partition_file=")
    try:
        raw = json.loads(path.read_text("utf-8")) if path.suffix == ".json" else _load_npz(path)
        found: dict[str, Any] = {key: _integers(key, raw[key]) for key in ARRAYS}
        found |= {key: str(raw[key]) for key in TEXTS}
        return found | {"client_name": [str(name) for name in raw.get("client_name", ())]}
    except FileNotFoundError:
        raise UsageError(f"{where}: there is no such file") from None
    except KeyError as error:
        raise UsageError(f"{where}: key {error.args[0]} is missing; {ANEW}") from None
    except Exception as error:  # zip, zlib, npy headers and JSON each raise their own
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UsageError(f"{where}: is no partition that can be read ({reason}); {ANEW}") from error


def _load_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def _integers(key: str, values: Any) -> np.ndarray:
    array = np.asarray(values if len(values) else np.zeros(0, np.int64))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"key {key}: found {array.dtype} of shape {array.shape}, allowed is a list of integers")
    return array.astype(np.int64)


def _check_labels(found: Mapping[str, Any], labels: Labels, where: str) -> None:
    images = [len(labels.train), len(labels.test)]
    if found["images"].tolist() != images:
        stored = " + ".join(map(str, found["images"].tolist()))
        raise UsageError(f"{where}: it divides {stored} images, the data have {images[0]} + {images[1]}")
    if found["labels_sha256"] != labels_sha256(labels):
        raise UsageError(f"{where}: it divides data with other labels, or in another order; {ANEW}")


def _cut(index: np.ndarray, offset: np.ndarray, clients: int) -> tuple[np.ndarray, ...]:
    """Each client's piece. ValueError for offsets that are none."""
    if len(offset) != clients + 1 or offset[0] or (np.diff(offset) < 0).any() or offset[-1] != len(index):
        raise ValueError("its offsets do not cut its indices into one piece for each client")
    return tuple(index[first:after] for first, after in pairwise(offset))


def _check_owners(found: Mapping[str, Any], parts: Mapping[str, tuple[np.ndarray, ...]], where: str) -> None:
    """UsageError for an index beyond the split, and for an image that is used twice."""
    sizes = dict(zip(("train", "test"), found["images"].tolist()))
    if found["test_split"] not in sizes:
        raise UsageError(f"{where}: key test_split is {found['test_split']}; allowed are train and test")
    used: dict[str, list[np.ndarray]] = {"train": [found["public_index"]], "test": []}
    for part, pieces in parts.items():
        used[found["test_split"] if part == "test" else "train"] += pieces
    may_repeat = found["repeats_images"] == "True"
    for split, own in used.items():
        joined = np.concatenate([np.zeros(0, int), *(np.unique(piece) if may_repeat else piece for piece in own)])
        beyond = joined[(joined < 0) | (joined >= sizes[split])]
        if len(beyond):
            raise UsageError(f"{where}: index {beyond[0]} of the {split} split, which has {sizes[split]} images")
        twice = np.flatnonzero(np.bincount(joined, minlength=1) > 1)
        if len(twice):
            raise UsageError(f"{where}: image {twice[0]} of the {split} split is given twice; {ANEW}")
