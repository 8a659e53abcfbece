"""A figure as data: what is drawn, in numbers and words. How it is drawn is the renderers' business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SHARES = -0.02, 1.02  # from 0 to 1, and room for the marks there
WIDE = 50  # times the smallest bar: beyond, the small ones cannot be seen beside the largest


@dataclass(frozen=True)
class Series:
    """One line, or the bars of one colour.

    Attributes:
        name: in the legend; series of one name, in different panels, look alike.
        x: (N,) numbers, or names where they are bars.
        y: (N,), NaN where there is nothing.
        low: (N,) lower end of the interval, NaN where there is none; None: no band.
        high: (N,) its upper end.
        panel: heading of the part of the figure where it is; "" where there is one alone.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    panel: str = ""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What all figures have.

    Attributes:
        name: of its files: letters, digits, underscores.
        title: one line.
        caption: what it shows and how it is computed.
        x_label: with the unit.
        y_label: with the unit.
    """

    name: str
    title: str
    caption: str
    x_label: str
    y_label: str


@dataclass(frozen=True, kw_only=True)
class Lines(Figure):
    """Series against a common axis.

    Attributes:
        series: in the order of the legend.
        marks: x of dotted vertical lines.
        mark_label: what these are.
        known: names of series that look alike in all figures of a study, whichever of them are in this one.
        are_shares: whether y is a share: then its axis goes no further than SHARES, wherever an interval ends.
        is_signed: whether y may be negative; else no interval is drawn below 0.
    """

    series: tuple[Series, ...]
    marks: tuple[float, ...] = ()
    mark_label: str = ""
    known: tuple[str, ...] = ()
    are_shares: bool = False
    is_signed: bool = False


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """Bars, one for each x, of one series upon the other or side by side.

    Attributes:
        series: all with the same x within a panel.
        stacked: whether they stand upon each other.
        known: as of lines.
    """

    series: tuple[Series, ...]
    stacked: bool = True
    known: tuple[str, ...] = ()


def is_wide(figure: Lines | Bars, series: Sequence[Series]) -> bool:
    """Whether the axis of a panel with these is logarithmic: of bars side by side whose sizes are WIDE apart."""
    if isinstance(figure, Lines) or figure.stacked:
        return False
    y = np.concatenate([one.y for one in series])
    return bool((y > 0).any() and y[y > 0].max() > WIDE * y[y > 0].min())


@dataclass(frozen=True, kw_only=True)
class HeatMap(Figure):
    """A matrix, darker = more; NaN is hatched, or grey on a page.

    Attributes:
        z_YX: the values.
        x: (X,) names of the columns.
        y: (Y,) names of the rows, the first at the top.
        z_label: of the values, with the unit.
        z_range: the values of the lightest and the darkest colour.
    """

    z_YX: np.ndarray
    x: tuple[str, ...]
    y: tuple[str, ...]
    z_label: str
    z_range: tuple[float, float]

    @property
    def has_counts(self) -> bool:
        """Whether all values are whole numbers, with more than one between the lightest and the darkest."""
        there = self.z_YX[~np.isnan(self.z_YX)]
        return bool((there == np.round(there)).all() and np.ptp(self.z_range) > 1)


@dataclass(frozen=True)
class NotRecorded:
    """In the place of a figure for which a run has no numbers: its name, its title, and why."""

    name: str
    title: str
    reason: str
