"""Figures on a page: plain dicts that plotly.js draws. Plotly itself is not needed to make them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hkd_hpc.figures.figure import SHARES, Bars, Figure, HeatMap, Lines, Series, is_wide
from hkd_hpc.figures.look import (
    DARKER,
    MARKS_A_LINE,
    MOST_MARKED,
    Look,
    band_alpha,
    drawn_low,
    legend_names,
    looks_of,
    panels,
)

DIGITS = 6  # that a page shows, and has to load
CLEAR = "rgba(0,0,0,0)"
PANEL_PX, BELOW_PX, LEGEND_PX = 300, 90, 90  # heights: of a panel, in it for the names below the axis, of the legend
FEW = 10  # rounds with a tick each
GAP = 0.06  # between panels, of the width


def plotly_of(figure: Figure) -> dict[str, Any]:
    """A figure for Plotly; colours of paper and text are left to the page, light or dark; those of lines and bars are
    for light paper, and the report's page.js has what a dark one takes in their place.

    Args:
        figure: from of_run or of_study.

    Returns:
        {"data": [traces], "layout": {...}}, for json.dumps and Plotly.newPlot; NaN is null.
    """
    if isinstance(figure, HeatMap):
        return _heat_map(figure)
    assert isinstance(figure, Lines | Bars)
    names, across, down = panels(figure)
    look_of, told = looks_of(figure), legend_names(figure)
    shown = set[str]()
    bands: list[dict[str, Any]] = []
    traces: list[dict[str, Any]] = []
    for series in figure.series:
        is_told = series.name in told and series.name not in shown  # once for all panels
        more = {**_axes_of(names.index(series.panel)), "legendgroup": series.name, "showlegend": is_told}
        if isinstance(figure, Lines):
            bands += _band(figure, series, look_of[series.name], more)
            traces.append(_line(series, look_of[series.name], more))
        else:
            traces.append(_bars(figure, series, look_of[series.name], more))
        shown.add(series.name)
    return {"data": [*bands, *traces], "layout": _layout(figure, names, across, down)}  # no band lies on a line


def _axes_of(panel: int) -> dict[str, str]:
    return {"xaxis": f"x{_number(panel)}", "yaxis": f"y{_number(panel)}"}


def _number(panel: int) -> str:
    """As plotly counts axes: x, x2, x3 ..."""
    return "" if panel == 0 else str(panel + 1)


def _line(series: Series, look: Look, more: dict[str, Any]) -> dict[str, Any]:
    most = {"maxdisplayed": MARKS_A_LINE} if len(series.x) > MOST_MARKED else {}
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": series.name,
        "x": listed(series.x),
        "y": listed(series.y),
        "line": {"color": look.colour, "dash": look.dash, "width": 2},
        "marker": {"symbol": look.marker, "size": 6, **most},
        **more,
    }


def _band(figure: Lines, series: Series, look: Look, more: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The outline there and back, filled."""
    ends = drawn_low(figure, series)
    if ends is None or series.high is None:
        return
    there = np.isfinite(ends) & np.isfinite(series.high)
    x, low, high = series.x[there], ends[there], series.high[there]
    yield {
        "type": "scatter",
        "mode": "lines",
        "name": f"{series.name}, 95 % interval",
        "x": listed(np.concatenate([x, x[::-1]])),
        "y": listed(np.concatenate([high, low[::-1]])),
        "fill": "toself",
        "fillcolor": look.colour,
        "opacity": band_alpha([one for one in figure.series if one.panel == series.panel]),
        "line": {"width": 0},
        "hoverinfo": "skip",
        **more,
        "showlegend": False,
    }


def _bars(figure: Bars, series: Series, look: Look, more: dict[str, Any]) -> dict[str, Any]:
    bars: dict[str, Any] = {
        "type": "bar",
        "name": series.name,
        "x": listed(series.x),
        "y": listed(series.y),
        "marker": {
            "color": look.colour,
            "pattern": {"shape": look.hatch, "fgcolor": "white", "solidity": 0.25, "fillmode": "overlay"},
        },
        **more,
    }
    low = drawn_low(figure, series)
    if low is not None and series.high is not None:
        ends = {"array": listed(series.high - series.y), "arrayminus": listed(series.y - low)}
        bars["error_y"] = {"type": "data", "symmetric": False, "thickness": 1, "color": "#444444", **ends}
    return bars


def _layout(figure: Lines | Bars, names: Sequence[str], across: int, down: int) -> dict[str, Any]:
    layout: dict[str, Any] = {**_page(down), "annotations": [], "shapes": []}
    if isinstance(figure, Bars):
        layout["barmode"] = "stack" if figure.stacked else "group"
    for panel, name in enumerate(names):
        column, row = panel % across, panel // across
        x, y = _domain(column, across, GAP), _domain(down - 1 - row, down, BELOW_PX / (PANEL_PX * down))
        layout |= _axes(figure, panel, x, y)
        if column:
            del layout[f"yaxis{_number(panel)}"]["title"]  # as on the left, where it stands for the whole row
        if is_wide(figure, [series for series in figure.series if series.panel == name]):
            layout[f"yaxis{_number(panel)}"] |= {"type": "log", "dtick": 1}
        if _has_few_rounds(figure):
            layout[f"xaxis{_number(panel)}"] |= {"dtick": 1}  # no round 1.5
        if _has_names(figure):
            layout[f"xaxis{_number(panel)}"] |= {"type": "category"}  # no rank 1.5
        if name:
            layout["annotations"].append(_heading(name, x, y))
        if isinstance(figure, Lines) and figure.are_shares:
            layout[f"yaxis{_number(panel)}"] |= {"autorangeoptions": dict(zip(("clipmin", "clipmax"), SHARES))}
        if isinstance(figure, Lines):
            layout["shapes"] += [_mark(mark, panel) for mark in figure.marks]
    if isinstance(figure, Lines) and figure.marks:
        layout["annotations"].append(_mark_words(figure))
    return layout


