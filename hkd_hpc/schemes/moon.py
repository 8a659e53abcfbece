"""MOON: Li et al., Model-Contrastive Federated Learning, CVPR 2021, as the FedHKD paper compares it: no projection
head.

L = cross-entropy + mu * mean_B -log( e^{cos(z, z_glob) / tau} / (e^{cos(z, z_glob) / tau} + e^{cos(z, z_prev) / tau}) )

z is the latent vector; z_glob comes from the received model, z_prev from the client's own model after its previous
local training, both frozen and in eval mode. Without augmentation (train.augment) both are computed once a round; with
it anew for each batch, of the images that the model gets too. A client that has no previous model yet (round 1, or its
first) trains with cross-entropy alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.common.lazy import F, torch
from hkd_hpc.common.settings import setting
from hkd_hpc.schemes.base import About, Scheme, SchemeSettings


@dataclass(frozen=True)
class MoonSettings(SchemeSettings):
    """Defaults: the FedHKD paper's appendix. mu = 0 is FedAvg."""

    name: str = setting("moon", "the scheme")
    mu: float = setting(1.0, "weight of the contrastive term", low=0, high=1e6)
    tau: float = setting(0.5, "temperature of the contrastive term", above=0, high=1e6)


class Moon(Scheme):
    """Keeps each client's previous model: memory of three models, traffic of one."""

    Settings = MoonSettings
    terms = ("cross_entropy", "contrastive")
    # its authors searched .001 to 10: 5 on CIFAR10, 1 elsewhere
    about = About(tunes={"mu": (0.01, 0.1, 1.0, 5.0, 10.0)}, slowdown=(1.25, 2.36), models_held=3)
    cuda_graph_safe = True

    def client_state_shapes(self):
        return {"previous": (self.info.values,)}

    def begin(self, client):
        previous_V = client.state.get("previous")
        client.cache["contrast"] = previous_V is not None and self.settings.mu > 0
        if client.cache["contrast"] and self.info.augments:
            client.cache["previous_V"] = previous_V
        elif client.cache["contrast"]:
            client.cache["global_ND"], _ = client.predict_train()
            client.flat.values_V.copy_(previous_V)
            client.cache["previous_ND"], _ = client.predict_train()
            client.flat.values_V.copy_(client.received_V)

    def loss(self, client, batch):
        feature_BD, logits_BC = client.net(batch.x_BCHW)
        terms = {"cross_entropy": self.cross_entropy(logits_BC, batch.y_B)}
        terms["contrastive"] = (
            self._contrast(client, batch, feature_BD)
            if client.cache["contrast"]
            else torch.zeros((), device=logits_BC.device)
        )
        return terms

    def _contrast(self, client, batch, feature_BD):
        global_BD, previous_BD = self._frozen(client, batch)
        pull_B = F.cosine_similarity(feature_BD, global_BD, dim=1)
        push_B = F.cosine_similarity(feature_BD, previous_BD, dim=1)
        return self.settings.mu * F.softplus((push_B - pull_B) / self.settings.tau).mean()

    def _frozen(self, client, batch):
        """The batch's latent vectors by the received and by the previous model."""
        if not self.info.augments:
            return client.cache["global_ND"][batch.index_B], client.cache["previous_ND"][batch.index_B]
        return [client.predict_with(v_V, batch.x_BCHW)[0] for v_V in (client.received_V, client.cache["previous_V"])]

    def report(self, client):
        """Keep the model, unless its training diverged: NaN would spoil every later round of this client."""
        if bool(torch.isfinite(client.flat.values_V).all()):
            client.state["previous"] = client.flat.values_V.detach().clone()
        return {}
