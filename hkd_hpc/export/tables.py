"""Rounds and clients as tables: CSV, or what a logger makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hkd_hpc import loggers
from hkd_hpc.analysis.metrics import in_order
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.common.words import counted
from hkd_hpc.loggers.base import Round, numbers_of
from hkd_hpc.loggers.files import csv_line
from hkd_hpc.privacy import ledger, releases
from hkd_hpc.results import Run, load
from hkd_hpc.store.atomic import replace_text


def export_rounds(path: Path, name: str, folder: Path, older: list[Path]) -> str:
    """Hand all rounds of a run to a logger (loggers.REGISTRY), in place of older files; what was written."""
    run = load(path)
    run.require()
    if not len(run):
        raise UsageError(f"{path}: has no round to export yet")
    [make] = loggers.classes_of([name], "--").values()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        logger = make(folder)
        logger.begin(rounds_of(run))
        if name == "csv":
            replace_text(folder / "clients.csv", clients_text(run))
        for old in set(older) - {folder / "clients.csv", logger.path}:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror or error}); name another folder") from None
    return f"{folder}: {counted(len(run), 'round')}"


def rounds_of(run: Run) -> list[Round]:
    """All rounds of a run, as a logger takes them."""
    columns = {name: column.tolist() for name, column in run.round_columns.items()}
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    return [(row["round"], numbers_of(row)) for row in rows]


def clients_text(run: Run) -> str:
    """The clients' table as CSV: a line for each round and client; of a column of classes (or of kinds of what is
    released) one for each class (kind).
    """
    columns: dict[str, np.ndarray] = {}
    for name in in_order(run.client_columns):
        values = run.client_columns[name]
        by_part = np.moveaxis(values, -1, 0) if values.ndim == 3 else ()
        names = releases.KINDS if name in ledger.COLUMNS else range(len(by_part))
        columns |= {f"{name}/{part}": column for part, column in zip(names, by_part)} or {name: values}
    lines = [csv_line(["round", "client", *columns])]
    for round, *rows in zip(run.round_columns["round"], *columns.values()):
        lines += [csv_line([round, client, *row]) for client, row in enumerate(zip(*rows))]
    return "".join(lines)
