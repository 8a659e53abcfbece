"""A table is the same numbers in Markdown, LaTeX, CSV, JSON and HTML, and each keeps what its own language needs."""

from __future__ import annotations

import csv
import io
import json

import pytest

from hkd_hpc import compare
from hkd_hpc.analysis.tables import Difference, Estimate, Table, document, estimate
from hkd_hpc.jobs.__main__ import main as jobs

NAN = float("nan")
TABLE = Table(
    ["scheme", "local", "local – fedavg"],
    [
        ["fedavg", Estimate(0.5, 0.0125, 3), ""],
        ["a_b & <i>", Estimate(0.51234567, NAN, 1), Difference(0.0125, 0.004, "better")],
        ["none", Estimate(NAN, NAN, 0), "–"],
    ],
    "50 % of <all>",
)


def test_markdown():
    assert TABLE.markdown().splitlines() == [
        "| scheme | local | local – fedavg |",
        "| --- | --- | --- |",
        "| fedavg | 0.500 ± 0.013 (3) |  |",
        "| a_b & <i> | 0.512 (1) | +0.013 ± 0.004, better |",
        "| none | – | – |",
    ]


def test_latex_is_escaped_and_for_booktabs():
    assert TABLE.latex().splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\caption{50 \% of \textless{}all\textgreater{}}",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"scheme & local & local -- fedavg \\",
        r"\midrule",
        r"fedavg & 0.500 $\pm$ 0.013 (3) &  \\",
        r"a\_b \& \textless{}i\textgreater{} & 0.512 (1) & +0.013 $\pm$ 0.004, better \\",
        r"none & -- & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


def test_csv_has_the_numbers_in_columns_of_their_own():
    assert list(csv.reader(io.StringIO(TABLE.csv()))) == [
        ["scheme", "local", "local ±", "local seeds", "local – fedavg", "local – fedavg ±", "local – fedavg verdict"],
        ["fedavg", "0.5", "0.0125", "3", "", "", ""],
        ["a_b & <i>", "0.51235", "", "1", "0.0125", "0.004", "better"],
        ["none", "", "", "0", "–", "", ""],
    ]


def test_html_is_escaped_and_says_what_a_row_is():
    html = TABLE.html()
    assert "<caption><span>50 % of &lt;all&gt;</span></caption>" in html
    assert '<th scope="col">local – fedavg</th>' in html
    assert '<tr><th scope="row">a_b &amp; &lt;i&gt;</th><td>0.512 (1)</td><td>+0.013 ± 0.004, better</td></tr>' in html


def test_json_has_numbers_by_the_names_of_the_csv_and_nothing_for_what_was_not_measured():
    table = Table(["clients", "local", "cost"], [["10", Estimate(0.5, NAN, 1), "1.50"], ["20", "–", "no"]], "caption")
    found = json.loads(document(["title", "", table, "two\nlines"], "json"))
    assert found["text"] == ["title", "two", "lines"]
    assert found["tables"] == [
        {
            "caption": "caption",
            "rows": [
                {"clients": "10", "local": 0.5, "local ±": None, "local seeds": 1, "cost": 1.5},
                {"clients": "20", "local": None, "local ±": None, "local seeds": None, "cost": "no"},
            ],
        }
    ]


def test_text_around_tables_is_a_comment_in_latex_and_csv():
    parts = ["two\nlines", "", Table(["x"], [["1"]])]
    assert document(parts) == "two\nlines\n\n| x |\n| --- |\n| 1 |"
    assert document(parts, "csv") == "# two\n# lines\n\nx\n1"
    assert document(parts, "latex").startswith("% two\n% lines\n\n\\begin{table}\n")


def test_a_row_above_the_head_spans_columns():
    table = Table(["scheme", "10", "20", "s"], [["a", "1", "2", "3"]], spans=[("", 1), ("local", 2), ("", 1)])
    assert table.markdown().splitlines()[0] == "| scheme | local 10 | local 20 | s |"
    assert table.csv().splitlines()[0] == "scheme,local 10,local 20,s"
    assert table.latex().splitlines()[3:7] == [
        r"\toprule",
        r"\multicolumn{1}{c}{} & \multicolumn{2}{c}{local} & \multicolumn{1}{c}{} \\",
        r"\cmidrule(lr){2-3}",
        r"scheme & 10 & 20 & s \\",
    ]
    assert '<th scope="colgroup" colspan="2">local</th>' in table.html()


def test_a_cell_of_markdown_stays_one_whatever_a_label_holds():
    assert Table(["x", "y"], [["a|b\nc", "1"]]).markdown().splitlines()[2:] == [r"| a\|b c | 1 |"]


def test_an_estimate_is_over_what_was_measured():
    found = estimate([0.5, NAN, 0.7])
    assert found.mean == pytest.approx(0.6)
    assert found.half == pytest.approx(1.2706, abs=1e-4)  # t(.975, 1) = 12.706, times .1414 / sqrt(2)
    assert found.count == 2
    assert str(estimate([NAN])) == "–"


@pytest.mark.parametrize(
    "command",
    [lambda: jobs(["table", "x", "--format", "word"]), lambda: compare.main(["x", "--root", "y", "--format", "word"])],
)
def test_an_unknown_format_is_one_line(command, capsys):
    assert command() == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--format: invalid choice: 'word'" in line
