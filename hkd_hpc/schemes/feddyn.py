"""FedDyn: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.

Client k minimises (its Eq. 1 and Algorithm 1, with g_k = -alpha d_k for its gradient and h = -alpha s)

    L = cross-entropy + alpha <d_k, w> + (alpha / 2) ||w - w_received||^2
      = cross-entropy + (alpha / 2) ||w - (w_received - d_k)||^2 + a constant

over the trainable parameters, and keeps d_k <- d_k + w_k - w_received; the server makes, of the mean of those that
delivered and their share p of all clients' weight,

    s <- s + p (mean - w_received),    w <- mean + s

d_k and s begin as zero. With fed.average=uniform, p is its paper's |P| / m. BatchNorm's statistics are averaged only.
"""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.aggregate import GlobalStep
from hkd_hpc.common.settings import setting
from hkd_hpc.schemes.base import About, Scheme, SchemeSettings
from hkd_hpc.schemes.proximal import pull


class DynamicStep(GlobalStep):
    """Goes on in the direction in which the means have moved so far."""

    def __init__(self, zeros_P):
        self.state = {"drift": zeros_P}

    def step(self, received_P, weights_P, share):
        drift_P = self.state["drift"]
        drift_P.add_((weights_P - received_P).mul_(share))
        weights_P.add_(drift_P)


@dataclass(frozen=True)
class FedDynSettings(SchemeSettings):
    """Default: its code on CIFAR10."""

    name: str = setting("feddyn", "the scheme")
    alpha: float = setting(0.01, "weight of the dynamic regularizer", above=0, high=1e6)


class FedDyn(Scheme):
    """A client's pull goes beyond the received weights, against where it drifted before."""

    Settings = FedDynSettings
    terms = ("cross_entropy", "dynamic")
    # .1, .01 and .001 in its paper
    about = About(
        tunes={"alpha": (0.001, 0.003, 0.01, 0.03, 0.1)},
        models_held=3,
        remark="global is the model that clients receive, its paper's server model; its code reports the mean",
    )
    cuda_graph_safe = True

    def client_state_shapes(self):
        return {"drift_P": (self.info.parameters,)}

    def global_step(self, zeros_P):
        return DynamicStep(zeros_P)

    def begin(self, client):
        client.cache["centre_P"] = client.received_P - client.state.get("drift_P", 0.0)

    def loss(self, client, batch):
        _, logits_BC = client.net(batch.x_BCHW)
        dynamic = pull(client, self.settings.alpha, client.cache["centre_P"])
        return {"cross_entropy": self.cross_entropy(logits_BC, batch.y_B), "dynamic": dynamic}

    def report(self, client):
        client.state["drift_P"] = client.flat.parameters_P - client.cache["centre_P"]
        return {}
