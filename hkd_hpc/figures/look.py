"""Colours, dashes and markers that people with colour blindness, and printers without colour, can tell apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hkd_hpc.figures.figure import Bars, Lines, Series

# Okabe and Ito, Color Universal Design (2008), without yellow, which is lost on white paper, and with brown and violet,
# which are no nearer to these than these to each other, also for the colour-blind
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#772200", "#5522AA")
MARKERS = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "x", "star", "pentagon")
DASHES = ("solid", "dash", "dot", "dashdot")
HATCHES = ("", "/", "\\", "x", ".", "-", "+")
MOST_MARKED, MARKS_A_LINE = 25, 8  # points of a line up to which each has its marker, and markers of a longer line
SEEDS = " (n="  # before their number, in the name of a group
MOST_TOLD_APART = len(COLOURS) * len(DASHES)
DARKER = (  # ColorBrewer's Blues, whose lightness falls all the way
    "#F7FBFF",
    "#DEEBF7",
    "#C6DBEF",
    "#9ECAE1",
    "#6BAED6",
    "#4292C6",
    "#2171B5",
    "#08519C",
    "#08306B",
)


@dataclass(frozen=True)
class Look:
    """Of one name in a legend."""

    colour: str
    marker: str
    dash: str
    hatch: str


def panels(figure: Lines | Bars) -> tuple[list[str], int, int]:
    """The headings of its panels; how many stand side by side, and how many below each other."""
    names = list(dict.fromkeys(series.panel for series in figure.series)) or [""]
    across = 2 if len(names) == 4 else min(3, len(names))
    return names, across, math.ceil(len(names) / across)


def legend_names(figure: Lines | Bars) -> list[str]:
    """What its legend has to tell: not a name that is its panel's heading, nor one alone."""
    names = list(dict.fromkeys(series.name for series in figure.series if series.name != series.panel))
    marks = [figure.mark_label] if isinstance(figure, Lines) and figure.marks and figure.mark_label else []
    return names + marks if len(names + marks) > 1 else []


def band_alpha(series: Sequence[Series]) -> float:
    """Of each band among these: many that lie upon each other hide no line."""
    bands = sum(one.low is not None for one in series)
    return round(min(0.18, 0.6 / max(1, bands)), 3)


def drawn_low(figure: Lines | Bars, series: Series) -> np.ndarray | None:
    """Where the intervals' lower ends are drawn: what cannot be negative has none below 0, however few the seeds."""
    is_signed = isinstance(figure, Lines) and figure.is_signed
    return series.low if series.low is None or is_signed else np.maximum(series.low, 0.0)


def looks_of(figure: Lines | Bars) -> dict[str, Look]:
    """Of its series; a group that is known in the study looks as it does in the other figures."""
    label_of = {series.name: series.name.partition(SEEDS)[0] for series in figure.series}
    known = () if set(label_of.values()).isdisjoint(figure.known) else figure.known
    look_of = looks((*known, *label_of.values()))
    return {name: look_of[label] for name, label in label_of.items()}


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each of the names, in their order; all different up to MOST_TOLD_APART."""
    return {name: look(place) for place, name in enumerate(dict.fromkeys(names))}


def look(place: int) -> Look:
    """Neighbours differ in all; a colour comes back with another dash, since 9 and 4 are coprime."""
    parts = COLOURS, MARKERS, DASHES, HATCHES
    return Look(*(choices[place % len(choices)] for choices in parts))
