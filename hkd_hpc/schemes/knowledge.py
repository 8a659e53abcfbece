"""Per-class knowledge of one client: class means, which classes are shared, noise; and distances of a client from the
knowledge of all. How features are clipped, and how large the noise is: privacy/mechanism.py.

"Code" below is what the FedHKD authors published: S at the submission, H in October 2023 and since.
Shape letters: N images, C classes, D latent size, X any last axis, K rows of any kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkd_hpc.common.lazy import F, torch
from hkd_hpc.models.precision import real
from hkd_hpc.privacy import mechanism
from hkd_hpc.privacy.settings import RECEIVED, PrivacySettings

if TYPE_CHECKING:
    from hkd_hpc.client import Client

DISTANCES = ("paper", "squared", "mse")
SOFT_DISTANCES = (*DISTANCES, "kl", "kl_wrong_sign")
NU_RULES = ("absolute", "relative")
NOISES = ("paper", "off", "code")


def outputs(client: Client, extractor: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(feature_ND, logits_NC) of a client's training images, by its trained model or by the one that it received."""
    return client.predict_train(client.received_V if extractor == RECEIVED else None)


def class_counts(y_N: torch.Tensor, classes: int) -> torch.Tensor:
    """count_C float32: images of each class."""
    return real(F.one_hot(y_N, classes).to(torch.float64).sum(0))


def class_means(value_NX: torch.Tensor, y_N: torch.Tensor, count_C: torch.Tensor) -> torch.Tensor:
    """mean_CX float32: per class the sum over its images by this count, its own or one with noise, or by 1 if that is
    less.
    """
    one_hot_NC = F.one_hot(y_N, len(count_C)).to(torch.float64)
    return real((one_hot_NC.T @ value_NX.to(torch.float64)) / count_C.double().clamp(min=1.0)[:, None])


def shared_classes(count_C: torch.Tensor, nu: float, rule: str = "absolute", min_count: int = 1) -> torch.Tensor:
    """Bool per class: N_j >= min_count, and N_j / N >= nu (paper, 3.2: clients below nu may not share the class).

    relative: N_j / N >= nu / C instead, since no share of 100 classes is near the paper's .25. min_count is at least 1.
    """
    share = nu / len(count_C) if rule == "relative" else nu
    return (count_C >= min_count) & (count_C.double() >= share * count_C.double().sum() - 1e-9)


def released_counts(client: Client, count_C: torch.Tensor, privacy: PrivacySettings) -> torch.Tensor:
    """count_C with the noise of privacy.counts, in whole numbers from 0 on."""
    std = mechanism.std_of_counts(privacy)
    return noisy(client, "counts", count_C[:, None], torch.full_like(count_C, std))[:, 0].round().clamp(min=0.0)


def noisy(
    client: Client, quantity: str, mean_CX: torch.Tensor, std_C: torch.Tensor, one_draw: bool = False
) -> torch.Tensor:
    """mean_CX with the client's noise for a quantity, which no other client, round or quantity has; std_C zero: none.

    Drawn for all classes, so that a class's draw does not depend on which others are shared. one_draw: the same for
    all of them (code). Scaled and added in float64, rounded once: from each mean only some float32 numbers are reached
    by float32 noise, so that one report would tell two means apart, whatever std_C.
    """
    if not std_C.any():
        return mean_CX
    unit_CX = client.normal(quantity, (1 if one_draw else len(mean_CX), mean_CX.shape[1]))
    noise_CX = torch.from_numpy(unit_CX).to(mean_CX.device) * std_C.double()[:, None]
    return real(mean_CX.double() + noise_CX)


def distance(form: str, value_KX: torch.Tensor, target_KX: torch.Tensor) -> torch.Tensor:
    """(K,): paper: ||v - t||_2, whose gradient at 0 is 0; squared: ||v - t||_2^2; mse: the same divided by X (code)."""
    difference_KX = value_KX - target_KX
    if form == "paper":
        return torch.linalg.vector_norm(difference_KX, dim=1)
    return difference_KX.square().sum(1) if form == "squared" else difference_KX.square().mean(1)


def soft_distance(form: str, logits_KC: torch.Tensor, target_KC: torch.Tensor) -> torch.Tensor:
    """(K,): how far softmax(logits) is from the target distributions; the forms of `distance`, and

    kl: KL(target || softmax) / C, the elementwise mean of code H; C times smaller than the divergence ("batchmean"). A
    target that noise made negative counts as 0, here and below.
    kl_wrong_sign: a bug kept for reproduction. Code S gave probabilities to a function that expects their logarithms
    and put a minus before it: mean_c t_c (p_c - log t_c). Minimising it LOWERS the agreement sum_c t_c p_c.
    """
    if form == "kl":
        return F.kl_div(F.log_softmax(logits_KC, dim=1), target_KC.clamp(min=0.0), reduction="none").mean(1)
    if form == "kl_wrong_sign":
        return -F.kl_div(F.softmax(logits_KC, dim=1), target_KC.clamp(min=0.0), reduction="none").mean(1)
    return distance(form, F.softmax(logits_KC, dim=1), target_KC)
