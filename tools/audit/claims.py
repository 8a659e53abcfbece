"""What is claimed of a release: by the ledger, and by the paper."""

from __future__ import annotations

import math

import numpy as np

from hkd_hpc.privacy.ledger import FIXED, WHOLE, Ledger
from hkd_hpc.rank_run import RankRun


def ledger_of(run: RankRun, rounds: int) -> Ledger:
    """The ledger that a run would have after so many rounds."""
    assert run.server is not None and run.server.spending is not None  # noqa: PT018  (one process is rank 0)
    spending = run.server.spending
    planned = [spending.planned(round) for round in range(1, rounds + 1)]
    fixed_RMK, whole_RMK = (np.stack([row[figure] for row in planned]) for figure in (FIXED, WHOLE))
    return Ledger(spending.terms, fixed_RMK, whole_RMK)


def paper_epsilon(sigma: float, delta: float) -> float:
    """Of one coordinate of one report, by the paper's section 3.4: the classical theorem, proved below epsilon 1 alone
    (Dwork and Roth 2014, theorem A.1)."""
    return math.sqrt(2 * math.log(1.25 / delta)) / sigma
