"""What the record of a round says of the knowledge that clients shared by class. Rank 0 only; no result depends on it.

Shape letters as in schemes/base.py: M clients whose reports were accepted, C classes, K pairs of them that were
shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from hkd_hpc import payload
from hkd_hpc.analysis.metrics import NAN, SharedKnowledge
from hkd_hpc.privacy.mechanism import of_features
from hkd_hpc.schemes.base import Scheme


def shared_knowledge(scheme: Scheme, accepted: np.ndarray) -> SharedKnowledge:
    """Of the accepted reports of a round; without anything where they do not say which classes they share.

    Args:
        scheme: whose reports they are.
        accepted: the records that entered the average (worker.report_type).
    """
    if scheme.report_shapes().get("count_C") != (scheme.info.classes,):
        return SharedKnowledge()
    reports = payload.tensors_of(accepted)
    shared_MC = reports["count_C"] > 0
    return SharedKnowledge(shared_MC.numpy(), *noise_and_signal(scheme, reports, shared_MC))


def noise_and_signal(
    scheme: Scheme, reports: Mapping[str, torch.Tensor], shared_MC: torch.Tensor
) -> tuple[float, float] | tuple[()]:
    """Of mean features (predictions are in another unit): (mean standard deviation of the noise, root mean square of
    the signal): NaN where no class was shared, nothing without noise.

    All shared classes of all clients count alike. What was sent is signal + noise, so that the mean of sent^2 - std^2
    estimates signal^2; where that is negative, it is 0.
    """
    mechanism = of_features(scheme.info.privacy, scheme.settings.own_mechanism)
    has_noise = "features" in scheme.protects and mechanism.std(1.0, scheme.info.latent) > 0
    if not has_noise or "feature_CD" not in reports:
        return ()
    if not shared_MC.any():
        return NAN, NAN
    std_K = mechanism.std(reports["count_C"], scheme.info.latent)[shared_MC].double()
    sent_K = reports["feature_CD"][shared_MC].double().square().mean(1)
    return float(std_K.mean()), math.sqrt(max(0.0, float((sent_K - std_K.square()).mean())))
