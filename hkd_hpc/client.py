"""A client and a batch of its images, as a scheme sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hkd_hpc import rng
from hkd_hpc.models import evaluate
from hkd_hpc.models.flat import FlatModel

OWN_MODEL, OWN_STATISTICS = "model", "statistics"  # in a client's state


@dataclass
class Batch:
    """Images normalised to [-1, 1], labels, and their positions in the client's training set."""

    x_BCHW: torch.Tensor
    y_B: torch.Tensor
    index_B: torch.Tensor


@dataclass
class Client:
    """A client as a scheme sees it. What has a default but `state` and the images is of the current round."""

    id: int
    x_train: torch.Tensor  # uint8, resident where it trains
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    classes: int
    seed: int
    x_public: torch.Tensor | None = None  # the public images, the same for all clients
    x_val: torch.Tensor | None = None  # held out of the training images (data.val_fraction)
    y_val: torch.Tensor | None = None
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    net: torch.nn.Module | None = None
    flat: FlatModel | None = None
    received_V: torch.Tensor | None = None  # the weights that this round started from: the global ones, as a rule
    message: dict[str, torch.Tensor] = field(default_factory=dict)
    round: int = 0
    cache: dict = field(default_factory=dict)
    name: str = ""  # of a natural client whose id in the data is another than `id`

    def leave(self) -> None:
        """Let go of the local trainer's model, so that a local trainer that is closed frees its memory."""
        self.net = self.flat = self.received_V = None
        self.cache = {}

    def random(self, purpose: str) -> np.random.Generator:
        """This client's stream of a purpose in the current round."""
        return rng.stream(self.seed, purpose, self.round, self.id)

    @property
    def received_P(self) -> torch.Tensor:
        """The trainable part of the received weights."""
        return self.received_V[: len(self.flat.parameters_P)]

    def predict(self, x_uint8: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(feature, logits) of the present model for any images, eval mode."""
        return evaluate.predict(self.net, x_uint8)

    def predict_train(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(feature_ND, logits_NC) of the present model over all training images, eval mode, fixed order."""
        return self.predict(self.x_train)
