"""Heat maps of clients, classes, ranks and rounds, made small enough to be looked at."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hkd_hpc.figures.figure import HeatMap
from hkd_hpc.figures.kind import Words

MOST_CELLS = 200  # along an axis
AVERAGED = f"Beyond {MOST_CELLS} rows or columns a cell is the mean of neighbours."


def heat_map(
    words: Words,
    z_YX: np.ndarray,
    labels: tuple[str, str, str],
    names: tuple[Sequence, Sequence],
    z_range: tuple[float, float] | None = None,
) -> HeatMap | str:
    """A matrix as a figure; a text where all of it is NaN.

    Args:
        words: of the figure.
        z_YX: the values.
        labels: of the x axis, the y axis and the values.
        names: of the columns and of the rows.
        z_range: of the lightest and the darkest colour; None: from the smallest to the largest value.
    """
    if np.isnan(z_YX).all():
        return "nothing was measured yet"
    small_YX = cells(z_YX)
    low, high = z_range or (float(np.nanmin(small_YX)), float(np.nanmax(small_YX)))
    x_label, y_label, z_label = labels
    x, y = (blocks_named(own, MOST_CELLS) for own in names)
    return HeatMap(
        **words, x_label=x_label, y_label=y_label, z_YX=small_YX, x=x, y=y, z_label=z_label, z_range=(low, high)
    )


def cells(z_YX: np.ndarray) -> np.ndarray:
    """At most MOST_CELLS along both axes: the means of all neighbours in a cell, NaN left out."""
    there_YX = ~np.isnan(z_YX)
    sums, counts = (summed(summed(of_YX).T).T for of_YX in (np.where(there_YX, z_YX, 0), there_YX.astype(float)))
    with np.errstate(invalid="ignore"):  # a cell without any is NaN
        return sums / counts


def summed(values: np.ndarray) -> np.ndarray:
    """The sums of neighbours along the first axis, at most MOST_CELLS."""
    return np.add.reduceat(values, np.arange(0, len(values), -(-len(values) // MOST_CELLS)))


def blocks_named(names: Sequence, most: int) -> tuple[str, ...]:
    """Of what is left of so many: 3; of a block of neighbours "0–4"."""
    size = -(-len(names) // most)
    if size <= 1:
        return tuple(map(str, names))
    return tuple(f"{own[0]}–{own[-1]}" for own in (names[at : at + size] for at in range(0, len(names), size)))


def rounds_of(z_RX: np.ndarray) -> range:
    """Their numbers."""
    return range(1, len(z_RX) + 1)
