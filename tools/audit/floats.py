"""The adversary who asks which float32 numbers can come of a mean, whatever the noise was (Mironov, CCS 2012).

Noise that is drawn, scaled and added in float32 reaches, from a given mean, only some of the float32 numbers near it:
x = fl(fl(u std) + mean) of a float32 u. Of a few dozen coordinates one is beyond the reach of the other mean, and tells
the two apart, however large the noise. Noise that is added in float64 and rounded once reaches all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .reports import Scores

STEPS = 4  # neighbours on each side that rounding may have come from


def scores_of(std: float, label: int) -> Scores:
    """The score of one class mean: how many of its coordinates D's mean cannot have given, less those of E's.

    Args:
        std: of the noise on that class's mean.
        label: the class.
    """
    beyond = lambda sent_D, mean_D: np.count_nonzero(~is_reached(sent_D, mean_D, std))
    return lambda sent_CX, from_CX, to_CX: (
        float(beyond(sent_CX[label], from_CX[label]) - beyond(sent_CX[label], to_CX[label])),
    )


def is_reached(sent_D: np.ndarray, mean_D: np.ndarray, std: float) -> np.ndarray:
    """Whether some float32 u gives each of these numbers of these means; all of them are float32 numbers."""
    sent_D, mean_D, std_1 = sent_D.astype(np.float32), mean_D.astype(np.float32), np.float32(std)
    found_D = np.zeros(sent_D.shape, bool)
    for noise_D in near(sent_D.astype(np.float64) - mean_D):
        scaled_D = np.zeros(sent_D.shape, bool)
        for unit_D in near(noise_D.astype(np.float64) / std_1):
            scaled_D |= unit_D * std_1 == noise_D
        found_D |= scaled_D & (noise_D + mean_D == sent_D)
    return found_D


def near(value_D: np.ndarray) -> Iterator[np.ndarray]:
    """The float32 numbers around each of these, STEPS on each side."""
    first_D = value_D.astype(np.float32)
    yield first_D
    for side in (-np.inf, np.inf):
        next_D = first_D
        for _ in range(STEPS):
            next_D = np.nextafter(next_D, np.float32(side))
            yield next_D
