"""The renderers: files that open, numbers that come back, plain dicts."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hkd_hpc
from hkd_hpc.common.errors import UsageError
from hkd_hpc.figures import Bars, HeatMap, Lines, NotRecorded, Series, csv_of, draw, plotly_of, write_figures
from hkd_hpc.figures.look import MOST_TOLD_APART, look, looks, looks_of

WORDS = dict(name="one", title="One", caption="Of one.", x_label="round", y_label="accuracy")
NAN = float("nan")


@pytest.fixture
def lines():
    x = np.array([1, 2, 3])
    banded = Series("a", x, np.array([0.1, 0.2, 0.3]), np.array([0, 0.1, NAN]), np.array([0.2, 0.3, NAN]), "left")
    return Lines(**WORDS, series=(banded, Series("b", x, np.array([1 / 3, NAN, 0.5]), panel="right")), marks=(2.0,))


@pytest.fixture
def bars():
    x = np.array(["fedavg", "fedhkd"])
    return Bars(**WORDS, series=(Series("up", x, np.array([1.0, 2.0])), Series("down", x, np.array([3.0, 4.0]))))


@pytest.fixture
def heat_map():
    z_YX = np.array([[1.0, NAN, 3.0], [4.0, 5.0, 6.0]])
    return HeatMap(**WORDS, z_YX=z_YX, x=("0", "1", "2"), y=("a", "b"), z_label="images", z_range=(0, 6))


def rows(text):
    return list(csv.reader(io.StringIO(text)))


def test_names_with_dollars_are_no_formulas(lines, bars, heat_map):
    """As a formula ${ b$ cannot be set at all."""
    odd = "a ${ b$"
    named = replace(lines, series=tuple(replace(one, name=f"{one.name} {odd}") for one in lines.series))
    barred = replace(bars, series=tuple(replace(one, x=np.array([odd, "$5 and $6"])) for one in bars.series))
    for figure in (named, barred, replace(heat_map, x=(odd, "$5 and $6", "2"), y=("a", odd))):
        drawn = io.StringIO()
        draw(figure).savefig(drawn, format="svg")
        assert odd in drawn.getvalue()


def test_csv_of_lines_comes_back(lines):
    head, *found = rows(csv_of(lines))
    assert head == ["panel", "series", "round", "accuracy", "low", "high"]
    assert found[0] == ["left", "a", "1", "0.1", "0", "0.2"]
    assert found[4] == ["right", "b", "2", "", "", ""]
    assert float(found[3][3]) == 1 / 3


def test_csv_of_a_heat_map_has_a_line_for_each_cell(heat_map):
    assert rows(csv_of(heat_map))[:3] == [["accuracy", "round", "images"], ["a", "0", "1"], ["a", "1", ""]]


def test_plotly_of_lines(lines):
    drawn = json.loads(json.dumps(plotly_of(lines), allow_nan=False))
    band, line, other = drawn["data"]
    assert band["y"] == [0.2, 0.3, 0.1, 0.0]  # there and back, without the end that has no interval
    assert line["y"] == [0.1, 0.2, 0.3]
    assert other["y"] == [0.333333, None, 0.5]
    assert other["xaxis"] == "x2"
    assert drawn["layout"]["xaxis2"]["dtick"] == 1
    assert [note["text"] for note in drawn["layout"]["annotations"][:2]] == ["left", "right"]


def test_plotly_of_bars_and_heat_maps(bars, heat_map):
    assert plotly_of(bars)["layout"]["barmode"] == "stack"
    assert plotly_of(bars)["data"][1]["y"] == [3.0, 4.0]
    assert plotly_of(heat_map)["data"][0]["z"] == [[1.0, None, 3.0], [4.0, 5.0, 6.0]]


def test_names_that_are_numbers_stay_names_and_counts_have_whole_ticks(bars, heat_map):
    ranks = replace(bars.series[0], x=np.array(["1", "2"]))
    assert plotly_of(replace(bars, series=(ranks,)))["layout"]["xaxis"]["type"] == "category"
    counts = replace(heat_map, z_range=(0, 3))
    assert plotly_of(counts)["data"][0]["colorbar"]["dtick"] == 1
    assert draw(counts).axes[1].get_yticks().tolist() == [0, 1, 2, 3]
    shares = replace(counts, z_YX=heat_map.z_YX / 2)
    assert "dtick" not in plotly_of(shares)["data"][0]["colorbar"]


def test_an_axis_of_shares_ends_at_0_and_1_wherever_an_interval_ends(lines):
    wide = replace(lines.series[0], low=np.array([-2.0, 0.1, NAN]), high=np.array([3.0, 0.3, NAN]), panel="")
    shares = replace(lines, series=(wide,), are_shares=True)
    assert draw(shares).axes[0].get_ylim() == (-0.02, 1.02)
    assert plotly_of(shares)["layout"]["yaxis"]["autorangeoptions"] == {"clipmin": -0.02, "clipmax": 1.02}
    assert plotly_of(shares)["data"][0]["y"] == [3.0, 0.3, 0.1, 0.0]  # beyond 1 the band itself is whole
    assert draw(replace(shares, are_shares=False, is_signed=True)).axes[0].get_ylim()[0] < -2


def test_no_interval_of_what_cannot_be_negative_is_drawn_below_0(lines, bars):
    """The numbers in the CSV are those of the interval."""
    wide = replace(lines, series=(replace(lines.series[0], low=np.array([-2.0, 0.1, NAN]), panel=""),))
    assert draw(wide).axes[0].collections[0].get_paths()[0].vertices[:, 1].min() == 0
    assert plotly_of(wide)["data"][0]["y"] == [0.2, 0.3, 0.1, 0.0]
    assert plotly_of(replace(wide, is_signed=True))["data"][0]["y"] == [0.2, 0.3, 0.1, -2.0]
    assert rows(csv_of(wide))[1] == ["", "a", "1", "0.1", "-2", "0.2"]
    one = replace(bars, series=(replace(bars.series[0], low=np.array([-1.0, 1.5]), high=np.array([3.0, 2.5])),))
    assert plotly_of(one)["data"][0]["error_y"]["arrayminus"] == [1.0, 0.5]
    [ends] = draw(one).axes[0].collections
    assert [path.vertices[:, 1].tolist() for path in ends.get_paths()] == [[0, 3], [1.5, 2.5]]


def nine(lines):
    """Nine lines with bands in one panel."""
    [one] = [series for series in lines.series if series.name == "a"]
    return replace(lines, series=tuple(replace(one, name=f"scheme {place}", panel="") for place in range(9)))


def test_all_bands_lie_below_all_lines_and_many_are_faint(lines):
    drawn = plotly_of(nine(lines))["data"]
    assert ["fill" in trace for trace in drawn] == [True] * 9 + [False] * 9
    assert {trace["opacity"] for trace in drawn[:9]} == {0.067}  # .6 / 9
    assert plotly_of(lines)["data"][0]["opacity"] == 0.18
    [axes] = draw(nine(lines)).axes
    assert max(band.get_zorder() for band in axes.collections) < min(line.get_zorder() for line in axes.lines)
    assert {band.get_alpha() for band in axes.collections} == {0.067}


def test_nine_schemes_have_nine_colours_that_the_colour_blind_tell_apart_on_light_and_dark_paper():
    """Oklab after Machado, Oliveira and Fernandes (2009); contrast as WCAG counts it."""
    light = {look(place).colour for place in range(9)}
    script = (Path(hkd_hpc.__file__).parent / "report/page.js").read_text()
    swaps = dict(re.findall(r'"(#\w{6})": "(#\w{6})"', script))
    for paper, colours in ("#FFFFFF", light), ("#14171B", {swaps.get(colour, colour) for colour in light}):
        assert len(colours) == 9
        assert min(contrast(colour, paper) for colour in colours) > 2.2
        for seen in MACHADO.values():
            assert min(distance(seen, *pair) for pair in itertools.combinations(colours, 2)) > 0.055
    assert distance(np.eye(3), look(0).colour, look(7).colour) > 0.25  # fedavg and fedhkd, in the schemes' order


MACHADO = {
    "all": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
CONES = np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]])
OKLAB = np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]])


def light_of(colour):
    """Linear red, green and blue."""
    value = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    low, high = sorted(float(light_of(colour) @ [0.2126, 0.7152, 0.0722]) + 0.05 for colour in (one, other))
    return high / low


def distance(seen, *pair):
    one, other = (OKLAB @ np.cbrt(CONES @ np.clip(seen @ light_of(colour), 0, 1)) for colour in pair)
    return float(np.linalg.norm(one - other))


def test_a_long_line_has_a_marker_here_and_there(lines):
    few = replace(lines.series[0], x=np.arange(1, 26), y=np.ones(25), low=None, high=None)
    many = replace(few, x=np.arange(1, 51), y=np.ones(50))
    [short, long] = plotly_of(replace(lines, series=(few, replace(many, name="b"))))["data"]
    assert short["mode"] == long["mode"] == "lines+markers"
    assert "maxdisplayed" not in short["marker"]
    assert long["marker"]["maxdisplayed"] == 8


def test_the_y_axis_is_named_once_for_panels_beside_each_other(lines):
    layout = plotly_of(lines)["layout"]
    assert layout["yaxis"]["title"]["text"] == "accuracy"
    assert "title" not in layout["yaxis2"]
    four = tuple(replace(lines.series[1], panel=panel) for panel in "abcd")
    layout = plotly_of(replace(lines, series=four))["layout"]
    assert ["title" in layout[f"yaxis{number}"] for number in ("", 2, 3, 4)] == [True, False, True, False]


def test_all_thousands_are_separated(lines):
    layout = plotly_of(lines)["layout"]
    assert [layout[axis]["separatethousands"] for axis in ("xaxis", "yaxis2")] == [True, True]


def test_what_a_mark_is_stands_above_it_and_within_the_figure(lines):
    for mark, anchor in (1.0, "left"), (3.0, "right"):
        note = plotly_of(replace(lines, marks=(mark,), mark_label="resumed"))["layout"]["annotations"][-1]
        assert (note["text"], note["x"], note["y"], note["yref"]) == ("resumed", mark, 1, "y domain")
        assert (note["xanchor"], note["yanchor"]) == (anchor, "bottom")


@pytest.mark.parametrize("largest, kind", [(51.0, "log"), (50.0, "linear")])
def test_bars_side_by_side_that_are_far_apart_have_a_logarithmic_axis(bars, largest, kind):
    far = replace(bars, series=(replace(bars.series[0], y=np.array([0.0, 1.0])), bars.series[1]), stacked=False)
    far = replace(far, series=(far.series[0], replace(far.series[1], y=np.array([largest, NAN]))))
    assert plotly_of(far)["layout"]["yaxis"].get("type", "linear") == kind
    assert draw(far).axes[0].get_yscale() == kind
    assert draw(replace(far, stacked=True)).axes[0].get_yscale() == "linear"


def test_looks_differ_in_colour_or_dash():
    found = looks(f"scheme {place}" for place in range(MOST_TOLD_APART))
    assert len({(look.colour, look.dash) for look in found.values()}) == MOST_TOLD_APART


def test_a_known_name_looks_alike_whichever_others_are_there(lines):
    known = replace(lines, known=("other", *dict.fromkeys(series.name for series in lines.series)))
    assert [looks_of(known)[series.name] for series in lines.series] == [look(1), look(2)]
    assert looks_of(replace(lines, known=("other", "another"))) == looks_of(lines)


def test_files_open_and_are_a_column_wide(bars, heat_map, tmp_path):
    paths = write_figures([bars], tmp_path / "new")
    assert [path.name for path in paths] == ["one.pdf", "one.svg", "one.png", "one.csv"]
    pdf, svg, png, text = paths
    assert pdf.read_bytes().startswith(b"%PDF-")
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert struct.unpack(">I", png.read_bytes()[16:20]) == (990,)  # 3.3 inches of 300 pixels
    assert text.read_text() == csv_of(bars)


def test_the_same_figure_is_the_same_file(heat_map, tmp_path):
    one, again = (write_figures([heat_map], tmp_path / name) for name in "12")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in again]


def test_several_panels_are_a_page_wide(lines):
    assert draw(lines).get_size_inches()[0] == 6.9
    assert [axes.get_title() for axes in draw(lines).axes] == ["left", "right"]


def ticks_of(names):
    bars = Bars(**WORDS, series=(Series("s", np.array(names), np.ones(len(names))),))
    return [text.get_text() for text in draw(bars).axes[0].get_xticklabels()]


def test_names_slant_and_numbers_of_many_are_left_out():
    assert ticks_of(["a long name of a scheme"] * 4) == ["a long name of a scheme"] * 4
    assert ticks_of([str(client) for client in range(100)]) == [str(client) for client in range(0, 100, 8)]


def test_what_was_not_recorded_has_no_file(tmp_path):
    assert write_figures([NotRecorded("memory", "Peak memory", "not recorded")], tmp_path) == []


def test_a_folder_that_cannot_be_made_is_one_line(bars, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--figures .*file: .*; name a folder that can be made and written to"):
        write_figures([bars], tmp_path / "file")


def test_data_and_pages_need_no_renderer():
    code = (
        "import sys, hkd_hpc.figures; "
        "print(sorted({'matplotlib', 'plotly', 'pandas', 'torch', 'scipy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_without_matplotlib_one_line_says_what_to_install(bars, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"figures on paper need matplotlib: pip install 'hkd_hpc\[report\]'"):
        write_figures([bars], tmp_path)
