"""A lower bound of epsilon from trials: what an adversary who sees a release tells apart, with 95 % confidence.

The trials of each of two neighbouring data sets D and E give scores. An adversary answers E where a score lies in a
region R, s > t or s <= t. Under (epsilon, delta) differential privacy P_E(R) <= exp(epsilon) P_D(R) + delta, and the
same with D and E exchanged, so that

    epsilon >= log((P_E(R) - delta) / P_D(R)),        both rates bounded by Clopper and Pearson (1934).

R is chosen on the first half of the trials, the bound computed on the other half: nothing is tested twice. A mechanism
that claims to be Gaussian with mu = sensitivity / std claims more (Dong, Roth and Su 2022):

    mu >= Phi^-1(P_E(R)) - Phi^-1(P_D(R)),            which a few thousand trials bound within some percent.

Uses no accounting of the package: what is audited does not audit itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import brentq
from scipy.stats import beta, norm

ALPHA = 0.05  # both rates of a bound together
REGIONS = 101  # that are tried of a score; odd, so that one lies in the middle

Evidence = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (least P_E(R), largest P_D(R)) to the bound


@dataclass(frozen=True)
class Bound:
    """With 95 % confidence each: epsilon at delta of whatever mechanism it is, and mu if it is a Gaussian one.

    Attributes:
        epsilon: inf never: n trials bound no more than about log(n / 4).
        mu: sensitivity / std.
        trials: of each data set, in the half that the bounds come from.
        delta: of epsilon.
    """

    epsilon: float
    mu: float
    trials: int
    delta: float

    @property
    def epsilon_if_gaussian(self) -> float:
        """What `mu` means at delta."""
        return epsilon_of(self.mu, self.delta)


def lower_bound(score_d: np.ndarray, score_e: np.ndarray, delta: float) -> Bound:
    """From the scores (trials, statistics) of two neighbouring data sets; the best statistic is chosen with the region.

    Args:
        score_d, score_e: as many trials each, independent, in the order in which they were made.
        delta: of epsilon.
    """
    half = len(score_d) // 2
    bounded = lambda evidence: bounded_by(evidence, score_d, score_e, half)
    epsilon, mu = bounded(epsilon_evidence(delta)), bounded(mu_evidence)
    return Bound(max(epsilon, 0.0), max(mu, 0.0), len(score_d) - half, delta)


def bounded_by(evidence: Evidence, score_d: np.ndarray, score_e: np.ndarray, half: int) -> float:
    """The region that shows most on the first trials, judged by the others."""
    regions = [
        (*best_region(evidence, sign * known[:half, column], sign * other[:half, column]), known, other, sign, column)
        for known, other in ((score_d, score_e), (score_e, score_d))
        for sign, column in product((1, -1), range(score_d.shape[1]))
    ]
    _, threshold, known, other, sign, column = max(regions, key=lambda region: region[0])
    within = lambda score: int(np.count_nonzero(sign * score[half:, column] > threshold))
    return float(evidence_of(evidence, within(known), within(other), len(score_d) - half))


def best_region(evidence: Evidence, known: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """(evidence, t) of the region s > t that shows most."""
    pooled = np.sort(np.concatenate([known, other]))
    below = np.unique(np.linspace(0, len(pooled) - 2, REGIONS).round().astype(int))
    threshold_T = (pooled[below] + pooled[below + 1]) / 2
    above = lambda score: len(score) - np.searchsorted(np.sort(score), threshold_T, side="right")
    found_T = evidence_of(evidence, above(known), above(other), len(known))
    best = int(found_T.argmax())
    return float(found_T[best]), float(threshold_T[best])


def evidence_of(evidence: Evidence, known: np.ndarray | int, other: np.ndarray | int, trials: int) -> np.ndarray:
    """From how many trials of each data set lie in a region."""
    return evidence(at_least(np.asarray(other), trials), at_most(np.asarray(known), trials))


def at_least(hits: np.ndarray, trials: float) -> np.ndarray:
    """The lower end of Clopper and Pearson's interval of a rate, one-sided at ALPHA / 2."""
    return np.where(hits > 0, beta.ppf(ALPHA / 2, np.maximum(hits, 1e-300), trials - hits + 1), 0.0)


def at_most(hits: np.ndarray, trials: float) -> np.ndarray:
    """The upper end."""
    return np.where(hits < trials, beta.ppf(1 - ALPHA / 2, hits + 1, np.maximum(trials - hits, 1e-300)), 1.0)


def epsilon_evidence(delta: float) -> Evidence:
    """log((P_E(R) - delta) / P_D(R)), -inf where delta explains all."""
    return lambda least, largest: np.log(np.maximum(least - delta, 1e-300)) - np.log(largest)


def mu_evidence(least: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Phi^-1(P_E(R)) - Phi^-1(P_D(R)); -inf where nothing is known."""
    return np.where((least > 0) & (largest < 1), norm.ppf(least) - norm.ppf(largest), -np.inf)


def attainable(mu: float, trials: int, delta: float) -> float:
    """The epsilon that `lower_bound` shows of an exact Gaussian with this mu on average, about; `trials` of a half.

    A bound near it says that the adversary is as good as can be, one far below that it was a poor one.
    """
    if math.isinf(mu):
        return float(evidence_of(epsilon_evidence(delta), 0, trials, trials))
    false_T = norm.sf(np.linspace(-3.0, 6.0, 2000))
    true_T = norm.sf(norm.isf(false_T) - mu)
    shown_T = epsilon_evidence(delta)(at_least(trials * true_T, trials), at_most(trials * false_T, trials))
    return max(float(shown_T.max()), 0.0)


def epsilon_of(mu: float, delta: float) -> float:
    """The exact curve of a Gaussian mechanism (Balle and Wang 2018, theorem 8), inverted."""
    if mu == 0 or math.isinf(mu):
        return mu
    excess = lambda epsilon: norm.cdf(mu / 2 - epsilon / mu) - delta - _tail(mu, epsilon)
    if excess(0.0) <= 0:
        return 0.0
    return float(brentq(excess, 0.0, mu * mu / 2 + mu * norm.isf(delta) + 1, xtol=1e-12))


def _tail(mu: float, epsilon: float) -> float:
    """exp(epsilon) Phi(-mu / 2 - epsilon / mu), which is small where both factors are extreme."""
    return math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
