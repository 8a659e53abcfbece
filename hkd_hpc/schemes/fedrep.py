"""FedRep: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021.

L = cross-entropy, h_k(phi(x)) with a shared body phi and a head h_k that stays with its client k. In a round (its
Algorithm 1) the client trains h_k for some epochs with the received phi frozen, then phi with h_k frozen; the phis are
averaged:

    h_k <- argmin_h L(phi, h; D_k),    phi_k <- argmin_phi L(phi, h_k; D_k),    phi <- sum_k |D_k| phi_k / sum_k |D_k|

Body is all before the classifier, BatchNorm included, whose running statistics move in both parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.common.lazy import torch
from hkd_hpc.common.settings import setting
from hkd_hpc.schemes.base import About, Phase, Scheme, SchemeSettings


@dataclass(frozen=True)
class FedRepSettings(SchemeSettings):
    """Default: its paper."""

    name: str = setting("fedrep", "the scheme")
    head_epochs: int = setting(10, "local epochs of the head, before the train.epochs of the body", low=1, high=10_000)

    def local_epochs(self, epochs):
        return self.head_epochs + epochs


class FedRep(Scheme):
    """A head of one's own on a common representation."""

    Settings = FedRepSettings
    about = About(
        tunes={"head_epochs": (1, 2, 5, 10, 15)},
        remark="the head stays with each client; global has the mean of all heads, as in its authors' code, which no "
        "client gets",
    )
    cuda_graph_safe = True

    def personal(self, net):
        return [f"classifier.{name}" for name in net.classifier.state_dict()]

    def phases(self, client, epochs):
        head = self.personal(client.net)
        body = [name for name, _ in client.net.named_parameters() if name not in head]
        return [Phase(self.settings.head_epochs, "head", frozen=body), Phase(epochs, "body", frozen=head)]

    def loss(self, client, batch):
        with torch.set_grad_enabled(client.phase == "body"):
            feature_BD, logits_BC = client.net(batch.x_BCHW)
        if client.phase == "head":  # no need to go back through the body
            logits_BC = client.net.classifier(feature_BD)
        return {"cross_entropy": self.cross_entropy(logits_BC, batch.y_B)}
