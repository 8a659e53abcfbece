"""FedHKD and FedHKD*: The Best of Both Worlds, Accurate Global and Personalized Models through Federated Learning with
Data-Free Hyper-Knowledge Distillation, ICLR 2023.

A client reports, for each class j that makes up at least nu of its images, its mean feature (with Gaussian noise), mean
soft prediction softmax(z / T) and count, computed in eval mode over all its training images after training. The server
averages them with the counts of the clients that share the class: (H^j, Q^j), used by all clients in the next round:

    L = cross-entropy + lam * mean_j || softmax(G(H^j) / T) - Q^j ||_2 + gamma * (1 / B) sum_k || R(x_k) - H^{y_k} ||_2

with G the classifier and R the extractor; norms not squared; classes nobody shares are left out of both sums: the soft
term is divided by the classes that somebody shares (the paper writes n), the feature term by all B images. Round 1 is
unassisted. FedHKD*: gamma = 0.

That is the paper. The authors' published code does otherwise, and the settings below reproduce it, one by one or
together (presets code-S and code-H): distances, aggregation and noise are defined in knowledge.py and aggregate.py. The
paper's nu leaves nothing to share on 100 classes or nearly equal class mixes; nu_rule=relative is the repair (preset
repaired). weights=none is neither's: hyper-knowledge alone travels, so that clients may have unequal models.
"""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.aggregate import AGGREGATIONS, combine_by_class
from hkd_hpc.common.lazy import F, torch
from hkd_hpc.common.settings import setting
from hkd_hpc.models.precision import real
from hkd_hpc.privacy import mechanism
from hkd_hpc.privacy.settings import CLIPS
from hkd_hpc.schemes import knowledge
from hkd_hpc.schemes.base import About, Scheme, SchemeSettings
from hkd_hpc.schemes.traffic import Formula

HYPER_KNOWLEDGE = Formula(
    "up n_i (D + C) + n_i, down n (D + C)",
    lambda of: of.shared_R * (of.latent + of.classes + 1),
    lambda of: of.sampled_R * of.known_R * (of.latent + of.classes),
)


@dataclass(frozen=True)
class FedHKDStarSettings(SchemeSettings):
    """Defaults: appendix A of the paper. lam = 0 is FedAvg; so is a nu that no class reaches."""

    name: str = setting("fedhkd_star", "the scheme")
    lam: float = setting(0.05, "weight of the soft-prediction term (lambda)", low=0, high=1e6)
    temperature: float = setting(0.5, "T of softmax(z / T)", above=0, high=1e6)
    nu: float = setting(0.25, "smallest share of a client's images for a class to be shared", low=0, high=1)
    nu_rule: str = setting(
        "absolute",
        "absolute: nu is a share of all images; relative: a share of images / classes",
        choices=knowledge.NU_RULES,
    )
    min_count: int = setting(1, "fewest images for a class to be shared, beside nu", low=1)
    zeta: float = setting(3.0, "bound of a feature's coordinates (clip=l2: norm); for noise, clip", above=0, high=1e6)
    sigma: float = setting(7.0, "noise multiplier: std 2 zeta sigma / N_j; 0: no noise", low=0, high=1e6)
    noise: str = setting(
        "paper", "paper; off; code: one draw of std 2 for all classes of a client", choices=knowledge.NOISES
    )
    clip: str = setting(
        "off", "every feature before averaging: box: coordinates to +-zeta; l2: norm to zeta", choices=CLIPS
    )
    aggregation: str = setting(
        "count",
        "mean over the clients that share a class; count: weighted by images; uniform; "
        "last: the highest client alone, old entries stay (code)",
        choices=AGGREGATIONS,
    )
    weights: str = setting(
        "average",
        "average: as FedAvg; none: every client goes on from its own model, hyper-knowledge alone travels",
        choices=("average", "none"),
    )
    soft_loss: str = setting(
        "paper",
        "soft term; paper: L2 norm; squared; mse; kl: code H; kl_wrong_sign: S's bug",
        choices=knowledge.SOFT_DISTANCES,
    )

    @property
    def own_mechanism(self) -> mechanism.Mechanism:
        return mechanism.Mechanism(self.noise, self.clip, self.zeta, self.sigma)

    def without_effect(self) -> dict[str, str]:
        """Without the paper's noise nothing reads its multiplier; without noise and clipping, not their bound."""
        idle = {} if self.noise == "paper" else {"scheme.sigma": f"scheme.noise={self.noise}"}
        if self.clip == "off" and (self.noise != "paper" or not self.sigma):
            idle["scheme.zeta"] = f"scheme.noise={self.noise}, scheme.sigma={self.sigma:g} and scheme.clip=off"
        return idle


@dataclass(frozen=True)
class FedHKDSettings(FedHKDStarSettings):
    """Defaults: appendix A of the paper. lam = gamma = 0 is FedAvg; so is a nu that no class reaches."""

    name: str = setting("fedhkd", "the scheme")
    gamma: float = setting(0.05, "weight of the feature term", low=0, high=1e6)
    feature_loss: str = setting(
        "paper", "feature term; paper: L2 norm; squared; mse: code", choices=knowledge.DISTANCES
    )


