"""TinyImageNet as it is downloaded: its zip, or that unpacked. The official validation split is its test."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np

from hkd_hpc.common.errors import UsageError
from hkd_hpc.data.folder import read_image
from hkd_hpc.data.raw import RawData, broken

ROOT = "tiny-imagenet-200"
SHAPE = (3, 64, 64)
_THREADS = 8  # Pillow decodes without Python's lock

Read = Callable[[str], bytes]  # a file below ROOT


def read_tinyimagenet(files: list[Path], _: object = None) -> RawData:
    """Images (N,3,64,64) uint8, labels (N,) in the order of the sorted WordNet ids, of train/ and val/."""
    [place] = files
    with _opened(place) as (names, read):
        ids = sorted(_text(read, "wnids.txt", place).split())
        words = dict(line.split("\t", 1) for line in _text(read, "words.txt", place).splitlines() if "\t" in line)
        train, test = _train(names), _annotated(_text(read, "val/val_annotations.txt", place))
        arrays = {}
        for split, labels in {"train": train, "test": test}.items():
            arrays[f"x_{split}"] = _images(list(labels), read, place)
            arrays[f"y_{split}"] = _numbers(labels, ids, place)
    return RawData(arrays, tuple(words.get(one, one).split(",")[0] for one in ids))


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[tuple[list[str], Read]]:
    """(all files below ROOT, how to read one) of the zip or the folder."""
    if place.is_dir():
        below = (Path(folder, name) for folder, _, found in os.walk(place / "train") for name in found)
        yield [path.relative_to(place).as_posix() for path in below], lambda name: (place / name).read_bytes()
        return
    try:
        archive = zipfile.ZipFile(place)
    except (OSError, zipfile.BadZipFile) as error:
        raise broken(place, error) from error
    with archive:
        names = [name.removeprefix(f"{ROOT}/") for name in archive.namelist()]
        yield names, lambda name: archive.read(f"{ROOT}/{name}")


def _text(read: Read, name: str, place: Path) -> str:
    return _content(read, name, place).decode("utf-8", "replace")


def _content(read: Read, name: str, place: Path) -> bytes:
    try:
        return read(name)
    except (OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise broken(place / name, error) from error


def _train(names: list[str]) -> dict[str, str]:
    """{train/n01443537/images/n01443537_0.JPEG: n01443537}, sorted."""
    images = (PurePosixPath(name) for name in sorted(names) if name.endswith(".JPEG"))
    return {str(path): path.parts[1] for path in images if path.match("train/*/images/*")}


def _annotated(text: str) -> dict[str, str]:
    """{val/images/val_0.JPEG: n03444034} of lines "val_0.JPEG n03444034 0 32 44 62", separated by tabs."""
    rows = (line.split("\t") for line in text.splitlines())
    return {f"val/images/{row[0]}": row[1] for row in rows if len(row) > 1}


def _numbers(labels: dict[str, str], ids: list[str], place: Path) -> np.ndarray:
    number = {one: at for at, one in enumerate(ids)}
    unknown = set(labels.values()) - set(ids)
    if unknown or not labels:
        raise UsageError(f"{place}: {f'class {min(unknown)} is not in wnids.txt' if unknown else 'holds no image'}")
    return np.array([number[one] for one in labels.values()])


def _images(names: list[str], read: Read, place: Path) -> np.ndarray:
    images = np.empty((len(names), *SHAPE), np.uint8)

    def decode(at: int) -> None:
        file = place / names[at]
        image, _ = read_image(file, None, _content(read, names[at], place))
        if image.shape != SHAPE:
            raise UsageError(f"{file}: {image.shape[2]} x {image.shape[1]} px; TinyImageNet's are 64 x 64")
        images[at] = image

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(decode, range(len(names))))
    return images
