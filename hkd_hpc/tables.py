"""Accuracies over seeds as text: mean, 95 % interval, tables in Markdown."""
from __future__ import annotations

import numpy as np

# column: its name in the summary of a run
COLUMNS = {"local": "local_test_accuracy_last", "worst tenth": "local_test_accuracy_worst_tenth_last",
           "global": "global_test_accuracy_last", "global, BN re-estimated": "global_test_accuracy_batchnorm_reestimated",
           "fine-tuned": "finetuned_on_local_test_accuracy"}


def interval(values) -> tuple[float, float]:
    """(mean, half width of its 95 % interval by Student's t) of independent values; the half of one value is NaN."""
    from scipy import stats

    array = np.asarray(values, float)
    if len(array) < 2:
        return float(array.mean()), float("nan")
    return float(array.mean()), float(stats.t.ppf(0.975, len(array) - 1) * array.std(ddof=1) / np.sqrt(len(array)))


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
