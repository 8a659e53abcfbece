"""The one protocol of a scheme. Its defaults ARE FedAvg; a scheme's file overrides only what its paper changes.

A scheme sees tensors and client ids, never a rank, a communicator, a file or another scheme. One round:

    every client of the cohort:  begin -> (loss, adjust_gradient) per batch -> report
    the server:                  combine(reports) -> message, which the clients see in the next round

The weights travel and are averaged by themselves. What else travels is declared once as named float32 tensors
(`report_shapes`, `message_shapes`); an absent class is a row of zeros with count 0. State that must survive a round,
and a checkpoint, is declared too (`client_state_shapes`) or kept in `server.state`; anything else is forgotten on
purpose.

Shape letters: B batch, N local training images, C classes, D latent size, M clients that report, P trainable floats,
V all floats of the model, A public images.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hkd_hpc import rng
from hkd_hpc.lazy import F
from hkd_hpc.settings import setting

if TYPE_CHECKING:
    import numpy as np
    import torch

    from hkd_hpc.client import Batch, Client

    Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RunInfo:
    """What a scheme may know about the run."""

    classes: int
    latent: int
    clients: int
    parameters: int  # P, gaps of the flat buffer included
    values: int  # V: parameters and float buffers, gaps included
    public: int  # A: public images


@dataclass
class SchemeServer:
    """The server as a scheme sees it. `state` survives rounds and checkpoints; `net` holds the newest global
    weights.
    """

    net: torch.nn.Module
    seed: int
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    round: int = 0
    client_ids: list[int] = field(default_factory=list)

    def random(self, purpose: str) -> np.random.Generator:
        return rng.stream(self.seed, purpose, self.round)


@dataclass(frozen=True)
class SchemeSettings:
    """Settings of a scheme without any of its own."""

    name: str = setting("fedavg", "the scheme, or your own as module:Class")

    def without_effect(self) -> dict[str, str]:
        """{"scheme.key": "the setting because of which nothing reads it"}, for a warning where somebody gave it."""
        return {}


class Scheme:
    """FedAvg (McMahan et al., AISTATS 2017), and the base of all others."""

    Settings: type = SchemeSettings
    terms: tuple[str, ...] = ("cross_entropy",)  # what `loss` returns, in the order of the log
    needs_public = False  # whether it cannot do without public images
    shares_weights = True  # False: a client starts from its own last model; the average serves the global test only
    pools_data = False  # True: one client has the images of all
    # True: `loss` and `adjust_gradient` draw nothing on the host, never wait for the device, keep nothing, and read of
    # a client only net, flat, message, cache, the received weights and images: run.graphs may replay them. Each class
    # says it for itself
    cuda_graph_safe = True
    remark = ""  # what people must know about its results; printed with them
    tunes: dict[
        str, tuple
    ] = {}  # its own hyper-parameters: point i of the search takes value i of each; 5 for all schemes
    # seconds of a round / those of the reference: what tools.bench asks for, and the FedHKD paper's on CIFAR10
    slowdown: tuple[float | None, float | None] = (None, None)

    def __init__(self, settings, facts: RunInfo):
        self.settings, self.facts = settings, facts

    # --- what travels and what stays, beside the weights

    def report_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors that a client reports after training."""
        return {}

    def message_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors that the server sends to all clients; all zero in round 1."""
        return {}

    def client_state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors in `client.state` that a client keeps from one round to the next."""
        return {}

    def parameters_held(self, model: int) -> int:
        """Parameters in memory while a client trains, as the paper's Table 1 counts them: `model`, those of the model,
        for each frozen model that the scheme needs beside it once more, and those of networks of its own."""
        return model

    # --- on the clients

    def begin(self, client: Client) -> None:
        """Before the first batch of a round: what is computed once goes into `client.cache`."""

    def loss(self, client: Client, batch: Batch) -> Tensors:
        """One scalar per name in `terms`, weights included; their sum is minimised.

        `client.flat.grad_P` is zero here; the backward pass adds to it.
        """
        _, logits_BC = client.net(batch.x_BCHW)
        return {"cross_entropy": F.cross_entropy(logits_BC, batch.y_B)}

    def adjust_gradient(self, client: Client) -> None:
        """After the backward pass: may change `client.flat.grad_P` in place."""

    def report(self, client: Client) -> Tensors:
        """The declared tensors, from the trained client."""
        return {}

    # --- on the server

    def combine(self, server: SchemeServer, reports: Tensors) -> Tensors:
        """The declared message, from the reports stacked in client order (first axis M, never empty)."""
        return {}

    def warning(self, message: Tensors) -> str:
        """What people must know about the message of a round, in a few words; empty when all is well."""
        return ""

    # --- what the paper counts as traffic, in floats beside the weights (method of Table 1)

    def report_floats(self, report: Tensors) -> int:
        """Floats in one client's report; absent classes do not count."""
        return sum(tensor.numel() for tensor in report.values())

    def message_floats(self, message: Tensors) -> int:
        """Floats in the message to one client."""
        return sum(tensor.numel() for tensor in message.values())
