"""The area under the ROC curve of an attack, and its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm, rankdata

Z = float(norm.ppf(0.975))


@dataclass(frozen=True)
class Auc:
    """The chance that a member scores above another, a tie counting half, with its standard error.

    Attributes:
        value: .5 is guessing.
        error: of `value`; NaN with fewer than two of either.
        members, others: how many were scored.
    """

    value: float
    error: float
    members: int
    others: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, within 0..1."""
        return max(0.0, self.value - Z * self.error), min(1.0, self.value + Z * self.error)


def auc(member_M: np.ndarray, other_N: np.ndarray) -> Auc:
    """By DeLong, DeLong and Clarke-Pearson (1988), with ranks as Sun and Xu (2014).

    Args:
        member_M, other_N: scores; members are said to score higher.
    """
    members, others = len(member_M), len(other_N)
    if not members or not others:
        return Auc(math.nan, math.nan, members, others)
    rank = rankdata(np.concatenate([member_M, other_N]))
    above_M = (rank[:members] - rankdata(member_M)) / others  # share of the others below each member
    above_N = 1 - (rank[members:] - rankdata(other_N)) / members  # share of the members above each other one
    enough = members > 1 and others > 1
    variance = above_M.var(ddof=1) / members + above_N.var(ddof=1) / others if enough else math.nan
    return Auc(float(above_M.mean()), math.sqrt(variance), members, others)


def mean_of(each: Sequence[Auc]) -> Auc:
    """The mean over independent attacks; those without an error are left out."""
    known = [one for one in each if not math.isnan(one.error)]
    if not known:
        return Auc(math.nan, math.nan, 0, 0)
    error = math.sqrt(sum(one.error**2 for one in known)) / len(known)
    value = sum(one.value for one in known) / len(known)
    return Auc(value, error, sum(one.members for one in known), sum(one.others for one in known))
