"""From raw arrays to what models take: images (N,3,H,W) uint8 of at least 32 x 32, labels 0..C-1; else UsageError."""

from __future__ import annotations

import numpy as np

from hkd_hpc.errors import UsageError, printable
from hkd_hpc.runtime.machine import memory_bytes

SMALLEST_SIDE_PX = 32
_SHAPES = "(N,H,W), (N,H,W,1), (N,H,W,3), (N,1,H,W) or (N,3,H,W)"


def check_memory(where: object, needed_bytes: int) -> None:
    """UsageError if arrays of this size do not fit into memory: a small file can unpack to, or only promise, any
    size.
    """
    if needed_bytes > memory_bytes():
        raise UsageError(
            f"{where}: its arrays need {needed_bytes / 1e9:,.1f} GB, and this machine has "
            f"{memory_bytes() / 1e9:,.1f} GB of memory; store fewer or smaller images"
        )


def check_pixels(arrays: dict[str, np.ndarray]) -> None:
    """UsageError for the first array of images (by its place) that is empty or not uint8, with what makes it so.

    Those of one dtype are to be scaled alike, so that training and test images stay comparable; one that is uint8
    stays.
    """
    for where, raw in arrays.items():
        if 0 in raw.shape:
            raise UsageError(f"{where}: found shape {raw.shape}, which holds no image; at least 1 is needed")
    for where, raw in arrays.items():
        if raw.dtype != np.uint8:
            alike = [other for other in arrays.values() if other.dtype == raw.dtype]
            which = "x_train and x_test alike, each" if len(alike) == len(arrays) else "this key alone,"
            raise UsageError(f"{where}: found dtype {raw.dtype}" + _scaling(alike, which))


def _scaling(alike: list[np.ndarray], which: str) -> str:
    """Of images that are not uint8: what they are, what is allowed, and the expression that makes them so."""
    kind = alike[0].dtype.kind
    if kind not in "biuf":
        return ", allowed is uint8 (0..255)"
    if kind == "f" and not all(np.isfinite(raw).all() for raw in alike):
        odd = "NaN" if any(np.isnan(raw).any() for raw in alike) else "infinity"
        return f" with {odd}, allowed is uint8 (0..255); mend the images that hold it, or leave them out"
    low, high = min(raw.min().item() for raw in alike), max(raw.max().item() for raw in alike)
    return (
        f" with values {low}..{high}, allowed is uint8 (0..255); "
        f"convert {which} as x, with {_to_uint8(kind, low, high)}"
    )


def _to_uint8(kind: str, low: float, high: float) -> str:
    """The expression in x that maps low..high to 0..255 with 0 as black; what lies in 0..255 already stays as it is."""
    if kind == "b":
        return "x.astype('uint8') * 255"
    if low >= 0 and high <= 1:
        return "(x * 255).round().astype('uint8')"
    if low >= 0 and high <= 255:
        return "x.astype('uint8')" if kind in "iu" else "x.round().astype('uint8')"
    black = min(low, 0)
    shifted = f"(x.astype('float64') - ({black}))" if black else "x"
    return f"({shifted} * (255 / {high - black})).round().astype('uint8')"


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
        _, height, width = shape
        return 1, height, width
    _, *axes = shape
    channels, height, width = axes if axes[0] in (1, 3) else (axes[2], axes[0], axes[1])
    return channels, height, width


def to_images(raw: np.ndarray, where: str) -> np.ndarray:
    """Images (N,3,H,W) uint8, C-contiguous: grey repeated, sides below 32 px zero-padded to 32 around the centre.

    An array that already has this form is returned as it is, not copied. UsageError names `where` (file and key).
    """
    check_pixels({where: raw})
    pixels = _channels_first(raw, where)
    count, channels, height, width = pixels.shape
    full_height, full_width = max(height, SMALLEST_SIDE_PX), max(width, SMALLEST_SIDE_PX)
    if (channels, full_height, full_width) == (3, height, width):
        return np.ascontiguousarray(pixels)
    top, left = (full_height - height) // 2, (full_width - width) // 2
    check_memory(where, count * 3 * full_height * full_width)
    images = np.zeros((count, 3, full_height, full_width), np.uint8)
    images[:, :, top : top + height, left : left + width] = pixels
    return images


