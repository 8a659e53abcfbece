"""What a paper says travels beside the weights, as a formula: the check of what `Scheme.traffic` counted. No result
depends on it.

Letters: C classes, D latent size, A public images, n_i classes that client i shares, n classes that any client shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RunTraffic:
    """What a formula is worked out from: who sent and received in the rounds of a run.

    Attributes:
        settings: of the run.
        classes: C.
        latent: D.
        public: A.
        shares_RMC: (rounds, clients, classes) bool, who shared knowledge of which class.
        delivers_RM: (rounds, clients) bool, whose report entered the average.
        sampled_R: (rounds,) clients that got a message.
    """

    settings: Mapping[str, Any]
    classes: int
    latent: int
    public: int
    shares_RMC: np.ndarray
    delivers_RM: np.ndarray
    sampled_R: np.ndarray

    @property
    def shared_R(self) -> np.ndarray:
        """(rounds,) the sum of n_i over the clients."""
        return self.shares_RMC.sum((1, 2))

    @property
    def known_R(self) -> np.ndarray:
        """(rounds,) n."""
        return self.shares_RMC.any(1).sum(1)

    @property
    def delivering_R(self) -> np.ndarray:
        """(rounds,) clients that entered the average."""
        return self.delivers_RM.sum(1)


@dataclass(frozen=True)
class Formula:
    """Floats beside the weights, of all clients in a round, (rounds,).

    Attributes:
        words: the formula, of one client.
        up: what the clients send.
        down: what they receive.
    """

    words: str
    up: Callable[[RunTraffic], np.ndarray]
    down: Callable[[RunTraffic], np.ndarray]
