"""The client side of a rank: trains the clients that live here, adds their weights up, fills in their reports."""
from __future__ import annotations

import numpy as np
import torch

from hkd_hpc import evaluate, payload
from hkd_hpc.aggregate import FixedPointSum
from hkd_hpc.client import Client, Trained, Workbench
from hkd_hpc.comm.base import Comm

OK, REFUSED, NO_DATA, BAD_REPORT = 0, 1, 2, 3
STATUS = {OK: "ok", REFUSED: "refused: its weights are not finite, or too large", NO_DATA: "too few images to train",
          BAD_REPORT: "refused: its report to the server is not finite"}


def report_type(scheme, counters: int) -> np.dtype:
    """One client's report of a round. client -1: an unused place of a rank that hosts fewer clients than others."""
    whole = {"client": (), "status": (), "weight": (), "test_n": (), "test_correct": (), "counters": (counters,)}
    numbers = {"train_s": (), "report_s": (), "weights_range": (2,), "loss": (len(scheme.terms),)}
    return payload.record_type(numbers, whole, scheme.report_shapes())


class Worker:
    """The clients of one rank. `places`: the largest number of clients on any rank, so that all ranks send alike."""

    def __init__(self, comm: Comm, bench: Workbench, clients: list[Client], places: int, total_images: int):
        self.comm, self.bench, self.clients, self.places = comm, bench, clients, places
        self.report_type = report_type(bench.scheme, counter_size(bench.flat.counters))
        self.sum = FixedPointSum(len(bench.flat.values_V), total_images, bench.flat.values_V.device)

    def train(self, round: int, cohort: list[int], weights_V: torch.Tensor, counters, message, keep: bool) -> np.ndarray:
        """Train the cohort's clients that live here; returns the reports (places,). `keep`: the model is client state."""
        self.sum.clear()
        reports = np.zeros(self.places, self.report_type)
        reports["client"] = -1
        here = [client for client in self.clients if client.id in set(cohort)]
        for report, client in zip(reports, here):
            self.comm.at(round, "training", client.id)
            report["client"] = client.id
            self.sum.bank()  # the model's memory is about to be used for this client
            if not self.bench.can_train(client):
                report["status"] = NO_DATA
                continue
            trained = self.bench.run(client, weights_V, counters, message, round)
            if keep:
                client.state["model"] = self.bench.flat.values_V.detach().cpu().clone()
            self._fill(report, client, trained)
        return reports

    def _fill(self, report: np.void, client: Client, trained: Trained) -> None:
        payload.fill(report, trained.report)
        report["loss"], report["train_s"], report["report_s"] = trained.loss_by_term, trained.train_s, trained.report_s
        report["test_n"], report["test_correct"] = len(client.y_test), trained.test_correct
        report["counters"] = pack_counters(self.bench.flat.counters)
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in trained.report.values())
        values_V = self.bench.flat.values_V
        refused = self.sum.add(values_V, len(client.y_train)) if finite else self.sum.refuses(values_V)
        report["status"] = REFUSED if refused else OK if finite else BAD_REPORT
        report["weights_range"] = refused or (0.0, 0.0)
        report["weight"] = len(client.y_train) if report["status"] == OK else 0

    def examine(self, weights_V: torch.Tensor, counters) -> np.ndarray:
        """With the final global model: its accuracy on each client's local test, and BatchNorm measured anew.

        Adds the re-estimated model to the sum. Returns (places, 3) int64: client id (-1: unused), test_n, correct.
        """
        self.sum.clear()
        rows = np.full((self.places, 3), -1, np.int64)
        for row, client in zip(rows, self.clients):
            self.sum.bank()
            self.bench.flat.load(weights_V, counters)
            row[:] = client.id, len(client.y_test), evaluate.test(self.bench.flat.net, client.x_test, client.y_test)[0]
            if self.bench.can_train(client):
                evaluate.reestimate_batch_norm(self.bench.flat.net, client.x_train)
                self.sum.add(self.bench.flat.values_V, len(client.y_train))
        return rows


def counter_size(counters: list[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in counters)


def pack_counters(counters: list[torch.Tensor]) -> np.ndarray:
    """Integer and bool buffers as one int64 vector."""
    return np.concatenate([t.cpu().numpy().reshape(-1).astype(np.int64) for t in counters] or [np.zeros(0, np.int64)])


def unpack_counters(vector: np.ndarray, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of `pack_counters`, in the dtypes, shapes and devices of `like`."""
    out, start = [], 0
    for tensor in like:
        part = torch.from_numpy(np.array(vector[start:start + tensor.numel()]))
        out.append(part.reshape(tensor.shape).to(device=tensor.device, dtype=tensor.dtype))
        start += tensor.numel()
    return out
