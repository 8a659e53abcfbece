"""Figures on paper: matplotlib, at the width of a paper's column."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from hkd_hpc.common.errors import UsageError
from hkd_hpc.figures.figure import SHARES, Bars, Figure, HeatMap, Lines, Series, is_wide
from hkd_hpc.figures.look import DARKER, MARKS_A_LINE, Look, band_alpha, drawn_low, legend_names, looks_of, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

COLUMN_IN, PAGE_IN = 3.3, 6.9  # widths of a column and of a page
PANEL_IN, SLANT_IN, LEGEND_ROW_IN = 2.0, 0.4, 0.16  # heights
MOST_SLANTING = 16
DASH = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
MARKER = {
    "circle": "o",
    "square": "s",
    "triangle-up": "^",
    "diamond": "D",
    "cross": "P",
    "triangle-down": "v",
    "x": "X",
    "star": "*",
    "pentagon": "p",
}
STYLE: dict[Any, Any] = {
    "font.size": 7.5,
    "axes.labelsize": 7.5,
    "axes.titlesize": 7.5,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.2,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 0.4,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # text stays text, which journals ask for
    "svg.fonttype": "none",
    "svg.hashsalt": "hkd_hpc",  # the same figure is the same file
}


@contextmanager
def style() -> Iterator[None]:
    """matplotlib with this module's style, whatever a person's own is; needed to draw and to save.

    Raises:
        UsageError: where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UsageError("figures on paper need matplotlib: pip install 'hkd_hpc[report]'") from None
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "agg", **STYLE}):
        yield


def draw(figure: Figure) -> Canvas:
    """A figure as matplotlib's; its title and caption are left to the paper.

    Args:
        figure: from of_run or of_study.

    Returns:
        matplotlib's Figure, one column of a paper wide, or two where it has several panels or many columns.

    Raises:
        UsageError: matplotlib is not installed.
    """
    with style():
        assert isinstance(figure, Lines | Bars | HeatMap)
        canvas = _heat_map(figure) if isinstance(figure, HeatMap) else _panels(figure)
        canvas.draw_without_rendering()  # finds the layout once, for whatever formats it is saved in
        canvas.set_layout_engine(None)  # not "none": savefig would look for it again, by drawing everything twice
        return canvas


def _canvas(width_in: float, height_in: float) -> Canvas:
    from matplotlib.figure import Figure as Canvas

    return Canvas(figsize=(width_in, height_in), layout="constrained", dpi=300)


# ---- lines and bars


def _panels(figure: Lines | Bars) -> Canvas:
    names, across, down = panels(figure)
    width_in = COLUMN_IN if across == 1 else PAGE_IN
    told = legend_names(figure)
    columns = _legend_columns(told, width_in)
    panel_in = PANEL_IN + SLANT_IN * any(_is_slanting(series.x) for series in figure.series)
    canvas = _canvas(width_in, panel_in * down + LEGEND_ROW_IN * math.ceil(len(told) / columns) + 0.1)
    all_axes = list(canvas.subplots(down, across, squeeze=False).flat)
    look_of = looks_of(figure)
    for axes, name in zip(all_axes, names):
        _panel(axes, figure, [series for series in figure.series if series.panel == name], look_of)
        axes.set_title(name)
    for axes in all_axes[len(names) :]:
        axes.set_axis_off()
    _legend(canvas, all_axes, told, columns)
    return canvas


def _panel(axes: Axes, figure: Lines | Bars, series: Sequence[Series], look_of: dict[str, Look]) -> None:
    axes.grid(axis="y", linewidth=0.3, color="0.85")
    axes.set(xlabel=figure.x_label, ylabel=figure.y_label)
    if isinstance(figure, Lines):
        for place, one in enumerate(series):
            _line(axes, one, look_of[one.name], place)
            low = drawn_low(figure, one)
            if low is not None and one.high is not None:  # which matplotlib draws below all lines
                style: dict[str, Any] = dict(color=look_of[one.name].colour, alpha=band_alpha(series), linewidth=0)
                axes.fill_between(one.x, low, one.high, **style)
        for mark in figure.marks:
            axes.axvline(mark, color="0.4", linewidth=0.8, linestyle=":", label=figure.mark_label)
        axes.margins(x=0.02)
        if figure.are_shares:
            axes.set_ylim(*np.clip(axes.get_ylim(), *SHARES))
    else:
        _bars(axes, figure, series, look_of)
        if is_wide(figure, series):
            axes.set_yscale("log")
    if all(_is_whole(one.x) for one in series):
        axes.locator_params(axis="x", integer=True)


def _is_whole(x: np.ndarray) -> bool:
    return x.dtype.kind in "iu"


