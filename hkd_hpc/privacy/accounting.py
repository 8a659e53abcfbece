"""epsilon(delta) of Gaussian releases, by Google's dp-accounting.

A release of sensitivity s (L2) with noise of standard deviation std has mu = s / std. Releases compose exactly, also
where a later one is chosen by what the earlier ones gave: all of them together are one release with
mu = sqrt(sum mu^2), so that T rounds with the noise multiplier z are one with z / sqrt(T). mu = 0: nothing differs
between neighbours; inf: no noise.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType

import numpy as np

from hkd_hpc.common.errors import UsageError

PIP = "pip install 'hkd_hpc[privacy]'"
UP = 1 + 1e-9  # far more than the root that dp-accounting finds may be off


def dp_accounting() -> ModuleType:
    """The package, seconds to import; UsageError where it is not installed."""
    try:
        import dp_accounting
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed, and epsilon needs it: {PIP}") from None
    return dp_accounting


@functools.lru_cache(1024)
def epsilon(mu: float, delta: float) -> float:
    """Of releases that compose to mu: exact (Balle and Wang 2018), rounded up in the ninth digit.

    delta = Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu), solved for epsilon

    Args:
        mu: sensitivity / standard deviation; 0 gives 0, inf gives inf.
        delta: in (0, 1).

    Raises:
        UsageError: dp-accounting is not installed.
    """
    if not 0 < mu < math.inf:
        return 0.0 if mu == 0 else math.inf
    return float(dp_accounting().get_epsilon_gaussian(1 / mu, delta)) * UP


def epsilons(mu_M: np.ndarray, delta: float) -> np.ndarray:
    """The same of each client, (M,); those of equal mu cost one."""
    return np.array([epsilon(float(mu), delta) for mu in mu_M])


def largest_mu(target: float, delta: float) -> float:
    """The mu whose epsilon(delta) is `target`, rounded down in the ninth digit.

    Args:
        target: an epsilon above 0.
        delta: in (0, 1).

    Raises:
        UsageError: dp-accounting is not installed.
    """
    return 1 / float(dp_accounting().get_sigma_gaussian(target / UP**2, delta))
