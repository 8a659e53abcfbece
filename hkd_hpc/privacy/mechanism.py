"""What is done to the knowledge of a class before it leaves a client: each image's feature is clipped, then the mean
over the class gets Gaussian noise.

    sensitivity of a class's sum, to one image replaced by another of the class:
        a coordinate, box clip       2 zeta                  a mean prediction, L2        sqrt(2)
        the vector, box clip, L2     2 zeta sqrt(D)          counts, of another class     sqrt(2)
        the vector, ball, L2         2 C
    standard deviation               multiplier * sensitivity / count

Shape letters: N images, C classes, D latent size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from hkd_hpc.common.lazy import torch
from hkd_hpc.privacy.settings import PrivacySettings

CODE_STD = 2.0  # of the noise in the FedHKD authors' code, whatever the count
SENSITIVITY_OF_PREDICTIONS = math.sqrt(2)  # L2, of a sum of distributions: one of them moves by sqrt(2) at most
SENSITIVITY_OF_COUNTS = math.sqrt(2)  # L2: one class loses an image, another gains it
OWN_CLIP = {"off": "off", "paper": "box", "vector": "l2"}

Count = TypeVar("Count", float, "torch.Tensor")


def std(mechanism: str, sensitivity: float, multiplier: float, count: Count) -> Count:
    """The standard deviation of a mechanism's noise on a mean.

    Args:
        mechanism: paper, vector: multiplier * sensitivity / count; off: 0; code: 2.
        sensitivity: of the sum, in the unit of what is summed; for `vector` in L2, for `paper` of one coordinate.
        multiplier: standard deviation / sensitivity.
        count: what the sum is divided by, 1 or more; 1: the noise of the sum itself. Of any shape.

    Returns:
        In the unit of what is summed, of the shape of `count`.
    """
    if mechanism in ("off", "code"):
        return 0.0 * count + (CODE_STD if mechanism == "code" else 0.0)
    return sensitivity * multiplier / count


def l2_sensitivity(clip: str, bound: float, latent: int) -> float:
    """How far one image, replaced by any other, moves the sum of the clipped features of its class; inf: no bound."""
    return {"off": math.inf, "box": 2 * bound * math.sqrt(latent), "l2": 2 * bound}[clip]


def clip_features(rule: str, feature_ND: torch.Tensor, bound: float) -> torch.Tensor:
    """box: coordinates into [-bound, bound], which the paper assumes (3.4); l2: the norm to `bound` at most."""
    if rule == "off":
        return feature_ND
    if rule == "box":
        return feature_ND.clamp(-bound, bound)
    norm_N1 = torch.linalg.vector_norm(feature_ND, dim=1, keepdim=True)
    return feature_ND * (bound / norm_N1.clamp(min=bound))


@dataclass(frozen=True)
class Mechanism:
    """What a client does to its features.

    Attributes:
        noise: off, paper, vector, or code: one draw for all classes.
        clip: of each image's feature: off, box, l2.
        bound: of its coordinates, or of its L2 norm.
        multiplier: of the noise.
    """

    noise: str = "off"
    clip: str = "off"
    bound: float = 3.0
    multiplier: float = 0.0

    def clipped(self, feature_ND: torch.Tensor) -> torch.Tensor:
        """Each image's feature, clipped."""
        return clip_features(self.clip, feature_ND, self.bound)

    def std(self, count: Count, latent: int) -> Count:
        """Of the noise on the mean feature of classes with these counts; of a class without images as with one.

        Args:
            count: images of a class, of any shape.
            latent: D.
        """
        sensitivity = 2.0 * self.bound
        if self.noise == "vector" and self.clip == "box":
            sensitivity = l2_sensitivity("box", self.bound, latent)
        return std(self.noise, sensitivity, self.multiplier, at_least_one(count))


def of_features(privacy: PrivacySettings, own: Mechanism) -> Mechanism:
    """What is done to features: privacy.mechanism, or what the scheme's own settings say."""
    if privacy.mechanism == "scheme":
        return own
    clip = privacy.clip or OWN_CLIP[privacy.mechanism]
    return Mechanism(privacy.mechanism, clip, privacy.bound, privacy.multiplier)


def std_of_predictions(privacy: PrivacySettings, count: Count) -> Count:
    """Of the noise on the mean soft prediction of classes with these counts."""
    noise = "vector" if privacy.predictions else "off"
    return std(noise, SENSITIVITY_OF_PREDICTIONS, privacy.multiplier, at_least_one(count))


def std_of_counts(privacy: PrivacySettings) -> float:
    """Of the noise on each count, before it is rounded."""
    return std("vector", SENSITIVITY_OF_COUNTS, privacy.counts, 1.0)


def at_least_one(count: Count) -> Count:
    """What a class's sum is divided by."""
    return max(count, 1.0) if isinstance(count, float) else count.clamp(min=1.0)
