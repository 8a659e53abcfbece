"""Standard normal draws for noise, from one of two sources.

simulation: the named stream of (seed, quantity, round, client). It comes again on a resume and on any number of ranks,
and whoever knows the seed can subtract it: it protects nobody.

release: the operating system's entropy. Uniforms of 53 bits, made normal by Box and Muller in float64, so that there
is no generator whose state could be stored, replayed or recovered. Such draws are a grid of doubles that ends at 8.6
standard deviations, not the normal distribution of the proofs (Mironov, CCS 2012).
"""

from __future__ import annotations

import os

import numpy as np

from hkd_hpc.common import rng
from hkd_hpc.privacy.settings import RELEASE

BITS = 53  # of a double's mantissa
PIECE = 1 << 20  # draws at a time, so that the weights of a large model need no many times their memory


def normal(mode: str, shape: tuple[int, ...], seed: int, quantity: str, round: int, client: int) -> np.ndarray:
    """Independent draws of N(0, 1).

    Args:
        mode: simulation or release (privacy.mode).
        shape: of the result.
        seed, round, client: name the stream, in simulation.
        quantity: what the noise is for: features, predictions, counts, weights, or a scheme's own.

    Returns:
        float64, of that shape.
    """
    if mode == RELEASE:
        return of_entropy(shape)
    return rng.stream(seed, purpose_of(quantity), round, client).standard_normal(shape)


def purpose_of(quantity: str) -> str:
    """The name of a quantity's stream; that of features is as old as FedHKD here."""
    return "noise" if quantity == "features" else f"noise {quantity}"


def of_entropy(shape: tuple[int, ...]) -> np.ndarray:
    """Draws of N(0, 1) that nobody can repeat, float64."""
    count = int(np.prod(shape))
    pieces = [_box_muller(min(PIECE, count - start)) for start in range(0, count, PIECE)]
    return np.concatenate([*pieces, np.zeros(0)]).reshape(shape)


def _box_muller(count: int) -> np.ndarray:
    """sqrt(-2 log u) cos(2 pi v) and sqrt(-2 log u) sin(2 pi v), with u in (0, 1] and v in [0, 1)."""
    pairs = -(-count // 2)
    radius = np.sqrt(-2 * np.log(_uniform(pairs) + 2.0**-BITS))
    angle = 2 * np.pi * _uniform(pairs)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _uniform(count: int) -> np.ndarray:
    """Multiples of 2^-53 in [0, 1)."""
    whole = np.frombuffer(os.urandom(8 * count), np.uint64)
    return (whole >> np.uint64(64 - BITS)) * 2.0**-BITS
