"""The one protocol of a scheme. Its defaults ARE FedAvg; a scheme's file overrides only what its paper changes.

A scheme sees tensors and client ids, never a rank, a communicator, a file or another scheme. One round:

    every client of the cohort:  begin -> (loss, adjust_gradient) per batch, in one or more phases -> report
    the server:                  combine(reports) -> message, which the clients see in the next round

The weights travel and are averaged by themselves; those that are `personal` no client takes over. What else travels is
declared once as named float32 tensors (`report_shapes`, `message_shapes`); an absent class is a row of zeros with count
0. State that must survive a round, and a checkpoint, is declared too (`client_state_shapes`) or kept in `server.state`;
anything else is forgotten on purpose.

Shape letters: B batch, N local training images, C classes, D latent size, M clients that report, P trainable floats,
V all floats of the model, A public images.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hkd_hpc.common import rng
from hkd_hpc.common.lazy import F
from hkd_hpc.common.settings import setting
from hkd_hpc.privacy import releases
from hkd_hpc.privacy.mechanism import Mechanism, of_features
from hkd_hpc.privacy.settings import PrivacySettings

if TYPE_CHECKING:
    import numpy as np
    import torch

    from hkd_hpc.aggregate import GlobalStep
    from hkd_hpc.client import Batch, Client
    from hkd_hpc.schemes.traffic import Formula

    Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RunInfo:
    """What a scheme may know about the run.

    Attributes:
        classes: C.
        latent: D, size of a feature vector.
        clients: of the federation; M is the number of those that report in a round.
        parameters: P, trainable floats of the model with the gaps of the flat buffer.
        values: V, the same and the float buffers.
        public: A, public images; 0 where there are none.
        label_smoothing: of every cross-entropy with the labels (train.label_smoothing).
        augments: whether batches are augmented, anew each time (train.augment): what a scheme computes of training
            images in `begin` is then not of the images of the batch.
        privacy: what is clipped and gets noise before it leaves a client.
        batch_size: images of a whole batch of local training (train.batch_size).
    """

    classes: int
    latent: int
    clients: int
    parameters: int
    values: int
    public: int
    label_smoothing: float = 0.0
    augments: bool = False
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    batch_size: int = 64


@dataclass(frozen=True)
class About:
    """What people and tools are told of a scheme; no result depends on it.

    Attributes:
        tunes: its own hyper-parameters: point i of a search takes value i of each; 5 values for all schemes.
        slowdown: seconds of a round / those of FedAvg: what `tools.bench` asks for, and what its paper (or the FedHKD
            paper, on CIFAR10) reports; None: nothing, or unknown.
        models_held: models in memory while a client trains, with the frozen ones (the paper's Table 1).
        own_parameters: parameters in memory of networks of its own.
        formula: what its paper says travels beside the weights; None: nothing, or nothing said.
        remark: what must be known about its results; printed with them.
    """

    tunes: Mapping[str, tuple] = field(default_factory=dict)
    slowdown: tuple[float | None, float | None] = (None, None)
    models_held: int = 1
    own_parameters: int = 0
    formula: Formula | None = None
    remark: str = ""

    def parameters_held(self, model: int) -> int:
        """Parameters in memory while a client trains, as the FedHKD paper's Table 1 counts them.

        Args:
            model: parameters of one model.

        Returns:
            models_held * model + own_parameters.
        """
        return self.models_held * model + self.own_parameters


@dataclass(frozen=True)
class Phase:
    """A part of a client's local training, which the optimizer begins anew.

    Attributes:
        epochs: so many; of a straggler (fed.straggler_epochs) no more than its own.
        name: what `client.phase` is meanwhile; each phase of a round has another.
        frozen: names of parameters that stay as they are: their gradient counts as zero, and no step moves them.
        own_model: of what it trains: empty, the model that is averaged; else one of the client's own, by the name in
            `client_state_shapes` of its V floats. That begins as the received one, and goes on from round to round.
    """

    epochs: int
    name: str = ""
    frozen: Collection[str] = ()
    own_model: str = ""


@dataclass
class SchemeServer:
    """The server as a scheme sees it.

    Attributes:
        net: holds the new global weights when `combine` is called.
        seed: the run's.
        state: tensors by name; empty at first, survives rounds and checkpoints.
        round: from 1 on.
        client_ids: those that report in this round, ascending: the first axis (M) of the reports.
    """

    net: torch.nn.Module
    seed: int
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    round: int = 0
    client_ids: list[int] = field(default_factory=list)

    def random(self, purpose: str) -> np.random.Generator:
        """The server's stream of random numbers in the current round: the same on any ranks, and after a resume.

        Args:
            purpose: what it is for: each has a stream of its own.

        Returns:
            A generator at the beginning of the stream, at each call.
        """
        return rng.stream(self.seed, purpose, self.round)


@dataclass(frozen=True)
class SchemeSettings:
    """Settings of a scheme without any of its own."""

    name: str = setting("fedavg", "the scheme, or your own as module:Class")

    @property
    def own_mechanism(self) -> Mechanism:
        """What they ask to be done to mean features before they leave a client (privacy.mechanism=scheme)."""
        return Mechanism()

    def without_effect(self) -> dict[str, str]:
        """Which settings change nothing beside the others, for a warning where somebody gave one.

        Returns:
            {"scheme.key": "the setting because of which nothing reads it"}.
        """
        return {}

    def local_epochs(self, epochs: int) -> int:
        """Epochs of all phases of a client's round together (`Scheme.phases`), for a forecast.

        Args:
            epochs: train.epochs.

        Returns:
            Their number.
        """
        return epochs


class Scheme:
    """FedAvg (McMahan et al., AISTATS 2017), and the base of all others.

    A client i with the images D_i minimises its loss from the received weights w; the server averages,

        w_i = argmin_w sum over `terms` of loss_k(w; D_i),    w <- sum_i |D_i| w_i / sum_i |D_i|

    which the program does by itself. A scheme changes the loss, the gradient, and what travels beside the weights.

    Attributes:
        Settings: a frozen dataclass of its settings, derived from SchemeSettings.
        terms: what `loss` returns, in the order of the log.
        needs_public: whether it cannot do without public images.
        shares_weights: False: a client starts from its own last model, at first from the run's initial one; the average
            serves the global test only.
        pools_data: True: one client has the images of all.
        protects: which of features, predictions and counts it reports by the rules of section `privacy`: as
            "feature_CD", "soft_CC" and "count_C".
        cuda_graph_safe: True: `loss` and `adjust_gradient` draw nothing on the host, never wait for the device, keep
            nothing, and read of a client only net, flat, message, cache, the received weights and public images, so
            that run.graphs may replay them. Each class declares it for itself: it is not inherited.
        about: what people and tools are told of it.
        settings: an instance of Settings.
        info: what it may know about the run.
    """

    Settings: type[SchemeSettings] = SchemeSettings
    terms: tuple[str, ...] = ("cross_entropy",)
    needs_public = False
    shares_weights = True
    pools_data = False
    protects: tuple[str, ...] = ()
    cuda_graph_safe = True
    about = About()

    def __init__(self, settings, info: RunInfo):
        self.settings, self.info = settings, info

    @property
    def facts(self) -> RunInfo:
        """`info`, by its name in older versions."""
        return self.info

    # --- what travels and what stays, beside the weights

    def report_shapes(self) -> dict[str, tuple[int, ...]]:
        """What a client reports after training.

        Returns:
            {name: shape} of float32 tensors, for example {"count_C": (classes,)}; an absent class is a row of zeros. A
            report with "count_C", the images behind what it says of each class, is recorded: who shared which class is
            where it is above 0.
        """
        return {}

    def message_shapes(self) -> dict[str, tuple[int, ...]]:
        """What the server sends to all clients.

        Returns:
            {name: shape} of float32 tensors; in round 1 all of them are zero.
        """
        return {}

    def client_state_shapes(self) -> dict[str, tuple[int, ...]]:
        """What a client keeps in `client.state` from one round to the next, in checkpoints too.

        Returns:
            {name: shape} of float32 tensors; the state is empty in a client's first round.
        """
        return {}

    def personal(self, net: torch.nn.Module) -> Collection[str]:
        """Which weights stay with a client, which starts a round from the received ones but for its own last ones of
        these, the run's initial ones at first. Their mean over the clients serves the global test only.

        Args:
            net: the model.

        Returns:
            Names of its state dict.
        """
        return ()

    def check_net(self, net: torch.nn.Module) -> None:
        """Before a run begins: whether this scheme can train the model.

        Args:
            net: the model; of unequal ones each.

        Raises:
            UsageError: what it lacks.
        """

    # --- on the clients

    def phases(self, client: Client, epochs: int) -> Sequence[Phase]:
        """The parts of a client's local training, in order. The client tests the model that the last one trained.

        Args:
            client: before the first of them.
            epochs: of the client in this round.

        Returns:
            One phase at least; by default one of all these epochs.
        """
        return [Phase(epochs)]

    def begin(self, client: Client) -> None:
        """Before the first batch of a round: what is computed once goes into `client.cache`.

        Args:
            client: with the received weights in `net`, the message of the last round and an empty cache.
        """

    def loss(self, client: Client, batch: Batch) -> Tensors:
        """The loss of one batch, whose gradient the optimizer steps along.

        `client.flat.grad_P` is zero here; the backward pass adds to it.

        Args:
            client: with the model, the message of the last round and the cache.
            batch: B images.

        Returns:
            One scalar per name in `terms`, weights included; their sum is minimised.
        """
        _, logits_BC = client.net(batch.x_BCHW)
        return {"cross_entropy": self.cross_entropy(logits_BC, batch.y_B)}

    def cross_entropy(self, logits_BC: torch.Tensor, y_B: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of a batch of training, the same rule for every scheme: use it in `loss`.

        Args:
            logits_BC: of a batch.
            y_B: its labels, of which train.label_smoothing goes evenly to all classes.

        Returns:
            A scalar.
        """
        return F.cross_entropy(logits_BC, y_B, label_smoothing=self.info.label_smoothing)

    def adjust_gradient(self, client: Client) -> None:
        """After the backward pass of a batch, before clipping and the optimizer's step.

        Args:
            client: `client.flat.grad_P`, P floats, may be changed in place.
        """

    def report(self, client: Client) -> Tensors:
        """What a client reports of a round.

        Args:
            client: trained; `predict_train` gives features and logits of its N images.

        Returns:
            The tensors of `report_shapes`.
        """
        return {}

    # --- on the server

    def combine(self, server: SchemeServer, reports: Tensors) -> Tensors:
        """What the server makes of the reports.

        Args:
            server: with the new global weights, and a state of its own.
            reports: each tensor stacked in client order: first axis M, never empty.

        Returns:
            The tensors of `message_shapes`.
        """
        return {}

    def global_step(self, zeros_P: torch.Tensor) -> GlobalStep | None:
        """What makes the new global weights of the clients' mean, on every rank.

        Args:
            zeros_P: P zeros, on the device of the weights.

        Returns:
            A GlobalStep (hkd_hpc.aggregate), without a step taken; None, the default: they are the mean.
        """
        return None

    def warning(self, message: Tensors) -> str:
        """What people must know about the message of a round.

        Args:
            message: what `combine` returned.

        Returns:
            A few words, printed and stored; empty when all is well.
        """
        return ""

    def traffic(self, tensors: Tensors, direction: str) -> int:
        """Floats beside the weights, as the paper counts them (Table 1): without absent classes.

        Args:
            tensors: one client's report, or the message to one client.
            direction: "up" for a report, "down" for a message.

        Returns:
            A number of floats, 4 bytes each; by default all there are.
        """
        return sum(tensor.numel() for tensor in tensors.values())

    # --- for the record: no result depends on it

    def released(self, count_MC: np.ndarray, is_private: bool) -> dict[str, releases.Release]:
        """What clients release in a round with their report, for the ledger of privacy (privacy/releases.py).

        Args:
            count_MC: training images by class of each client that reports.
            is_private: whether the weights that clients receive have noise enough to be private themselves.

        Returns:
            By kind; by default what `protects` names, and no bound at all of a report with more tensors than that.
        """
        found: dict[str, releases.Release] = {}
        if self.protects:
            privacy, features = self.info.privacy, of_features(self.info.privacy, self.settings.own_mechanism)
            found = releases.knowledge(privacy, features, self.protects, self.info.latent, count_MC, is_private)
        if len(self.report_shapes()) > len(self.protects):
            found[releases.REPORT] = releases.unnoised(len(count_MC))
        return found
