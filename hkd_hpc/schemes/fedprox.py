"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

L = cross-entropy + (mu / 2) ||w - w_received||^2 over the trainable parameters (its Eq. 2), once (the FedHKD authors'
code multiplies by its weight twice: an effective mu of .01). Adam rescales the proximal gradient like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.common.settings import setting
from hkd_hpc.schemes.base import About, Scheme, SchemeSettings
from hkd_hpc.schemes.proximal import pull


@dataclass(frozen=True)
class FedProxSettings(SchemeSettings):
    """Default: the FedHKD paper's appendix. mu = 0 is FedAvg."""

    name: str = setting("fedprox", "the scheme")
    mu: float = setting(0.5, "weight of the proximal term", low=0, high=1e6)


class FedProx(Scheme):
    """A pull towards the received weights."""

    Settings = FedProxSettings
    terms = ("cross_entropy", "proximal")
    # the grid of its authors' code; .5: the FedHKD paper
    about = About(tunes={"mu": (0.001, 0.01, 0.1, 0.5, 1.0)}, slowdown=(1.05, 1.18), models_held=2)
    cuda_graph_safe = True

    def loss(self, client, batch):
        _, logits_BC = client.net(batch.x_BCHW)
        return {"cross_entropy": self.cross_entropy(logits_BC, batch.y_B), "proximal": pull(client, self.settings.mu)}
