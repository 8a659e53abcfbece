"""The client side of a rank: trains the clients that live here, adds their weights up, fills in their reports."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from hkd_hpc import payload, quarantine
from hkd_hpc.aggregate import FixedPointSum
from hkd_hpc.client import OWN_MODEL, OWN_STATISTICS, Client
from hkd_hpc.cohort import draw_failures
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.console import messages as log
from hkd_hpc.gpu.concurrent import Lanes
from hkd_hpc.models import evaluate
from hkd_hpc.quarantine import DROPPED, LATE, NO_DATA, Finding
from hkd_hpc.schemes.base import Scheme, SchemeSettings
from hkd_hpc.training import LocalTrainer, Trained


def report_type(scheme, counters: int) -> np.dtype:
    """One client's report of a round. client -1: an unused place of a rank that hosts fewer clients than others."""
    whole = {
        "client": (),
        "status": (),
        "weight": (),
        "test_n": (),
        "test_correct": (),
        "counters": (counters,),
        "bad_tensor": (),
    }  # a place in quarantine.names
    numbers = {"train_s": (), "report_s": (), "bad_value": (), "loss": (len(scheme.terms),)}
    whole |= {"val_n": (), "val_correct": ()}
    return payload.record_type(numbers, whole, scheme.report_shapes())


