"""The runs of a folder together: the root of a sweep or of a comparison, or any folder with runs below it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from hkd_hpc.analysis.tables import COLUMNS, Cell, Table, document, estimate
from hkd_hpc.common.errors import printable
from hkd_hpc.common.groups import grouped
from hkd_hpc.config import HOW, is_location
from hkd_hpc.results.find import find_runs
from hkd_hpc.results.run import Run
from hkd_hpc.results.seeds import SEED, by_seed, copies
from hkd_hpc.runtime import provenance

if TYPE_CHECKING:
    import pandas

SCHEME, DATA = "scheme.name", "data.path"


class StudyRuns:
    """The runs below a folder, finished or not; they are looked at anew each time.

    Args:
        root: The folder.

    Attributes:
        root: The same.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def runs(self) -> list[Run]:
        """All runs, in the order of their paths; broken ones too."""
        return find_runs(self.root)

    def table(self) -> pandas.DataFrame | Table:
        """Mean, half of the 95 % interval over the seeds, and their number, of the complete runs.

        Returns:
            A pandas frame of numbers; without pandas a Table, whose text is Markdown.
        """
        return framed(next(part for part in self.parts() if isinstance(part, Table)))

    def parts(self) -> list[str | Table]:
        """The table, and lines about it, for analysis.tables.document."""
        runs = self.runs
        complete = [run for run in runs if run.state == "complete"]
        varied = varied_settings(complete)
        rows = rows_of(complete, varied)
        absent = [run.problem for run in runs if run.problem] + [
            line for own in rows.values() for line in copies(own).values()
        ]
        absent += [line for own in rows.values() for line in different_data(own)]
        return [
            f"{len(complete)} of {len(runs)} runs are complete",
            "",
            table_of(rows, varied),
            *(printable(f"not in the table: {line}") for line in absent),
        ]

    def __str__(self) -> str:
        return document(self.parts())

    def _repr_html_(self) -> str:
        return "\n".join(
            part.html() if isinstance(part, Table) else f"<p>{escape(part)}</p>" for part in self.parts() if part
        )


def rows_of(runs: Sequence[Run], varied: Sequence[str]) -> dict[tuple[str, ...], list[Run]]:
    """The runs of each scheme and whatever else was varied but the seed."""
    return grouped((tuple(str(run.settings.get(key, "")) for key in (SCHEME, *varied)), run) for run in runs)


def table_of(runs: Mapping[tuple[str, ...], Sequence[Run]], varied: Sequence[str]) -> Table:
    """A column for each accuracy that was measured: of each row over its seeds, each of which counts once; – for a row
    whose runs had different data."""
    sound = {row: [] if different_data(own) else by_seed(own).values() for row, own in runs.items()}
    values = {row: {name: accuracies(own, name) for name in COLUMNS} for row, own in sound.items()}
    shown = [name for name in COLUMNS if any(value == value for row in values.values() for value in row[name])]
    rows: list[list[Cell | str]] = [[*row, *(estimate(found[name]) for name in shown)] for row, found in values.items()]
    return Table(["scheme", *varied, *shown], rows, names=1 + len(varied))


def different_data(runs: Sequence[Run]) -> list[str]:
    """A line where the runs of a row had different images under one name: no mean is over them."""
    content = {str(run.path): run.identity.get(provenance.CONTENT) for run in by_seed(runs).values()}
    found = provenance.mixed({path: {provenance.CONTENT: [value]} for path, value in content.items() if value})
    return provenance.lines(found)


def accuracies(runs: Iterable[Run], column: str) -> list[float]:
    """Of complete runs; NaN where it was not measured."""
    return [float(run.summary.get(COLUMNS[column], float("nan"))) for run in runs]


def varied_settings(runs: Sequence[Run]) -> list[str]:
    """Settings in which runs differ, of the schemes' own those in which runs of one scheme do; seeds, places and what
    changes no round aside."""
    values: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        for key, value in run.settings.items():
            owner = str(run.settings.get(SCHEME)) if key.startswith("scheme.") else ""
            values.setdefault((owner, key), set()).add(str(value))
    found = {key for (_, key), texts in values.items() if len(texts) > 1}
    return sorted(key for key in found if key not in (SEED, *HOW) and (key == DATA or not is_location(key)))


def framed(table: Table) -> pandas.DataFrame | Table:
    """As a pandas frame of numbers, its seeds one column where all means of a row have as many; else itself."""
    try:
        import pandas
    except ImportError:
        return table
    frame = pandas.read_csv(
        io.StringIO(table.csv()), dtype=str, keep_default_na=False
    )  # a setting may be "None", or ""
    numbers = frame.columns[table.names :]
    frame[numbers] = frame[numbers].apply(pandas.to_numeric, errors="coerce")  # of – and of nothing NaN
    seeds = [name for name in frame if str(name).endswith(" seeds")]
    if seeds and frame[seeds].nunique(axis=1).le(1).all():
        frame.insert(table.names, "seeds", frame[seeds[0]])
        frame = frame.drop(columns=seeds)
    return frame
