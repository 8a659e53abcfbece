"""A scheme of one's own: cross-entropy with logits adjusted for how a client's class mix differs from the federation's.

After logit adjustment (Menon et al., ICLR 2021): z + tau * (log local prior - log prior of all clients), in training.
"""

from dataclasses import dataclass

from hkd_hpc.common.lazy import F
from hkd_hpc.schemes.base import About, Scheme, SchemeSettings, setting


@dataclass(frozen=True)
class MySettings(SchemeSettings):
    tau: float = setting(1.0, "strength of the adjustment; 0 is FedAvg", low=0, high=100)


class MyScheme(Scheme):
    Settings = MySettings
    about = About(tunes={"tau": (0.1, 0.3, 1.0, 2.0, 4.0)})  # what hkd compare tries

    def report_shapes(self):  # what a client sends; all floats, all of fixed shape
        return {"count_C": (self.info.classes,)}

    message_shapes = report_shapes  # what the server answers; zeros in round 1

    def begin(self, client):  # once a round, before the first batch
        own_C = F.one_hot(client.y_train, self.info.classes).sum(0).float()
        shift_C = (own_C + 1).log() - (client.message["count_C"] + 1).log()
        client.cache.update(own_C=own_C, shift_C=self.settings.tau * shift_C * (client.round > 1))

    def loss(self, client, batch):  # one scalar for each name in `terms`, by default cross_entropy alone
        _, logits_BC = client.net(batch.x_BCHW)
        return {"cross_entropy": self.cross_entropy(logits_BC + client.cache["shift_C"], batch.y_B)}

    def report(self, client):  # once a round, after training
        return {"count_C": client.cache["own_C"]}

    def combine(self, server, reports):  # on the server; reports are stacked in client order
        return {"count_C": reports["count_C"].sum(0)}
