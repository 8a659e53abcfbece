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
from hkd_hpc.schemes import contract
from hkd_hpc.schemes.base import Scheme


def shared_knowledge(scheme: Scheme, accepted: np.ndarray) -> SharedKnowledge:
    """Of the accepted reports of a round; without anything where the scheme shares nothing by class.

    Args:
        scheme: says which classes were shared, and with how much noise.
        accepted: the records that entered the average (worker.report_type).

    Raises:
        RunError: The scheme does not keep its contract.
    """
    reports = payload.tensors_of(accepted)
    shared_MC = scheme.shared_classes(reports)
    contract.check_shared_classes(scheme, shared_MC, len(accepted))
    if shared_MC is None:
        return SharedKnowledge()
    std_by_name = scheme.noise_std(reports)
    contract.check_noise_std(scheme, std_by_name, len(accepted))
    return SharedKnowledge(shared_MC.numpy(), *noise_and_signal(reports, shared_MC, std_by_name))


def noise_and_signal(
    reports: Mapping[str, torch.Tensor], shared_MC: torch.Tensor, std_by_name: Mapping[str, torch.Tensor]
) -> tuple[float, float] | tuple[()]:
    """(mean standard deviation of the noise, root mean square of the signal): NaN where no class was shared, nothing
    without noise.

    All shared classes of all clients count alike. What was sent is signal + noise, so that the mean of sent^2 - std^2
    estimates signal^2; where that is negative, it is 0.
    """
    if not std_by_name:
        return ()
    if not shared_MC.any():
        return NAN, NAN
    [(name, std_MC)] = std_by_name.items()
    std_K = std_MC[shared_MC].double()
    sent_K = reports[name][shared_MC].double().square().mean(1)
    return float(std_K.mean()), math.sqrt(max(0.0, float((sent_K - std_K.square()).mean())))
