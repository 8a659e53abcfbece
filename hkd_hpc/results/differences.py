"""Paired differences from the reference scheme, and what can be told from them: the same in every table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.analysis import statistics
from hkd_hpc.analysis.tables import NOTHING, Cell, Difference
from hkd_hpc.common.words import counted

GOALS = ("local", "global")  # what a user wants to be best: her clients' own models, or the one model of all
AGAINST = {goal: f"{goal} – {schemes.REFERENCE}" for goal in GOALS}  # how the column of the differences is called

Accuracies = Mapping[str, Mapping[str, Sequence[float]]]  # by row, whose name is mostly its scheme's, and column


def differences(found: Accuracies, goal: str, schemes_asked: int = 0) -> dict[str, Cell | str]:
    """Of each row from the reference scheme's, by pairs of one seed.

    Args:
        found: Accuracies of the rows that are compared, one a seed, in the order of the seeds; NaN: not measured.
        goal: Their column.
        schemes_asked: how many schemes will be compared with the reference, if more than are there yet.

    Returns:
        {row: mean of the differences, half of its 95 % interval, and a verdict; – where a pair is missing}. Schemes
        are one family of the correction for many tests, controls another; a row without all its pairs belongs to it
        too, or what is called now would be taken back when its runs end.
    """
    reference = np.array(found[schemes.REFERENCE][goal])
    pairs = {name: np.array(row[goal]) - reference for name, row in found.items() if name != schemes.REFERENCE}
    told = {name: values for name, values in pairs.items() if len(values) > 1 and not np.isnan(values).any()}
    verdicts: dict[str, str] = {}
    for are_controls in (False, True):
        family = [name for name in pairs if (name in schemes.CONTROLS) == are_controls]
        size = max(len(family), 0 if are_controls else schemes_asked)
        verdicts |= statistics.verdicts({name: told[name] for name in family if name in told}, size)
    return {
        name: Difference(*statistics.interval(told[name]), verdicts[name]) if name in told else NOTHING
        for name in pairs
    }


def method_text(found: Accuracies, schemes_asked: int = 0) -> str:
    """The test behind better and worse, and the seeds that it needs; empty where no scheme is compared. Arguments as of
    `differences`."""
    there = sum(name != schemes.REFERENCE and name not in schemes.CONTROLS for name in found)
    family = max(there, schemes_asked) if there else 0
    return (
        "better, worse: exact sign-flip test of the paired differences, two-sided, corrected by Holm over the "
        f"{counted(family, 'scheme')} of a column (controls by themselves), level {statistics.LEVEL}; that needs "
        f"{statistics.seeds_needed(family)} seeds."
        if family
        else ""
    )
