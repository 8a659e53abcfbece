"""Small files of the official form of MNIST, Fashion-MNIST and EMNIST."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import numpy as np

from hkd_hpc.data.idx import EMNIST_CLASSES

FOLDERS = {"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw"}


def as_idx(array: np.ndarray) -> bytes:
    """http://yann.lecun.com/exdb/mnist: 0 0, 8 for unsigned byte, the axes, their lengths in 4 bytes, high first."""
    lengths = b"".join(int(length).to_bytes(4, "big") for length in array.shape)
    return bytes((0, 0, 8, array.ndim)) + lengths + array.astype(np.uint8).tobytes()


def parts(classes: int, first: int = 0) -> dict[str, np.ndarray]:
    """Two training images of each class and one test image, random."""
    random = np.random.default_rng(0)
    found = {}
    for half, times in (("train", 2), ("test", 1)):
        found[f"x_{half}"] = random.integers(0, 256, (times * classes, 28, 28), np.uint8)
        found[f"y_{half}"] = np.tile(np.arange(classes), times) + first
    return found


def save_mnist(dir: Path, name: str, ending: str = ".gz", **changes: bytes) -> Path:
    """The four files, with the bytes of some of them replaced."""
    folder = dir / FOLDERS[name]
    folder.mkdir(parents=True)
    for part, array in parts(10).items():
        what = "images-idx3-ubyte" if part.startswith("x") else "labels-idx1-ubyte"
        half = "train" if part.endswith("train") else "t10k"
        content = changes.get(part, as_idx(array))
        (folder / f"{half}-{what}{ending}").write_bytes(gzip.compress(content) if ending else content)
    return dir


def save_emnist(dir: Path, split: str) -> Path:
    """EMNIST/raw/gzip.zip with the four files of a split; images are stored column by column, letters from 1."""
    (dir / "EMNIST/raw").mkdir(parents=True)
    classes = EMNIST_CLASSES[split]
    with zipfile.ZipFile(dir / "EMNIST/raw/gzip.zip", "w") as archive:
        for part, array in parts(len(classes), split == "letters").items():
            what, half = part.split("_")
            name = f"gzip/emnist-{split}-{half}-" + ("images-idx3" if what == "x" else "labels-idx1") + "-ubyte.gz"
            stored = array.transpose(0, 2, 1) if what == "x" else array
            archive.writestr(name, gzip.compress(as_idx(stored)))
    return dir
