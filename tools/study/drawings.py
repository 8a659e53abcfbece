"""The figures of the page: curves over the rounds, means over the seeds with their 95 % intervals, as SVG."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc.figures import Lines, Series, csv_of, draw
from hkd_hpc.figures.accuracy import KINDS
from hkd_hpc.figures.as_matplotlib import style
from hkd_hpc.figures.groups import groups_of
from hkd_hpc.store.atomic import replace_file

from .records import SCHEME, SEED, Record

SHOWN = 5  # digits of a drawn number: finer ones, which may depend on the machine, nobody sees


@dataclass(frozen=True)
class Drawn:
    """A record as figures read a run (hkd_hpc.figures.run.Run)."""

    record: Record
    client_columns: Mapping[str, np.ndarray]
    client_ranks: Sequence[int] = ()
    sessions: Sequence[Mapping[str, Any]] = ()
    identity: Mapping[str, str] = field(default_factory=dict)  # `tables` rejects runs of different images

    @property
    def settings(self) -> Mapping[str, Any]:
        """Those that tell rows apart: a later version may have more that all runs of a row share."""
        return {key: self.record.settings[key] for key in (SCHEME, SEED)}

    @property
    def round_columns(self) -> dict[str, np.ndarray]:
        """None becomes NaN."""
        return {name: np.array(values, float) for name, values in self.record.rounds.items()}

    @property
    def partition(self) -> Mapping[str, Any]:
        return {}

    def part(self, name: str) -> Mapping[str, Any]:
        return {}


def curves(name: str, title: str, runs: Sequence[Record]) -> Lines:
    """Local, worst tenth and global accuracy of each row after each round, over its seeds."""
    found = KINDS[0].of(groups_of([Drawn(run, {}) for run in runs]))
    assert isinstance(found, Lines)
    return replace(found, name=f"study_{name}", title=title, series=tuple(map(rounded, found.series)))


def rounded(series: Series) -> Series:
    low, high = (None if ends is None else np.round(ends, SHOWN) for ends in (series.low, series.high))
    return replace(series, y=np.round(series.y, SHOWN), low=low, high=high)


def digest(figure: Lines) -> str:
    """Of its numbers; the file has it, so that the page can tell whose it is without drawing it again."""
    return hashlib.sha256(csv_of(figure).encode()).hexdigest()


def write(figure: Lines, folder: Path) -> None:
    """FOLDER/NAME.svg. Raises UsageError without matplotlib."""
    canvas = draw(figure)
    metadata = {"Date": None, "Creator": None, "Description": digest(figure)}
    with style():
        replace_file(folder / f"{figure.name}.svg", partial(canvas.savefig, format="svg", metadata=metadata))


def is_drawn(figure: Lines, folder: Path) -> bool:
    """Whether the file is there and shows these numbers."""
    path = folder / f"{figure.name}.svg"
    return path.exists() and digest(figure) in path.read_text()
