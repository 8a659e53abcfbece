"""Bars: numbers of a run by round, and of groups of runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from hkd_hpc.analysis.classification import mean_of_known
from hkd_hpc.analysis.statistics import intervals
from hkd_hpc.figures.figure import Bars, Series
from hkd_hpc.figures.groups import Group, stacked
from hkd_hpc.figures.kind import Words, in_unit, named
from hkd_hpc.figures.run import Run
from hkd_hpc.figures.units import Units, with_unit

Numbers = Mapping[str, np.ndarray]  # (rounds,) by name
MOST_BARS = 100
BINNED = f"Beyond {MOST_BARS} rounds a bar is the mean of neighbouring rounds."


def of_rounds(
    numbers_of: Callable[[Run], Numbers],
    label: str,
    units: Units,
    nothing: str,
    words: Words,
    groups: Sequence[Group],
) -> Bars | str:
    """Stacked bars of what a round has of each name: by round of one group, by group (mean of a round) of several.

    Args:
        numbers_of: of a run.
        label: of the y axis, to which the unit is added.
        units: that it may have.
        nothing: what is said where all numbers are 0.
        words: of the figure.
        groups: of which the numbers are averaged over the seeds.
    """
    series = list(_by_round(groups[0], numbers_of) if len(groups) == 1 else _by_group(groups, numbers_of))
    if not any(np.nansum(one.y) for one in series):
        return nothing
    found, unit = in_unit([one for one in series if np.nansum(one.y)], units, "y")
    x_label = "round" if len(groups) == 1 else ""
    label = label if len(found) > 1 else f"{label}: {found[0].name}"  # one alone has no legend
    return Bars(**words, x_label=x_label, y_label=with_unit(label, unit), series=found)


def _by_round(group: Group, numbers_of: Callable[[Run], Numbers]) -> Iterator[Series]:
    found = [numbers_of(run) for run in group.runs]
    for name in dict.fromkeys(name for numbers in found for name in numbers):
        mean_R, _ = intervals(stacked([numbers[name] for numbers in found if name in numbers]))
        yield Series(name, blocks(np.arange(1, len(mean_R) + 1), MOST_BARS), blocks(mean_R, MOST_BARS))


def _by_group(groups: Sequence[Group], numbers_of: Callable[[Run], Numbers]) -> Iterator[Series]:
    """The mean of all rounds and seeds."""
    found = [[numbers_of(run) for run in group.runs] for group in groups]
    labels = np.array([named(group, group.seeds) for group in groups])
    for name in dict.fromkeys(name for seeds in found for numbers in seeds for name in numbers):
        of_group = [[mean_of_known(numbers[name]) for numbers in seeds if name in numbers] for seeds in found]
        yield Series(name, labels, np.array([mean_of_known(np.array(seeds)) if seeds else 0.0 for seeds in of_group]))


def of_groups(groups: Sequence[Group], name: str, value_of: Callable[[Run], float]) -> Series:
    """One number of each run: the mean over the seeds of each group, with its interval."""
    values_SG = stacked([np.array([value_of(run) for run in group.runs]) for group in groups]).T
    mean_G, half_G = intervals(values_SG)
    labels = np.array([named(group, group.seeds) for group in groups])
    if len(values_SG) == 1:
        return Series(name, labels, mean_G)
    return Series(name, labels, mean_G, mean_G - half_G, mean_G + half_G)


def blocks(values: np.ndarray, most: int) -> np.ndarray:
    """At most so many along the first axis: the means of neighbours, NaN left out."""
    size = -(-len(values) // most)
    if size <= 1:
        return values
    starts, there = np.arange(0, len(values), size), ~np.isnan(values)
    counts = np.add.reduceat(there.astype(float), starts)
    with np.errstate(invalid="ignore"):
        return np.add.reduceat(np.where(there, values, 0), starts) / counts
