"""Local training of one client: begin, epochs of batches, tests, report. The same rule for every scheme."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from hkd_hpc.client import OWN, OWN_MODEL, OWN_STATISTICS, OWN_WEIGHTS, Batch, Client
from hkd_hpc.common import rng
from hkd_hpc.config import Config
from hkd_hpc.models import evaluate
from hkd_hpc.models.augmentation import augmentation
from hkd_hpc.models.family import prefix_of
from hkd_hpc.models.flat import FlatModel, Spans
from hkd_hpc.models.images import normalise
from hkd_hpc.models.networks import has_batch_norm
from hkd_hpc.models.optimizer import Optimizer, clip_gradients, make_optimizer
from hkd_hpc.schemes import contract
from hkd_hpc.schemes.base import Phase, Scheme

Bounds = list[tuple[int, int]]  # (start, stop) of each batch in the order of an epoch
Weights = tuple[torch.Tensor, Sequence[torch.Tensor]]  # V floats, and the integer buffers


class Draws(NamedTuple):
    """A client's streams of a round, from which its epochs draw one after the other."""

    batches: np.random.Generator
    augment: np.random.Generator

    @classmethod
    def of(cls, client: Client) -> Draws:
        """Both at their beginning."""
        return cls(client.random("batches"), client.random("augment"))


class ClientRound(NamedTuple):
    """One client's part of a round: who trains, and what it receives.

    Attributes:
        client: its images lie on the model's device; its `state` is changed.
        weights_V: the global weights, V floats.
        counters: the integer buffers of the global model.
        message: what the server sent, by name.
        round: from 1 on.
        epochs: local epochs; None: train.epochs; fewer, of a straggler: in each phase at most.
        initial: what the run began with of all that never travels (`LocalTrainer.own_parts`): that of a client that has
            none of its own yet.
    """

    client: Client
    weights_V: torch.Tensor
    counters: Sequence[torch.Tensor]
    message: dict[str, torch.Tensor]
    round: int
    epochs: int | None = None
    initial: Mapping[str, torch.Tensor] = MappingProxyType({})


@dataclass
class Trained:
    """What one client's round gave: loss terms (means over the last epoch), the local tests, seconds, the report; and
    which model was tested: empty, the one that is averaged; else one of the client's own, by its name in the state."""

    loss_by_term: list[float]
    test: evaluate.Tested
    val: evaluate.Tested
    train_s: float
    report_s: float
    report: dict[str, torch.Tensor]
    own_model: str = ""


def min_images(net: torch.nn.Module) -> int:
    """Fewest images that a client trains on: BatchNorm cannot train on one."""
    return 2 if has_batch_norm(net) else 1


