"""Each round as a line of a text file: rounds.csv, rounds.jsonl; and what any logger does that keeps one file."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hkd_hpc.analysis.metrics import in_order
from hkd_hpc.loggers.base import Logger, Round
from hkd_hpc.store.atomic import append, replace_bytes


class FileLogger(Logger):
    """Rounds in a file, which a process writes anew from the record, whatever became of it, and then appends to.

    What cannot be written, on a full disk, is written with the next round.
    """

    name = ""  # of the file

    def __init__(self, folder: Path, after_round: int = 0) -> None:
        super().__init__(folder, after_round)
        self.path = folder / self.name
        self._is_new = True  # until this process has written it
        self._unwritten = b""

    def begin(self, rounds: Sequence[Round]) -> None:
        """Write the file anew: these rounds and nothing else."""
        self._write(self.head() + b"".join(self.content(round, values) for round, values in rounds))

    def log_round(self, round: int, values: Mapping[str, float]) -> None:
        """Append a round."""
        self._write(self.content(round, values))

    def head(self) -> bytes:
        """What stands before the rounds."""
        return b""

    def content(self, round: int, values: Mapping[str, float]) -> bytes:
        """A round as it stands in the file."""
        raise NotImplementedError

    def _write(self, content: bytes) -> None:
        """Write this, after what could not be written before."""
        self._unwritten += content
        (replace_bytes if self._is_new else append)(self.path, self._unwritten)
        self._is_new, self._unwritten = False, b""


class CsvLogger(FileLogger):
    """rounds.csv: a line for each round, below the names of the columns; an empty field for what was not measured."""

    name = "rounds.csv"
    _columns: tuple[str, ...] = ()  # known with the first round

    def log_round(self, round: int, values: Mapping[str, float]) -> None:
        """Append a round; one with new columns, as after a change of settings, has the file written anew with them."""
        if self._columns and not values.keys() <= {*self._columns}:
            self._widen(in_order({*self._columns, *values}))
        super().log_round(round, values)

    def _widen(self, columns: Sequence[str]) -> None:
        """Have the rounds so far written anew with these columns, with empty fields in the new ones."""
        written = b"" if self._is_new else self.path.read_bytes()
        rows = list(csv.DictReader(io.StringIO((written + self._unwritten).decode(), newline="")))
        self._columns = tuple(columns)
        names = ["round", *columns]
        lines = [csv_line(names), *(csv_line(row.get(name, "") for name in names) for row in rows)]
        self._is_new, self._unwritten = True, "".join(lines).encode()

    def content(self, round: int, values: Mapping[str, float]) -> bytes:
        """Its line; the first follows the line of names."""
        names = "" if self._columns else csv_line(["round", *values])
        self._columns = self._columns or tuple(values)
        line = csv_line([round, *(values[name] for name in self._columns)])
        return (names + line).encode()


class JsonLinesLogger(FileLogger):
    """rounds.jsonl: a JSON object for each round; null for what was not measured."""

    name = "rounds.jsonl"

    def content(self, round: int, values: Mapping[str, float]) -> bytes:
        """Its object, in a line."""
        row = {"round": round, **{name: number_or_none(value) for name, value in values.items()}}
        return f"{json.dumps(row, allow_nan=False)}\n".encode()


def csv_line(fields: Iterable[object]) -> str:
    """A line of a CSV file; an empty field for NaN."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow("" if field != field else field for field in fields)
    return text.getvalue()


def number_or_none(value: float) -> float | None:
    """None for NaN and infinity, which JSON does not know."""
    return value if math.isfinite(value) else None
