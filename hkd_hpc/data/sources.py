"""The data sets by name: is everything there (`check_present`, quick), and the checked arrays (`load`)."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hkd_hpc.common.errors import UsageError
from hkd_hpc.data import checks, holdout, normalise
from hkd_hpc.data.partition import eligible_ids
from hkd_hpc.data.raw import Arrays, RawData
from hkd_hpc.data.registry import SOURCES, Sizes, Source, find_source
from hkd_hpc.data.settings import DataSettings
from hkd_hpc.data.tables import is_table
from hkd_hpc.runtime.own_code import load_object

SPLITS = ("train", "test")


@dataclass(frozen=True)
class DataSet:
    """Both splits: inputs, labels (N,) int64 in 0..classes-1, client ids (N,) or None; all C-contiguous.

    Inputs are images (N,C,H,W) uint8 or float32, rows (N,F) float32, or sequences (N,T) int64. They are normalised by
    `mean` and `std`, a number for each channel or column, where these are not empty; of uint8 images, those of x / 255.
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
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def arrays(self) -> Arrays:
        """Images, labels and client ids of both splits, as far as there are any, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def shapes(self) -> dict[str, str]:
        """Classes, and of each array its shape and dtype, as text."""
        return {
            "classes": str(self.classes),
            "normalised by": f"{self.mean} {self.std}",
            **{name: f"{array.shape} {array.dtype}" for name, array in self.arrays().items()},
        }


def source_of(name: str) -> Source:
    """The entry of a data set, or of a loader of one's own. UsageError lists the names when there is none."""
    source = find_source(name)
    if source is None:
        raise UsageError(f"data.name={name!r}: allowed are {', '.join(SOURCES)}, or module:function")
    return source


def check_present(data: DataSettings) -> None:
    """Raise UsageError if the files of a data set are not there, saying what to do; reads a file's head at most.

    Args:
        data: section `data`: data.dir for the official data sets, data.path for the user's own data.
    """
    source = source_of(data.name)
    try:
        if source.is_own:
            load_object(source.check, f"data.name={data.name}")(data)
        else:
            _check_files(source, Path(data.dir))
    except (OSError, ValueError) as error:  # a name that is too long, or in a folder that may not be read
        raise UsageError(
            f"{place_of(data)}: cannot be looked at ({getattr(error, 'strerror', None) or error})"
        ) from error


def place_of(data: DataSettings) -> str:
    """The setting that says where the data are, for messages."""
    source = source_of(data.name)
    if source.is_own and not source.is_loader:
        return f"data.path={data.path}"
    return f"data.name={data.name}" if source.bundled or source.is_loader else f"data.dir={data.dir}"


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
    return read(DataSettings(name, os.fspath(dir), os.fspath(path), image_size))


def read(data: DataSettings) -> DataSet:
    """The data set of section `data`, checked and ready. Raises UsageError as `load`."""
    check_present(data)
    source = source_of(data.name)
    where = f"data.name={data.name}" if source.is_loader else source.where(data.dir, data.path)
    dataset = _checked(source, read_raw(source, data, where), data, where)
    expected = source.sizes.classes if isinstance(source.sizes, Sizes) else dataset.classes
    if dataset.classes != expected:
        raise UsageError(f"{where}: found {dataset.classes} classes, {data.name} has {expected}")
    return dataset


def read_raw(source: Source, data: DataSettings, where: object) -> RawData:
    """What its reader finds, with a test split."""
    found = load_object(source.read, f"data.name={data.name}")(source.files(data.dir, data.path), data)
    return found._replace(arrays=holdout.with_test_split(found.arrays, data, where)) if source.is_own else found


def natural_clients(data: DataSettings) -> int:
    """How many clients with data.min_images or more inputs the ids in the user's own data name; UsageError where there
    are none, or no such file."""
    check_present(data)
    ids = _client_ids(data)
    if ids is None or not ids.size:
        raise UsageError(
            f"{data.path or data.name}: key client_train is missing; data.partition=natural needs a client id for each "
            "image in it"
        )
    return len(eligible_ids(ids, data.min_images))


def _client_ids(data: DataSettings) -> np.ndarray | None:
    """(N,) of the training split, without its inputs where they need not be read."""
    source, what = source_of(data.name), f"data.name={data.name}"
    some_held_out = data.test_fraction and data.min_images  # else no client loses what counts here
    if source.read_clients and not is_table(data) and not some_held_out:
        return load_object(source.read_clients, what)(Path(data.path))
    return read_raw(source, data, data.path or what).arrays.get("client_train")