def _has_few_rounds(figure: Lines | Bars) -> bool:
    return all(series.x.dtype.kind in "iu" and np.ptp(series.x) <= FEW for series in figure.series if len(series.x))


def _has_names(figure: Lines | Bars) -> bool:
    return all(series.x.dtype.kind == "U" for series in figure.series)


def _page(down: int) -> dict[str, Any]:
    return {
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "height": PANEL_PX * down + LEGEND_PX,
        "margin": {"l": 60, "r": 20, "t": 36, "b": 50},
        "legend": {"orientation": "h", "yanchor": "top", "y": -0.28 / down, "x": 0},
        "hovermode": "closest",
    }


def _domain(place: int, count: int, gap: float) -> list[float]:
    size = (1 - gap * (count - 1)) / count
    return [round(place * (size + gap), 4), round(min(1.0, place * (size + gap) + size), 4)]


def _axes(figure: Lines | Bars, panel: int, x: list[float], y: list[float]) -> dict[str, Any]:
    number = _number(panel)
    common = {
        "automargin": True,
        "zeroline": False,
        "gridcolor": "rgba(128,128,128,0.25)",
        "separatethousands": True,  # else those of a narrow range alone are
    }
    return {
        f"xaxis{number}": {"title": _title(figure.x_label), "domain": x, "anchor": f"y{number}", **common},
        f"yaxis{number}": {"title": _title(figure.y_label), "domain": y, "anchor": f"x{number}", **common},
    }


def _title(label: str) -> dict[str, Any]:
    return {"text": label, "standoff": 6}  # pixels from the numbers of the axis


def _heading(text: str, x: list[float], y: list[float]) -> dict[str, Any]:
    place = {"xref": "paper", "yref": "paper", "x": sum(x) / 2, "y": y[1]}
    return {"text": text, **place, "xanchor": "center", "yanchor": "bottom", "showarrow": False}


def _mark(x: float, panel: int) -> dict[str, Any]:
    axes = _axes_of(panel)
    place = {"xref": axes["xaxis"], "yref": f"{axes['yaxis']} domain", "x0": x, "x1": x, "y0": 0, "y1": 1}
    return {"type": "line", **place, "line": {"color": "gray", "dash": "dot", "width": 1.5}}


def _mark_words(figure: Lines) -> dict[str, Any]:
    """Above the first mark, where no line is, towards the side with more room."""
    first, x = figure.marks[0], np.concatenate([series.x for series in figure.series])
    anchor = {"xanchor": "left" if first <= (x.min() + x.max()) / 2 else "right", "yanchor": "bottom"}
    place = {"xref": "x", "yref": "y domain", "x": first, "y": 1}
    return {"text": figure.mark_label, **place, **anchor, "showarrow": False}


def _heat_map(figure: HeatMap) -> dict[str, Any]:
    low, high = figure.z_range
    trace = {
        "type": "heatmap",
        "x": list(figure.x),
        "y": list(figure.y),
        "z": [listed(row) for row in figure.z_YX],
        "zmin": rounded(low),
        "zmax": rounded(high),
        "colorscale": [[place / (len(DARKER) - 1), colour] for place, colour in enumerate(DARKER)],
        "colorbar": {"title": {"text": figure.z_label, "side": "right"}, **_few_ticks(figure)},
        "hoverongaps": False,
        "xgap": 1,
        "ygap": 1,
    }
    axis = {"type": "category", "automargin": True, "showgrid": False}
    return {
        "data": [trace],
        "layout": {
            "paper_bgcolor": CLEAR,
            "plot_bgcolor": "rgba(128,128,128,0.25)",  # what shows where there is no value
            "height": min(700, max(260, 120 + 18 * len(figure.y))),
            "margin": {"l": 60, "r": 20, "t": 36, "b": 50},
            "xaxis": {"title": _title(figure.x_label), **axis},
            "yaxis": {"title": _title(figure.y_label), "autorange": "reversed", **axis},
        },
    }


def _few_ticks(figure: HeatMap) -> dict[str, Any]:
    """No half of a client, a class, an image."""
    return {"dtick": 1} if figure.has_counts and np.ptp(figure.z_range) <= FEW else {}


def listed(values: np.ndarray) -> list[Any]:
    """For JSON: DIGITS digits, None for NaN; names as they are."""
    return values.tolist() if values.dtype.kind in "UOiu" else [rounded(value) for value in values.tolist()]


def rounded(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