def _line(axes: Axes, series: Series, look: Look, place: int) -> None:
    step = max(1, len(series.x) // MARKS_A_LINE)
    axes.plot(
        series.x,
        series.y,
        label=series.name,
        color=look.colour,
        linestyle=DASH[look.dash],
        marker=MARKER[look.marker],
        markevery=(place % step, step),
    )


def _bars(axes: Axes, figure: Bars, series: Sequence[Series], look_of: dict[str, Look]) -> None:
    stacked = figure.stacked
    places = np.arange(len(series[0].x)) if series[0].x.dtype.kind == "U" else series[0].x
    gap = np.diff(places).min(initial=1e9) if len(places) > 1 else 1.0
    width, bottom = 0.8 * gap / (1 if stacked else len(series)), np.zeros(len(places))
    for place, one in enumerate(series):
        look, y = look_of[one.name], np.nan_to_num(one.y)
        shift = 0.0 if stacked else (place - (len(series) - 1) / 2) * width
        style: dict[str, Any] = dict(color=look.colour, hatch=3 * look.hatch, edgecolor="white", linewidth=0.3)
        axes.bar(places + shift, y, width, bottom if stacked else 0, label=one.name, **style)
        low = drawn_low(figure, one)
        if low is not None:
            ends = np.nan_to_num(np.abs([one.y - low, one.high - one.y]))
            axes.errorbar(places + shift, bottom * stacked + y, ends, fmt="none", ecolor="black", elinewidth=0.7)
        bottom = bottom + y
    if series[0].x.dtype.kind == "U":
        _name_places(axes, series[0].x)
        axes.set_xlim(-max(0.6, 2 - len(places) / 2), len(places) - 1 + max(0.6, 2 - len(places) / 2))


def _crowding(names: np.ndarray) -> float:
    """Up to 1 names fit side by side."""
    return sum(0.06 * len(name) + 0.08 for name in names) / (0.8 * COLUMN_IN)


def _is_slanting(names: np.ndarray) -> bool:
    """Whether they do not fit side by side, and are few enough to be all told."""
    return names.dtype.kind == "U" and len(names) <= MOST_SLANTING and _crowding(names) > 1


def _name_places(axes: Axes, names: np.ndarray) -> None:
    slant: dict[str, Any] = dict(rotation=40, ha="right", rotation_mode="anchor") if _is_slanting(names) else {}
    step = 1 if slant else max(1, math.ceil(_crowding(names)))
    axes.set_xticks(np.arange(0, len(names), step), names[::step], parse_math=False, **slant)


def _legend_columns(names: Sequence[str], width_in: float) -> int:
    """As many as fit side by side; matplotlib fills one after the other, each as wide as its longest name."""
    for columns in range(len(names), 1, -1):
        rows = math.ceil(len(names) / columns)
        longest = [max(map(len, names[first : first + rows])) for first in range(0, len(names), rows)]
        if sum(0.055 * length + 0.48 for length in longest) <= width_in:
            return len(longest)
    return 1


def _legend(canvas: Canvas, all_axes: Sequence[Axes], names: Sequence[str], columns: int) -> None:
    """One for all panels, below them."""
    handles: dict[str, Any] = {}
    for axes in all_axes:
        handles |= {name: handle for handle, name in zip(*axes.get_legend_handles_labels())}
    told = [name for name in names if name in handles]  # matplotlib tells no name that begins with "_"
    if told:
        legend = canvas.legend([handles[name] for name in told], told, loc="outside lower center", ncols=columns)
        for text in legend.get_texts():  # a name with $ is no formula, and one that is none would end all
            text.set_parse_math(False)


# ---- heat maps


def _heat_map(figure: HeatMap) -> Canvas:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    rows, columns = figure.z_YX.shape
    canvas = _canvas(COLUMN_IN if columns <= 60 else PAGE_IN, min(5.0, max(1.6, 0.9 + 0.13 * rows)))
    axes = canvas.subplots()
    axes.patch.set(hatch=6 * "/", edgecolor="0.8", facecolor="white", linewidth=0)
    low, high = figure.z_range
    image = axes.imshow(
        np.ma.masked_invalid(figure.z_YX),
        cmap=LinearSegmentedColormap.from_list("darker", DARKER),
        vmin=low,
        vmax=high,
        aspect="auto",
        interpolation="nearest",
    )
    axes.set(xlabel=figure.x_label, ylabel=figure.y_label)
    _name_cells(canvas, axes, figure)
    bar = canvas.colorbar(image, label=figure.z_label, pad=0.02, aspect=max(8, 3 * canvas.get_figheight()))
    if figure.has_counts:
        bar.locator = MaxNLocator("auto", integer=True)
    return canvas


def _name_cells(canvas: Canvas, axes: Axes, figure: HeatMap) -> None:
    """As many names as stand beside each other."""
    width_in, height_in = canvas.get_size_inches()
    longest = max(map(len, figure.x), default=1)
    for names, most, axis in (
        (figure.x, 0.65 * width_in / (0.06 * longest + 0.08), axes.xaxis),
        (figure.y, (height_in - 0.5) / 0.12, axes.yaxis),
    ):
        step = max(1, math.ceil(len(names) / most))
        axis.set_ticks(np.arange(0, len(names), step), list(names[::step]), parse_math=False)
    axes.tick_params(length=2)
