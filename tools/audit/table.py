"""The rows of tools.audit: what is claimed, what the audit shows, and whether that is as it must be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .bound import Bound, attainable

HOLDS, FALSE, NONE = "holds", "false", "none"  # what must be true of a claim; none: nothing is claimed, all is seen
HEADINGS = ("release", "figure", "epsilon", "at least", "if Gaussian", "at best", "trials", "verdict")
ALL_SEEN = 0.99  # of what so many trials can show at most


@dataclass(frozen=True)
class Row:
    """One figure of one release, audited.

    Attributes:
        release: what was released.
        figure: whose claim it is, and of what.
        claimed: epsilon at the bound's delta; inf: no guarantee.
        bound: what the trials show.
        must: HOLDS: the figure is the ledger's, and no bound may lie above it; FALSE: it claims too much, and the bound
            must lie above it; NONE: there is no guarantee, and the trials must show all that so many can.
        mu: of the claim, where it is that of a Gaussian; for what could be shown at best.
    """

    release: str
    figure: str
    claimed: float
    bound: Bound
    must: str
    mu: float = math.nan

    @property
    def is_right(self) -> bool:
        """Whether the bound lies on the side where it must."""
        if self.must == HOLDS:
            return max(self.bound.epsilon, self.bound.epsilon_if_gaussian) <= self.claimed
        if self.must == FALSE:
            return self.bound.epsilon > self.claimed
        return self.bound.epsilon >= ALL_SEEN * attainable(math.inf, self.bound.trials, self.bound.delta)

    @property
    def verdict(self) -> str:
        """For people."""
        if self.must == HOLDS:
            return "holds" if self.is_right else "BROKEN: the ledger promises too much"
        found = {FALSE: "exceeded, as it must be", NONE: "caught"}[self.must]
        return found if self.is_right else "NOT CAUGHT: the audit is too weak"

    @property
    def cells(self) -> tuple[str, ...]:
        """As HEADINGS."""
        bound = self.bound
        best = self.mu if math.isnan(self.mu) else attainable(self.mu, bound.trials, bound.delta)
        numbers = (self.claimed, bound.epsilon, bound.epsilon_if_gaussian, best)
        return self.release, self.figure, *map(number, numbers), f"2 x {bound.trials}", self.verdict


def number(value: float) -> str:
    """Two decimals; "none" of an epsilon that is not finite, "-" of what is not known."""
    if math.isnan(value):
        return "-"
    return "none" if math.isinf(value) else f"{value:.2f}"
