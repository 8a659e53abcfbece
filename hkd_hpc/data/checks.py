"""From raw arrays to what models take: images, rows or sequences, and labels 0..C-1; else UsageError."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hkd_hpc.common.errors import UsageError, printable
from hkd_hpc.data.registry import SMALLEST_SIDE_PX
from hkd_hpc.runtime.machine import memory_bytes

_SHAPES = "(N,H,W), (N,H,W,1), (N,H,W,3), (N,1,H,W) or (N,3,H,W)"
_ANY_CHANNELS = "data.as_stored=true takes any number of channels"
_FLAT = "rows (N,F) are floats, sequences (N,T) are int64"
_PIECE_BYTES = 1 << 22  # of inputs that are looked at together: temporary arrays stay small


def check_memory(where: object, needed_bytes: int) -> None:
    """UsageError if arrays of this size do not fit into memory: a small file can unpack to, or only promise, any
    size.
    """
    if needed_bytes > memory_bytes():
        raise UsageError(
            f"{where}: its arrays need {needed_bytes / 1e9:,.1f} GB, and this machine has "
            f"{memory_bytes() / 1e9:,.1f} GB of memory; store fewer or smaller images"
        )


def check_inputs(arrays: dict[str, np.ndarray], allow_floats: bool = False) -> None:
    """UsageError for the first array of inputs (by its place) that is no array of images, rows or sequences.

    Args:
        arrays: of both splits, which must be of one form.
        allow_floats: whether images may be floats: somebody said how these are normalised.
    """
    for where, raw in arrays.items():
        if 0 in raw.shape:
            raise UsageError(f"{where}: found shape {raw.shape}, which holds no image; at least 1 is needed")
        if raw.ndim == 2 and raw.dtype.kind not in "iuf":
            raise UsageError(f"{where}: found dtype {raw.dtype}, where numbers belong; {_FLAT}")
    if all(is_flat(raw) or (allow_floats and raw.dtype.kind == "f") for raw in arrays.values()):
        for where, raw in arrays.items():
            _check_numbers(raw, where)
        _check_one_form(arrays)
    else:
        check_pixels(arrays)


def is_flat(raw: np.ndarray) -> bool:
    """Whether these are rows of columns or sequences, not images."""
    return raw.ndim == 2 and raw.dtype != np.uint8


def _check_numbers(raw: np.ndarray, where: str) -> None:
    """UsageError for NaN and infinity, and for what no embedding has an entry for."""
    if raw.dtype.kind == "f":
        for start, part in pieces(raw):
            with np.errstate(over="ignore"):  # a number beyond float32 is infinite as one
                bad_N = ~np.isfinite(part.astype(np.float32, copy=False)).reshape(len(part), -1).all(1)
            if bad_N.any():
                first = start + int(bad_N.argmax())
                raise UsageError(f"{where}: input {first} holds NaN, infinity or more than a float32 can; leave it out")
    elif raw.min() < 0 or int(raw.max()) > np.iinfo(np.int64).max:
        raise UsageError(f"{where}: found values {raw.min()}..{raw.max()}, sequences hold integers >= 0")


def _check_one_form(arrays: dict[str, np.ndarray]) -> None:
    (first, one), *others = arrays.items()
    for where, other in others:
        if other.dtype.kind != one.dtype.kind or other.ndim != one.ndim:
            raise UsageError(
                f"{where}: found dtype {other.dtype}, allowed is one form in both; {first} has {one.dtype}"
            )


def pieces(raw: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(where it begins, a part of the inputs), in order: what is computed of a part needs little memory."""
    count = max(1, _PIECE_BYTES // max(1, raw[:1].nbytes))
    for start in range(0, len(raw), count):
        yield start, raw[start : start + count]


def check_pixels(arrays: dict[str, np.ndarray]) -> None:
    """UsageError for the first array of images (by its place) that is not uint8, with what makes it so.

    Those of one dtype are to be scaled alike, so that training and test images stay comparable; one that is uint8
    stays.
    """
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
        f" with values {low}..{high}, allowed is uint8 (0..255){_or_normalised(kind)}; "
        f"convert {which} as x, with {_to_uint8(kind, low, high)}"
    )


