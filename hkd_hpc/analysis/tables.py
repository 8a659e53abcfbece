"""Accuracies over seeds, and the tables that show them: Markdown, LaTeX (booktabs), CSV, JSON, HTML."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from hkd_hpc.analysis.metrics import FINAL, NAN, SUMMARISED
from hkd_hpc.analysis.statistics import interval

# column: the name in a run's summary of what stands there
COLUMNS = {metric.column: f"{metric.name}_last" for metric in SUMMARISED if metric.column} | {
    metric.column: metric.name for metric in FINAL if metric.column
}
NOTHING = "–"
LATEX = {
    "\\": r"\textbackslash{}",
    **{character: f"\\{character}" for character in "{}$&#_%"},
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "β": r"$\beta$",
    "–": "--",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
}


class Cell(Protocol):
    """What stands in a table, as text, and for CSV the numbers in it: "" for the cell's own column, others by what
    is added to its head.
    """

    def __str__(self) -> str: ...

    def parts(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: NaN where nothing was measured.
        half: half width of its 95 % interval by Student's t; NaN of one value.
        count: of the values.
    """

    mean: float
    half: float
    count: int

    def __str__(self) -> str:
        """0.812 ± 0.004 (5), or – where nothing was measured."""
        if not self.count:
            return NOTHING
        return f"{self.mean:.3f}" + (f" ± {self.half:.3f}" if self.half == self.half else "") + f" ({self.count})"

    def parts(self) -> dict[str, str]:
        return {"": number(self.mean), " ±": number(self.half), " seeds": str(self.count)}


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, half of its 95 % interval, and what the test says of them."""

    mean: float
    half: float
    verdict: str

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.half:.3f}, {self.verdict}"

    def parts(self) -> dict[str, str]:
        return {"": number(self.mean), " ±": number(self.half), " verdict": self.verdict}


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]


@dataclass(frozen=True)
class Table:
    """A table, whatever it is written as.

    Attributes:
        head: of its columns.
        rows: of cells.
        caption: one sentence, which Markdown and CSV leave to the text around them.
        names: how many of the first columns say what a row is.
        spans: (title, columns) of a row above the head, from the left; text formats put the title before the head.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str = ""
    names: int = 1
    spans: Sequence[tuple[str, int]] = ()

    def __str__(self) -> str:
        """As Markdown."""
        return self.markdown()

    def _repr_html_(self) -> str:
        """As notebooks show it."""
        return self.html()

    def titles(self) -> list[str]:
        """Of each column, that of its span included."""
        above = [title for title, count in self.spans for _ in range(count)] or [""] * len(self.head)
        return [f"{title} {name}".strip() for title, name in zip(above, self.head)]

    def markdown(self) -> str:
        rows = [self.titles(), ["---"] * len(self.head), *self.rows]
        return "\n".join("| " + " | ".join(as_markdown(str(cell)) for cell in row) + " |" for row in rows)

    def latex(self) -> str:
        """For the package booktabs."""
        head, *rows = (" & ".join(as_latex(str(cell)) for cell in row) + r" \\" for row in [self.head, *self.rows])
        columns = "l" * self.names + "r" * (len(self.head) - self.names)
        caption = [rf"\caption{{{as_latex(self.caption)}}}"] if self.caption else []
        lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *self._latex_of_spans(), head, r"\midrule", *rows]
        tabular = [*lines, r"\bottomrule", r"\end{tabular}"]
        return "\n".join([r"\begin{table}", r"\centering", *caption, *tabular, r"\end{table}"])

    def _latex_of_spans(self) -> list[str]:
        """Their row, and a rule below each that has a title."""
        if not self.spans:
            return []
        cells = " & ".join(rf"\multicolumn{{{count}}}{{c}}{{{as_latex(title)}}}" for title, count in self.spans)
        ends = list(itertools.accumulate(count for _, count in self.spans))
        rules = [rf"\cmidrule(lr){{{end - count + 1}-{end}}}" for (title, count), end in zip(self.spans, ends) if title]
        return [rf"{cells} \\", " ".join(rules)]

    def csv(self) -> str:
        """For programs: of a mean the number, half of its interval and the seeds in columns of their own."""
        text = io.StringIO()
        head, rows = self._parts()
        csv.writer(text, lineterminator="\n").writerows([[f"{title}{name}" for title, name, _ in head], *rows])
        return text.getvalue().rstrip("\n")

    def records(self) -> list[dict[str, str | float | None]]:
        """A row as {column of the CSV: text, number, or None where nothing was measured}."""
        head, rows = self._parts()
        return [
            {
                f"{title}{name}": text if place < self.names else as_number(text)
                for (title, name, place), text in zip(head, row)
            }
            for row in rows
        ]

    def _parts(self) -> tuple[list[tuple[str, str, int]], list[list[str]]]:
        """((title, part, column) of each part that some row has, the rows of parts)."""
        columns = [[parts_of(row[place]) for row in self.rows] for place in range(len(self.head))]
        names = [list(dict.fromkeys(["", *(name for cell in cells for name in cell)])) for cells in columns]
        head = [(title, name, place) for place, title in enumerate(self.titles()) for name in names[place]]
        return head, [[row[place].get(name, "") for _, name, place in head] for row in zip(*columns)]

    def html(self) -> str:
        """A whole <table>; text is escaped, but for that of cells with an `__html__` of their own."""
        caption = f"<caption><span>{escape(self.caption)}</span></caption>\n" if self.caption else ""
        above = "".join(
            f'<th scope="colgroup" colspan="{count}">{escape(title)}</th>' if title else f'<td colspan="{count}"></td>'
            for title, count in self.spans
        )
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.head)
        rows = [f"<tr>{self._html_of(row)}</tr>\n" for row in self.rows]
        heads = (f"<tr>{above}</tr>\n" if above else "") + f"<tr>{head}</tr>"
        return f"<table>{caption}<thead>{heads}</thead>\n<tbody>\n{''.join(rows)}</tbody>\n</table>"

    def _html_of(self, row: Sequence[Cell | str]) -> str:
        named, others = row[: self.names], row[self.names :]
        heads = [f'<th scope="row">{as_html(cell)}</th>' for cell in named]
        return "".join([*heads, *(f"<td>{as_html(cell)}</td>" for cell in others)])


