"""FedProto: Tan et al., Federated Prototype Learning across Heterogeneous Clients, AAAI 2022, with weights averaged too
(the FedHKD paper reports a global model for it) unless `weights=none`, as in its own paper: only prototypes travel.

L = cross-entropy + lam * (1 / (B D)) sum_k ||R(x_k) - P^{y_k}||^2

A client reports its mean feature of every class it holds, computed in eval mode over all its training images after
training; the server averages them weighted by counts (Eq. 6 without its extra 1 / holders). A class that nobody holds
adds 0. Round 1 is unassisted.
"""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.aggregate import AGGREGATIONS, combine_by_class
from hkd_hpc.common.lazy import torch
from hkd_hpc.common.settings import setting
from hkd_hpc.models.precision import real
from hkd_hpc.privacy import mechanism
from hkd_hpc.schemes import knowledge
from hkd_hpc.schemes.base import About, Scheme, SchemeSettings
from hkd_hpc.schemes.traffic import Formula


@dataclass(frozen=True)
class FedProtoSettings(SchemeSettings):
    """Default: the FedHKD paper's appendix. lam = 0 is FedAvg."""

    name: str = setting("fedproto", "the scheme")
    lam: float = setting(0.05, "weight of the distance to the global prototypes", low=0, high=1e6)
    weights: str = setting(
        "average",
        "average: as FedAvg; none: every client goes on from its own model (its paper)",
        choices=("average", "none"),
    )
    aggregation: str = setting(
        "count",
        "mean over the clients that hold a class; count: weighted by images; uniform: its "
        "code; last: the highest client alone, old entries stay (FedHKD's code)",
        choices=AGGREGATIONS,
    )


class FedProto(Scheme):
    """Class prototypes without threshold, and without noise but for that of section `privacy`."""

    Settings = FedProtoSettings
    terms = ("cross_entropy", "prototype")
    protects = ("features", "counts")
    # 1 and .1: its code on MNIST and CIFAR10; .05: the FedHKD paper
    about = About(
        tunes={"lam": (0.01, 0.05, 0.1, 0.5, 1.0)},
        slowdown=(1.10, 1.34),
        formula=Formula(
            "up n_i D, down n D",
            lambda of: of.shared_R * of.latent,
            lambda of: of.sampled_R * of.known_R * of.latent,
        ),
    )
    cuda_graph_safe = True

    def __init__(self, settings, info):
        super().__init__(settings, info)
        self.shares_weights = settings.weights == "average"
        self.mechanism = mechanism.of_features(info.privacy, settings.own_mechanism)

    def report_shapes(self):
        return {"count_C": (self.info.classes,), "feature_CD": (self.info.classes, self.info.latent)}

    message_shapes = report_shapes

    def begin(self, client):
        known_C = client.message["count_C"] > 0
        client.cache.update(known_C=real(known_C), any_known=bool(known_C.any()))

    def loss(self, client, batch):
        feature_BD, logits_BC = client.net(batch.x_BCHW)
        terms = {"cross_entropy": self.cross_entropy(logits_BC, batch.y_B)}
        use = client.cache["any_known"] and self.settings.lam
        terms["prototype"] = (
            self._distance(client, feature_BD, batch.y_B) if use else torch.zeros((), device=logits_BC.device)
        )
        return terms

    def _distance(self, client, feature_BD, y_B):
        square_B = knowledge.distance("mse", feature_BD, client.message["feature_CD"][y_B])
        return self.settings.lam * (square_B * client.cache["known_C"][y_B]).mean()

    def report(self, client):
        y_N, privacy = client.y_train, self.info.privacy
        feature_ND, _ = knowledge.outputs(client, privacy.extractor)
        count_C = knowledge.released_counts(client, knowledge.class_counts(y_N, self.info.classes), privacy)
        feature_CD = knowledge.class_means(self.mechanism.clipped(feature_ND), y_N, count_C)
        feature_CD = knowledge.noisy(client, "features", feature_CD, self.mechanism.std(count_C, self.info.latent))
        return {"count_C": count_C, "feature_CD": feature_CD * real(count_C > 0)[:, None]}

    def combine(self, server, reports):
        return combine_by_class(self.settings.aggregation, reports, server.state)

    def traffic(self, tensors, direction):
        return int((tensors["count_C"] > 0).sum()) * self.info.latent
