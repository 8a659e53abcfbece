"""Each round as a line of a text file: rounds.csv, rounds.jsonl."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hkd_hpc.loggers.base import Logger
from hkd_hpc.store.atomic import replace_text


class FileLogger(Logger):
    """Rows in a file that a resumed run continues: those beyond `after_round` are dropped, they come again.

    The first round of a process writes the file anew, with the rows before it, the others append to it.
    """

    name = ""  # of the file

    def __init__(self, folder: Path, after_round: int = 0) -> None:
        super().__init__(folder, after_round)
        self.path = folder / self.name
        self._kept = [row for row in self.parse(complete_lines(self.path)) if int(row["round"]) <= after_round]
        self._columns: list[str] = []  # none: nothing was written yet
        self.logged = len(self._kept)

    def log_round(self, round: int, values: Mapping[str, float]) -> None:
        """Append a row; an empty field, or null, stands for a number that was not measured."""
        row = {"round": round, **{name: number_or_none(value) for name, value in values.items()}}
        if not self._columns:
            self._columns = list(row)
            replace_text(self.path, self.head() + "".join(map(self.line, self._kept)))
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            file.write(self.line(row))

    def parse(self, text: str) -> list[dict[str, Any]]:
        """The rows of such a file, whole lines of it."""
        raise NotImplementedError

    def head(self) -> str:
        """What stands before the rows."""
        return ""

    def line(self, row: Mapping[str, Any]) -> str:
        """A row as text."""
        raise NotImplementedError


class CsvLogger(FileLogger):
    """rounds.csv: a line for each round, below the names of the columns."""

    name = "rounds.csv"

    def parse(self, text: str) -> list[dict[str, Any]]:
        return list(csv.DictReader(io.StringIO(text)))

    def head(self) -> str:
        return csv_line(self._columns)

    def line(self, row: Mapping[str, Any]) -> str:
        return csv_line(map(row.get, self._columns))


class JsonLinesLogger(FileLogger):
    """rounds.jsonl: a JSON object for each round."""

    name = "rounds.jsonl"

    def parse(self, text: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in text.splitlines()]

    def line(self, row: Mapping[str, Any]) -> str:
        return json.dumps(row, allow_nan=False) + "\n"


def csv_line(fields: Iterable[Any]) -> str:
    """A line of a CSV file; an empty field for None."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue()


def number_or_none(value: float) -> float | None:
    """None for NaN and infinity, which neither format knows."""
    return value if math.isfinite(value) else None


def complete_lines(path: Path) -> str:
    """The text of a file without its last line where that was not written to its end; empty where there is no file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[: text.rfind("\n") + 1]
