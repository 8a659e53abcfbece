"""The data sets by name: is everything there (`check_present`, quick), and the checked arrays (`load`)."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hkd_hpc.data import checks, readers
from hkd_hpc.data.partition import able_ids
from hkd_hpc.data.registry import SOURCES, Sizes, Source
from hkd_hpc.errors import UsageError
from hkd_hpc.runtime.own_code import load_object

SPLITS = ("train", "test")


@dataclass(frozen=True)
class DataSet:
    """Both splits: images (N,3,H,W) uint8 C-contiguous, labels (N,) int64 in 0..classes-1, client ids (N,) or None.

    Labels and client ids that were names are their index in `class_names` and `client_names`, else empty. `remarks`:
    what of the user's own data was left out, changed, or looks wrong.
    sha256: of the arrays (`content`), empty where nobody asked for it.
    """

    name: str
    classes: int
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    client_train: np.ndarray | None = None
    client_test: np.ndarray | None = None
    sha256: str = ""
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def shapes(self) -> dict[str, str]:
        """Classes, and of each array its shape and dtype, as text."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return {
            "classes": str(self.classes),
            **{name: f"{array.shape} {array.dtype}" for name, array in arrays.items()},
        }


def source_of(name: str) -> Source:
    """The entry of a data set. UsageError lists the names when there is none."""
    if name not in SOURCES:
        raise UsageError(f"data.name={name!r}: allowed are {', '.join(SOURCES)}")
    return SOURCES[name]


def check_present(name: str, dir: str | os.PathLike, path: str | os.PathLike) -> None:
    """Raise UsageError if the files of data set `name` are not there, saying what to do; reads a file's head at most.

    Args:
        name: data.name.
        dir: data.dir, for the official data sets; else not looked at.
        path: data.path, for the user's own data; else not looked at.
    """
    source = source_of(name)
    try:
        if source.is_own:
            load_object(source.check, f"data.name={name}")(path)
        else:
            _check_files(source, Path(dir))
    except (OSError, ValueError) as error:  # a name that is too long, or in a folder that may not be read
        raise UsageError(
            f"{place_of(name, dir, path)}: cannot be looked at ({getattr(error, 'strerror', None) or error})"
        ) from error


def place_of(name: str, dir: str | os.PathLike, path: str | os.PathLike) -> str:
    """The setting that says where the data are, for messages."""
    source = source_of(name)
    if source.is_own:
        return f"data.path={path}"
    return f"data.name={name}" if source.bundled else f"data.dir={dir}"


def _check_files(source: Source, dir: Path) -> None:
    missing = [file for file in source.files(dir, "") if not _has_content(file)]
    if missing and source.bundled:
        raise UsageError(f"{missing[0]} is missing although it ships with hkd_hpc: install the package again")
    if missing:
        raise UsageError(
            f"data.name={source.name}: {missing[0]} is missing; get it on a machine with internet: "
            f"python -m hkd_hpc.data prepare {source.name} --dir {shlex.quote(str(dir))}"
        )


def _has_content(file: Path) -> bool:
    return file.is_dir() or (file.is_file() and file.stat().st_size > 0)  # a folder: of an archive that was unpacked


def load(name: str, dir: str | os.PathLike, path: str | os.PathLike, image_size: int | None = None) -> DataSet:
    """The data set `name`, checked and ready.

    Args:
        name: data.name.
        dir: data.dir, for the official data sets.
        path: data.path, for the user's own data.
        image_size: px; a folder of images is resized to image_size x image_size.

    Returns:
        Both splits, of the shapes that DataSet names.

    Raises:
        UsageError: one line, for anything wrong with the files.
    """
    check_present(name, dir, path)
    source, where = SOURCES[name], SOURCES[name].where(dir, path)
    read = load_object(source.read, f"data.name={name}")
    data = _checked(source, read(source.files(dir, path), image_size), where)
    expected = source.sizes.classes if isinstance(source.sizes, Sizes) else data.classes
    if data.classes != expected:
        raise UsageError(f"{where}: found {data.classes} classes, {name} has {expected}")
    return data


