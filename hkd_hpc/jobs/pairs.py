"""Which cells of a study's table are compared: those of one setting, whose schemes differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from hkd_hpc import schemes
from hkd_hpc.analysis.tables import NOTHING, Cell, Difference
from hkd_hpc.common.groups import grouped
from hkd_hpc.jobs.sweep import Trial
from hkd_hpc.results.differences import GOALS, differences, method_text

SCHEME = "scheme.name"
CellKey = tuple[tuple[str, ...], tuple[str, ...]]  # labels of the row, and of the column
Groups = Mapping[CellKey, list[Trial]]  # the trials of each cell: they differ in their seeds alone


class Against:
    """Differences from the reference scheme in the cells of a table.

    Args:
        groups: Its cells.
        axes: What the labels of a row are.
        by_seed: (trials of a cell, goal) to the accuracies by seed of those that are complete.
    """

    def __init__(
        self, groups: Groups, axes: Sequence[str], by_seed: Callable[[list[Trial], str], Mapping[int, float]]
    ) -> None:
        self._groups, self._axes, self._by_seed = groups, axes, by_seed

    def cell(self, key: CellKey, goal: str) -> Cell | str:
        """Empty for the reference itself, – where there is nothing to tell."""
        name = self._groups[key][0].settings[SCHEME] if key in self._groups else ""
        return self._cells[goal].get(key, "" if name == schemes.REFERENCE else NOTHING)

    @cached_property
    def goals(self) -> list[str]:
        """Those with a difference that can be told."""
        return [goal for goal in GOALS if any(isinstance(cell, Difference) for cell in self._cells[goal].values())]

    @property
    def methods(self) -> list[str]:
        """How they were told: a line, or some where settings have not as many schemes."""
        found = [self._accuracies(keys) for keys in self._compared] if self.goals else []
        return list(dict.fromkeys(filter(None, map(method_text, found))))

    @cached_property
    def _cells(self) -> dict[str, dict[CellKey, Cell | str]]:
        """By goal and cell; not of the reference."""
        return {
            goal: {
                keys[name]: cell
                for keys in self._compared
                for name, cell in differences(self._accuracies(keys), goal).items()
            }
            for goal in GOALS
        }

    def _accuracies(self, keys: Mapping[str, CellKey]) -> dict[str, dict[str, list[float]]]:
        """As `differences` takes them, over all seeds of these cells."""
        own = {name: self._groups[key] for name, key in keys.items()}
        found = {name: {goal: self._by_seed(group, goal) for goal in GOALS} for name, group in own.items()}
        seeds = sorted({seed for goals in found.values() for values in goals.values() for seed in values})
        return {
            name: {goal: [values.get(seed, math.nan) for seed in seeds] for goal, values in goals.items()}
            for name, goals in found.items()
        }

    @cached_property
    def _compared(self) -> list[dict[str, CellKey]]:
        """The cells of each setting that has the reference, once, and others, by what tells them apart."""
        own = own_axes(self._groups, self._axes)
        shared = lambda row: tuple(label for at, label in enumerate(row) if at not in own)
        settings = grouped(((shared(row), column), (row, column)) for row, column in self._groups)
        named = [self._named(keys, own) for keys in settings.values() if len(keys) > 1]
        return [keys for keys in named if schemes.REFERENCE in keys]

    def _named(self, keys: list[CellKey], own: set[int]) -> dict[str, CellKey]:
        """By scheme; one that stands in several rows by its labels there."""
        names = [self._groups[key][0].settings[SCHEME] for key in keys]
        labels = [" ".join(label for at, label in enumerate(row) if at in own) for row, _ in keys]
        return {
            name if names.count(name) == 1 else f"{name} ({label})": key
            for name, label, key in zip(names, labels, keys)
        }


def own_axes(groups: Groups, axes: Sequence[str]) -> set[int]:
    """Which labels of a row say which scheme it is, or how that is set: its settings, or labels of one scheme each."""
    schemes_of: list[dict[str, set[str]]] = [{} for _ in axes]
    for (row, _), group in groups.items():
        for by_label, label in zip(schemes_of, row):
            by_label.setdefault(label, set()).add(group[0].settings[SCHEME])
    return {
        at
        for at, (axis, by_label) in enumerate(zip(axes, schemes_of))
        if axis.startswith("scheme.") or all(len(names) == 1 for names in by_label.values())
    }