class LocalTrainer:
    """Trains the clients of a rank one after the other, on one model with one optimizer.

    One step, from the weights w that the client holds, with a batch B of its images:

        w <- step(w, gradient of sum_k loss_k(w; B))        loss_k: the terms of the scheme; step: train.optimizer

    The optimizer starts anew in every phase of a round. gpu/ has trainers of the same interface that train several at
    once.

    Args:
        flat: the model; each client's weights are loaded into it.
        scheme: gives the loss, may change the gradient, reports.
        config: epochs, batch size, learning rate, clipping.
    """

    at_once = 1  # clients that `train` trains together, at most

    def __init__(self, flat: FlatModel, scheme: Scheme, config: Config):
        self.flat, self.scheme, self.config = flat, scheme, config
        self.min_images = min_images(flat.net)
        self.augmentation = augmentation(config.train.augment, config.train.augment_padding)
        self._steps = 0
        self._frozen: list[tuple[torch.Tensor, torch.Tensor]] = []  # (weights, gradient) that the phase leaves alone
        self._member = ""  # of unequal models, the active one
        self._optimizers: dict[str, Optimizer] = {}  # by member
        self._loaded = ""  # which model is in `flat`: the shared one, or one of the client's own
        self._unloaded: dict[str, Weights] = {}  # those of this round that are not

    @property
    def steps(self) -> int:
        """Optimizer steps taken so far, of all clients and rounds."""
        return self._steps

    @property
    def optimizer(self) -> Optimizer:
        """Of the weights that are active, made for the first client: the server of several ranks trains none."""
        if self._member not in self._optimizers:
            train = self.config.train
            self._optimizers[self._member] = make_optimizer(
                self.flat, train.optimizer, train.weight_decay, train.momentum, train.nesterov
            )
        return self._optimizers[self._member]

    def can_train(self, client: Client) -> bool:
        """Whether a client is eligible.

        Args:
            client: with its training images.

        Returns:
            Whether it has `min_images` or more.
        """
        return len(client.y_train) >= self.min_images

    def with_scheme(self, scheme: Scheme, config: Config) -> LocalTrainer:
        """Another trainer on the same model.

        Args:
            scheme: whose loss it takes.
            config: its epochs, batch size, learning rate and clipping.

        Returns:
            A trainer of the same class, with an optimizer of its own.
        """
        return type(self)(self.flat, scheme, config)

    def train(self, given: Sequence[ClientRound]) -> list[Trained]:
        """Train the first of these clients, as many as are trained at once.

        Args:
            given: the clients, and what each receives.

        Returns:
            What the first of them gave, at most `at_once`, in order.

        Raises:
            RunError: as `run`.
        """
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
        for loss_K in self.epochs(given):
            if not is_finite(loss_K):
                break
        return self.end(given.client, loss_K.tolist(), time.perf_counter() - start_s)

    def begin(self, given: ClientRound) -> None:
        """Load the model, hand it to the client, and let the scheme prepare the round."""
        client = given.client
        weights_V = self.start_of(given)
        self.flat.load(weights_V, given.counters)
        self._loaded, self._unloaded = "", {}
        self._member = client.member
        client.net, client.flat, client.received_V = self.flat.activate(client.member), self.flat, weights_V
        client.message, client.round, client.cache = given.message, given.round, {}
        seed = rng.torch_seed(client.seed, "dropout", client.round, client.id)
        torch.manual_seed(seed)
        rng.seed_globals(seed)
        self.flat.net.train()
        self.scheme.begin(client)

    def epochs(self, given: ClientRound) -> Iterator[torch.Tensor]:
        """Each epoch of a client's round, phase by phase; (terms,): the mean of each loss term, still on the device."""
        client, draws, usual = given.client, Draws.of(given.client), self.config.train.epochs
        epochs = usual if given.epochs is None else given.epochs
        phases = contract.phases(self.scheme, self.scheme.phases(client, epochs), len(self.flat.values_V))
        counts = [min(phase.epochs, epochs) if epochs < usual else phase.epochs for phase in phases]
        client.epochs_left = sum(counts)
        for phase, count in zip(phases, counts):
            self._begin_phase(given, phase)
            for _ in range(count):
                client.epochs_left -= 1
                yield self.epoch(client, draws)

    def _begin_phase(self, given: ClientRound, phase: Phase) -> None:
        """With the model that it trains, and a new optimizer."""
        client, flat = given.client, self.flat
        client.phase = phase.name
        self._load(phase.own_model, (client.state.get(phase.own_model, client.received_V), given.counters))
        prefix = prefix_of(flat.net, client.member)
        spans = flat.spans_of({prefix + name for name in phase.frozen})
        self._frozen = [(flat.parameters_P[start:stop], flat.grad_P[start:stop]) for start, stop in spans]
        self.optimizer.reset()

    def _load(self, name: str, new: Weights) -> None:
        """This of the client's models into `flat`, the present one is kept; one that is not kept yet is `new`."""
        if name != self._loaded:
            flat = self.flat
            self._unloaded[self._loaded] = flat.values_V.clone(), [counter.clone() for counter in flat.counters]
            flat.load(*self._unloaded.pop(name, new))
            self._loaded = name

    def epoch(self, client: Client, draws: Draws) -> torch.Tensor:
        """One epoch in a new order; (terms,): the mean of each loss term over its images, still on the device."""
        train, count, device = self.config.train, len(client.y_train), client.y_train.device
        order_N = torch.from_numpy(draws.batches.permutation(count)).to(device)
        client.drawn_N3 = self.augmentation.draw(draws.augment, count).to(device) if self.augmentation else None
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
        batch = Batch(normalise(self._images(client, index_B)), client.y_train[index_B], index_B)
        self.optimizer.zero_gradients()
        values = contract.loss_terms(self.scheme, self.scheme.loss(client, batch))
        self.flat.backward(sum(values[1:], values[0]))
        self.scheme.adjust_gradient(client)
        for _, gradient in self._frozen:
            gradient.zero_()
        if self.config.train.clip_norm:
            clip_gradients(self.optimizer.gradients, self.config.train.clip_norm)
        kept = [weights.clone() for weights, _ in self._frozen]
        self.optimizer.step(lr)
        for (weights, _), before in zip(self._frozen, kept):  # momentum and weight decay move them too
            weights.copy_(before)
        self._steps += 1
        return torch.stack([value.detach() for value in values])

    def _images(self, client: Client, index_B: torch.Tensor) -> torch.Tensor:
        """The training images of a batch, augmented if that is asked for; uint8 as they lie in memory."""
        x_BCHW = client.x_train[index_B]
        if self.augmentation is None or client.drawn_N3 is None:
            return x_BCHW
        return self.augmentation(x_BCHW, client.drawn_N3[index_B])

    def end(self, client: Client, loss_by_term: list[float], train_s: float) -> Trained:
        """Test the trained client, and let the scheme report. Raises as `run`."""
        start_s = time.perf_counter()
        test = evaluate.test(client.net, client.x_test, client.y_test)
        val = evaluate.Tested()
        if client.x_val is not None and client.y_val is not None:
            val = evaluate.test(client.net, client.x_val, client.y_val)
        tested = self._loaded
        self._keep_own_models(client)
        report = self.scheme.report(client)
        contract.check_tensors(self.scheme, "report", report, self.scheme.report_shapes())
        contract.check_client_state(self.scheme, client.state, OWN)
        client.state |= self.own_parts(self.flat.values_V)
        client.cache = {}
        return Trained(loss_by_term, test, val, train_s, time.perf_counter() - start_s, report, tested)

    def learning_rate(self, round: int) -> float:
        """The learning rate of a round (train.lr_schedule).

        Args:
            round: from 1 on.

        Returns:
            Of all its local steps; on a GPU rounded to float32, as a recorded epoch reads it, so that both agree.
        """
        lr = self.config.lr(round)
        return float(np.float32(lr)) if self.flat.values_V.is_cuda else lr

    def start_of(self, given: ClientRound) -> torch.Tensor:
        """What a client begins with: the global weights, but for what never travels: that is its own, and before it has
        trained the initial one, however late it joins."""
        own = {**given.initial, **given.client.state}
        held = {name: spans for name, spans in self.own_spans.items() if name in own}
        start_V = given.weights_V.clone() if held else given.weights_V
        for name, spans in held.items():
            sizes = [stop - start for start, stop in spans]
            for (start, stop), part in zip(spans, own[name].split(sizes)):
                start_V[start:stop].copy_(part)
        return start_V

    @cached_property
    def own_spans(self) -> dict[str, Spans]:
        """What a client keeps of the model that is averaged: the name in its state, and where it lies in `flat`."""
        parameters, values = len(self.flat.parameters_P), len(self.flat.values_V)
        if not self.scheme.shares_weights:
            return {OWN_MODEL: [(0, values)]}
        spans = {OWN_STATISTICS: [(parameters, values)]} if self.config.train.batchnorm == "local" else {}
        personal = self.flat.spans_of(
            {
                prefix_of(self.flat.net, member) + name
                for member in self.config.model.members
                for name in self.scheme.personal(self.flat.net_of(member))
            }
        )
        return spans | ({OWN_WEIGHTS: personal} if personal else {})

    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        """What a client keeps beside the scheme's own state."""
        return {name: (sum(stop - start for start, stop in spans),) for name, spans in self.own_spans.items()}

    def payload_floats_of(self, member: str) -> int:
        """Floats of weights that a client with this member sends, and gets, in a round, as the paper counts: without
        what stays."""
        return self.flat.floats_of(member, but=[span for spans in self.own_spans.values() for span in spans])

    def own_parts(self, values_V: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copies of what never travels of a model's V floats, by the name in a client's state."""
        return {
            name: torch.cat([values_V[start:stop] for start, stop in spans]) for name, spans in self.own_spans.items()
        }

    def _keep_own_models(self, client: Client) -> None:
        """Those that are finite; then the one that is averaged is in `flat`."""
        if self._loaded:
            self._load("", self._unloaded[""])
        for name, (values_V, _) in self._unloaded.items():
            if bool(torch.isfinite(values_V).all()):
                client.state[name] = values_V
        self._unloaded = {}


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
