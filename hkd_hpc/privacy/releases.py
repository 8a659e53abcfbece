"""What leaves clients in a round, by kind, as mu = L2 sensitivity / standard deviation of the noise (accounting.py).

Neighbouring data differ as privacy.adjacency says: in one image of a client, replaced by one of the same label (counts
and presence of classes then do not differ), in one image and its label, or in all data of a client. Two figures of each
release:

    fixed  the extractor does not depend on anybody's data, and the counts of the classes do not differ, or are noisy:
           one image moves the mean of one class of N_j images by 2 C / N_j at most. The paper's kind of claim.
    whole  no assumption. The extractor was trained on the image, so that it moves ALL features: the mean of each shared
           class by up to 2 C. Only of a model that is private itself (`is_private`) the figure is the fixed one.

Sums of a class and their noise are divided by its count. Where that is not public, it has to be noisy itself
(privacy.counts): else the noise of two neighbours differs, and no mu holds. Divided by the same noisy counts, the sums
of two neighbours are farthest apart where an image keeps its label, 2 C: of one that changes it the sum of one class
loses a feature of norm C at most and another's gains one, sqrt(C^2 + C^2). Sums of predictions: sqrt(2) either way.
Shape letters: M clients, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from hkd_hpc.privacy.mechanism import SENSITIVITY_OF_PREDICTIONS, Mechanism, l2_sensitivity, std_of_predictions
from hkd_hpc.privacy.settings import RECEIVED, PrivacySettings

FEATURES, PREDICTIONS, COUNTS, PRESENCE, WEIGHTS, STATISTICS, REPORT = KINDS = (
    "features",
    "predictions",
    "counts",
    "presence",
    "weights",
    "statistics",
    "report",  # of a scheme that does not say what is in it
)
PUBLIC = "none: labels are public"
NO_NOISE = "no noise"


@dataclass(frozen=True)
class Release:
    """One kind of what M clients release in a round.

    Attributes:
        fixed_M: mu for a fixed extractor.
        whole_M: mu without that assumption.
        told: clip and noise in words.
        mend: the settings that give a kind without a bound one; empty where it has one, or none would.
    """

    fixed_M: np.ndarray
    whole_M: np.ndarray
    told: str
    mend: str = ""


Releases = Mapping[str, Release]  # by kind


def same(clients: int, mu: float, told: str, mend: str = "") -> Release:
    """Of all clients alike, whatever the extractor."""
    return Release(np.full(clients, mu), np.full(clients, mu), told, mend)


def unnoised(clients: int, mend: str = "", told: str = NO_NOISE) -> Release:
    """What leaves as it is."""
    return same(clients, math.inf, told, mend)


def class_means(
    settings: PrivacySettings, mu: float, count_MC: np.ndarray, is_private: bool, told: str, mend: str = ""
) -> Release:
    """Means over the images of each class, with independent noise of standard deviation ~ 1 / N_j.

    Args:
        settings: adjacency and extractor.
        mu: of one class, when one of its images is replaced: 2 C / N_j over the standard deviation, so that N_j
            cancels; inf without noise or clip.
        count_MC: images of the classes that are shared, 0 of others.
        is_private: whether the weights that clients receive are private themselves.
        told, mend: as of Release.
    """
    fixed_M = np.where((count_MC > 0).any(1), mu, 0.0)
    if settings.adjacency == "client":  # all classes move, by any number of images
        return Release(_times(fixed_M, math.inf), _times(fixed_M, math.inf), told)
    if settings.adjacency == "label" and not settings.counts:
        fixed_M = _times(fixed_M, math.inf)  # the counts of two classes differ, and so does the noise that they divide
    mend = mend or ("" if settings.adjacency == "image" or settings.counts else "privacy.counts=1")
    mend = mend or ("" if settings.extractor == RECEIVED else "privacy.extractor=received")
    return Release(fixed_M, _times(fixed_M, _spread(settings, count_MC, is_private)), told, mend)


def _spread(settings: PrivacySettings, count_MC: np.ndarray, is_private: bool) -> float | np.ndarray:
    """(M,) how many times the figure of a fixed extractor the whole one is."""
    if settings.extractor == RECEIVED and is_private:
        return 1.0
    return math.inf if settings.adjacency == "label" else np.sqrt((count_MC.astype(float) ** 2).sum(1))


def _times(mu_M: np.ndarray, factor: float | np.ndarray) -> np.ndarray:
    """0 stays 0, also times infinity."""
    return np.where(mu_M > 0, np.where(mu_M > 0, mu_M, 1) * factor, 0.0)


def knowledge(
    settings: PrivacySettings,
    features: Mechanism,
    kinds: Collection[str],
    latent: int,
    count_MC: np.ndarray,
    is_private: bool,
) -> dict[str, Release]:
    """What a client reports by class by the rules of section `privacy`.

    Args:
        settings: of the section.
        features: what is done to features.
        kinds: those of features, predictions and counts that the scheme reports.
        latent: D.
        count_MC: images of each client that are trained on; a client shares these classes at most.
        is_private: as of class_means.
    """
    clients, found = len(count_MC), {}
    if FEATURES in kinds:
        found[FEATURES] = _features(settings, features, latent, count_MC, is_private)
    if PREDICTIONS in kinds:
        found[PREDICTIONS] = _predictions(settings, count_MC, is_private)
    if COUNTS in kinds:
        found |= {COUNTS: counts(settings, clients), PRESENCE: presence(settings, clients)}
    return found


def _features(
    settings: PrivacySettings, features: Mechanism, latent: int, count_MC: np.ndarray, is_private: bool
) -> Release:
    std = features.std(1.0, latent)
    holds = std > 0 and features.noise != "code"  # one draw for all classes: their differences have none
    mu = l2_sensitivity(features.clip, features.bound, latent) / std if holds else math.inf
    return class_means(settings, mu, count_MC, is_private, told_of(features), mend_of(settings, features, holds))


def told_of(features: Mechanism) -> str:
    """Clip and noise in words: coordinates to +-3, noise multiplier 7"""
    clip = {"off": "no clip", "box": f"coordinates to +-{features.bound:g}", "l2": f"norm to {features.bound:g}"}
    noise = f"noise multiplier {features.multiplier:.4g}" if features.multiplier else NO_NOISE
    noise = {"off": NO_NOISE, "code": "one draw of noise for all classes"}.get(features.noise, noise)
    return noise if (features.clip, noise) == ("off", NO_NOISE) else f"{clip[features.clip]}, {noise}"


def mend_of(settings: PrivacySettings, features: Mechanism, has_noise: bool) -> str:
    """What gives features without noise or clip both."""
    if not has_noise:
        return "privacy.mechanism=vector"
    section = "scheme" if settings.mechanism == "scheme" else "privacy"
    return f"{section}.clip=l2" if features.clip == "off" else ""


def _predictions(settings: PrivacySettings, count_MC: np.ndarray, is_private: bool) -> Release:
    std = std_of_predictions(settings, 1.0)
    if not std:
        return class_means(settings, math.inf, count_MC, is_private, NO_NOISE, "privacy.predictions=true")
    told = f"sums to 1, noise multiplier {settings.multiplier:.4g}"
    return class_means(settings, SENSITIVITY_OF_PREDICTIONS / std, count_MC, is_private, told)


def counts(settings: PrivacySettings, clients: int) -> Release:
    """Images by class: L2 sensitivity sqrt(2) when a label changes, the standard deviation counts sqrt(2)."""
    if settings.adjacency == "image":
        return same(clients, 0.0, PUBLIC)
    if settings.adjacency == "client":
        return unnoised(clients, "", "no bound of what a client may have")
    if not settings.counts:
        return unnoised(clients, "privacy.counts=1")
    return same(clients, 1 / settings.counts, f"noise multiplier {settings.counts:.4g}")


def presence(settings: PrivacySettings, clients: int) -> Release:
    """Which classes are shared: follows from the counts, and so costs nothing where those are noisy."""
    of_counts = counts(settings, clients)
    if math.isinf(of_counts.whole_M.max(initial=0)):
        return of_counts
    return same(clients, 0.0, of_counts.told if settings.adjacency == "image" else "follows from the noisy counts")


def weights_mu(settings: PrivacySettings, delivered: int, cohort: int) -> float:
    """Of a client's weights in the sum of a round: 2 S over the noise that was really in it; inf without.

    Each of the cohort adds its share, std update_multiplier 2 S / sqrt(cohort); the noise of who did not deliver is
    missing. The same for one image as for all of a client's: only the clip bounds the change.

    Args:
        settings: update_clip S and update_multiplier.
        delivered: clients whose weights are in the sum.
        cohort: clients that were drawn for the round.
    """
    if not (settings.update_clip and settings.update_multiplier and delivered):
        return math.inf
    return math.sqrt(cohort / delivered) / settings.update_multiplier


def weights(settings: PrivacySettings, clients: int, delivered: int, cohort: int) -> Release:
    """The floats of the model, in the sum over the clients that delivered."""
    mu = weights_mu(settings, delivered, cohort)
    if math.isinf(mu):
        return unnoised(clients, "privacy.update_clip=1 privacy.update_multiplier=1 fed.average=uniform")
    clip = f"L2 norm of a change to {settings.update_clip:g}"
    return same(clients, mu, f"{clip}, noise multiplier {settings.update_multiplier:.4g} of the sum")


def at_home(clients: int) -> Release:
    """Weights that no client goes on from: their mean is summed for the test of the global model alone."""
    return unnoised(clients, "scheme.weights=average", f"{NO_NOISE}, for the test of their mean alone")


def statistics(clients: int) -> Release:
    """Running statistics and integer buffers of a model that has them: they get no noise."""
    return unnoised(clients, "model.norm=group")


def without_bound(found: Releases, mend: str) -> dict[str, Release]:
    """The same of data in which one image of a client is several, or moves what others are: only what does not differ
    at all keeps its mu.

    Args:
        found: by kind.
        mend: the setting with which an image is one.
    """
    nowhere = lambda mu_M: _times(mu_M, math.inf)
    return {
        kind: replace(
            each, fixed_M=nowhere(each.fixed_M), whole_M=nowhere(each.whole_M), mend=f"{mend} {each.mend}".strip()
        )
        for kind, each in found.items()
    }


def has_noise(releases: Releases) -> bool:
    """Whether anything is clipped or noisy."""
    return any(each.told not in (NO_NOISE, PUBLIC) for each in releases.values())
