"""FedHKD and FedHKD*: The Best of Both Worlds, Accurate Global and Personalized Models through Federated Learning with
Data-Free Hyper-Knowledge Distillation, ICLR 2023.

A client reports, for each class j that makes up at least nu of its images, its mean feature (with Gaussian noise), mean
soft prediction softmax(z / T) and count, computed in eval mode over all its training images after training. The server
averages them with the counts of the clients that share the class: (H^j, Q^j), used by all clients in the next round:

    L = cross-entropy + lam * mean_j || softmax(G(H^j) / T) - Q^j ||_2 + gamma * (1 / B) sum_k || R(x_k) - H^{y_k} ||_2

with G the classifier and R the extractor; norms not squared; classes nobody shares are left out of both sums. Round 1 is
unassisted. FedHKD*: gamma = 0.
"""
from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc import knowledge
from hkd_hpc.aggregate import mean_by_count
from hkd_hpc.lazy import F, torch
from hkd_hpc.schemes.base import Scheme, SchemeSettings
from hkd_hpc.settings import setting


@dataclass(frozen=True)
class FedHKDSettings(SchemeSettings):
    """Defaults: appendix A of the paper. lam = gamma = 0 is FedAvg; so is a nu that no class reaches."""

    name: str = setting("fedhkd", "the scheme")
    lam: float = setting(0.05, "weight of the soft-prediction term (lambda)", low=0, high=1e6)
    gamma: float = setting(0.05, "weight of the feature term", low=0, high=1e6)
    temperature: float = setting(0.5, "T of softmax(z / T)", above=0, high=1e6)
    nu: float = setting(0.25, "smallest share of a client's images for a class to be shared", low=0, high=1)
    zeta: float = setting(3.0, "assumed bound of a feature's coordinates, in the noise only", above=0, high=1e6)
    sigma: float = setting(7.0, "noise multiplier: std 2 zeta sigma / N_j; 0: no noise", low=0, high=1e6)


@dataclass(frozen=True)
class FedHKDStarSettings(FedHKDSettings):
    """FedHKD without the feature term."""

    name: str = setting("fedhkd_star", "the scheme")
    gamma: float = setting(0.0, "weight of the feature term", low=0, high=0)


class FedHKD(Scheme):
    """Hyper-knowledge distillation without public data."""

    Settings = FedHKDSettings
    terms = ("cross_entropy", "soft", "feature")

    def report_shapes(self):
        classes, latent = self.facts.classes, self.facts.latent
        return {"count_C": (classes,), "feature_CD": (classes, latent), "soft_CC": (classes, classes)}

    message_shapes = report_shapes

    def begin(self, client):
        """Keep only the classes that somebody shared; decided once a round, so that no batch waits for the device."""
        count_C = client.message["count_C"]
        known = count_C > 0
        client.cache.update(known_C=known, any_known=bool(known.any()), feature_KD=client.message["feature_CD"][known],
                            soft_KC=client.message["soft_CC"][known])

    def loss(self, client, batch):
        feature_BD, logits_BC = client.net(batch.x_BCHW)
        terms = {"cross_entropy": F.cross_entropy(logits_BC, batch.y_B)}
        nothing = torch.zeros((), device=logits_BC.device)
        use = client.cache["any_known"]
        terms["soft"] = self._soft_term(client) if use and self.settings.lam else nothing
        terms["feature"] = self._feature_term(client, feature_BD, batch.y_B) if use and self.settings.gamma else nothing
        return terms

    def _soft_term(self, client):
        """Reaches only the classifier: H and Q are constants."""
        soft_KC = F.softmax(client.net.classifier(client.cache["feature_KD"]) / self.settings.temperature, dim=1)
        distance_K = torch.linalg.vector_norm(soft_KC - client.cache["soft_KC"], dim=1)  # its gradient at 0 is 0
        return self.settings.lam * distance_K.mean()

    def _feature_term(self, client, feature_BD, y_B):
        """Reaches only the extractor. An image whose class nobody shares counts 0, and B is not reduced for it."""
        distance_B = torch.linalg.vector_norm(feature_BD - client.message["feature_CD"][y_B], dim=1)
        return self.settings.gamma * (distance_B * client.cache["known_C"][y_B]).mean()

    def report(self, client):
        feature_ND, logits_NC = client.predict_train()
        classes, s = self.facts.classes, self.settings
        feature_CD, count_C = knowledge.class_means(feature_ND, client.y_train, classes)
        soft_CC, _ = knowledge.class_means(F.softmax(logits_NC / s.temperature, dim=1), client.y_train, classes)
        std_C = knowledge.noise_std(count_C, s.zeta, s.sigma)
        feature_CD = feature_CD + knowledge.gaussian_noise(std_C, feature_CD.shape[1], client.random("noise"))
        shared_C1 = knowledge.shared_classes(count_C, s.nu).float()[:, None]
        return {"count_C": count_C * shared_C1[:, 0], "feature_CD": feature_CD * shared_C1, "soft_CC": soft_CC * shared_C1}

    def combine(self, server, reports):
        feature_CD, count_C = mean_by_count(reports["feature_CD"], reports["count_C"])
        soft_CC, _ = mean_by_count(reports["soft_CC"], reports["count_C"])
        return {"count_C": count_C, "feature_CD": feature_CD, "soft_CC": soft_CC}

    def report_floats(self, report):
        return int((report["count_C"] > 0).sum()) * (self.facts.latent + self.facts.classes + 1)

    def message_floats(self, message):
        return int((message["count_C"] > 0).sum()) * (self.facts.latent + self.facts.classes)


class FedHKDStar(FedHKD):
    """FedHKD*: the feature term is off; H still travels, since it is the classifier's input."""

    Settings = FedHKDStarSettings
