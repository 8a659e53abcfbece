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

from hkd_hpc.errors import UsageError

PIP = "pip install 'hkd_hpc[privacy]'"
GRID = 200  # values of the privacy loss in one standard deviation of it, which is mu
COARSEST = 1e-3  # of mu^2, where epsilon is about mu^2 / 2: above it a finer grid costs seconds and tells nothing
LARGEST = 500.0  # whose exponential is a number
SHRINK = 1 - 1e-4


def dp_accounting() -> ModuleType:
    """The package, seconds to import; UsageError where it is not installed."""
    try:
        import dp_accounting
        import dp_accounting.pld
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed, and epsilon needs it: {PIP}") from None
    return dp_accounting


@functools.lru_cache(1024)
def epsilon(mu: float, delta: float) -> float:
    """Of releases that compose to mu: not below the exact value, and less than 1 % above it.

    By the privacy loss distribution on a grid, pessimistic (connect the dots; Doroshenko et al. 2022).

    Args:
        mu: sensitivity / standard deviation; 0 gives 0, inf gives inf.
        delta: in (0, 1).

    Raises:
        UsageError: dp-accounting is not installed.
    """
    if not 0 < mu < math.inf:
        return 0.0 if mu == 0 else math.inf
    accounting = dp_accounting()
    losses = accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
        1 / mu, value_discretization_interval=min(max(mu / GRID, COARSEST * mu**2), LARGEST)
    )
    exact = accounting.get_epsilon_gaussian(1 / mu, delta)
    return float(max(losses.get_epsilon_for_delta(delta), exact))


def epsilons(mu_M: np.ndarray, delta: float) -> np.ndarray:
    """The same of each client, (M,); those of equal mu cost one."""
    return np.array([epsilon(float(mu), delta) for mu in mu_M])


def largest_mu(target: float, delta: float) -> float:
    """The mu whose epsilon(delta) is `target`, or so little less that nobody can tell (below .1 %).

    Args:
        target: an epsilon above 0.
        delta: in (0, 1).

    Raises:
        UsageError: dp-accounting is not installed.
    """
    mu = 1 / float(dp_accounting().get_sigma_gaussian(target, delta))
    while epsilon(mu, delta) > target:
        mu *= SHRINK
    return mu
