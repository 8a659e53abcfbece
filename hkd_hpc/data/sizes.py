"""How many inputs and classes, of which shape, a data set has: known, from the heads of the files, or by reading it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from hkd_hpc.data import sources
from hkd_hpc.data.checks import input_shape, is_flat, seen_shape
from hkd_hpc.data.folder import find_classes, listed, read_image
from hkd_hpc.data.readers import npz_names, open_h5
from hkd_hpc.data.registry import Sizes, find_source
from hkd_hpc.data.settings import DataSettings
from hkd_hpc.data.tables import is_table
from hkd_hpc.runtime.own_code import load_object


@lru_cache
def sizes_of(data: DataSettings) -> Sizes | None:
    """Of the data set of section `data`; None where files cannot be read, which others say."""
    source = find_source(data.name)
    if source is None:
        return None
    if isinstance(source.sizes, Sizes):
        return source.sizes
    try:
        return load_object(source.sizes, f"data.name={data.name}")(data)
    except Exception:  # a damaged file can raise anything
        return None


def kind_of(data: DataSettings) -> str | None:
    """images, rows or sequences, where that costs no more than the head of a file; else None."""
    if is_table(data):
        return "rows"
    try:
        head = head_of(Path(data.path)) if data.name == "file" else None
    except Exception:  # as above
        return None
    if head is None or not is_flat(head):
        return None
    return "rows" if head.dtype.kind == "f" else "sequences"


def of_file(data: DataSettings) -> Sizes:
    """Of an own file; of an .npz or .h5 from its head and labels. Raises OSError, KeyError, ValueError, UsageError."""
    path = Path(data.path)
    head = head_of(path)
    if head is None or data.test_fraction is not None:
        return of_loaded(data)
    y_train, y_test = labels_of(path)
    shape = seen_shape(input_shape(head.shape, data.as_stored), data.as_stored)
    # labels are 0..C-1, or names
    return Sizes(len(y_train), len(y_test), len(np.unique(y_train)), shape, dtype_seen(head))


def head_of(path: Path) -> np.ndarray | None:
    """x_train of an .npz or .h5 without its numbers; None of a table. Raises OSError, KeyError or ValueError."""
    if path.suffix == ".h5":
        with open_h5(path) as file:
            return hollow(file["x_train"].shape, file["x_train"].dtype)
    if path.suffix != ".npz":
        return None
    with np.load(path, allow_pickle=False) as file, file.zip.open(f"{npz_names(path)['x_train']}.npy") as raw:
        version = np.lib.format.read_magic(raw)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(raw)
        return hollow(shape, dtype)


def labels_of(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(y_train, y_test) of an .npz or .h5. Raises as head_of."""
    if path.suffix == ".npz":
        names = npz_names(path)
        with np.load(path, allow_pickle=False) as file:
            return file[names["y_train"]], file[names["y_test"]]
    with open_h5(path) as file:
        return file["y_train"][()], file["y_test"][()]


def hollow(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of this shape that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def of_folder(data: DataSettings) -> Sizes:
    """Of a folder of images; opens one of them. Raises OSError or UsageError."""
    if data.test_fraction is not None:
        return of_loaded(data)
    names = find_classes(data)
    train, test = (listed(Path(data.path, split), names)[0] for split in ("train", "test"))
    side = data.image_size
    shape = (3, side, side) if side else read_image(train[0], None)[0].shape
    return Sizes(len(train), len(test), len(names), seen_shape(shape, data.as_stored))


def of_loaded(data: DataSettings) -> Sizes:
    """Of what can be known only by reading it. Raises UsageError."""
    dataset = sources.read(data)
    x_train = dataset.x_train
    return Sizes(len(x_train), len(dataset.x_test), dataset.classes, x_train.shape[1:], x_train.dtype.name)


def dtype_seen(x_train: np.ndarray) -> str:
    """Of inputs as networks see them."""
    if x_train.dtype.kind == "f":
        return "float32"
    return "int64" if is_flat(x_train) else "uint8"