class FedHKD(Scheme):
    """Hyper-knowledge distillation without public data."""

    Settings: type[FedHKDStarSettings] = FedHKDSettings
    terms: tuple[str, ...] = ("cross_entropy", "soft", "feature")
    protects = ("features", "predictions", "counts")
    # one value for both, as in the paper (.05) and the authors' code (.1); the rest of the grid is ours
    about = About(
        tunes={"lam": (0.01, 0.05, 0.1, 0.5, 1.0), "gamma": (0.01, 0.05, 0.1, 0.5, 1.0)},
        slowdown=(1.10, 1.47),
        formula=HYPER_KNOWLEDGE,
    )
    cuda_graph_safe = True

    def __init__(self, settings, info):
        super().__init__(settings, info)
        self.shares_weights = settings.weights == "average"
        self.mechanism = mechanism.of_features(info.privacy, settings.own_mechanism)
        self.gamma = getattr(settings, "gamma", 0.0)  # FedHKD* has no feature term

    def report_shapes(self):
        classes, latent = self.info.classes, self.info.latent
        return {"count_C": (classes,), "feature_CD": (classes, latent), "soft_CC": (classes, classes)}

    message_shapes = report_shapes

    def begin(self, client):
        """Keep only the classes that somebody shared; decided once a round, so that no batch waits for the device."""
        count_C = client.message["count_C"]
        known = count_C > 0
        client.cache.update(
            known_C=known,
            any_known=bool(known.any()),
            feature_KD=client.message["feature_CD"][known],
            soft_KC=client.message["soft_CC"][known],
        )

    def loss(self, client, batch):
        feature_BD, logits_BC = client.net(batch.x_BCHW)
        nothing = torch.zeros((), device=logits_BC.device)
        known = client.cache["any_known"]
        return {
            "cross_entropy": self.cross_entropy(logits_BC, batch.y_B),
            "soft": self._soft_term(client) if known and self.settings.lam else nothing,
            "feature": self._feature_term(client, feature_BD, batch.y_B) if known and self.gamma else nothing,
        }

    def _soft_term(self, client):
        """Reaches only the classifier: H and Q are constants. The mean is over the classes that somebody shares."""
        logits_KC = client.net.classifier(client.cache["feature_KD"]) / self.settings.temperature
        distance_K = knowledge.soft_distance(self.settings.soft_loss, logits_KC, client.cache["soft_KC"])
        return self.settings.lam * distance_K.mean()

    def _feature_term(self, client, feature_BD, y_B):
        """Reaches only the extractor. An image whose class nobody shares counts 0, and B is not reduced for it."""
        distance_B = knowledge.distance(self.settings.feature_loss, feature_BD, client.message["feature_CD"][y_B])
        return self.gamma * (distance_B * client.cache["known_C"][y_B]).mean()

    def report(self, client):
        y_N, s, privacy = client.y_train, self.settings, self.info.privacy
        feature_ND, logits_NC = knowledge.outputs(client, privacy.extractor)
        count_C = knowledge.released_counts(client, knowledge.class_counts(y_N, self.info.classes), privacy)
        feature_CD = knowledge.class_means(self.mechanism.clipped(feature_ND), y_N, count_C)
        soft_CC = knowledge.class_means(F.softmax(logits_NC / s.temperature, dim=1), y_N, count_C)
        feature_std_C = self.mechanism.std(count_C, self.info.latent)
        soft_std_C = mechanism.std_of_predictions(privacy, count_C)
        one_draw = self.mechanism.noise == "code"
        shared_C1 = real(knowledge.shared_classes(count_C, s.nu, s.nu_rule, s.min_count))[:, None]
        return {
            "count_C": count_C * shared_C1[:, 0],
            "feature_CD": knowledge.noisy(client, "features", feature_CD, feature_std_C, one_draw) * shared_C1,
            "soft_CC": knowledge.noisy(client, "predictions", soft_CC, soft_std_C) * shared_C1,
        }

    def combine(self, server, reports):
        return combine_by_class(self.settings.aggregation, reports, server.state)

    def warning(self, message):
        if message["count_C"].any():
            return ""
        s, without = self.settings, "FedAvg's" if self.shares_weights else "that of scheme.name=local"
        return (
            f"no class reached scheme.nu={s.nu} ({s.nu_rule}) and scheme.min_count={s.min_count} at any client, so "
            f"the hyper-knowledge is empty, and training with it is {without}"
        )

    def traffic(self, tensors, direction):
        """Of n shared classes: up n (D + C + 1), with their counts; down n (D + C)."""
        shared = int((tensors["count_C"] > 0).sum())
        return shared * (self.info.latent + self.info.classes + (direction == "up"))


class FedHKDStar(FedHKD):
    """FedHKD*: the feature term is off; H still travels, since it is the classifier's input."""

    Settings = FedHKDStarSettings
    about = About(tunes={"lam": (0.01, 0.05, 0.1, 0.5, 1.0)}, slowdown=(1.10, 1.29), formula=HYPER_KNOWLEDGE)
    cuda_graph_safe = True
