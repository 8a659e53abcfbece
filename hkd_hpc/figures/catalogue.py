"""All figures of a run, and of a study."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hkd_hpc.common.groups import grouped
from hkd_hpc.figures import accuracy, confusion, costs, federation, traffic
from hkd_hpc.figures.figure import Bars, Figure, Lines, NotRecorded
from hkd_hpc.figures.groups import Group, groups_of
from hkd_hpc.figures.run import Planned, Run

MOST_LINES = 12  # in one figure: of more, no reader finds hers in the legend
KINDS = (*accuracy.KINDS, *confusion.KINDS, *federation.KINDS, *costs.KINDS, *traffic.KINDS)


def of_run(run: Run) -> list[Figure | NotRecorded]:
    """Every figure of one run.

    Args:
        run: from hkd_hpc.load or find_runs; it may still be running.

    Returns:
        The figures, in the order of the report; instead of one that the run has no numbers for, a NotRecorded that
        says why. Empty before the first round.
    """
    groups = groups_of(with_rounds([run]))
    return [kind.of(groups) for kind in KINDS if kind.scope != "study"] if groups else []


def of_partition(seed: int, partition: Mapping[str, Any]) -> Figure | NotRecorded:
    """Who has what, of a partition as metrics.h5 has it and of its seed, before any run."""
    [kind] = [kind for kind in KINDS if kind.name == "partition"]
    return kind.of([Group("", "", (Planned({"run.seed": seed}, partition),))])


def of_study(runs: Iterable[Run]) -> list[Figure | NotRecorded]:
    """The figures of many runs: those that differ only in the seed are one line with a band.

    Schemes are compared within one setting (data, clients, beta ...): each setting has figures of its own, with its
    name in theirs, and no figure has more than MOST_LINES groups. A group looks alike in all of them.

    Args:
        runs: from find_runs; those without a round are passed over.

    Returns:
        The figures, setting by setting; instead of one that has no numbers, a NotRecorded that says why.
    """
    groups = groups_of(with_rounds(runs))
    labels = tuple(dict.fromkeys(group.label for group in groups))
    found = (
        titled(alike(kind.of(part), labels), *suffix)
        for suffix, part in _parts(groups)
        for kind in KINDS
        if kind.scope != "run"
    )
    return distinct(found, set())


def with_rounds(runs: Iterable[Run]) -> list[Run]:
    """Those that have completed any, and tell their settings."""
    return [run for run in runs if run.settings and len(run.round_columns.get("round", ()))]


def _parts(groups: list[Group]) -> Iterator[tuple[tuple[str, ...], list[Group]]]:
    """Groups that share a figure, with what tells theirs from the others: the setting, "part 2"."""
    for setting, own in grouped((group.setting, group) for group in groups).items():
        for first in range(0, len(own), MOST_LINES):
            part = f"part {1 + first // MOST_LINES}" if len(own) > MOST_LINES else ""
            yield tuple(filter(None, (setting, part))), own[first : first + MOST_LINES]


def alike(figure: Figure | NotRecorded, known: tuple[str, ...]) -> Figure | NotRecorded:
    """The same where series of these names look as in all other figures of the study."""
    return replace(figure, known=known) if isinstance(figure, Lines | Bars) else figure


def titled(figure: Figure | NotRecorded, *suffix: str) -> Figure | NotRecorded:
    """accuracy_rounds_cifar10_beta_0_5: "Accuracy against rounds: cifar10, beta 0.5" """
    if not suffix:
        return figure
    name = re.sub(r"[^A-Za-z0-9]+", "_", "_".join((figure.name, *suffix))).strip("_")
    return replace(figure, name=name, title=f"{figure.title}: {', '.join(suffix)}")


def distinct(figures: Iterable[Figure | NotRecorded], taken: set[str]) -> list[Figure | NotRecorded]:
    """The same, each with a name of its own: run-1 and run_1 are both run_1 to `titled`.

    Args:
        figures: in their order.
        taken: names that others have, in lower case, since not all file systems tell A from a; theirs are added.
    """
    found = []
    for figure in figures:
        names = (f"{figure.name}_{number}" if number > 1 else figure.name for number in itertools.count(1))
        name = next(name for name in names if name.lower() not in taken)
        taken.add(name.lower())
        found.append(replace(figure, name=name))
    return found
