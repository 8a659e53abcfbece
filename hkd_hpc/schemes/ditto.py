"""Ditto: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021.

Each client k trains the global model w as FedAvg does, and beside it a personal model v_k (its Algorithm 1):

    w_k = argmin_w F_k(w),    v_k <- argmin_v F_k(v) + (lam / 2) ||v - w_received||^2

F_k: cross-entropy. w_k travels and is averaged, v_k stays and is what the client tests. v_k begins as the first weights
that the client receives.
"""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.common.lazy import torch
from hkd_hpc.common.settings import setting
from hkd_hpc.schemes.base import About, Phase, Scheme, SchemeSettings
from hkd_hpc.schemes.proximal import pull


@dataclass(frozen=True)
class DittoSettings(SchemeSettings):
    """Default: its paper."""

    name: str = setting("ditto", "the scheme")
    lam: float = setting(1.0, "weight of the distance of the personal model to the received one", low=0, high=1e6)

    def local_epochs(self, epochs):
        return 2 * epochs


class Ditto(Scheme):
    """Two models a client, as many epochs for each; the global one is FedAvg's, bit for bit, unless a personal model
    diverges, whose loss and test have the client's update rejected."""

    Settings = DittoSettings
    terms = ("cross_entropy", "proximal")
    # its paper's grids
    about = About(
        tunes={"lam": (0.05, 0.1, 0.2, 1.0, 2.0)},
        models_held=3,
        remark="local is the clients' personal models; global is FedAvg's model",
    )
    cuda_graph_safe = True

    def client_state_shapes(self):
        return {"personal": (self.info.values,)}

    def phases(self, client, epochs):
        return [Phase(epochs, "global"), Phase(epochs, "personal", own_model="personal")]

    def loss(self, client, batch):
        _, logits_BC = client.net(batch.x_BCHW)
        is_personal = client.phase == "personal"
        return {
            "cross_entropy": self.cross_entropy(logits_BC, batch.y_B),
            "proximal": pull(client, self.settings.lam) if is_personal else torch.zeros((), device=logits_BC.device),
        }
