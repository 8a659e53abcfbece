"""epsilon of Gaussian releases, against the exact curve and against numbers worked out elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import log_ndtr

from hkd_hpc.privacy.accounting import epsilon, epsilons, largest_mu


def exact(mu: float, delta: float) -> float:
    """Of delta(eps) = Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2), the privacy curve of one Gaussian release."""

    def log_delta(eps):
        first, second = log_ndtr(mu / 2 - eps / mu), eps + log_ndtr(-mu / 2 - eps / mu)
        return first + math.log1p(-math.exp(second - first)) if second < first else -math.inf

    if log_delta(0) < math.log(delta):
        return 0.0
    return brentq(lambda eps: log_delta(eps) - math.log(delta), 0, mu**2 + 20 * mu + 20, xtol=1e-13)


# sigma 7, bound 3, features alone of a fixed extractor: dimensions under the box clip (1: the L2 ball), rounds, delta
@pytest.mark.parametrize(
    "latent, rounds, delta, told",
    [
        (64, 50, 0.01, 50.6),
        (64, 50, 1e-5, 66.3),
        (64, 1, 0.01, 2.775),
        (64, 1, 1e-5, 5.11),
        (32, 50, 0.01, 28.8),
        (32, 50, 1e-5, 40.0),
        (1, 50, 0.01, 2.35),
        (1, 50, 1e-5, 4.43),
    ],
)
def test_known_numbers(latent, rounds, delta, told):
    assert epsilon(math.sqrt(rounds * latent) / 7, delta) == pytest.approx(told, rel=2e-3)


@pytest.mark.parametrize("delta", [0.01, 1e-5, 1e-8])
@pytest.mark.parametrize("mu", [0.001, 0.01, 0.1, 0.3, 1, 3, 8, 30, 293, 300, 1e4])
def test_the_exact_value_rounded_up(mu, delta):
    true = exact(mu, delta)
    assert true <= epsilon(mu, delta) <= true * (1 + 3e-9)


def test_sigma_for_epsilon_one_over_fifty_rounds_of_64_coordinates():
    assert math.sqrt(50 * 64) / largest_mu(1, 1e-5) == pytest.approx(211, abs=0.5)


@pytest.mark.parametrize("target", [0.01, 0.1, 1, 4, 50, 1e4])
def test_the_largest_mu_meets_its_target_from_below(target):
    assert target * (1 - 1e-8) <= epsilon(largest_mu(target, 1e-5), 1e-5) <= target


def test_more_rounds_cost_more():
    found = [epsilon(math.sqrt(rounds) / 7, 1e-5) for rounds in range(1, 30)]
    assert found == sorted(set(found))


def test_of_nothing_and_without_noise():
    assert epsilons(np.array([0.0, math.inf, 1.0, 1.0]), 1e-5).tolist()[:2] == [0.0, math.inf]
    assert epsilons(np.array([5e-324, 1e-6]), 1e-5).tolist() == [0.0, 0.0]  # delta alone is more than they tell