def degenerate_images(raw: np.ndarray, where: str) -> tuple[int, int]:
    """(images that are constant, images that have two values only) in each channel, of raw images that `to_images`
    takes.
    """
    constant = two_valued = 0
    pixels = _channels_first(raw, where)
    for start in range(0, len(pixels), 1000):  # in pieces that need little memory
        part = pixels[start : start + 1000].reshape(*pixels[start : start + 1000].shape[:2], -1)
        low, high = part.min(2, keepdims=True), part.max(2, keepdims=True)
        is_constant = (low == high).all((1, 2))
        constant += int(is_constant.sum())
        two_valued += int((((part == low) | (part == high)).all((1, 2)) & ~is_constant).sum())
    return constant, two_valued


def to_integers(raw: np.ndarray, count: int, where: str) -> np.ndarray:
    """Labels or client ids as (N,) int64; UsageError unless they are `count` integers >= 0."""
    if raw.shape != (count,):
        raise UsageError(
            f"{where}: found shape {raw.shape}, allowed is ({count},): one integer for each image"
            + _one_for_each(raw, count)
        )
    if raw.dtype.kind not in "iu":
        raise UsageError(f"{where}: found dtype {raw.dtype}{_to_integers_advice(raw)}")
    if raw.min() < 0 or int(raw.max()) > np.iinfo(np.int64).max:
        raise UsageError(f"{where}: found values {raw.min()}..{raw.max()}, allowed are integers >= 0")
    return np.ascontiguousarray(raw, dtype=np.int64)


def _one_for_each(raw: np.ndarray, count: int) -> str:
    """The conversion of labels that stand in a column, or are one-hot."""
    if raw.shape == (count, 1):
        return "; convert with y.reshape(-1)"
    is_one_hot = (
        raw.ndim == 2
        and len(raw) == count
        and raw.dtype.kind in "biuf"
        and np.isin(raw, (0, 1)).all()
        and (raw.sum(1) == 1).all()
    )
    return "; they are one-hot: convert with y.argmax(1)" if is_one_hot else ""


def _to_integers_advice(raw: np.ndarray) -> str:
    """Of numbers that are no integers: what is allowed, and the conversion where it loses nothing."""
    if raw.dtype.kind == "f" and np.isnan(raw).any():
        return " with NaN, allowed are integers or names; leave out the images without one"
    fractions = raw[raw != np.floor(raw)] if raw.dtype.kind == "f" else raw[:0]
    if fractions.size:
        return f" with {fractions.flat[0]}, allowed are integers or names"
    return ", allowed are integers or names" + ("; convert with y.astype('int64')" if raw.dtype.kind in "bf" else "")


def numbered(
    train: np.ndarray, test: np.ndarray | None, where: str, key: str
) -> tuple[np.ndarray, np.ndarray | None, tuple[str, ...]]:
    """Names (text or UTF-8 bytes) as their index in the sorted names of `train`; numbers as they are.

    Args:
        train: (N,) labels or client ids of the training split.
        test: those of the test split, if there are any.
        where: file, for messages.
        key: "y" or "client".

    Returns:
        train, test, and the sorted names; these are empty where the values are no texts.

    Raises:
        UsageError: text in one split alone, bytes that are no UTF-8, a name that only `test` has.
    """
    splits = {f"{key}_train": train} | ({} if test is None else {f"{key}_test": test})
    kinds = {name: values.dtype.kind in "US" for name, values in splits.items()}
    if not any(kinds.values()):
        return train, test, ()
    if not all(kinds.values()):
        in_train, in_test = (values.dtype for values in splits.values())
        raise UsageError(
            f"{where}: key {key}_train holds {in_train} and {key}_test {in_test}; allowed are names in both, "
            "or integers in both"
        )
    texts = {name: _as_text(values, f"{where}: key {name}") for name, values in splits.items()}
    for name, text in texts.items():
        if (np.char.strip(text) == "").any():
            raise UsageError(
                f"{where}: key {name}: {int((np.char.strip(text) == '').sum())} of {len(text)} images have an empty "
                "name; name them, or leave these images out"
            )
    names = np.unique(texts[f"{key}_train"])
    unknown = np.setdiff1d(texts.get(f"{key}_test", names), names)
    if len(unknown):
        what = "label" if key == "y" else "client"
        raise UsageError(f"{where}: key {key}_test: {what} {printable(_some(unknown))} never occurs in {key}_train")
    numbers = [np.searchsorted(names, text) for text in texts.values()]
    return numbers[0], None if test is None else numbers[1], tuple(map(printable, names.tolist()))


def _as_text(values: np.ndarray, where: str) -> np.ndarray:
    try:
        return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: holds bytes that are no UTF-8 text ({error.reason}); store names as text") from None


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
        raise UsageError(
            f"{where}: key y_train: found labels up to {last} but none is {gap}; allowed are 0..C-1 without a gap"
        )
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
