"""The table of a study: mean and 95 % interval over the seeds of what its finished cells found."""
from __future__ import annotations

from pathlib import Path

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.tree import BadFile, load_tree
from hkd_hpc.tables import COLUMNS, markdown, mean_with_interval
from jobs.sweep import Cell

GOALS = ("local", "global")
ACROSS = ("clients", "beta")  # the axes that stand across, as in the paper's tables; the others stand down


def table(root: Path, cells: list[Cell]) -> str:
    """Rows: data, scheme and whatever else was varied; columns: clients or beta, once for local and once for global."""
    axes = list(dict.fromkeys(axis for cell in cells for axis in cell.labels if axis != "seed"))
    across = [axis for axis in ACROSS if axis in axes]
    down = sorted((axis for axis in axes if axis not in across), key=lambda axis: axis != "data")
    summaries = {cell.name: RunFolder(root / cell.name).summary() for cell in cells}
    heads = list(dict.fromkeys(_labels(cell, across) for cell in cells))
    groups: dict[tuple, list[Cell]] = {}
    for cell in cells:
        groups.setdefault((_labels(cell, down), _labels(cell, across)), []).append(cell)
    rows = []
    for row in dict.fromkeys(row for row, _ in groups):
        own = [groups.get((row, head), []) for head in heads]
        rows.append([*row, *(mean_with_interval(_values(group, summaries, goal)) for goal in GOALS for group in own),
                     *_costs([cell for group in own for cell in group], root)])
    head = [*down, *(" ".join([goal, *(f"{axis} {label}" for axis, label in zip(across, labels))])
                     for goal in GOALS for labels in heads), "parameters held (M)", "s a client and round", "public data"]
    done = sum(summary is not None for summary in summaries.values())
    return "\n".join([f"Accuracy in the last round: mean ± half of the 95 % interval over the seeds (their number); "
                      f"{done} of {len(cells)} runs are complete", "", markdown(head, rows),
                      *(f"not in the table: {line}" for line in [*damages(root, cells), *gaps(root, summaries)])])


def damages(root: Path, cells: list[Cell]) -> list[str]:
    """A line for each cell whose metrics.h5 cannot be read."""
    return list(filter(None, (RunFolder(root / cell.name).damage() for cell in cells)))


def gaps(root: Path, summaries: dict[str, dict | None]) -> list[str]:
    """A line for each accuracy that is not a number in the summary of a complete cell, by name."""
    return [f"{root / name}: complete, but without a {goal} accuracy" for name, summary in summaries.items() if summary
            for goal in GOALS if np.isnan(summary[COLUMNS[goal]])]


def _costs(cells: list[Cell], root: Path) -> list[str]:
    """Millions of parameters in memory while a client trains (Scheme.parameters_held); seconds of its local training a
    round, mean over all clients and rounds; whether the scheme needs public images."""
    metrics = [table for cell in cells if (table := _metrics(root / cell.name / "metrics.h5"))]
    held = {table["parameters"]["held"] for table in metrics}
    seconds = [table["clients"]["train_s"].ravel() for table in metrics]
    mean_s = np.nanmean(np.concatenate(seconds)) if seconds else np.nan
    needed = any(schemes.get(cell.settings["scheme.name"]).needs_public for cell in cells)
    return [", ".join(f"{count / 1e6:.3f}" for count in sorted(held)) or "–",
            "–" if np.isnan(mean_s) else f"{mean_s:.2f}", "yes" if needed else "no"]


def _metrics(path: Path) -> dict | None:
    try:
        return load_tree(path, only=["clients/train_s", "parameters/held"])
    except BadFile:
        return None


def _labels(cell: Cell, axes: list[str]) -> tuple[str, ...]:
    return tuple(cell.labels.get(axis, "") for axis in axes)


def _values(cells: list[Cell], summaries: dict, goal: str) -> list[float]:
    return [float(summary[COLUMNS[goal]]) for cell in cells if (summary := summaries[cell.name]) is not None]
