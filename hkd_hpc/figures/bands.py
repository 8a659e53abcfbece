"""Means over seeds and their 95 % intervals, along rounds or along a common grid of time or bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hkd_hpc.analysis.statistics import intervals
from hkd_hpc.figures.figure import Series
from hkd_hpc.figures.groups import stacked

MOST_POINTS = 500  # of a line: beyond, a screen and a column of paper show no more


def along_rounds(name: str, rows: Sequence[np.ndarray], panel: str = "") -> Series:
    """The mean of each round over the seeds that have it.

    Args:
        name: of the line.
        rows: one a seed, (rounds,), NaN where nothing was measured.
        panel: where it is drawn.

    Returns:
        Rounds in which any seed has a number, with a band where there is more than one seed.
    """
    y_SR = stacked(rows)
    return band(name, np.arange(1, y_SR.shape[1] + 1), y_SR, panel)


def along(name: str, x_rows: Sequence[np.ndarray], y_rows: Sequence[np.ndarray], panel: str = "") -> Series:
    """The mean on a grid of as many points as the longest run has rounds, evenly from where the last seed has begun
    to where the first one ends; each seed is interpolated linearly between its rounds.

    Args:
        name: of the line.
        x_rows: one a seed, (rounds,), growing: seconds, bytes.
        y_rows: one a seed, (rounds,), NaN where nothing was measured.
        panel: where it is drawn.
    """
    measured = [~np.isnan(y) for y in y_rows]
    points = [(x[there], y[there]) for x, y, there in zip(x_rows, y_rows, measured) if there.any()]
    if not points:
        return Series(name, np.array([]), np.array([]), panel=panel)
    if len(points) == 1:
        x, y = map(thinned, points[0])
        return Series(name, x, y, panel=panel)
    begin, end = max(x[0] for x, _ in points), min(x[-1] for x, _ in points)
    grid = np.linspace(begin, end, max(len(x) for x, _ in points)) if begin < end else np.array([begin])
    return band(name, grid, np.array([np.interp(grid, x, y) for x, y in points]), panel)


def band(name: str, x: np.ndarray, y_SX: np.ndarray, panel: str = "") -> Series:
    """The mean over the seeds (rows of y_SX) where there is any, and the interval where there is more than one."""
    mean_X, half_X = intervals(y_SX)
    there = ~np.isnan(mean_X)
    x, mean, half = (thinned(values[there]) for values in (x, mean_X, half_X))
    if len(y_SX) < 2:
        return Series(name, x, mean, panel=panel)
    return Series(name, x, mean, mean - half, mean + half, panel)


def thinned(values: np.ndarray) -> np.ndarray:
    """Evenly at most MOST_POINTS of them, the first and the last among them."""
    if len(values) <= MOST_POINTS:
        return values
    return values[np.linspace(0, len(values) - 1, MOST_POINTS).round().astype(int)]
