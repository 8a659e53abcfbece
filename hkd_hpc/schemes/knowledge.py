"""Per-class knowledge of one client: clipped features, class means, which classes are shared, noise; and distances of a
client from the knowledge of all.

"Code" below is what the FedHKD authors published: S at the submission, H in October 2023 and since.
Shape letters: N images, C classes, D latent size, X any last axis, K rows of any kind.
"""

from __future__ import annotations

import numpy as np

from hkd_hpc.lazy import F, torch
from hkd_hpc.models.precision import real

DISTANCES = ("paper", "squared", "mse")
SOFT_DISTANCES = (*DISTANCES, "kl", "kl_wrong_sign")
CLIPS = ("off", "box", "l2")
NU_RULES = ("absolute", "relative")
NOISES = ("paper", "off", "code")
CODE_STD = 2.0


def clip_features(rule: str, feature_ND: torch.Tensor, zeta: float) -> torch.Tensor:
    """box: coordinates into [-zeta, zeta], the bound that the paper assumes (3.4); l2: the norm to zeta at most."""
    if rule == "off":
        return feature_ND
    if rule == "box":
        return feature_ND.clamp(-zeta, zeta)
    norm_N1 = torch.linalg.vector_norm(feature_ND, dim=1, keepdim=True)
    return feature_ND * (zeta / norm_N1.clamp(min=zeta))


def class_means(value_NX: torch.Tensor, y_N: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean_CX float32, count_C float32): per class the mean over its images; zeros where there are none."""
    one_hot_NC = F.one_hot(y_N, classes).to(torch.float64)
    count_C = one_hot_NC.sum(0)
    mean_CX = (one_hot_NC.T @ value_NX.to(torch.float64)) / count_C.clamp(min=1.0)[:, None]
    return real(mean_CX), real(count_C)


def shared_classes(count_C: torch.Tensor, nu: float, rule: str = "absolute", min_count: int = 1) -> torch.Tensor:
    """Bool per class: N_j >= min_count, and N_j / N >= nu (paper, 3.2: clients below nu may not share the class).

    relative: N_j / N >= nu / C instead, since no share of 100 classes is near the paper's .25. min_count is at least 1.
    """
    share = nu / len(count_C) if rule == "relative" else nu
    return (count_C >= min_count) & (count_C.double() >= share * count_C.double().sum() - 1e-9)


def feature_noise(
    kind: str, count_C: torch.Tensor, latent: int, zeta: float, sigma: float, random: np.random.Generator
) -> torch.Tensor:
    """(C, D): independent for all classes; code: ONE draw for all of them."""
    std_C = noise_std(kind, count_C, zeta, sigma)
    if kind == "code":
        return gaussian_noise(std_C[:1], latent, random).expand(len(count_C), latent)
    return gaussian_noise(std_C, latent, random)


def noise_std(kind: str, count_C: torch.Tensor, zeta: float, sigma: float) -> torch.Tensor:
    """Standard deviation per class; paper (3.4): sigma times the sensitivity 2 zeta / N_j of one coordinate; off: 0;
    code: 2.
    """
    if kind == "paper":
        return 2.0 * zeta * sigma / count_C.clamp(min=1.0)
    return torch.full_like(count_C, CODE_STD if kind == "code" else 0.0)


def gaussian_noise(std_C: torch.Tensor, latent: int, random: np.random.Generator) -> torch.Tensor:
    """Independent N(0, std_j^2) for every class j and coordinate: (C, D) float32 on the device of std_C.

    Drawn for all classes, so that a class's draw does not depend on which others are shared.
    """
    unit_CD = random.standard_normal((len(std_C), latent)).astype(np.float32)
    return torch.from_numpy(unit_CD).to(std_C) * std_C[:, None]


def distance(form: str, value_KX: torch.Tensor, target_KX: torch.Tensor) -> torch.Tensor:
    """(K,): paper: ||v - t||_2, whose gradient at 0 is 0; squared: ||v - t||_2^2; mse: the same divided by X (code)."""
    difference_KX = value_KX - target_KX
    if form == "paper":
        return torch.linalg.vector_norm(difference_KX, dim=1)
    return difference_KX.square().sum(1) if form == "squared" else difference_KX.square().mean(1)


def soft_distance(form: str, logits_KC: torch.Tensor, target_KC: torch.Tensor) -> torch.Tensor:
    """(K,): how far softmax(logits) is from the target distributions; the forms of `distance`, and

    kl: KL(target || softmax) / C, the elementwise mean of code H; C times smaller than the divergence ("batchmean").
    kl_wrong_sign: a bug kept for reproduction. Code S gave probabilities to a function that expects their logarithms
    and put a minus before it: mean_c t_c (p_c - log t_c). Minimising it LOWERS the agreement sum_c t_c p_c.
    """
    if form == "kl":
        return F.kl_div(F.log_softmax(logits_KC, dim=1), target_KC, reduction="none").mean(1)
    if form == "kl_wrong_sign":
        return -F.kl_div(F.softmax(logits_KC, dim=1), target_KC, reduction="none").mean(1)
    return distance(form, F.softmax(logits_KC, dim=1), target_KC)
