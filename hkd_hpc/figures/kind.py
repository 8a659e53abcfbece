"""What a figure is called and says, what it needs of a run, and who makes it; how lines over seeds are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from hkd_hpc.figures import bands
from hkd_hpc.figures.figure import Figure, NotRecorded, Series
from hkd_hpc.figures.groups import Group, column, parts
from hkd_hpc.figures.look import SEEDS
from hkd_hpc.figures.run import Run
from hkd_hpc.figures.units import Units, unit

Rows = Callable[[Run], "np.ndarray | None"]  # (rounds,) of a run, None where it has none
Growing = Callable[[Run], np.ndarray]  # (rounds,) that grow from round to round
NEWEST = "clients/memory_bytes"  # the newest column that every run has
OVER_SEEDS = "Lines are means over the seeds, bands their 95 % intervals (Student's t); n: seeds."


class Words(TypedDict):
    """As a Figure takes them."""

    name: str
    title: str
    caption: str


@dataclass(frozen=True)
class Kind:
    """One figure of a run or a study.

    Attributes:
        name: of its files.
        title: one line.
        caption: what it shows and how it is computed.
        needs: columns, and other parts of a run, without which it cannot be; "rounds/loss/" stands for any below it.
        build: from its words and the groups that have those columns; text: why there is nothing to show.
        scope: "run" for what is told of one run alone, "study" for what is told of several, "both".
        lacking: why a run of this version may lack them; "": it never does.
    """

    name: str
    title: str
    caption: str
    needs: tuple[str, ...]
    build: Callable[[Words, Sequence[Group]], Figure | str]
    scope: str = "both"
    lacking: str = ""

    def of(self, groups: Sequence[Group]) -> Figure | NotRecorded:
        """The figure of these groups, or why there is none."""
        recorded = [replace(group, runs=runs) for group in groups if (runs := tuple(filter(self._has_all, group.runs)))]
        if not recorded:
            return NotRecorded(self.name, self.title, self._why_not(groups))
        found = self.build(Words(name=self.name, title=self.title, caption=self.caption), recorded)
        return NotRecorded(self.name, self.title, found) if isinstance(found, str) else found

    def _has_all(self, run: Run) -> bool:
        return all(has(run, name) for name in self.needs)

    def _why_not(self, groups: Sequence[Group]) -> str:
        runs = [run for group in groups for run in group.runs]
        if self.lacking and any(has(run, NEWEST) for run in runs):
            return self.lacking
        missing = [name for name in self.needs if not any(has(run, name) for run in runs)]
        return f"not recorded (a run of an older version): {', '.join(missing or self.needs)}"


def has(run: Run, name: str) -> bool:
    """Whether a run has a column, or any below a name that ends in "/", or a part that is no column ("partition")."""
    if "/" not in name:
        return len(getattr(run, name) if hasattr(run, name) else run.part(name)) > 0
    if name.endswith("/"):
        return bool(parts(run, name.removeprefix("rounds/")[:-1]))
    return column(run, name) is not None


def named(group: Group, seeds: int) -> str:
    """fedhkd (n=3)"""
    return f"{group.label}{SEEDS}{seeds})" if seeds > 1 else group.label


def lines(
    groups: Sequence[Group], measures: Mapping[str, Rows], x: Growing | None = None, apart: bool = False
) -> Iterator[Series]:
    """Each measure of each group over its seeds.

    Args:
        groups: one: a line for each measure; more: a panel for each measure, a line for each group.
        measures: name to the numbers of a run.
        x: what they stand against, growing over the rounds; None: the rounds.
        apart: each measure in a panel of its own, even of one group.
    """
    for measure, rows in measures.items():
        for group in groups:
            found = [(run, y) for run in group.runs if (y := rows(run)) is not None]
            if not found:
                continue
            name = named(group, len(found)) if len(groups) > 1 else measure
            panel = measure if len(measures) > 1 and (len(groups) > 1 or apart) else ""
            if x is None:
                yield bands.along_rounds(name, [y for _, y in found], panel)
            else:
                yield bands.along(name, [x(run) for run, _ in found], [y for _, y in found], panel)


def with_seeds(words: Words, groups: Sequence[Group]) -> Words:
    """The words, with what bands are where there are any."""
    if all(group.seeds == 1 for group in groups):
        return words
    return adding(words, OVER_SEEDS)


def adding(words: Words, *sentences: str) -> Words:
    """The words, with more sentences in the caption."""
    return {**words, "caption": " ".join((words["caption"], *sentences))}


def in_unit(series: Sequence[Series], units: Units, axis: str) -> tuple[tuple[Series, ...], str]:
    """The series with x or y divided so that numbers are short, and the unit's name."""
    divisor, name = unit([getattr(one, axis) for one in series], units)
    scaled = {"x": _x_by, "y": _y_by}[axis]
    return tuple(scaled(one, divisor) for one in series), name


def _x_by(series: Series, divisor: float) -> Series:
    return replace(series, x=series.x / divisor)


def _y_by(series: Series, divisor: float) -> Series:
    low, high = (None if ends is None else ends / divisor for ends in (series.low, series.high))
    return replace(series, y=series.y / divisor, low=low, high=high)
