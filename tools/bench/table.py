"""The table of tools.bench: medians with spread, verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from hkd_hpc.analysis.tables import aligned
from hkd_hpc.runtime.machine import header


@dataclass(frozen=True)
class Line:
    """One line of the table: values of repeated measurements, and the figure that their median must not exceed."""

    title: str
    values: tuple[float, ...]
    at_most: float | None = None
    unit: str = ""

    @property
    def verdict(self) -> str:
        if self.at_most is None:
            return "-"
        return "reached" if median(self.values) <= self.at_most else "missed"


def heading(quick: bool) -> str:
    """What stands above a table: where was measured; `quick`: that it means nothing."""
    return header() + "\nquick: tiny sizes, the numbers mean nothing" * quick


def number(value: float) -> str:
    """Three significant digits, no exponent: 0.0123, 1.05, 46.2, 118"""
    if value == 0:
        return "0"
    digits = max(0, 2 - int(f"{abs(value):.2e}".split("e")[1]))
    return f"{value:.{digits}f}"


def row(line: Line) -> tuple[str, ...]:
    """(row, measured, spread, to reach, verdict) as text."""
    unit = f" {line.unit}" if line.unit else ""
    spread = f"{number(min(line.values))} .. {number(max(line.values))} of {len(line.values)}"
    to_reach = "-" if line.at_most is None else f"<= {number(line.at_most)}{unit}"
    return line.title, number(median(line.values)) + unit, spread, to_reach, line.verdict


def table(lines: list[Line]) -> str:
    rows = [("row", "measured", "spread", "to reach", "verdict"), *map(row, lines)]
    return "\n".join(aligned(rows))
