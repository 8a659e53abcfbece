"""Runs that differ only in the seed, what to call them, and their numbers side by side."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hkd_hpc.common.groups import grouped
from hkd_hpc.config import HOW, is_location
from hkd_hpc.figures.run import Run
from hkd_hpc.runtime.provenance import CONTENT, short

SEED = "run.seed"
SCHEME = "scheme."
DATA = "data set"
FIRST = (DATA, "fed.clients", "data.beta")  # settings that others which vary with them are not told beside
SAID_BY_VALUE = ("scheme.name", DATA, "data.name", "model.name")  # "cifar10", not "name cifar10"


@dataclass(frozen=True)
class Group:
    """Runs of the same settings but for the seed.

    Attributes:
        label: what tells it from the other groups of its setting: the scheme and its settings.
        setting: what it shares with them: the other settings that differ within the study, "cifar10, beta 0.5".
        runs: one or more.
    """

    label: str
    setting: str
    runs: tuple[Run, ...]

    @property
    def seeds(self) -> int:
        return len(self.runs)


def groups_of(runs: Iterable[Run]) -> list[Group]:
    """The groups among runs, in the order of their first; of locations (`is_location`) that of the data counts alone,
    by its last part, and by its content where runs had different images under one name."""
    runs = list(runs)
    images = [(data_set(run.settings), run.identity.get(CONTENT, "")) for run in runs]
    twice = [name for name, count in Counter(name for name, content in {*images} if content).items() if count > 1]
    told = [f"{name} {short(content)}" if name in twice and content else name for name, content in images]
    texts = [{key: str(value) for key, value in settings_of(run).items()} for run in runs]
    by_settings = grouped((tuple({**text, DATA: data}.items()), run) for text, data, run in zip(texts, told, runs))
    found = {key: dict(key) for key in by_settings}
    shared = [key for key in differing(list(found.values())) if not key.startswith(SCHEME)]
    elsewhere = fewest(list(found.values()), sorted(shared, key=lambda key: key not in FIRST))
    by_scheme = grouped((one["scheme.name"], one) for one in found.values())
    own = {name: differing(same) for name, same in by_scheme.items()}
    return [
        Group(
            _words(settings, ["scheme.name", *(k for k in own[settings["scheme.name"]] if k.startswith(SCHEME))]),
            _words(settings, elsewhere),
            tuple(by_settings[key]),
        )
        for key, settings in found.items()
    ]


def settings_of(run: Run) -> dict[str, Any]:
    """What the numbers of a run depend on beside the seed; DATA for what it is trained on."""
    settings = {key: value for key, value in run.settings.items() if key not in (SEED, *HOW) and not is_location(key)}
    return {**settings, DATA: data_set(run.settings)}


def data_set(settings: Mapping[str, Any]) -> str:
    """Its name; of a file of one's own that of the file, without its suffix: cifar10 of data/cifar10.npz."""
    path = str(settings.get("data.path") or "")
    return os.path.splitext(os.path.basename(path))[0] or str(settings.get("data.name", ""))


def differing(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys whose value is not the same in all, the scheme's name aside."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if key != "scheme.name" and len({one.get(key) for one in settings}) > 1]


def fewest(settings: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> list[str]:
    """Those of the keys, in their order, that tell the settings apart: one that changes only where those before it do
    (an image size with the data set) is none.
    """
    found: list[str] = []
    for key in keys:
        values: dict[tuple[str, ...], set[str]] = {}
        for one in settings:
            values.setdefault(tuple(str(one.get(before)) for before in found), set()).add(str(one.get(key)))
        if any(len(own) > 1 for own in values.values()):
            found.append(key)
    return found


def _words(settings: Mapping[str, str], keys: Iterable[str]) -> str:
    """cifar10, beta 0.5"""
    said = lambda key: settings[key] if key in SAID_BY_VALUE else f"{key.partition('.')[2]} {settings[key]}"
    return ", ".join(said(key) for key in keys if key in settings)


def column(run: Run, name: str) -> np.ndarray | None:
    """A column of /rounds or /clients, "rounds/wall_s"; None where the run has none."""
    table, _, own = name.partition("/")
    return (run.round_columns if table == "rounds" else run.client_columns).get(own)


def parts(run: Run, group: str) -> dict[str, np.ndarray]:
    """The columns of /rounds below a name, "loss": {"cross entropy": (rounds,)}."""
    return {
        name.removeprefix(f"{group}/").replace("_", " "): column
        for name, column in run.round_columns.items()
        if name.startswith(f"{group}/")
    }


def stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    """(S, R) of one row a seed, NaN behind the end of the shorter ones."""
    found_SR = np.full((len(rows), max(map(len, rows))), np.nan)
    for place, row in enumerate(rows):
        found_SR[place, : len(row)] = row
    return found_SR
