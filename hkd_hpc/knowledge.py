"""Per-class knowledge of one client: counts, mean features, mean soft predictions, and the paper's noise on features.

Shape letters: N images, C classes, D latent size, X any last axis.
"""
from __future__ import annotations

import numpy as np

from hkd_hpc.lazy import F, torch


def class_means(value_NX: torch.Tensor, y_N: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean_CX float32, count_C float32): per class the mean over its images; zeros where there are none."""
    one_hot_NC = F.one_hot(y_N, classes).to(torch.float64)
    count_C = one_hot_NC.sum(0)
    mean_CX = (one_hot_NC.T @ value_NX.to(torch.float64)) / count_C.clamp(min=1.0)[:, None]
    return mean_CX.float(), count_C.float()


def shared_classes(count_C: torch.Tensor, nu: float) -> torch.Tensor:
    """Bool per class: N_j / N >= nu and N_j > 0 (paper, 3.2: clients below nu may not share the class)."""
    return (count_C > 0) & (count_C.double() >= nu * count_C.double().sum() - 1e-9)


def noise_std(count_C: torch.Tensor, zeta: float, sigma: float) -> torch.Tensor:
    """Standard deviation per class: sigma times the sensitivity 2 zeta / N_j of one coordinate (paper, 3.4)."""
    return 2.0 * zeta * sigma / count_C.clamp(min=1.0)


def gaussian_noise(std_C: torch.Tensor, latent: int, random: np.random.Generator) -> torch.Tensor:
    """Independent N(0, std_j^2) for every class j and coordinate: (C, D) float32 on the device of std_C.

    Drawn for all classes, so that a class's draw does not depend on which others are shared.
    """
    unit_CD = random.standard_normal((len(std_C), latent)).astype(np.float32)
    return torch.from_numpy(unit_CD).to(std_C.device) * std_C[:, None]
