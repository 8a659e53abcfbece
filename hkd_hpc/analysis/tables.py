"""Accuracies over seeds as text: mean, 95 % interval, tables in Markdown."""

from __future__ import annotations

from hkd_hpc.analysis.statistics import interval

# column: its name in the summary of a run
COLUMNS = {
    "local": "local_test_accuracy_last",
    "worst tenth": "local_test_accuracy_worst_tenth_last",
    "global": "global_test_accuracy_last",
    "global, BN re-estimated": "global_test_accuracy_batchnorm_reestimated",
    "fine-tuned": "finetuned_on_local_test_accuracy",
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