FORMATS: dict[str, Callable[[Table], str]] = {"markdown": Table.markdown, "latex": Table.latex, "csv": Table.csv}
SUFFIXES = {"markdown": "md", "latex": "tex", "csv": "csv", "json": "json"}  # of a document, by its format
_COMMENTS = {"markdown": "", "latex": "% ", "csv": "# "}


def document(parts: Sequence[str | Table], format: str = "markdown") -> str:
    """Lines of text and tables, one below the other.

    Args:
        parts: Text, of which LaTeX and CSV make comments, and tables.
        format: One of SUFFIXES. JSON has {"tables": [{"caption", "rows"}], "text": [line]}.

    Returns:
        The text, without a line feed at its end.
    """
    if format == "json":
        return as_json(parts)
    mark = _COMMENTS[format]
    return "\n".join(
        FORMATS[format](part)
        if isinstance(part, Table)
        else "\n".join(mark + line if line else "" for line in part.split("\n"))
        for part in parts
    )


def as_json(parts: Sequence[str | Table]) -> str:
    tables = [{"caption": part.caption, "rows": part.records()} for part in parts if isinstance(part, Table)]
    lines = [line for part in parts if isinstance(part, str) for line in part.split("\n") if line]
    return json.dumps({"tables": tables, "text": lines}, indent=1, ensure_ascii=False)


def estimate(values: Iterable[float]) -> Estimate:
    """Over the values that are numbers."""
    found = [value for value in values if value == value]
    return Estimate(*interval(found), len(found)) if found else Estimate(NAN, NAN, 0)


def number(value: float) -> str:
    """For programs: five significant digits; empty for NaN."""
    return f"{value:.5g}" if value == value else ""


def as_number(text: str) -> str | float | None:
    """What `number` wrote, and other text as it is; None for nothing."""
    if text in ("", NOTHING):
        return None
    try:
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        return text


def parts_of(cell: Cell | str) -> dict[str, str]:
    return {"": cell} if isinstance(cell, str) else cell.parts()


def as_markdown(text: str) -> str:
    """What stands in one cell, whatever is in the text."""
    return " ".join(text.replace("|", r"\|").splitlines())


def as_latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


def as_html(cell: Any) -> str:
    return cell.__html__() if hasattr(cell, "__html__") else escape(str(cell))
