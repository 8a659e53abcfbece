"""The parts of a metrics file, read while a run may be writing it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hkd_hpc.store.history import LAYOUT, flattened
from hkd_hpc.store.tree import BadFile, TreeFile, open_tree

LARGE = ("clients", "partition", "events")  # read when asked for
RETRY_S = 0.05  # a writer needs less to put a new file in the place of an older one

Columns = Mapping[str, np.ndarray]
Read = TypeVar("Read")


@dataclass(frozen=True)
class Parts:
    """What a metrics file holds beside its large parts, at one moment.

    Attributes:
        small: its other parts by name, groups as dicts.
        shapes: of the values in its large parts, by path, "clients/status" to (rounds, clients).
    """

    small: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def rounds(self) -> Columns:
        """The columns of /rounds, slashes in their names kept."""
        return dict(flattened(self.small.get("rounds", {})))


def read(path: Path, look: Callable[[TreeFile], Read]) -> Read:
    """What `look` makes of a file; once more where its writer moved on meanwhile. Raises BadFile."""
    try:
        return _read(path, look)
    except BadFile:
        time.sleep(RETRY_S)
        return _read(path, look)


def _read(path: Path, look: Callable[[TreeFile], Read]) -> Read:
    with open_tree(path) as file:
        return look(file)


def parts_in(file: TreeFile) -> Parts:
    """All but the large parts. Raises BadFile for a layout of the future."""
    version, known = file.attributes().get("layout_version", 1), LAYOUT["layout_version"]
    if version > known:
        raise BadFile(
            file.path,
            f"it was made by a newer version of hkd_hpc (layout {version}; this one reads up to {known}); "
            "update hkd_hpc",
        )
    names = file.names()
    large = [name for name in LARGE if name in names]
    shapes = {f"{name}/{path}": shape for name in large for path, shape in file.shapes(name).items()}
    return Parts({name: file.load(name) for name in names if name not in LARGE}, shapes)


class ClientColumns(Mapping[str, np.ndarray]):
    """The columns of /clients, each read when it is asked for and then kept; (rounds, clients) or more axes.

    A column that lacks the last rounds (its file was made anew meanwhile) has NaN there.
    """

    def __init__(self, path: Path, parts: Parts):
        self._path, self._rounds = path, len(parts.rounds.get("round", ()))
        self._names = [name.removeprefix("clients/") for name, shape in parts.shapes.items() if _is_column(name, shape)]
        self._read: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._read:
            self._read[name] = fitted(read(self._path, lambda file: file.load(f"clients/{name}")), self._rounds)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _is_column(path: str, shape: tuple[int, ...]) -> bool:
    """What has one axis is said of the clients once: their ranks and names."""
    return path.startswith("clients/") and len(shape) > 1


def fitted(column: np.ndarray, rounds: int) -> np.ndarray:
    """So many first rows; NaN for those that it lacks."""
    lacks = rounds - len(column)
    return np.concatenate([column, np.full((lacks, *column.shape[1:]), np.nan)]) if lacks > 0 else column[:rounds]
