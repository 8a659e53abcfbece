"""A client and a batch of its images, as a scheme sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hkd_hpc.common import rng
from hkd_hpc.models import evaluate
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.images import normalise
from hkd_hpc.privacy import random
from hkd_hpc.privacy.settings import SIMULATION

# in a client's state: what it keeps of its model, all of it, BatchNorm's statistics, or the weights that are personal
OWN_MODEL, OWN_STATISTICS, OWN_WEIGHTS = OWN = "model", "statistics", "personal_weights"


@dataclass
class Batch:
    """One batch of local training.

    Attributes:
        x_BCHW: images, floats, in [-1, 1] if the data are uint8, augmented if train.augment says so; or rows (B, F), or
            sequences (B, T) of int64.
        y_B: labels, int64.
        index_B: where the images are in the client's training set.
    """

    x_BCHW: torch.Tensor
    y_B: torch.Tensor
    index_B: torch.Tensor


@dataclass
class Client:
    """A client as a scheme sees it.

    Attributes:
        id: from 0 on.
        x_train, x_test, x_val: inputs as they lie in the data, (N, C, H, W) uint8 as a rule, on the device where it
            trains; x_val: held out of the training images (data.val_fraction), None without.
        y_train, y_test, y_val: their labels, int64.
        classes: C.
        seed: the run's.
        x_public: the public images, the same for all clients; None where the scheme needs none.
        state: tensors by name that it keeps from one round to the next (`Scheme.client_state_shapes`).
        message: of the current round: what the server sent, by name; zeros in round 1.
        round: from 1 on.
        cache: of the current round: whatever `Scheme.begin` computes once.
        name: of a natural client whose id in the data is another than `id`.
        member: of unequal models (models/family.py), which one it has.
        phase: the name of the present part of its local training (`Scheme.phases`).
        epochs_left: of its local training of the round, after the present one.
        noise_from: where its noise comes from (privacy.mode).
        drawn_N3: of the current epoch: what is drawn for the augmentation of each training image; None without.
        net: while it trains: the model, net(x_BCHW) = (feature_BD, logits_BC).
        flat: while it trains: the same model as one vector, and its gradient.
        received_V: while it trains: the weights that it started from: the global ones, as a rule.
    """

    id: int
    x_train: torch.Tensor
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    classes: int
    seed: int
    x_public: torch.Tensor | None = None
    x_val: torch.Tensor | None = None
    y_val: torch.Tensor | None = None
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    message: dict[str, torch.Tensor] = field(default_factory=dict)
    round: int = 0
    cache: dict = field(default_factory=dict)
    name: str = ""
    member: str = ""
    phase: str = ""
    epochs_left: int = 0
    noise_from: str = SIMULATION
    drawn_N3: torch.Tensor | None = None
    net: torch.nn.Module = field(init=False, repr=False, compare=False)
    flat: FlatModel = field(init=False, repr=False, compare=False)
    received_V: torch.Tensor = field(init=False, repr=False, compare=False)

    def drop_model(self) -> None:
        """Give the local trainer's model back, so that a local trainer that is closed frees its memory."""
        for name in ("net", "flat", "received_V"):
            vars(self).pop(name, None)
        self.cache, self.drawn_N3 = {}, None

    def random(self, purpose: str) -> np.random.Generator:
        """This client's stream of random numbers in the current round: the same on any ranks, and after a resume.

        Args:
            purpose: what it is for: each has a stream of its own.

        Returns:
            A generator at the beginning of the stream, at each call.
        """
        return rng.stream(self.seed, purpose, self.round, self.id)

    def normal(self, quantity: str, shape: tuple[int, ...]) -> np.ndarray:
        """Draws of N(0, 1) for the noise on what it reports; the same ones in a round only in simulation.

        Args:
            quantity: what the noise is for: each has draws of its own, as each client and round has.
            shape: of the result.

        Returns:
            float64, of that shape.
        """
        return random.normal(self.noise_from, shape, self.seed, quantity, self.round, self.id)

    @property
    def received_P(self) -> torch.Tensor:
        """The trainable part of the received weights, P floats."""
        return self.received_V[: len(self.flat.parameters_P)]

    def predict(self, x_uint8: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The present model's outputs for any images, in eval mode, without gradients.

        Args:
            x_uint8: N x channels x height x width, as they lie in the data, on the model's device.

        Returns:
            (feature_ND, logits_NC).
        """
        return evaluate.predict(self.net, x_uint8)

    def predict_with(self, values_V: torch.Tensor, x_BCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Another model's outputs for a batch: this network's with other weights, in eval mode, without gradients.

        Args:
            values_V: its weights, V floats, for example `received_V`.
            x_BCHW: `Batch.x_BCHW`, augmented if the batch is.

        Returns:
            (feature_BD, logits_BC).
        """
        self.net.eval()
        with torch.no_grad():
            tensors = self.flat.tensors_of(self.member, values_V)
            outputs = torch.func.functional_call(self.net, tensors, (x_BCHW,), tie_weights=False)
        self.net.train()
        return outputs

    def predict_train(self, values_V: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A model's outputs for all training images, eval mode, fixed order, as they are: without augmentation.

        Args:
            values_V: its weights, as in `predict_with`; None: the present model.

        Returns:
            (feature_ND, logits_NC).
        """
        if values_V is None:
            return self.predict(self.x_train)
        parts = [self.predict_with(values_V, normalise(x)) for x in self.x_train.split(evaluate.BATCH)]
        return torch.cat([feature for feature, _ in parts]), torch.cat([logits for _, logits in parts])
