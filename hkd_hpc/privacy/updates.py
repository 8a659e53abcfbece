"""What enters the sum of the weights where updates are private: a client's clipped change, and its share of the noise.

    sent_i = w + min(1, S / |w_i - w|) (w_i - w) + N(0, (2 S z)^2 / M)     S: update_clip, z: update_multiplier

for the weights w that all received, w_i that client i trained, and M clients of the cohort; |.| is the L2 norm of the
change of all floats together. The exact sum over the cohort moves by 2 S at most, whichever client is replaced, and
has noise of std 2 S z: mu = 1 / z a round (Dong, Roth and Su, Gaussian Differential Privacy, 2022). A client tests and
keeps its own model, neither clipped nor noised: that stays with it.

Why a whole release holds (adjacency=image, updates and predictions noised, privacy.extractor=received):

1. Before round t all that clients have in common, w and the message, is computed of earlier releases and public seeds.
2. Features and predictions of round t are those of w, clipped: whatever the training of this round makes of the model,
   one image moves one mean, of N_j features by 2 C / N_j, of predictions by sqrt(2) / N_j.
3. The change of the weights may depend on all that a client has and had: clipped, any two are 2 S apart at most.
4. So for every outcome of earlier rounds each release is a Gaussian mechanism of a mu fixed before. That is what
   adaptive composition asks for: mu^2 adds up over kinds and rounds.
5. With a trained extractor 2. fails: one image moves the model, and so the features of all others.
6. Means, server optimizers and messages are computed of releases, which costs nothing.
7. Clients that do not deliver take their share of the noise with them: `summed_std` is what was in the sum.
8. Who sees a client's own summand (the transport, a rank with one client) sees M times less variance: secure_sum is
   for that. Clients that tell others their noise take it out of the sum.
9. Losses, accuracies, numbers of images, norms and rejections that rank 0 records have no noise and are no part of it;
   a client that was rejected, which shows in the sum, has no bound from then on (spending.py).
10. Noise is drawn in float64, then rounded to float32 and to whole numbers: Mironov (2012) on floats applies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from hkd_hpc.common.lazy import torch
from hkd_hpc.privacy import mechanism


@dataclass(frozen=True)
class UpdatePrivacy:
    """What is done to each client's weights before the sum.

    Attributes:
        clip: S, largest L2 norm of a client's change of all its floats, above 0.
        multiplier: z, of the noise on the sum; 0: none.
        cohort: M, clients of a round's cohort.
    """

    clip: float
    multiplier: float
    cohort: int

    @property
    def sensitivity(self) -> float:
        """L2, of the sum: two clipped changes are so far apart at most."""
        return 2 * self.clip

    @property
    def share_std(self) -> float:
        """Of the noise of one client, each coordinate."""
        return self.summed_std(1)

    def summed_std(self, delivered: int) -> float:
        """Of the noise that the sum over so many clients of the cohort really has, each coordinate."""
        return mechanism.std("vector", self.sensitivity, self.multiplier, math.sqrt(self.cohort / delivered))

    def sent(self, values_V: torch.Tensor, received_V: torch.Tensor, unit_V: torch.Tensor | None) -> Sent:
        """What a client sends in the place of its weights.

        Args:
            values_V: those that it trained; they stay as they are.
            received_V: those that it received.
            unit_V: independent N(0, 1), float64, 0 in the gaps between tensors; None without noise.

        Returns:
            Of the dtype of the weights: `values_V` itself where nothing is clipped or added; NaN, if they have one.
        """
        change_V = values_V.double() - received_V.double()
        norm = float(torch.linalg.vector_norm(change_V))
        if norm <= self.clip and unit_V is None:
            return Sent(values_V, norm)
        sent_V = change_V.mul_(clip_factor(norm, self.clip)).add_(received_V)
        if unit_V is not None:
            sent_V.add_(unit_V, alpha=self.share_std)
        return Sent(sent_V.to(values_V.dtype), norm)


class Sent(NamedTuple):
    """The weights that enter the sum, and the L2 norm of the change before it was clipped."""

    values_V: torch.Tensor
    norm: float


def clip_factor(norm: float, largest: float) -> float:
    """What a vector of that norm is multiplied by, so that its norm is the largest at most; 1 of a zero vector."""
    return largest / norm if norm > largest else 1.0
