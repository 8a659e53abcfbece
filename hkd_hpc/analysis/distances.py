"""How far the clients' class mixes are from that of all clients together. Axes: M clients, C classes."""

from __future__ import annotations

import numpy as np


def total_variation_M(count_MC: np.ndarray) -> np.ndarray:
    """Of each client's class mix from that of all: half of the sum over the classes of |p - q|, 0 (equal) to 1.

    It is the share of a client's images that would have to be of another class for the mix of all. Classes have no
    order or distance, so it is also the earth mover's distance where each move costs 1 (Zhao et al. 2018 state twice
    this), and it is finite where a client lacks classes.

    Args:
        count_MC: images.

    Returns:
        (M,), NaN for a client without images.
    """
    size_M1 = count_MC.sum(1, keepdims=True)
    with np.errstate(invalid="ignore"):
        mix_MC = count_MC / size_M1
    return abs(mix_MC - count_MC.sum(0) / max(count_MC.sum(), 1)).sum(1) / 2
