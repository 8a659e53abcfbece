"""How many images and classes, of which shape, a data set has: known, or from the heads of the files."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from hkd_hpc.data.checks import SMALLEST_SIDE_PX
from hkd_hpc.data.folder import check_folder, listed, read_image
from hkd_hpc.data.readers import open_h5
from hkd_hpc.data.registry import SOURCES, Sizes
from hkd_hpc.errors import UsageError
from hkd_hpc.runtime.own_code import load_object


@lru_cache
def sizes_of(name: str, path: str, image_size: int | None) -> Sizes | None:
    """Of the data set data.name, data.path, data.image_size (px); None where files cannot be read, which others say."""
    known = SOURCES[name].sizes
    if isinstance(known, Sizes):
        return known
    try:
        return load_object(known, f"data.name={name}")(Path(path), image_size)
    except (OSError, KeyError, ValueError, UsageError):
        return None


def of_file(path: Path, _: int | None = None) -> Sizes:
    """Of an own .npz or .h5. Raises OSError, KeyError or ValueError."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            y_train, y_test = file["y_train"], file["y_test"]
            with file.zip.open("x_train.npy") as raw:
                version = np.lib.format.read_magic(raw)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape = read(raw)[0]
    else:
        with open_h5(path) as file:
            y_train, y_test, shape = file["y_train"][()], file["y_test"][()], file["x_train"].shape
    sides = shape[1:] if len(shape) == 3 else shape[2:] if shape[1] in (1, 3) else shape[1:3]
    return Sizes(
        len(y_train),
        len(y_test),
        len(np.unique(y_train)),  # 0..C-1, or names
        _seen(sides),
    )


def of_folder(path: Path, image_size: int | None) -> Sizes:
    """Of a folder of images; opens one of them. Raises OSError or UsageError."""
    names = check_folder(path)
    train, test = (listed(path / split, names)[0] for split in ("train", "test"))
    sides = (image_size,) * 2 if image_size else read_image(train[0], None)[0].shape[1:]
    return Sizes(len(train), len(test), len(names), _seen(sides))


def _seen(sides: tuple[int, ...]) -> tuple[int, int, int]:
    """(3, height, width) after padding."""
    height, width = (max(SMALLEST_SIDE_PX, side) for side in sides)
    return 3, height, width
