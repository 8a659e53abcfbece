"""Paired comparisons over seeds: interval, exact test, correction for many schemes. Pure functions of arrays.

Runs of one seed share data, initial weights, cohorts and batches, so schemes are compared by the differences of one
seed each. The interval is Student's t; the decision is an exact sign-flip test (Fisher 1935: under no difference each
sign is a fair coin), which asks nothing of their distribution but symmetry, corrected by Holm (1979) over the schemes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

LEVEL = 0.05
MOST_FLIPPED = 16  # differences whose sign patterns are all counted: 65,536; of more, so many are drawn
NOT_SEPARATED = "not separated"
POWER = 0.8
MOST_SEEDS = 100_000  # of which anybody needs to know
MOST_DRAWN, DRAWN = 12, 2000  # seeds up to which power is that of the exact test, in so many drawn studies


def interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean and 95 % interval by Student's t.

    Args:
        values: independent numbers, at least one.

    Returns:
        (mean, half width of the interval); the half of one value is NaN.
    """
    from scipy import special

    array = np.asarray(values, float)
    if len(array) < 2:
        return float(array.mean()), float("nan")
    t = special.stdtrit(len(array) - 1.0, 1 - LEVEL / 2)
    return float(array.mean()), float(t * array.std(ddof=1) / math.sqrt(len(array)))


def intervals(values_SX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`interval` of each column over its rows, NaN left out.

    Args:
        values_SX: (S, X), one row a seed.

    Returns:
        mean_X: NaN where all are.
        half_X: half widths, NaN where fewer than two are numbers.
    """
    from scipy import special

    is_there_SX = ~np.isnan(values_SX)
    count_X = is_there_SX.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):  # of none the mean, of one the deviation
        mean_X = np.where(is_there_SX, values_SX, 0).sum(0) / count_X
        squares_X = np.where(is_there_SX, (values_SX - mean_X) ** 2, 0).sum(0)
        t_X = special.stdtrit(count_X - 1.0, 1 - LEVEL / 2)
        return mean_X, np.where(count_X > 1, t_X * np.sqrt(squares_X / (count_X - 1) / count_X), np.nan)


def sign_flip_p(difference_S: Sequence[float] | np.ndarray) -> float:
    """Two-sided exact sign-flip test (Fisher 1935) that differences are symmetric about 0.

    Args:
        difference_S: (S,) one difference a seed.

    Returns:
        p: the share of all sign patterns whose sum is at least as far from 0 as theirs; never below 2 ** (1 - S).
    """
    difference_S = np.asarray(difference_S, float)
    sums = np.abs(_signs(len(difference_S)) @ difference_S)
    observed = abs(difference_S.sum())
    return float(np.mean(sums >= observed - 1e-12 * max(1.0, observed)))


@lru_cache(maxsize=4)
def _signs(count: int) -> np.ndarray:
    """All patterns (2 ** count, count) of +1 and -1; beyond MOST_FLIPPED a fixed draw of them, the observed one among
    them.
    """
    if count <= MOST_FLIPPED:
        return 1.0 - 2.0 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
    drawn = 1.0 - 2.0 * np.random.default_rng(0).integers(0, 2, (2**MOST_FLIPPED, count))
    drawn[0] = 1.0
    return drawn


def holm(p_by_name: dict[str, float], family: int = 0) -> dict[str, float]:
    """Holm's step-down correction (1979): the chance that any of a family is called a difference where none is stays
    at the level.

    Args:
        p_by_name: {name: p} of the family.
        family: how many it will have, if more: what is called then stays called, whatever the others are.

    Returns:
        {name: corrected p}, in the same order.
    """
    corrected, largest, size = {}, 0.0, max(family, len(p_by_name))
    for rank, name in enumerate(sorted(p_by_name, key=lambda name: p_by_name[name])):
        largest = max(largest, min(1.0, (size - rank) * p_by_name[name]))
        corrected[name] = largest
    return {name: corrected[name] for name in p_by_name}


def seeds_needed(family: int) -> int:
    """The fewest seeds with which the exact test can call one of `family` differences after the correction: 6 for
    one.
    """
    return 1 + math.ceil(math.log2(family / LEVEL))


def seeds_to_see(effect: float, deviation: float, family: int = 1) -> int:
    """About how many seeds a difference needs to be called, if it is normal: up to MOST_DRAWN from the exact test of
    drawn studies, beyond by the t test, which the exact test then comes near.

    Args:
        effect: the true difference, not 0.
        deviation: standard deviation of the differences of one seed each.
        family: how many differences are corrected for, by Holm's first and hardest step.

    Returns:
        The fewest seeds with which it is called in POWER of all studies: `seeds_needed(family)` at least, MOST_SEEDS at
        most.
    """
    needed = seeds_needed(family)
    if not deviation:
        return needed
    ratio = round(abs(effect) / deviation, 3)
    is_seen = lambda seeds: _power(ratio, seeds, LEVEL / family) >= POWER
    return needed + bisect.bisect_left(range(needed, MOST_SEEDS), True, key=is_seen)


@lru_cache(maxsize=1024)
def _power(ratio: float, seeds: int, level: float) -> float:
    """How often the level calls a difference of so many standard deviations on its side."""
    if seeds <= MOST_DRAWN:
        drawn_SX = np.random.default_rng(seeds).normal(ratio, 1, (seeds, DRAWN))
        reached_X = np.zeros(DRAWN)
        for signs_PS in np.array_split(_signs(seeds), 16):
            reached_X += (np.abs(signs_PS @ drawn_SX) >= np.abs(drawn_SX.sum(0)) - 1e-12).sum(0)
        return float(np.mean((reached_X <= level * 2**seeds) & (drawn_SX.sum(0) > 0)))
    from scipy import stats

    bound = stats.t.ppf(1 - level / 2, seeds - 1)
    return float(stats.nct.sf(bound, seeds - 1, ratio * math.sqrt(seeds)))


def verdicts(difference_S_by_name: dict[str, np.ndarray], family: int = 0) -> dict[str, str]:
    """What a paired comparison says of each scheme.

    Args:
        difference_S_by_name: {scheme: (S,) scheme - reference, one value a seed, without NaN}; all of one column,
            which are one family.
        family: how many it will have, if more than are there yet.

    Returns:
        {scheme: "better", "worse", NOT_SEPARATED, or "cannot be told with n seeds" where even equal signs would not do}

    Raises:
        ValueError: NaN, of which a test would say anything.
    """
    if any(np.isnan(np.asarray(values, float)).any() for values in difference_S_by_name.values()):
        raise ValueError("verdicts: a difference is NaN")
    size = max(family, len(difference_S_by_name))
    p = holm({name: sign_flip_p(values) for name, values in difference_S_by_name.items()}, size)
    return {name: _verdict(np.asarray(values, float), p[name], size) for name, values in difference_S_by_name.items()}


def _verdict(difference_S: np.ndarray, corrected_p: float, family: int) -> str:
    if len(difference_S) < seeds_needed(family):
        return f"cannot be told with {len(difference_S)} seed{'s' * (len(difference_S) != 1)}"
    return NOT_SEPARATED if corrected_p > LEVEL else "better" if difference_S.mean() > 0 else "worse"