def _checked(source: Source, found: RawData, data: DataSettings, where: object) -> DataSet:
    """The data set of what a reader found. UsageError, one line, for anything wrong with it."""
    raw = found.arrays
    checks.check_inputs(
        {f"{where}: key x_{split}": raw[f"x_{split}"] for split in SPLITS}, normalise.takes_floats(data)
    )
    names = {key: _number(raw, key, where) for key in ("y", "client")}
    remarks = _remarks(raw, data.as_stored, where) if source.is_own else []
    stored_shapes = [raw[f"x_{split}"].shape for split in SPLITS]
    train, test = (_checked_split(raw, split, data.as_stored, where) for split in SPLITS)
    shapes = [checks.input_shape(shape, data.as_stored) for shape in stored_shapes]  # before any padding
    if shapes[0] != shapes[1]:
        raise UsageError(f"{where}: key x_test: found images of {shapes[1]}, allowed is x_train's {shapes[0]}")
    checks.check_clients(train.clients, test.clients, str(where))
    mean, std = normalise.scale_of(train.images, data, where)
    classes = checks.count_classes(train.labels, test.labels, str(where))
    class_names = found.class_names or names["y"]
    if source.is_own:
        remarks += untested_remarks(test.labels, class_names or tuple(map(str, range(classes))))
    return DataSet(
        source.name,
        classes,
        train.images,
        train.labels,
        test.images,
        test.labels,
        train.clients,
        test.clients,
        class_names=class_names,
        client_names=names["client"],
        remarks=(*found.remarks, *remarks),
        mean=mean,
        std=std,
    )


def _number(raw: Arrays, key: str, where: object) -> tuple[str, ...]:
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


def _checked_split(raw: Arrays, split: str, as_stored: bool, where: object) -> _Split:
    """Taken out of `raw`, so that the stored form is freed before the next split is converted."""
    images = checks.to_inputs(raw.pop(f"x_{split}"), f"{where}: key x_{split}", as_stored)
    labels = checks.to_integers(raw.pop(f"y_{split}"), len(images), f"{where}: key y_{split}")
    ids = raw.pop(f"client_{split}", None)
    clients = None if ids is None else checks.to_integers(ids, len(images), f"{where}: key client_{split}")
    return _Split(images, labels, clients)


def _remarks(raw: Arrays, as_stored: bool, where: object) -> list[str]:
    """What becomes of images on their way to networks, and which of them look wrong."""
    if checks.is_flat(raw["x_train"]):
        return []
    wrong = [
        text
        for split in SPLITS
        for text in degenerate_remarks(split, raw[f"x_{split}"], f"{where}: key x_{split}", as_stored)
    ]
    return [*form_remarks(checks.input_shape(raw["x_train"].shape, as_stored), as_stored), *wrong]


def untested_remarks(y_test: np.ndarray, class_names: tuple[str, ...]) -> list[str]:
    """A remark where the test split has nothing of a class: no accuracy speaks of it."""
    absent = np.setdiff1d(np.arange(len(class_names)), y_test)
    named = ", ".join(class_names[label] for label in absent[:5]) + " ..." * (len(absent) > 5)
    return [f"in no test input: {len(absent)} of {len(class_names)} classes ({named})"] * bool(len(absent))


def form_remarks(shape: tuple[int, ...], as_stored: bool = False) -> list[str]:
    """What becomes of the user's own images (C,H,W) of this form on their way to (3,H,W) of 32 px or more."""
    seen = checks.seen_shape(shape, as_stored)
    return ["grey images repeated as RGB"] * (seen[0] != shape[0]) + [
        f"images of {shape[2]} x {shape[1]} px with zeros around them to {seen[2]} x {seen[1]}"
    ] * (seen[1:] != shape[1:])


def degenerate_remarks(split: str, images: np.ndarray, where: str, as_stored: bool = False) -> list[str]:
    """A remark where raw images are constant or have two values only: they hold little, or were cut when they were
    stored.
    """
    counts = zip(checks.degenerate_images(images, where, as_stored), ("are constant", "have two values only"))
    found = [f"{count:,} {what}" for count, what in counts if count]
    return [
        f"of {len(images):,} {split} images {' and '.join(found)} (all values: {images.min()}..{images.max()})"
    ] * bool(found)
