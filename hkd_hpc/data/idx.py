"""The official files of MNIST, Fashion-MNIST and EMNIST: IDX, gzipped or not, in the folders that torchvision uses."""

from __future__ import annotations

import gzip
import string
import zipfile
import zlib
from pathlib import Path

import numpy as np

from hkd_hpc.data.raw import RawData, broken
from hkd_hpc.data.settings import DataSettings

_PARTS = ("x_train", "y_train", "x_test", "y_test")
_UINT8 = 8  # IDX's code of the type
_MERGED = "cijklmopsuvwxyz"  # lower-case letters that EMNIST counts as their upper-case ones
_ALL = sorted(string.digits + string.ascii_letters)
EMNIST_CLASSES = {
    "byclass": _ALL,
    "bymerge": [name for name in _ALL if name not in _MERGED],
    "balanced": [name for name in _ALL if name not in _MERGED],
    "letters": list(string.ascii_lowercase),
    "digits": list(string.digits),
    "mnist": list(string.digits),
}


def read_mnist(files: list[Path], _: object = None) -> RawData:
    """Images (N,28,28) uint8 and labels (N,) of both splits, of the four files in the order of `_PARTS`."""
    return RawData({part: _read(file, _axes(part)) for part, file in zip(_PARTS, files)})


def read_emnist(files: list[Path], data: DataSettings) -> RawData:
    """The same of one split of EMNIST's zip; images upright, letters from 0."""
    [file], split = files, data.name.removeprefix("emnist_")
    try:
        with zipfile.ZipFile(file) as archive:
            content = {part: gzip.decompress(archive.read(_emnist_name(split, part))) for part in _PARTS}
    except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise broken(file, error) from error
    arrays = {part: parsed(raw, _axes(part), file / _emnist_name(split, part)) for part, raw in content.items()}
    for images in ("x_train", "x_test"):
        arrays[images] = arrays[images].transpose(0, 2, 1)  # stored column by column
    first = int(split == "letters")  # labelled from 1 on
    for labels in ("y_train", "y_test"):
        arrays[labels] = arrays[labels].astype(np.int64) - first
    return RawData(arrays, tuple(EMNIST_CLASSES[split]))


def _emnist_name(split: str, part: str) -> str:
    what, _, half = part.partition("_")
    return f"gzip/emnist-{split}-{half}-" + ("images-idx3-ubyte.gz" if what == "x" else "labels-idx1-ubyte.gz")


def _axes(part: str) -> int:
    return 3 if part.startswith("x") else 1


def _read(file: Path, axes: int) -> np.ndarray:
    try:
        content = file.read_bytes()
        content = gzip.decompress(content) if file.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise broken(file, error) from error
    return parsed(content, axes, file)


def parsed(content: bytes, axes: int, file: Path) -> np.ndarray:
    """The array of uint8 in the bytes of an IDX file: 0, 0, type, axes, their lengths as big-endian int32, the numbers.

    UsageError, which names the file, where it has another form.
    """
    head_bytes = 4 + 4 * axes
    if content[:4] != bytes((0, 0, _UINT8, axes)) or len(content) < head_bytes:
        raise broken(file, f"begins with {content[:4].hex()}, an IDX file of {axes} axes with 00000{_UINT8:x}0{axes}")
    shape = np.frombuffer(content[4:head_bytes], ">u4").astype(int)
    if len(content) != head_bytes + shape.prod():
        raise broken(file, f"has {len(content) - head_bytes} numbers, its head announces {shape.prod()}")
    return np.frombuffer(content, np.uint8, offset=head_bytes).reshape(shape)
