"""Local training of one client: begin, epochs of batches, tests, report. The same rule for every scheme."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from hkd_hpc import rng
from hkd_hpc.client import OWN_MODEL, OWN_STATISTICS, Batch, Client
from hkd_hpc.config import Config
from hkd_hpc.gpu import graphs
from hkd_hpc.gpu.concurrent import side_by_side
from hkd_hpc.models import evaluate
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.images import normalise
from hkd_hpc.models.networks import has_batch_norm
from hkd_hpc.models.optimizer import Adam, clip_gradients
from hkd_hpc.schemes import contract
from hkd_hpc.schemes.base import Scheme


@dataclass
class Trained:
    """What one client's round gave: loss terms (means over the last epoch), the local tests, seconds, and the
    report.
    """

    loss_by_term: list[float]
    test: evaluate.Tested
    val: evaluate.Tested
    train_s: float
    report_s: float
    report: dict[str, torch.Tensor]


class LocalTrainer:
    """One rank's model, optimiser and rule of local training; the same rule for every scheme."""

    def __init__(self, flat: FlatModel, scheme: Scheme, config: Config):
        self.flat, self.scheme, self.config = flat, scheme, config
        self.steps = 0  # taken in all
        self.fewest = 2 if has_batch_norm(flat.net) else 1  # BatchNorm cannot train on one image
        self.stream: torch.cuda.Stream | None = None  # None: the current one
        can_record = config.run.graphs == "on" and not graphs.why_not(scheme, flat.net, flat.values_V.device)
        self.graphs = graphs.Graphs(graphs.recorder()) if can_record else None

    @cached_property
    def adam(self) -> Adam:
        """Made for the first client: the server of several ranks trains none."""
        return Adam(self.flat)

    def can_train(self, client: Client) -> bool:
        return len(client.y_train) >= self.fewest

    def run(
        self, client: Client, weights_V: torch.Tensor, counters, message, round: int, epochs: int | None = None
    ) -> Trained:
        """Train one client from the global weights, test it, and let the scheme report. `epochs`: else train.epochs."""
        return side_by_side([self], [(client, weights_V, counters, message, round, epochs)])[0]

    def training(
        self, client: Client, weights_V: torch.Tensor, counters, message, round: int, epochs: int | None = None
    ) -> Generator[None, None, Trained]:
        """The same with a pause after each epoch that was launched and is not waited for yet."""
        start_s = time.perf_counter()
        weights_V = self.start_of(client, weights_V)
        self.flat.load(weights_V, counters)
        self.adam.reset()
        client.net, client.flat, client.received_V = self.flat.net, self.flat, weights_V
        client.message, client.round, client.cache = message, round, {}
        torch.manual_seed(rng.torch_seed(client.seed, "dropout", round, client.id))
        self.flat.net.train()
        self.scheme.begin(client)
        terms = yield from self._epochs(client, self.config.train.epochs if epochs is None else epochs)
        trained_s = time.perf_counter()
        test = evaluate.test(self.flat.net, client.x_test, client.y_test)
        val = evaluate.Tested() if client.x_val is None else evaluate.test(self.flat.net, client.x_val, client.y_val)
        report = self.scheme.report(client)
        contract.check_tensors(self.scheme, "report", report, self.scheme.report_shapes())
        contract.check_client_state(self.scheme, client.state, (OWN_MODEL, OWN_STATISTICS))
        self._keep_own(client)
        client.cache = {}
        return Trained(terms, test, val, trained_s - start_s, time.perf_counter() - trained_s, report)

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
        """Floats of weights that a client sends, and gets, in a round, as the paper counts: without what stays with
        it.
        """
        kept = self.flat.statistic_floats if self.config.train.batchnorm == "local" else 0
        return (self.flat.payload_floats - kept) * self.scheme.shares_weights

    def _keep_own(self, client: Client) -> None:
        values = {OWN_MODEL: self.flat.values_V, OWN_STATISTICS: self.flat.statistics_S}
        client.state.update({name: values[name].clone() for name in self.own_shapes()})

    def _epochs(self, client: Client, epochs: int) -> Generator[None, None, list[float]]:
        """Local epochs, none after one whose loss is not finite; the mean of each loss term over the images of the
        last.
        """
        train, lr = self.config.train, self.config.lr(client.round)
        if self.flat.values_V.is_cuda:
            lr = float(np.float32(lr))  # as a recorded epoch reads it: both take the same steps
        shuffle, count = client.random("batches"), len(client.y_train)
        bounds = batch_bounds(count, train.batch_size, train.drop_last)
        for _ in range(epochs):
            order_N = torch.from_numpy(shuffle.permutation(count)).to(client.y_train.device)
            steps = self.steps + len(bounds)
            sums = (
                self.graphs.run(self._epoch, client, order_N, bounds, lr)
                if self.graphs
                else self._epoch(client, order_N, bounds, lr)
            )
            self.steps = steps  # a graph that is replayed does not count
            yield
            if not bool(torch.isfinite(sums).all()):
                break
        return (sums / bounds[-1][1]).tolist()

    def _epoch(self, client: Client, order_N: torch.Tensor, bounds: list[tuple[int, int]], lr) -> torch.Tensor:
        """One pass over the images; the sum of each loss term over them, still on the device."""
        sums = torch.zeros(len(self.scheme.terms), device=client.y_train.device)
        for start, stop in bounds:
            sums += self._step(client, order_N[start:stop], lr) * (stop - start)
        return sums

    def _step(self, client: Client, index_B: torch.Tensor, lr: float | torch.Tensor) -> torch.Tensor:
        """One optimiser step; returns the loss terms, still on the device."""
        batch = Batch(normalise(client.x_train[index_B]), client.y_train[index_B], index_B)
        if not graphs.promises(self.scheme, "sets_gradient"):
            self.adam.zero_gradients()
        values = contract.loss_terms(self.scheme, self.scheme.loss(client, batch))
        self.flat.backward(sum(values))
        self.scheme.adjust_gradient(client)
        if self.config.train.clip_norm:
            clip_gradients(self.adam.gradients, self.config.train.clip_norm)
        self.adam.step(lr)
        self.steps += 1
        return torch.stack([value.detach() for value in values])


def batch_bounds(count: int, size: int, drop_last: bool = False) -> list[tuple[int, int]]:
    """(start, stop) of each batch. The short last batch is kept; a last batch of one is merged into the one before.

    drop_last: a short last batch is left out, unless it is the only one.
    """
    if drop_last and count > size:
        count -= count % size
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], count]))
