"""Images in one folder per class, DIR/train/<class>/ and DIR/test/<class>/, as torchvision's ImageFolder has them.

Read with Pillow, upright as a viewer shows them. Classes are numbered by their sorted names; images of a class, those
of its inner folders too, are in the order of their names. What is left out (names that begin with a dot, other endings,
linked inner folders, other splits) and what is changed on the way is counted and reported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hkd_hpc.common.errors import UsageError, printable
from hkd_hpc.data.raw import Arrays, RawData, broken
from hkd_hpc.data.settings import DataSettings

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm", ".pbm", ".pnm")
FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "BMP",
    "TIFF",
    "GIF",
    "PPM",
)  # a file of another kind under such a name is rejected, not tried
MOST_IMAGES = 2_000_000
_SPLITS = ("train", "test")
_ORIENTATION = 0x0112  # EXIF's tag
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}  # what makes each orientation upright
_CHANGED = {
    "RGB": "",
    "L": "",
    "1": "one bit made 0 and 255",
    "P": "palette looked up",
    "CMYK": "CMYK made RGB",
    "YCbCr": "YCbCr made RGB",
    "HSV": "HSV made RGB",
    "RGBX": "",
    "RGBA": "",
    "LA": "",
    "PA": "",
    "La": "",
    "RGBa": "",
}


def find_classes(data: DataSettings) -> list[str]:
    """The class names in data.path, sorted; UsageError unless it is a folder whose splits have the same, and an image
    in each. Opens no image."""
    if not data.path:
        raise UsageError("data.name=folder needs data.path=DIR with DIR/train/<class>/ and DIR/test/<class>/")
    if importlib.util.find_spec("PIL") is None:
        raise UsageError("data.name=folder needs Pillow, which is not installed here: pip install pillow")
    folder = Path(data.path)
    if not folder.is_dir():
        raise UsageError(f"data.path={folder}: {'is not a folder' if folder.exists() else 'there is no such folder'}")
    places = _places(data)
    for place in places.values():
        if not place.is_dir():
            raise UsageError(
                f"{place} is missing; data.name=folder needs DIR/train/<class>/ and DIR/test/<class>/, or "
                "data.test_fraction and DIR/<class>/"
            )
    train = _class_names(places["train"])
    if len(train) < 2:
        raise UsageError(f"{places['train']}: found {len(train)} class folder(s), at least 2 are needed")
    alone = sorted({*train} ^ {*_class_names(places.get("test", places["train"]))})
    if alone:
        raise UsageError(
            f"{folder}: class {alone[0]} is in {'train' if alone[0] in train else 'test'} alone; "
            "train and test must have the same class folders"
        )
    for place in (split / name for split in places.values() for name in train):
        if not any(not why for _, why in _below(place)):
            raise UsageError(f"{place}: holds no image; allowed are files {', '.join(ENDINGS)}")
    return train


def _places(data: DataSettings) -> dict[str, Path]:
    """The folder of each split: one alone, DIR/train or DIR itself, where data.test_fraction makes the other."""
    folder = Path(data.path)
    inner = {split: folder / split for split in _SPLITS}
    if data.test_fraction is None or all(place.is_dir() for place in inner.values()):
        return inner
    return {"train": inner["train"] if inner["train"].is_dir() else folder}


# ---- what is there


def _entries(folder: Path) -> Iterator[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read ({error.strerror})") from error


def _class_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in _entries(folder) if entry.is_dir() and not entry.name.startswith("."))


def _below(folder: Path, inner: str = "") -> Iterator[tuple[str, str]]:
    """(path below `folder`, why it is left out, empty for an image) of what lies in it and in its inner folders."""
    for entry in _entries(folder / inner):
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _below(folder, f"{inner}{entry.name}/")
        else:
            yield inner + entry.name, _why_left_out(entry)


def _why_left_out(entry: os.DirEntry) -> str:
    if entry.name.startswith("."):
        return "hidden"
    if entry.is_dir():
        return "a linked folder"  # it may lead back to where it lies
    if not entry.is_file():
        return "no file"
    ending = os.path.splitext(entry.name)[1].lower()
    return "" if ending in ENDINGS else ending or "without an ending"


def listed(folder: Path, classes: list[str]) -> tuple[list[Path], np.ndarray, Counter[str]]:
    """(images, their labels (N,) int64, how many others are left out and why) of a split, class by class."""
    left_out = Counter(
        "in no class folder" for entry in _entries(folder) if not entry.is_dir() and not entry.name.startswith(".")
    )
    files: list[Path] = []
    counts = []
    for name in classes:
        found = list(_below(folder / name))
        own = sorted(path for path, why in found if not why)
        files += [folder / name / path for path in own]
        counts.append(len(own))
        left_out.update(why for _, why in found if why)
    return files, np.repeat(np.arange(len(classes)), counts), left_out


def _other_splits(folder: Path, places: dict[str, Path]) -> Iterator[str]:
    """A remark on each folder beside those of the splits, which nothing reads."""
    for name in _class_names(folder) if folder not in places.values() else []:
        if name not in places:
            count = sum(1 for _ in _below(folder / name))
            yield (
                f"not read: {printable(name)}/ with {count:,} file{'s' * (count != 1)} "
                "(data.val_fraction holds validation images out of train/)"
            )


def counted(counts: Counter[str]) -> str:
    """.txt 3, hidden 1"""
    return ", ".join(f"{printable(what)} {count:,}" for what, count in counts.most_common())


# ---- what is read


def read_folder(folders: list[Path], data: DataSettings) -> RawData:
    """Of the one folder, images (N,3,H,W) uint8 and labels (N,) int64 of its splits, resized if data.image_size is set.

    UsageError names the first image that cannot be read or has another size than the first one.
    """
    [folder] = folders
    side_px, classes, places = data.image_size, find_classes(data), _places(data)
    splits = {split: listed(place, classes) for split, place in places.items()}
    count = sum(len(files) for files, _, _ in splits.values())
    if count > MOST_IMAGES:
        raise UsageError(f"{folder}: found {count} images, at most {MOST_IMAGES} are allowed")
    first = splits["train"][0][0]
    shape = read_image(first, side_px)[0].shape
    arrays: Arrays = {}
    changed: Counter[str] = Counter()
    for split, (files, labels, _) in splits.items():
        arrays[f"x_{split}"] = _pixels(files, shape, first, side_px, changed)
        arrays[f"y_{split}"] = labels
    left_out = sum((found[2] for found in splits.values()), Counter())
    others = sum(left_out.values())
    remarks = [f"left out: {others:,} of {count + others:,} files ({counted(left_out)})"] * bool(left_out)
    remarks += [f"images changed: {counted(changed)}"] * bool(changed)
    return RawData(arrays, tuple(map(printable, classes)), (*remarks, *_other_splits(folder, places)))


def _pixels(
    files: list[Path], shape: tuple[int, ...], first: Path, side_px: int | None, changed: Counter[str]
) -> np.ndarray:
    """(N,3,H,W) uint8 of images that all have `shape` (3,H,W), the one of the file `first`; counts what was changed."""
    _, height, width = shape
    try:
        images = np.empty((len(files), *shape), np.uint8)
    except MemoryError as error:
        raise UsageError(
            f"{first.parents[2]}: {len(files)} images of {width} x {height} px do not fit into memory; "
            "data.image_size=N resizes all images to N x N"
        ) from error
    for i, file in enumerate(files):
        image, changes = read_image(file, side_px)
        if image.shape != shape:
            raise UsageError(
                f"{file}: {image.shape[2]} x {image.shape[1]} px, but {first} has {width} x {height}; "
                "all need one size: data.image_size=N resizes all images to N x N"
            )
        images[i] = image
        changed.update(changes)
    return images


def read_image(file: Path, side_px: int | None, content: bytes | None = None) -> tuple[np.ndarray, list[str]]:
    """(one image as RGB, (3,H,W) uint8, upright; what was changed): grey is repeated, a palette looked up, transparency
    dropped, of several frames the first taken. `content`: its bytes, where `file` says only what messages call it."""
    from PIL import Image

    try:
        with Image.open(file if content is None else io.BytesIO(content), formats=FORMATS) as image:
            _check_mode(file, image.mode)
            changes = _changes(image)
            image.load()
            rgb = image.convert("RGB")
            turn = _TURNS.get(_orientation(image))  # read again: Pillow itself turns a TIFF when it loads it
    except UsageError:
        raise
    except Exception as error:  # a damaged image can raise anything
        raise broken(file, error) from error
    if turn:
        rgb = rgb.transpose(Image.Transpose[turn])
    if side_px:
        changes += ["stretched to a square"] * (rgb.width != rgb.height)
        rgb = rgb.resize((side_px, side_px), Image.Resampling.BILINEAR)
    return np.asarray(rgb).transpose(2, 0, 1), changes


def _check_mode(file: Path, mode: str) -> None:
    if mode.startswith(("I", "F")):  # Pillow would cut values above 255
        raise UsageError(f"{file}: grey of more than 8 bits (Pillow's mode {mode}); allowed are 8 bits a channel")
    if mode not in _CHANGED:
        raise UsageError(f"{file}: has colours of Pillow's mode {mode}; allowed are RGB and grey, a palette or CMYK")


def _changes(image: ImageFile) -> list[str]:
    """What turning an opened image into upright RGB of 8 bits changes or drops. May load it."""
    several = getattr(image, "n_frames", 1) > 1
    many_bits = ";16" in repr(image.tile) or (image.format == "PPM" and image.tile[0][0] != "raw")
    clear = image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info
    found = {
        "first of several frames taken": several,
        "more than 8 bits a channel cut to 8": many_bits,
        "transparency dropped": clear,
        "turned upright as EXIF says": _orientation(image) in _TURNS,
        _CHANGED[image.mode]: bool(_CHANGED[image.mode]),
    }
    return [what for what, is_so in found.items() if is_so]


def _orientation(image: ImageFile) -> int:
    """EXIF's, 1 (upright) where there is none; a viewer passes over a damaged EXIF block too."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # Pillow warns of it, or raises anything
        warnings.simplefilter("ignore")
        return image.getexif().get(_ORIENTATION, 1)
    return 1