class Worker:
    """The clients of one rank. `places`: the largest number of clients on any rank, so that all ranks send alike."""

    def __init__(self, comm: Comm, trainer: LocalTrainer, clients: list[Client], places: int, images_M: list[int]):
        """images_M: training images by client, of all clients."""
        self.lanes = Lanes([trainer])  # more on a GPU, where assemble.widen finds room
        self.comm, self.trainer, self.clients, self.places = comm, trainer, clients, places
        self.able = [client for client, images in enumerate(images_M) if images >= trainer.fewest]
        self.delivered: list[int] = []  # those here whose weights are in the sum
        total_images = max(sum(images_M), 1)
        self.names = quarantine.names(trainer.flat, trainer.scheme.report_shapes(), trainer.scheme.terms)
        self.report_type = report_type(trainer.scheme, counter_size(trainer.flat.counters))
        self.sum = FixedPointSum(
            len(trainer.flat.values_V), total_images, trainer.flat.values_V.device, trainer.flat.averaged_spans
        )
        self.statistics_sum = FixedPointSum(len(trainer.flat.statistics_S), total_images, trainer.flat.values_V.device)

    def train(
        self, round: int, cohort: list[int], weights_V: torch.Tensor, counters, message, keep: bool
    ) -> np.ndarray:
        """Train the cohort's clients that live here; returns the reports (places,). `keep`: the model is client
        state.
        """
        self.sum.clear()
        self.delivered.clear()
        reports = np.zeros(self.places, self.report_type)
        reports["client"] = -1
        config = self.trainer.config
        dropped, late = draw_failures(config.fed, config.run.seed, round, sorted(set(cohort).intersection(self.able)))
        here = [client for client in self.clients if client.id in set(cohort)]
        waiting = []
        for report, client in zip(reports, here):
            report["client"] = client.id
            epochs = (
                config.train.epochs if client.id not in late else min(config.fed.straggler_epochs, config.train.epochs)
            )
            if client.id in dropped or not epochs or not self.trainer.can_train(client):
                report["status"] = DROPPED if client.id in dropped else LATE if not epochs else NO_DATA
            else:
                waiting.append((report, client, epochs))
        while waiting:
            self.comm.at(round, "training", waiting[0][1].id if len(self.lanes.trainers) == 1 else None)
            self.sum.bank()  # the models' memory is about to be used for the next clients
            group = waiting[: len(self.lanes.trainers)]
            before = [dict(client.state) for _, client, _ in group]
            trained = self.lanes.train(
                [(client, weights_V, counters, message, round, epochs) for _, client, epochs in group]
            )
            for (report, client, _), state, each in zip(group, before, trained):
                if keep:
                    client.state[OWN_MODEL] = client.flat.values_V.detach().cpu().clone()
                self._fill(report, client, each)
                if report["status"]:
                    client.state = state  # what spoilt this round must not spoil its next
                else:
                    self.delivered.append(client.id)
                client.leave()
            waiting = waiting[len(trained) :]
        return reports

    def _fill(self, report: np.void, client: Client, trained: Trained) -> None:
        payload.fill(report, trained.report)
        report["loss"], report["train_s"], report["report_s"] = trained.loss_by_term, trained.train_s, trained.report_s
        report["test_n"], report["test_correct"] = trained.test.n, trained.test.correct
        report["val_n"], report["val_correct"] = trained.val.n, trained.val.correct
        report["counters"] = pack_counters(client.flat.counters)
        found = self._add(client, trained)
        if found:
            report["status"], report["bad_tensor"], report["bad_value"] = (
                found.status,
                self.names.index(found.tensor),
                found.value,
            )
        report["weight"] = 0 if found else len(client.y_train)

    def _add(self, client: Client, trained: Trained) -> Finding | None:
        """Add the client's weights to the sum, unless something is wrong with it: that returns, the weights first."""
        flat, max_norm = client.flat, self.trainer.config.fed.max_norm
        found = (
            quarantine.bad_report(trained.report, max_norm)
            or quarantine.bad_loss(dict(zip(self.trainer.scheme.terms, trained.loss_by_term)))
            or quarantine.bad_update(flat, client.received_V, max_norm)
            or quarantine.bad_test(trained.test.nonfinite, trained.val.nonfinite)
        )
        if found:
            return quarantine.bad_weights(flat) or found
        return quarantine.bad_weights(flat) if self.sum.add(flat.values_V, self.weight_of(client)) else None

    def weight_of(self, client: Client) -> int:
        """In every average of models (fed.average)."""
        return len(client.y_train) if self.trainer.config.fed.average == "images" else 1

    def measure_statistics(self, clients: list[int], weights_V: torch.Tensor, counters) -> None:
        """Add BatchNorm's running statistics, measured anew with the global weights by those of these clients here."""
        self.statistics_sum.clear()
        for client in self.clients:
            if client.id in clients and self.trainer.can_train(client):
                self.statistics_sum.bank()
                self.trainer.flat.load(weights_V, counters)
                evaluate.reestimate_batch_norm(self.trainer.flat.net, client.x_train)
                refused = self.statistics_sum.add(self.trainer.flat.statistics_S, self.weight_of(client))
                if refused:
                    log.warn(
                        f"{log.client_text(client.id, client.name)}: BatchNorm's statistics measured with the global "
                        "weights have "
                        f"{refused[0]:.6g} to {refused[1]:.6g}; they count with weight 0"
                    )

    def examine(self, weights_V: torch.Tensor, counters) -> np.ndarray:
        """(places, 4) int64: client id (-1: unused), test_n, how many the final global model has right of them, and for
        how many its logits are not finite."""
        rows = np.full((self.places, 4), -1, np.int64)
        for row, client in zip(rows, self.clients):
            self.trainer.flat.load(weights_V, counters)
            row[:] = result_row(client, evaluate.test(self.trainer.flat.net, client.x_test, client.y_test))
        return rows

    def finetune(self, weights_V: torch.Tensor, counters, round: int) -> np.ndarray:
        """The same of the global model trained fed.finetune_epochs more on each client, with plain cross-entropy."""
        config = self.trainer.config
        epochs = config.fed.finetune_epochs
        trainer = LocalTrainer(self.trainer.flat, Scheme(SchemeSettings(), self.trainer.scheme.facts), config)
        rows = np.full((self.places, 4), -1, np.int64)
        for row, client in zip(rows, self.clients):
            self.comm.at(round, "fine-tuning", client.id)
            row[:] = result_row(client, evaluate.Tested())
            if trainer.can_train(client):
                own = {name: client.state[name] for name in (OWN_MODEL, OWN_STATISTICS) if name in client.state}
                plain = replace(client, state=own)  # without what the scheme remembers of it
                row[:] = result_row(client, trainer.run(plain, weights_V, counters, {}, round, epochs).test)
        return rows


def result_row(client: Client, tested: evaluate.Tested) -> tuple[int, int, int, int]:
    """What travels of a client's last tests."""
    return client.id, tested.n, tested.correct, tested.nonfinite


def counter_size(counters: list[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in counters)


def pack_counters(counters: list[torch.Tensor]) -> np.ndarray:
    """Integer and bool buffers as one int64 vector."""
    parts = [counter.reshape(-1).long() for counter in counters]
    return torch.cat(parts).cpu().numpy() if parts else np.zeros(0, np.int64)  # one transfer from a GPU


def unpack_counters(vector: np.ndarray, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of `pack_counters`, in the dtypes, shapes and devices of `like`."""
    out, start = [], 0
    for tensor in like:
        part = torch.from_numpy(np.array(vector[start : start + tensor.numel()]))
        out.append(part.reshape(tensor.shape).to(device=tensor.device, dtype=tensor.dtype))
        start += tensor.numel()
    return out
