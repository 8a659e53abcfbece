"""The table of a study: mean and 95 % interval over the seeds of what its finished cells found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.analysis.tables import COLUMNS, markdown, mean_with_interval
from hkd_hpc.config import identity
from hkd_hpc.errors import UsageError
from hkd_hpc.jobs.sweep import Cell
from hkd_hpc.runtime import provenance
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.tree import BadFile, load_tree

GOALS = ("local", "global")
ACROSS = ("clients", "beta")  # the axes that stand across, as in the paper's tables; the others stand down


def table(root: Path, cells: list[Cell]) -> str:
    """Rows: data, scheme and whatever else was varied; columns: clients or beta, once for local and once for global."""
    axes = list(dict.fromkeys(axis for cell in cells for axis in cell.labels if axis != "seed"))
    across = [axis for axis in ACROSS if axis in axes]
    down = sorted((axis for axis in axes if axis not in across), key=lambda axis: axis != "data")
    found = read(root, cells)
    heads = list(dict.fromkeys(_labels(cell, across) for cell in cells))
    groups: dict[tuple, list[Cell]] = {}
    for cell in cells:
        groups.setdefault((_labels(cell, down), _labels(cell, across)), []).append(cell)
    rows = []
    for row in dict.fromkeys(row for row, _ in groups):
        own = [groups.get((row, head), []) for head in heads]
        rows.append(
            [
                *row,
                *(_mean(group, found, goal) for goal in GOALS for group in own),
                *_costs([cell for group in own for cell in group], root, found),
            ]
        )
    head = [
        *down,
        *(
            " ".join([goal, *(f"{axis} {label}" for axis, label in zip(across, labels))])
            for goal in GOALS
            for labels in heads
        ),
        "parameters held (M)",
        "s a client and round",
        "public data",
    ]
    done = len(found.summaries)
    return "\n".join(
        [
            f"Accuracy in the last round: mean ± half of the 95 % interval over the seeds (their number); "
            f"{done} of {len(cells)} runs are complete",
            "",
            markdown(head, rows),
            *(f"not in the table: {line}" for line in [*found.faults, *gaps(root, found.summaries)]),
            *(f"remark: {line}" for line in remarks(found.facts)),
        ]
    )


@dataclass(frozen=True)
class Found:
    """summaries, facts (identity): of the complete cells, by name. faults: a line for each cell whose metrics.h5 cannot
    be read or is that of another run, and for runs of different data."""

    summaries: dict[str, dict]
    facts: dict[str, provenance.Provenance]
    faults: list[str]


def read(root: Path, cells: list[Cell]) -> Found:
    found = Found({}, {}, [])
    for cell in cells:
        folder = RunFolder(root / cell.name)
        summary = folder.summary()
        other = summary and identity.other_run(folder, cell.config())
        if other:
            found.faults.append(f"{folder.path} holds another run: {other}")
        elif summary:
            found.summaries[cell.name] = summary
            found.facts[cell.name] = provenance.facts_of(folder.record())
        elif folder.damage():
            found.faults.append(folder.damage())
    clashes = [line for group in alike(cells) for line in different_data(group, found.facts)]
    found.faults.extend(dict.fromkeys(clashes))
    return found


def alike(cells: list[Cell]) -> Iterator[list[Cell]]:
    """Cells that must have the same data: those of one mean, and those whose settings name the same data set."""
    mean = lambda cell: tuple(label for axis, label in cell.labels.items() if axis != "seed")
    named = lambda cell: tuple(
        os.path.basename(str(cell.settings.get(f"data.{key}", ""))) for key in ("name", "path", "image_size")
    )
    for key in (mean, named):
        groups: dict[tuple, list[Cell]] = {}
        for cell in cells:
            groups.setdefault(key(cell), []).append(cell)
        yield from groups.values()


def different_data(cells: list[Cell], facts: dict[str, provenance.Provenance]) -> list[str]:
    """A line where the runs of these cells were trained on different data."""
    found = provenance.mixed({cell.name: facts[cell.name] for cell in cells if cell.name in facts})
    return provenance.lines({key: by_value for key, by_value in found.items() if key == provenance.CONTENT})


def remarks(facts: dict[str, provenance.Provenance]) -> list[str]:
    """A line for each other fact in which the complete runs differ: code, versions, threads."""
    mixed = provenance.mixed(facts)
    return provenance.lines({key: by_value for key, by_value in mixed.items() if key != provenance.CONTENT})


def check_code(root: Path, cells: list[Cell]) -> None:
    """UsageError where complete runs are of different code."""
    found = provenance.lines(provenance.mixed_code(read(root, cells).facts), refused=True)
    if found:
        raise UsageError(f"--strict-code: {'; '.join(found)}")


def gaps(root: Path, summaries: dict[str, dict]) -> list[str]:
    """A line for each accuracy that is not a number in the summary of a complete cell, by name."""
    return [
        f"{root / name}: complete, but without a {goal} accuracy"
        for name, summary in summaries.items()
        for goal in GOALS
        if np.isnan(summary[COLUMNS[goal]])
    ]


def _costs(cells: list[Cell], root: Path, found: Found) -> list[str]:
    """Millions of parameters in memory while a client trains (About.parameters_held); seconds of its local training a
    round, mean over all clients and rounds; whether the scheme needs public images."""
    metrics = [
        table for cell in cells if cell.name in found.summaries and (table := _metrics(root / cell.name / "metrics.h5"))
    ]
    held = {table["parameters"]["held"] for table in metrics}
    seconds = [table["clients"]["train_s"].ravel() for table in metrics]
    mean_s = np.nanmean(np.concatenate(seconds)) if seconds else np.nan
    needed = any(schemes.get(cell.settings["scheme.name"]).needs_public for cell in cells)
    return [
        ", ".join(f"{count / 1e6:.3f}" for count in sorted(held)) or "–",
        "–" if np.isnan(mean_s) else f"{mean_s:.2f}",
        "yes" if needed else "no",
    ]


def _metrics(path: Path) -> dict | None:
    try:
        return load_tree(path, only=["clients/train_s", "parameters/held"])
    except BadFile:
        return None


def _labels(cell: Cell, axes: list[str]) -> tuple[str, ...]:
    return tuple(cell.labels.get(axis, "") for axis in axes)


def _mean(cells: list[Cell], found: Found, goal: str) -> str:
    return (
        "different data"
        if different_data(cells, found.facts)
        else mean_with_interval(_values(cells, found.summaries, goal))
    )


def _values(cells: list[Cell], summaries: dict, goal: str) -> list[float]:
    return [float(summary[COLUMNS[goal]]) for cell in cells if (summary := summaries.get(cell.name))]
