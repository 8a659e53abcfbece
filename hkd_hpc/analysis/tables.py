"""Accuracies over seeds as text: mean, 95 % interval, tables in Markdown."""

from __future__ import annotations

from hkd_hpc.analysis.metrics import FINAL, READ_THRICE
from hkd_hpc.analysis.statistics import interval

# column: the name in a run's summary of what stands there
COLUMNS = {metric.column: f"{metric.name}_last" for metric in READ_THRICE if metric.column} | {
    metric.column: metric.name for metric in FINAL if metric.column
}


def mean_with_interval(values) -> str:
    """0.812 ± 0.004 (5): mean, half width of the 95 % interval, number of values; – where nothing was measured."""
    found = [value for value in values if value == value]
    if not found:
        return "–"
    mean, half = interval(found)
    return f"{mean:.3f}" + (f" ± {half:.3f}" if half == half else "") + f" ({len(found)})"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])
