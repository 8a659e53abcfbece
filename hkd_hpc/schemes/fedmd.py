"""FedMD: Li and Wang, Heterogeneous Federated Learning via Model Distillation, 2019, with weights averaged too, as the
FedHKD paper compares it, unless `weights=none`, as in its own paper: only predictions travel.

L = cross-entropy + lam * KL( teacher || softmax(z / T) ) on a batch of public images without labels (its Algorithm 1)

The public images are training images that no client holds (`data.public_fraction`). A client reports softmax(z / T) of
all of them after training; the teacher is the plain mean over the clients. A client uses every public image once before
any twice, in an order of its own. BatchNorm normalises public batches with their own mean and variance, as it does
private ones; they enter the running statistics only with `public_batchnorm=train`, as in the FedHKD authors' code. (In
eval mode
they would be normalised by running statistics that lag behind the weights: accuracy falls to a third in one round.)
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.lazy import F, torch
from hkd_hpc.common.settings import setting
from hkd_hpc.models.images import normalise
from hkd_hpc.models.precision import real
from hkd_hpc.schemes.base import About, Scheme, SchemeSettings
from hkd_hpc.schemes.traffic import Formula


@dataclass(frozen=True)
class FedMDSettings(SchemeSettings):
    """Defaults: the FedHKD paper's appendix. lam = 0 is FedAvg."""

    name: str = setting("fedmd", "the scheme")
    lam: float = setting(0.05, "weight of the distillation term", low=0, high=1e6)
    temperature: float = setting(0.5, "T of softmax(z / T)", above=0, high=1e6)
    weights: str = setting(
        "average",
        "average: as FedAvg; none: every client goes on from its own model (its paper)",
        choices=("average", "none"),
    )
    public_batchnorm: str = setting(
        "keep", "keep: public images do not enter BatchNorm's running statistics; train: do", choices=("keep", "train")
    )


class FedMD(Scheme):
    """Distils the clients' mean prediction on public images."""

    Settings = FedMDSettings
    terms = ("cross_entropy", "distillation")
    needs_public = True
    # .05: the FedHKD paper, .1: its code; the rest is ours
    about = About(
        tunes={"lam": (0.01, 0.05, 0.1, 0.5, 1.0)},
        slowdown=(2.00, 2.58),
        formula=Formula(
            "A C each way",
            lambda of: of.delivering_R * of.public * of.classes,
            lambda of: of.sampled_R * of.public * of.classes,
        ),
    )
    cuda_graph_safe = False  # which public images are next is kept from batch to batch, in an order drawn on the way

    def __init__(self, settings, info):
        super().__init__(settings, info)
        self.shares_weights = settings.weights == "average"
        if info.public == 1:  # BatchNorm cannot normalise one image by itself
            raise UsageError("scheme.name=fedmd: needs 2 public images or more, there is 1; raise data.public_fraction")

    def report_shapes(self):
        return {"soft_AC": (self.info.public, self.info.classes)}

    message_shapes = report_shapes

    def begin(self, client):
        nothing_left = torch.empty(0, dtype=torch.int64, device=client.y_train.device)
        client.cache.update(
            random=client.random("public batches"),
            order_A=nothing_left,
            teach=client.round > 1 and self.settings.lam > 0,
        )

    def loss(self, client, batch):
        _, logits_BC = client.net(batch.x_BCHW)
        terms = {"cross_entropy": self.cross_entropy(logits_BC, batch.y_B)}
        terms["distillation"] = (
            self._distil(client, len(batch.y_B)) if client.cache["teach"] else torch.zeros((), device=logits_BC.device)
        )
        return terms

    def _distil(self, client, size):
        index_B = self._next_public(client, size)
        with running_statistics_kept(client.net, self.settings.public_batchnorm == "keep"):
            _, logits_BC = client.net(normalise(client.x_public[index_B]))
        log_soft_BC = F.log_softmax(logits_BC / self.settings.temperature, dim=1)
        return self.settings.lam * F.kl_div(log_soft_BC, client.message["soft_AC"][index_B], reduction="batchmean")

    def _next_public(self, client, size):
        """The next public images: each of them once, then all again in a new order; at most all in one batch."""
        cache, size = client.cache, min(size, self.info.public)
        if len(cache["order_A"]) < size:
            order_A = torch.from_numpy(cache["random"].permutation(self.info.public))
            cache["order_A"] = torch.cat([cache["order_A"], order_A.to(cache["order_A"].device)])
        index_B, cache["order_A"] = cache["order_A"][:size], cache["order_A"][size:]
        return index_B

    def report(self, client):
        _, logits_AC = client.predict(client.x_public)
        return {"soft_AC": F.softmax(logits_AC / self.settings.temperature, dim=1)}

    def combine(self, server, reports):
        return {"soft_AC": real(reports["soft_AC"].double().mean(0))}


@contextmanager
def running_statistics_kept(net, keep=True):
    """BatchNorm in train mode leaves its running statistics and counters alone; `keep` false: all as ever."""
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    layers = [m for m in net.modules() if isinstance(m, batch_norm) and m.track_running_stats]
    for layer in layers:
        layer.track_running_stats = not keep
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
