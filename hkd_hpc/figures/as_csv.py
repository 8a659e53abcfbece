"""A figure's numbers as CSV: a line for each point, bar or cell."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

import numpy as np

from hkd_hpc.figures.figure import Bars, Figure, HeatMap, Lines, Series


def csv_of(figure: Figure) -> str:
    """The numbers of a figure as CSV.

    Args:
        figure: from of_run or of_study.

    Returns:
        A head and a line for each number. Of lines and bars: panel, series, x, y, low, high; of a heat map: y, x,
        value. An empty cell: not measured. Each number reads back as the same float64.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if isinstance(figure, HeatMap):
        writer.writerow((figure.y_label, figure.x_label, figure.z_label))
        writer.writerows(_cells(figure))
    elif isinstance(figure, Lines | Bars):
        writer.writerow(("panel", "series", figure.x_label, figure.y_label, "low", "high"))
        for series in figure.series:
            writer.writerows(_points(series))
    return text.getvalue()


def _cells(figure: HeatMap) -> Iterator[tuple]:
    for row, z_X in zip(figure.y, figure.z_YX):
        yield from ((row, column, _number(z)) for column, z in zip(figure.x, z_X))


def _points(series: Series) -> Iterator[tuple]:
    nothing = np.full(len(series.y), np.nan)
    low, high = (nothing if ends is None else ends for ends in (series.low, series.high))
    for x, *numbers in zip(series.x.tolist(), series.y, low, high):
        yield series.panel, series.name, x, *map(_number, numbers)


def _number(value: float) -> str:
    """The shortest text that reads back as the same number."""
    return "" if np.isnan(value) else repr(float(value)).removesuffix(".0")
