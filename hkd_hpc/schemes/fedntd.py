"""FedNTD: Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS
2022.

L = cross-entropy + beta * mean_B sum_{c != y} q_g(c) log( q_g(c) / q_l(c) )

q_g, q_l: softmax over the classes other than the true one, of the received and of the own logits / tau. The received
model is frozen and in eval mode, so its logits are computed once a round; with augmentation (train.augment) anew for
each batch, of the images that the model gets too.
"""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.common.lazy import F, torch
from hkd_hpc.common.settings import setting
from hkd_hpc.schemes.base import About, Scheme, SchemeSettings


@dataclass(frozen=True)
class FedNTDSettings(SchemeSettings):
    """Defaults: its paper and code on CIFAR10. beta = 0 is FedAvg."""

    name: str = setting("fedntd", "the scheme")
    beta: float = setting(1.0, "weight of the distillation", low=0, high=1e6)
    tau: float = setting(1.0, "temperature of both predictions", above=0, high=1e6)


class FedNTD(Scheme):
    """Keeps what the received model says of the classes that an image does not show."""

    Settings = FedNTDSettings
    terms = ("cross_entropy", "not_true")
    about = About(tunes={"beta": (0.1, 0.3, 1.0, 3.0, 10.0)}, models_held=2)
    cuda_graph_safe = True

    def begin(self, client):
        if self.settings.beta and not self.info.augments:
            _, client.cache["received_NC"] = client.predict_train()

    def loss(self, client, batch):
        _, logits_BC = client.net(batch.x_BCHW)
        terms = {"cross_entropy": self.cross_entropy(logits_BC, batch.y_B)}
        terms["not_true"] = (
            self._distillation(logits_BC, self._received(client, batch), batch.y_B)
            if self.settings.beta
            else torch.zeros((), device=logits_BC.device)
        )
        return terms

    def _received(self, client, batch):
        """The batch's logits by the received model."""
        if self.info.augments:
            return client.predict_with(client.received_V, batch.x_BCHW)[1]
        return client.cache["received_NC"][batch.index_B]

    def _distillation(self, logits_BC, received_BC, y_B):
        own, received = (F.log_softmax(not_true(z, y_B) / self.settings.tau, 1) for z in (logits_BC, received_BC))
        return self.settings.beta * F.kl_div(own, received, reduction="batchmean", log_target=True)


def not_true(logits_BC, y_B):
    """(B, C - 1): the logits of the other classes, in their order."""
    other_K = torch.arange(logits_BC.shape[1] - 1, device=y_B.device)
    return logits_BC.gather(1, other_K + (other_K >= y_B[:, None]))
