"""Axes in units that give short numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

Units = tuple[tuple[float, str], ...]  # size and name, the largest first

BYTES: Units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
COUNT: Units = ((1e6, "million"), (1e3, "thousand"), (1.0, ""))
PLAIN: Units = ((1.0, ""),)
SECONDS: Units = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


def with_unit(label: str, unit: str) -> str:
    """wall time (s)"""
    return f"{label} ({unit})" if unit else label


def unit(values: Iterable[np.ndarray], units: Units) -> tuple[float, str]:
    """(divisor, name) of the largest unit of which the largest value has two or more."""
    largest = max((np.nanmax(array) for array in values if np.isfinite(array).any()), default=0.0)
    return next((found for found in units if largest >= 2 * found[0]), units[-1])
