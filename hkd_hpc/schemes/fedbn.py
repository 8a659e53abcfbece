"""FedBN: Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

L = cross-entropy. All layers but BatchNorm are averaged (its Algorithm 1); scale, shift and running statistics of
BatchNorm stay with their client k, also while it rests:

    w_k = (the others' and its own mean weights, its own BatchNorm)
"""

from __future__ import annotations

from hkd_hpc.common.lazy import torch
from hkd_hpc.schemes.base import About, Scheme


class FedBN(Scheme):
    """FedAvg but for BatchNorm; in a network without it, it is FedAvg."""

    about = About(
        remark="BatchNorm stays with each client; global has the mean of all clients' BatchNorm, which no client gets",
    )
    cuda_graph_safe = True

    def personal(self, net):
        return [
            f"{place}.{name}"
            for place, layer in net.named_modules()
            if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)
            for name in layer.state_dict()
        ]