def natural_clients(path: str | os.PathLike, min_images: int | None = None, name: str = "file") -> int:
    """How many clients with `min_images` or more images the ids in the user's own data name; UsageError where there are
    none, or no such data."""
    check_present(name, "", path)
    ids = load_object(SOURCES[name].read_clients, f"data.name={name}")(Path(path))
    if ids is None or not ids.size:
        raise UsageError(
            f"{path}: key client_train is missing; data.partition=natural needs a client id for each image in it"
        )
    return len(able_ids(ids, min_images))


def _checked(source: Source, found: readers.RawData, where: Path) -> DataSet:
    """The data set of what a reader found. UsageError, one line, for anything wrong with it."""
    raw = found.arrays
    checks.check_pixels({f"{where}: key x_{split}": raw[f"x_{split}"] for split in SPLITS})
    names = {key: _number(raw, key, where) for key in ("y", "client")}
    remarks = _degenerate_remarks(raw, where) if source.is_own else []
    stored_shapes = [raw[f"x_{split}"].shape for split in SPLITS]
    train, test = (_checked_split(raw, split, where) for split in SPLITS)
    shapes = list(map(checks.image_shape, stored_shapes))  # before any padding
    if shapes[0] != shapes[1]:
        raise UsageError(f"{where}: key x_test: found images of {shapes[1]}, allowed is x_train's {shapes[0]}")
    if source.is_own:
        remarks = form_remarks(shapes[0]) + remarks
    checks.check_clients(train.clients, test.clients, str(where))
    return DataSet(
        source.name,
        checks.count_classes(train.labels, test.labels, str(where)),
        train.images,
        train.labels,
        test.images,
        test.labels,
        train.clients,
        test.clients,
        class_names=found.class_names or names["y"],
        client_names=names["client"],
        remarks=(*found.remarks, *remarks),
    )


def _number(raw: readers.Arrays, key: str, where: Path) -> tuple[str, ...]:
    """Names in the arrays of a key become numbers, in place; returns these names."""
    if f"{key}_train" not in raw:
        return ()
    train, test, names = checks.numbered(raw[f"{key}_train"], raw.get(f"{key}_test"), str(where), key)
    raw[f"{key}_train"] = train
    if test is not None:
        raw[f"{key}_test"] = test
    return names


class _Split(NamedTuple):
    images: np.ndarray
    labels: np.ndarray
    clients: np.ndarray | None


def _checked_split(raw: readers.Arrays, split: str, where: Path) -> _Split:
    """Taken out of `raw`, so that the stored form is freed before the next split is converted."""
    images = checks.to_images(raw.pop(f"x_{split}"), f"{where}: key x_{split}")
    labels = checks.to_integers(raw.pop(f"y_{split}"), len(images), f"{where}: key y_{split}")
    ids = raw.pop(f"client_{split}", None)
    clients = None if ids is None else checks.to_integers(ids, len(images), f"{where}: key client_{split}")
    return _Split(images, labels, clients)


def _degenerate_remarks(raw: readers.Arrays, where: Path) -> list[str]:
    return [
        text for split in SPLITS for text in degenerate_remarks(split, raw[f"x_{split}"], f"{where}: key x_{split}")
    ]


def form_remarks(shape: tuple[int, int, int]) -> list[str]:
    """What becomes of the user's own images (C,H,W) of this form on their way to (3,H,W) of 32 px or more."""
    channels, height, width = shape
    full_height, full_width = (max(side, checks.SMALLEST_SIDE_PX) for side in (height, width))
    small = (full_height, full_width) != (height, width)
    return ["grey images repeated as RGB"] * (channels == 1) + [
        f"images of {width} x {height} px with zeros around them to {full_width} x {full_height}"
    ] * small


def degenerate_remarks(split: str, images: np.ndarray, where: str) -> list[str]:
    """A remark where raw images are constant or have two values only: they hold little, or were cut when they were
    stored.
    """
    counts = zip(checks.degenerate_images(images, where), ("are constant", "have two values only"))
    found = [f"{count:,} {what}" for count, what in counts if count]
    return [
        f"of {len(images):,} {split} images {' and '.join(found)} (all values: {images.min()}..{images.max()})"
    ] * bool(found)
