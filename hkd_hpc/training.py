"""Local training of one client: begin, epochs of batches, tests, report. The same rule for every scheme."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from hkd_hpc import rng
from hkd_hpc.client import OWN_MODEL, OWN_STATISTICS, Batch, Client
from hkd_hpc.config import Config
from hkd_hpc.models import evaluate
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.images import normalise
from hkd_hpc.models.networks import has_batch_norm
from hkd_hpc.models.optimizer import Adam, clip_gradients
from hkd_hpc.schemes import contract
from hkd_hpc.schemes.base import Scheme

Bounds = list[tuple[int, int]]  # (start, stop) of each batch in the order of an epoch


class ClientRound(NamedTuple):
    """One client's part of a round: who trains, and what it receives.

    Attributes:
        client: its images lie on the model's device; its `state` is changed.
        weights_V: the global weights, V floats.
        counters: the integer buffers of the global model.
        message: what the server sent, by name.
        round: from 1 on.
        epochs: local epochs; None: train.epochs.
    """

    client: Client
    weights_V: torch.Tensor
    counters: Sequence[torch.Tensor]
    message: dict[str, torch.Tensor]
    round: int
    epochs: int | None = None


@dataclass
class Trained:
    """What one client's round gave: loss terms (means over the last epoch), the local tests, seconds, the report."""

    loss_by_term: list[float]
    test: evaluate.Tested
    val: evaluate.Tested
    train_s: float
    report_s: float
    report: dict[str, torch.Tensor]


