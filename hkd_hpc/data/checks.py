"""From raw arrays to what models take: images (N,3,H,W) uint8 of at least 32 x 32, labels 0..C-1; else UsageError."""
from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from hkd_hpc.errors import UsageError

SMALLEST_SIDE_PX = 32
_SHAPES = "(N,H,W), (N,H,W,1), (N,H,W,3), (N,1,H,W) or (N,3,H,W)"


def memory_bytes() -> int:
    """Memory of this machine, or of the share of it that this job may use."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine


def check_room(where: object, needed_bytes: int) -> None:
    """UsageError if arrays of this size do not fit into memory: a small file can unpack to, or only promise, any size."""
    if needed_bytes > memory_bytes():
        raise UsageError(f"{where}: its arrays need {needed_bytes / 1e9:,.1f} GB, and this machine has "
                         f"{memory_bytes() / 1e9:,.1f} GB of memory; store fewer or smaller images")


def _check_pixels(raw: np.ndarray, where: str) -> None:
    if raw.dtype != np.uint8:
        nan = " with NaN" if raw.dtype.kind == "f" and np.isnan(raw).any() else ""
        how = "(x * 255).round().astype('uint8') if x is in 0..1" if raw.dtype.kind == "f" else "x.astype('uint8')"
        raise UsageError(f"{where}: found dtype {raw.dtype}{nan}, allowed is uint8 (0..255); convert with {how}")
    if 0 in raw.shape:
        raise UsageError(f"{where}: found shape {raw.shape}, which holds no image; at least 1 is needed")


def _channels_first(raw: np.ndarray, where: str) -> np.ndarray:
    if raw.ndim == 3:
        return raw[:, None]
    first = raw.ndim == 4 and raw.shape[1] in (1, 3)
    last = raw.ndim == 4 and raw.shape[3] in (1, 3)
    if first == last:
        why = "is ambiguous" if first else "is not an image shape"
        raise UsageError(f"{where}: found shape {raw.shape}, which {why}; allowed is {_SHAPES}")
    return raw if first else raw.transpose(0, 3, 1, 2)


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(C, H, W) of an array of images that `to_images` takes."""
    if len(shape) == 3:
        return 1, *shape[1:]
    return shape[1:] if shape[1] in (1, 3) else (shape[3], *shape[1:3])


def to_images(raw: np.ndarray, where: str) -> np.ndarray:
    """Images (N,3,H,W) uint8, C-contiguous: grey repeated, sides below 32 px zero-padded to 32 around the centre.

    An array that already has this form is returned as it is, not copied. UsageError names `where` (file and key).
    """
    _check_pixels(raw, where)
    pixels = _channels_first(raw, where)
    count, channels, height, width = pixels.shape
    full_height, full_width = max(height, SMALLEST_SIDE_PX), max(width, SMALLEST_SIDE_PX)
    if (channels, full_height, full_width) == (3, height, width):
        return np.ascontiguousarray(pixels)
    top, left = (full_height - height) // 2, (full_width - width) // 2
    check_room(where, count * 3 * full_height * full_width)
    images = np.zeros((count, 3, full_height, full_width), np.uint8)
    images[:, :, top:top + height, left:left + width] = pixels
    return images


def to_integers(raw: np.ndarray, count: int, where: str) -> np.ndarray:
    """Labels or client ids as (N,) int64; UsageError unless they are `count` integers >= 0."""
    if raw.dtype.kind not in "iu":
        nan = " with NaN" if raw.dtype.kind == "f" and np.isnan(raw).any() else ""
        raise UsageError(f"{where}: found dtype {raw.dtype}{nan}, allowed are integers; convert with y.astype('int64')")
    if raw.shape != (count,):
        raise UsageError(f"{where}: found shape {raw.shape}, allowed is ({count},): one integer for each image")
    if raw.min() < 0 or int(raw.max()) > np.iinfo(np.int64).max:
        raise UsageError(f"{where}: found values {raw.min()}..{raw.max()}, allowed are integers >= 0")
    return np.ascontiguousarray(raw, dtype=np.int64)


def _some(values: np.ndarray) -> str:
    text = ", ".join(str(value) for value in values[:5])
    return text + (f" and {len(values) - 5} more" if len(values) > 5 else "")


def _first_gap(present: np.ndarray) -> int | None:
    """The smallest class number that is missing below the largest present one (`present` is sorted and distinct)."""
    gaps = np.flatnonzero(present != np.arange(len(present)))
    return int(gaps[0]) if len(gaps) else None


def count_classes(y_train: np.ndarray, y_test: np.ndarray, where: str) -> int:
    """C of labels that are exactly 0..C-1; UsageError for a gap, a single class, or test labels that train lacks."""
    present = np.unique(y_train)
    unknown = np.setdiff1d(y_test, present)
    gap = _first_gap(np.union1d(present, unknown))
    if gap is not None:
        last = max(y_train.max(), y_test.max())
        raise UsageError(f"{where}: key y_train: found labels up to {last} but none is {gap}; "
                         "allowed are 0..C-1 without a gap")
    if len(unknown):
        raise UsageError(f"{where}: key y_test: label {_some(unknown)} never occurs in y_train; allowed are its labels")
    if len(present) < 2:
        raise UsageError(f"{where}: key y_train: found 1 class, at least 2 are needed")
    return len(present)


def check_clients(client_train: np.ndarray | None, client_test: np.ndarray | None, where: str) -> None:
    """UsageError if the test images name clients that have no training image."""
    if client_test is None:
        return
    if client_train is None:
        raise UsageError(f"{where}: key client_test without client_train; give both or client_train alone")
    unknown = np.setdiff1d(client_test, client_train)
    if len(unknown):
        raise UsageError(f"{where}: key client_test: client {_some(unknown)} never occurs in client_train")
