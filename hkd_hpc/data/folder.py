"""Images in one folder per class, DIR/train/<class>/ and DIR/test/<class>/, as torchvision's ImageFolder has them.

Read with Pillow. Classes are numbered by their sorted names, images of a class are in the order of their names. Names
that begin with a dot, files with other endings and folders inside a class are passed over.
"""
from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hkd_hpc.data.readers import Arrays, broken
from hkd_hpc.errors import UsageError

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # a file of another kind under such a name is refused, not tried
MOST_IMAGES = 2_000_000
_SPLITS = ("train", "test")


def check_folder(folder: Path) -> list[str]:
    """The class names, sorted; UsageError unless both splits have the same and an image in each. Opens no image."""
    if importlib.util.find_spec("PIL") is None:
        raise UsageError("data.name=folder needs Pillow, which is not installed here: pip install pillow")
    if not folder.is_dir():
        raise UsageError(f"data.path={folder}: {'is not a folder' if folder.exists() else 'there is no such folder'}")
    for split in _SPLITS:
        if not (folder / split).is_dir():
            raise UsageError(f"{folder / split} is missing; "
                             "data.name=folder needs DIR/train/<class>/ and DIR/test/<class>/")
    train, test = (_class_names(folder / split) for split in _SPLITS)
    if len(train) < 2:
        raise UsageError(f"{folder / 'train'}: found {len(train)} class folder(s), at least 2 are needed")
    alone = sorted({*train} ^ {*test})
    if alone:
        raise UsageError(f"{folder}: class {alone[0]} is in {'train' if alone[0] in train else 'test'} alone; "
                         "train and test must have the same class folders")
    for place in (folder / split / name for split in _SPLITS for name in train):
        if next(_image_names(place), None) is None:
            raise UsageError(f"{place}: holds no image; allowed are files {', '.join(ENDINGS)}")
    return train


def _entries(folder: Path) -> Iterator[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read ({error.strerror})") from error


def _class_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in _entries(folder) if entry.is_dir())


def _image_names(folder: Path) -> Iterator[str]:
    return (entry.name for entry in _entries(folder) if entry.name.lower().endswith(ENDINGS) and entry.is_file())


def read_folder(folder: Path, side_px: int | None) -> Arrays:
    """Images (N,3,H,W) uint8 and labels (N,) int64 of both splits; with `side_px` all are resized to that, bilinear.

    UsageError names the first image that cannot be read or has another size than the first one.
    """
    classes = check_folder(folder)
    listed = {split: _listed(folder / split, classes) for split in _SPLITS}
    count = sum(len(files) for files, _ in listed.values())
    if count > MOST_IMAGES:
        raise UsageError(f"{folder}: found {count} images, at most {MOST_IMAGES} are allowed")
    first = listed["train"][0][0]
    shape = read_image(first, side_px).shape
    arrays: Arrays = {}
    for split, (files, labels) in listed.items():
        arrays[f"x_{split}"] = _pixels(files, shape, first, side_px)
        arrays[f"y_{split}"] = labels
    return arrays


def _listed(folder: Path, classes: list[str]) -> tuple[list[Path], np.ndarray]:
    """(files, labels) of a split, class by class."""
    names = [sorted(_image_names(folder / name)) for name in classes]
    files = [folder / name / file for name, own in zip(classes, names) for file in own]
    return files, np.repeat(np.arange(len(classes)), [len(own) for own in names])


def _pixels(files: list[Path], shape: tuple[int, ...], first: Path, side_px: int | None) -> np.ndarray:
    """(N,3,H,W) uint8 of images that all have `shape` (3,H,W), the one of the file `first`."""
    _, height, width = shape
    try:
        images = np.empty((len(files), *shape), np.uint8)
    except MemoryError as error:
        raise UsageError(f"{first.parents[2]}: {len(files)} images of {width} x {height} px do not fit into memory; "
                         "data.image_size=N resizes all images to N x N") from error
    for i, file in enumerate(files):
        image = read_image(file, side_px)
        if image.shape != shape:
            raise UsageError(f"{file}: {image.shape[2]} x {image.shape[1]} px, but {first} has {width} x {height}; "
                             "all need one size: data.image_size=N resizes all images to N x N")
        images[i] = image
    return images


def read_image(file: Path, side_px: int | None) -> np.ndarray:
    """One image as RGB, (3,H,W) uint8: grey is repeated, a palette looked up, transparency dropped."""
    from PIL import Image

    try:
        with Image.open(file, formats=FORMATS) as image:
            mode = image.mode
            rgb = image.convert("RGB")
    except Exception as error:  # a damaged image can raise anything
        raise broken(file, error) from error
    if mode.startswith(("I", "F")):  # Pillow would cut values above 255
        raise UsageError(f"{file}: grey of more than 8 bits (Pillow's mode {mode}); allowed are 8 bits a channel")
    if side_px:
        rgb = rgb.resize((side_px, side_px), Image.Resampling.BILINEAR)
    return np.asarray(rgb).transpose(2, 0, 1)