class LocalTrainer:
    """Trains the clients of a rank one after the other, on one model with one optimizer.

    One step, from the weights w that the client holds, with a batch B of its images:

        w <- Adam(w, gradient of sum_k loss_k(w; B))        loss_k: the terms of the scheme

    The optimizer starts anew in every round. gpu/ has trainers of the same interface that train several at once.

    Args:
        flat: the model; each client's weights are loaded into it.
        scheme: gives the loss, may change the gradient, reports.
        config: epochs, batch size, learning rate, clipping.
    """

    at_once = 1  # clients that `train` trains together, at most

    def __init__(self, flat: FlatModel, scheme: Scheme, config: Config):
        self.flat, self.scheme, self.config = flat, scheme, config
        self.min_images = 2 if has_batch_norm(flat.net) else 1  # BatchNorm cannot train on one image
        self._steps = 0

    @property
    def steps(self) -> int:
        """Optimizer steps taken so far, of all clients and rounds."""
        return self._steps

    @cached_property
    def adam(self) -> Adam:
        """Made for the first client: the server of several ranks trains none."""
        return Adam(self.flat)

    def can_train(self, client: Client) -> bool:
        """Whether the client is eligible: it has `min_images` or more."""
        return len(client.y_train) >= self.min_images

    def with_scheme(self, scheme: Scheme) -> LocalTrainer:
        """Another trainer on the same model, for another scheme."""
        return type(self)(self.flat, scheme, self.config)

    def train(self, given: Sequence[ClientRound]) -> list[Trained]:
        """Train the first of these clients, as many as are trained at once; what they gave, in order."""
        return [self.run(given[0])]

    def run(self, given: ClientRound) -> Trained:
        """Train one client from the global weights, test it, and let the scheme report.

        Args:
            given: the client, and what it receives.

        Returns:
            Its losses, tests and report; its trained weights are in `flat`.

        Raises:
            RunError: the scheme does not keep its contract.
        """
        start_s = time.perf_counter()
        self.begin(given)
        loss_by_term = self.epochs(given.client, self.epochs_of(given))
        return self.end(given.client, loss_by_term, time.perf_counter() - start_s)

    def epochs_of(self, given: ClientRound) -> int:
        """Local epochs of a client in its round."""
        return self.config.train.epochs if given.epochs is None else given.epochs

    def begin(self, given: ClientRound) -> None:
        """Load the model, lend it to the client, and let the scheme prepare the round."""
        client = given.client
        weights_V = self.start_of(client, given.weights_V)
        self.flat.load(weights_V, given.counters)
        self.adam.reset()
        client.net, client.flat, client.received_V = self.flat.net, self.flat, weights_V
        client.message, client.round, client.cache = given.message, given.round, {}
        torch.manual_seed(rng.torch_seed(client.seed, "dropout", client.round, client.id))
        self.flat.net.train()
        self.scheme.begin(client)

    def epochs(self, client: Client, count: int) -> list[float]:
        """So many epochs, none after one whose loss is not finite; the mean of each loss term over the last."""
        shuffle = client.random("batches")
        for _ in range(count):
            loss_K = self.epoch(client, shuffle)
            if not is_finite(loss_K):
                break
        return loss_K.tolist()

    def epoch(self, client: Client, shuffle: np.random.Generator) -> torch.Tensor:
        """One epoch in a new order; (terms,): the mean of each loss term over its images, still on the device."""
        train, count = self.config.train, len(client.y_train)
        order_N = torch.from_numpy(shuffle.permutation(count)).to(client.y_train.device)
        bounds = batch_bounds(count, train.batch_size, train.drop_last)
        return self.take_steps(client, order_N, bounds, self.learning_rate(client.round)) / bounds[-1][1]

    def take_steps(
        self, client: Client, order_N: torch.Tensor, bounds: Bounds, lr: float | torch.Tensor
    ) -> torch.Tensor:
        """A step for each batch of the images in this order; (terms,): the sum of each loss term over the images."""
        sums_K = torch.zeros(len(self.scheme.terms), device=client.y_train.device)
        for start, stop in bounds:
            sums_K += self._step(client, order_N[start:stop], lr) * (stop - start)
        return sums_K

    def _step(self, client: Client, index_B: torch.Tensor, lr: float | torch.Tensor) -> torch.Tensor:
        """One optimizer step; returns the loss terms, still on the device."""
        batch = Batch(normalise(client.x_train[index_B]), client.y_train[index_B], index_B)
        self.adam.zero_gradients()
        values = contract.loss_terms(self.scheme, self.scheme.loss(client, batch))
        self.flat.backward(sum(values[1:], values[0]))
        self.scheme.adjust_gradient(client)
        if self.config.train.clip_norm:
            clip_gradients(self.adam.gradients, self.config.train.clip_norm)
        self.adam.step(lr)
        self._steps += 1
        return torch.stack([value.detach() for value in values])

    def end(self, client: Client, loss_by_term: list[float], train_s: float) -> Trained:
        """Test the trained client, and let the scheme report."""
        start_s = time.perf_counter()
        test = evaluate.test(self.flat.net, client.x_test, client.y_test)
        val = evaluate.Tested()
        if client.x_val is not None and client.y_val is not None:
            val = evaluate.test(self.flat.net, client.x_val, client.y_val)
        report = self.scheme.report(client)
        contract.check_tensors(self.scheme, "report", report, self.scheme.report_shapes())
        contract.check_client_state(self.scheme, client.state, (OWN_MODEL, OWN_STATISTICS))
        self._keep_own(client)
        client.cache = {}
        return Trained(loss_by_term, test, val, train_s, time.perf_counter() - start_s, report)

    def learning_rate(self, round: int) -> float:
        """Of all local steps of a round; on a GPU as a float32, as a recorded epoch reads it, so that both agree."""
        lr = self.config.lr(round)
        return float(np.float32(lr)) if self.flat.values_V.is_cuda else lr

    def start_of(self, client: Client, weights_V: torch.Tensor) -> torch.Tensor:
        """What a client begins with: the global weights, but for what it keeps to itself."""
        if not self.scheme.shares_weights:
            return client.state.get(OWN_MODEL, weights_V)
        if OWN_STATISTICS in client.state:
            return torch.cat([weights_V[: len(self.flat.parameters_P)], client.state[OWN_STATISTICS]])
        return weights_V

    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """What a client keeps beside the scheme's own state."""
        if not self.scheme.shares_weights:
            return {OWN_MODEL: (len(self.flat.values_V),)}
        return {OWN_STATISTICS: (len(self.flat.statistics_S),)} if self.config.train.batchnorm == "local" else {}

    @property
    def payload_floats(self) -> int:
        """Floats of weights that a client sends, and gets, in a round, as the paper counts: without what stays."""
        kept = self.flat.statistic_floats if self.config.train.batchnorm == "local" else 0
        return (self.flat.payload_floats - kept) * self.scheme.shares_weights

    def _keep_own(self, client: Client) -> None:
        values = {OWN_MODEL: self.flat.values_V, OWN_STATISTICS: self.flat.statistics_S}
        client.state.update({name: values[name].clone() for name in self.own_shapes()})


def is_finite(loss_K: torch.Tensor) -> bool:
    """Whether each loss term is a finite number; waits for the device."""
    return bool(torch.isfinite(loss_K).all())


def batch_bounds(count: int, size: int, drop_last: bool = False) -> Bounds:
    """(start, stop) of each batch. The short last batch is kept; a last batch of one is merged into the one before.

    Args:
        count: images.
        size: images of a batch.
        drop_last: a short last batch is left out, unless it is the only one.
    """
    if drop_last and count > size:
        count -= count % size
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], count]))