def _or_normalised(kind: str) -> str:
    return ", or floats and data.normalise=measured or none" * (kind == "f")


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


def _channels_first(raw: np.ndarray, where: str, as_stored: bool) -> np.ndarray:
    """(N,C,H,W), a view."""
    if raw.ndim == 3:
        return raw[:, None]
    axes = _channel_axes(raw.shape, as_stored)
    if len(axes) != 1:
        why = "is ambiguous" if axes else "is not an image shape"
        allowed = _FLAT if raw.ndim == 2 else _ANY_CHANNELS
        raise UsageError(f"{where}: found shape {raw.shape}, which {why}; allowed is {_SHAPES}; {allowed}")
    return raw if axes == [1] else raw.transpose(0, 3, 1, 2)


def _channel_axes(shape: tuple[int, ...], as_stored: bool) -> list[int]:
    """Which axes of images (N,.,.,.) may be their channels: 1 or 3 of them, else as stored the shorter axis."""
    if len(shape) != 4:
        return []
    usual = [axis for axis in (1, 3) if shape[axis] in (1, 3)]
    least = min(shape[1], shape[3])
    return usual or ([axis for axis in (1, 3) if shape[axis] == least] if as_stored else [])


def input_shape(shape: tuple[int, ...], as_stored: bool = False) -> tuple[int, ...]:
    """(C,H,W), (F,) or (T,) of an array of inputs that `to_inputs` takes, before any padding."""
    if len(shape) == 2:
        return shape[1:]
    if len(shape) == 3:
        return 1, *shape[1:]
    _, *axes = shape
    if len(axes) != 3:
        raise ValueError(f"{shape} is no shape of inputs")
    first = _channel_axes(shape, as_stored) == [1]
    channels, height, width = axes if first else (axes[2], axes[0], axes[1])
    return channels, height, width


def seen_shape(shape: tuple[int, ...], as_stored: bool = False) -> tuple[int, ...]:
    """What networks get of an input of this shape: images as RGB, of `SMALLEST_SIDE_PX` or more."""
    if len(shape) == 1 or as_stored:
        return shape
    _, *sides = shape
    return 3, *(max(side, SMALLEST_SIDE_PX) for side in sides)


def to_inputs(raw: np.ndarray, where: str, as_stored: bool = False) -> np.ndarray:
    """What networks get, C-contiguous: images as `to_images`, rows (N,F) float32, sequences (N,T) int64."""
    if is_flat(raw):
        return np.ascontiguousarray(raw, np.float32 if raw.dtype.kind == "f" else np.int64)
    return to_images(raw, where, as_stored)


def to_images(raw: np.ndarray, where: str, as_stored: bool = False) -> np.ndarray:
    """Images (N,3,H,W) uint8 or float32, C-contiguous: grey repeated, sides below 32 px zero-padded around the centre.

    With `as_stored` they keep channels and size. An array that already has this form is returned as it is, not copied.
    UsageError names `where` (file and key).
    """
    pixels = _channels_first(raw, where, as_stored)
    dtype = np.dtype(np.uint8 if raw.dtype == np.uint8 else np.float32)
    count, *shape = pixels.shape
    full = seen_shape(tuple(shape), as_stored)
    if full == tuple(shape):
        return np.ascontiguousarray(pixels, dtype)
    _, height, width = shape
    top, left = (full[1] - height) // 2, (full[2] - width) // 2
    check_memory(where, count * int(np.prod(full)) * dtype.itemsize)
    images = np.zeros((count, *full), dtype)
    images[:, :, top : top + height, left : left + width] = pixels
    return images


def degenerate_images(raw: np.ndarray, where: str, as_stored: bool = False) -> tuple[int, int]:
    """(images that are constant, images that have two values only) in each channel, of raw images that `to_images`
    takes.
    """
    constant = two_valued = 0
    for _, piece in pieces(_channels_first(raw, where, as_stored)):
        part = piece.reshape(*piece.shape[:2], -1)
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
