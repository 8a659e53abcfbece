"""FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

Cross-entropy on the client, weights averaged by |D_i| / M: the defaults of the protocol, nothing else.
"""

from __future__ import annotations

from hkd_hpc.schemes.base import Scheme


class FedAvg(Scheme):
    """The reference that every other scheme is compared with."""

    cuda_graph_safe = True
