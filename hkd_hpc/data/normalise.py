"""By which mean and standard deviation inputs are normalised: given, or measured on the training split."""

from __future__ import annotations

import math

import numpy as np

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.settings import NUMBER
from hkd_hpc.data.checks import pieces
from hkd_hpc.data.settings import DataSettings

ROUNDING = 1e-12  # of a mean in float64, which a constant channel seems to deviate from
DIGITS = 6  # of a measured number: what differs between two machines' sums is far behind them
Scale = tuple[tuple[float, ...], tuple[float, ...]]  # (mean, std), one number for each channel or column; or ((), ())


def numbers(key: str, text: str) -> tuple[float, ...]:
    """Of data.mean or data.std; UsageError for what is no list of finite numbers."""
    words = [word.strip() for word in text.split(",")] if text else []
    values = tuple(float(word) for word in words if NUMBER.fullmatch(word))
    if len(values) < len(words) or not all(map(math.isfinite, values)):
        raise UsageError(f"{key}={text}: not allowed; {key} must be numbers with commas between")
    return values


def check_given(data: DataSettings) -> None:
    """UsageError unless data.mean and data.std go together."""
    mean, std = numbers("data.mean", data.mean), numbers("data.std", data.std)
    if len(mean) != len(std):
        raise UsageError(f"data.mean={data.mean}: data.std={data.std} must have as many numbers")
    if mean and data.normalise != "fixed":
        raise UsageError(f"data.mean={data.mean}: goes with data.normalise=fixed alone; leave one of them out")
    if any(value <= 0 for value in std):
        raise UsageError(f"data.std={data.std}: not allowed; data.std must be numbers > 0")


def takes_floats(data: DataSettings) -> bool:
    """Whether it is said how images of any range are normalised."""
    return bool(data.mean) or data.normalise != "fixed"


def scale_of(x_train: np.ndarray, data: DataSettings, where: object) -> Scale:
    """(mean, std) of each channel or column of inputs as networks see them, empty where nothing is normalised by them.

    Of uint8 images: those of x / 255.

    Args:
        x_train: (N,C,H,W), (N,F) or (N,T).
        data: section `data`.
        where: file or loader, for messages.

    Raises:
        UsageError: the numbers given do not fit the inputs, or the inputs cannot be normalised.
    """
    if data.normalise == "none" and x_train.dtype == np.uint8:
        raise UsageError(f"data.normalise=none: the images of {where} are uint8; allowed are fixed and measured")
    mean, std = numbers("data.mean", data.mean), numbers("data.std", data.std)
    if not mean and data.normalise != "measured":
        return (), ()
    if x_train.dtype == np.int64:
        raise UsageError(f"{where} holds sequences, which nothing normalises; leave out data.normalise and data.mean")
    if not mean:
        return measured(x_train)
    channels = x_train.shape[1]
    if len(mean) not in (1, channels):
        raise UsageError(f"data.mean={data.mean}: {len(mean)} numbers; the inputs of {where} have {channels} channels")
    return mean * (channels // len(mean)), std * (channels // len(std))


def measured(x_train: np.ndarray) -> Scale:
    """Over all inputs, and pixels of a channel, in float64; a constant channel has standard deviation 1."""
    unit = 255.0 if x_train.dtype == np.uint8 else 1.0
    count = x_train.size / x_train.shape[1]
    mean_C = _sum_C(x_train, unit, 0.0) / count
    variance_C = _sum_C(x_train, unit, mean_C, power=2) / count
    std_C = np.sqrt(variance_C)
    return _rounded(mean_C), _rounded(np.where(std_C > ROUNDING * np.abs(mean_C), std_C, 1.0))


def _sum_C(x_train: np.ndarray, unit: float, shift_C: np.ndarray | float, power: int = 1) -> np.ndarray:
    """(C,): the sum of (x / unit - shift) ** power."""
    shift_CP = np.reshape(shift_C, (-1, 1))
    flat = (part.reshape(*part.shape[:2], -1).astype(np.float64) for _, part in pieces(x_train))
    return sum((((part / unit - shift_CP) ** power).sum((0, 2)) for part in flat), np.zeros(x_train.shape[1]))


def _rounded(values_C: np.ndarray) -> tuple[float, ...]:
    return tuple(float(f"{value:.{DIGITS}g}") for value in values_C)
