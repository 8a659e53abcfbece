"""The client side of a rank: trains the clients that live here, adds their weights up, fills in their reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from hkd_hpc import payload, quarantine
from hkd_hpc.aggregate import LIMIT, FixedPointSum
from hkd_hpc.client import OWN_MODEL, OWN_STATISTICS, Client
from hkd_hpc.cohort import cohort_size, draw_failures
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.console import messages as log
from hkd_hpc.models import evaluate
from hkd_hpc.privacy.updates import UpdatePrivacy
from hkd_hpc.quarantine import DROPPED_OUT, STRAGGLER, TOO_FEW_IMAGES, Finding
from hkd_hpc.runtime.machine import peak_memory_bytes
from hkd_hpc.schemes.base import Scheme, SchemeSettings
from hkd_hpc.training import ClientRound, LocalTrainer, Trained

STATISTICS = f"BatchNorm's statistics within +-{LIMIT:,.0f}, measured with the global weights"


def report_type(scheme: Scheme, counters: int, clips: bool = False) -> np.dtype:
    """One client's report of a round. client -1: an unused slot of a rank that hosts fewer clients than others.

    clips: with what privacy.update_clip found.
    """
    integers = {
        "client": (),
        "status": (),
        "train_n": (),
        "test_n": (),
        "test_correct": (),
        "counters": (counters,),
        "invalid_tensor": (),  # an index of quarantine.names
        "val_n": (),
        "val_correct": (),
        "memory_bytes": (),
    }
    numbers = {
        "train_s": (),
        "report_s": (),
        "invalid_value": (),
        "loss": (len(scheme.terms),),
        "test_balanced_accuracy": (),
        "test_macro_f1": (),
    }
    if clips:
        numbers["update_norm"] = integers["clipped"] = ()
    return payload.record_type(numbers, integers, scheme.report_shapes())


def update_privacy(trainer: LocalTrainer) -> UpdatePrivacy | None:
    """What is done to the weights that travel; None: nothing, or they stay at home."""
    privacy, fed = trainer.config.privacy, trainer.config.fed
    if not privacy.update_clip or not trainer.scheme.shares_weights:
        return None
    cohort = cohort_size(fed.clients, fed.participation)
    return UpdatePrivacy(privacy.update_clip, privacy.update_multiplier, cohort)


class Worker:
    """The clients of one rank.

    Args:
        comm: told what this rank does, for messages about failures.
        trainer: trains and tests them.
        clients: those that live here, by ascending id.
        slots: the largest number of clients on any rank, so that all ranks send alike.
        images_M: training images of each client of the federation.

    Attributes:
        initial: what the run began with of all that never travels (`LocalTrainer.own_parts`); at first of the trainer's
            model.
    """

    def __init__(self, comm: Comm, trainer: LocalTrainer, clients: list[Client], slots: int, images_M: list[int]):
        self.comm, self.trainer, self.clients, self.slots = comm, trainer, clients, slots
        self.images_M = images_M
        self.eligible = [client for client, images in enumerate(images_M) if images >= trainer.min_images]
        self.initial = trainer.own_parts(trainer.flat.values_V)
        self.delivered: list[int] = []  # those here whose weights are in the sum
        most = max(self.weight_of_all(images_M), 1)
        self.names = quarantine.names(trainer.flat, trainer.scheme.report_shapes(), trainer.scheme.terms)
        self.updates = update_privacy(trainer)
        self.report_type = report_type(trainer.scheme, counter_size(trainer.flat.counters), self.updates is not None)
        flat, members = trainer.flat, trainer.config.model.members
        device = flat.values_V.device
        self.sums = {
            name: FixedPointSum(len(flat.values_V), most, device, flat.averaged_spans_of(name)) for name in members
        }
        self.statistics_sums = {
            name: FixedPointSum(len(flat.statistics_S), most, device, flat.statistics_spans_of(name), STATISTICS)
            for name in members
        }

    def train(
        self,
        round: int,
        cohort: list[int],
        weights_V: torch.Tensor,
        counters: Sequence[torch.Tensor],
        message: dict[str, torch.Tensor],
        keep: bool,
    ) -> np.ndarray:
        """Train the cohort's clients that live here; returns the reports (slots,).

        Args:
            round: from 1 on.
            cohort: ids of the clients of this round, on all ranks.
            weights_V, counters, message: what they receive.
            keep: each client keeps its trained model in its state.
        """
        clear(self.sums)
        self.delivered.clear()
        reports = np.zeros(self.slots, self.report_type)
        reports["client"] = -1
        of_cohort = set(cohort)
        here = [client for client in self.clients if client.id in of_cohort]
        epochs_by_id = self._epochs_of(round, cohort, reports, here)
        waiting = [
            (report, ClientRound(client, weights_V, counters, message, round, epochs_by_id[client.id], self.initial))
            for report, client in zip(reports, here)
            if client.id in epochs_by_id
        ]
        while waiting:
            waiting = waiting[self._train_some(waiting, keep) :]
        return reports

    def _epochs_of(self, round: int, cohort: list[int], reports: np.ndarray, here: list[Client]) -> dict[int, int]:
        """Local epochs by id of those that train; the reports say who they are, and why the others do not train."""
        config = self.trainer.config
        dropped_out, stragglers = draw_failures(
            config.fed, config.run.seed, round, sorted({*cohort} & {*self.eligible})
        )
        epochs_by_id = {}
        for report, client in zip(reports, here):
            most = config.fed.straggler_epochs if client.id in stragglers else config.train.epochs
            report["client"] = client.id
            if client.id in dropped_out or not most:
                report["status"] = DROPPED_OUT if client.id in dropped_out else STRAGGLER
            elif not self.trainer.can_train(client):
                report["status"] = TOO_FEW_IMAGES
            else:
                epochs_by_id[client.id] = min(most, config.train.epochs)
        return epochs_by_id

    def _train_some(self, waiting: list[tuple[np.void, ClientRound]], keep: bool) -> int:
        """Train the first of the waiting clients, collect what they give; how many they were."""
        group = [given for _, given in waiting[: self.trainer.at_once]]
        self.comm.at(group[0].round, "training", group[0].client.id if self.trainer.at_once == 1 else None)
        flush(self.sums)  # the models' memory is about to be used for the next clients
        states = [dict(given.client.state) for given in group]
        trained = self.trainer.train(group)
        for (report, given), state, each in zip(waiting, states, trained):
            self._collect(report, given.client, each, state, keep)
        return len(trained)

    def _collect(self, report: np.void, client: Client, trained: Trained, state: dict, keep: bool) -> None:
        """Fill the report; a valid client's weights enter the sum, an invalid one's `state` is as it was before."""
        if keep:
            tested_V = client.state.get(trained.own_model, client.flat.values_V)
            client.state[OWN_MODEL] = tested_V.detach().cpu().clone()
        self._fill(report, client, trained)
        if report["status"]:
            client.state = state  # what made this round invalid must not reach its next
        else:
            self.delivered.append(client.id)
        client.drop_model()

    def _fill(self, report: np.void, client: Client, trained: Trained) -> None:
        payload.fill(report, trained.report)
        report["loss"], report["train_s"], report["report_s"] = trained.loss_by_term, trained.train_s, trained.report_s
        report["test_n"], report["test_correct"] = trained.test.n, trained.test.correct
        report["test_balanced_accuracy"], report["test_macro_f1"] = (
            trained.test.balanced_accuracy,
            trained.test.macro_f1,
        )
        report["val_n"], report["val_correct"] = trained.val.n, trained.val.correct
        report["counters"] = pack_counters(client.flat.counters)
        report["memory_bytes"] = peak_memory_bytes()
        found = self._add(client, trained, self._sent(client, report))
        if found:
            report["status"], report["invalid_tensor"], report["invalid_value"] = (
                found.status,
                self.names.index(found.tensor),
                found.value,
            )
        report["train_n"] = 0 if found else len(client.y_train)

    def _sent(self, client: Client, report: np.void) -> torch.Tensor:
        """What a client sends of its weights, (V,): privacy may clip their change and add noise."""
        flat, updates = client.flat, self.updates
        if updates is None:
            return flat.values_V
        sent = updates.sent(flat.values_V, client.received_V, unit_noise(client) if updates.multiplier else None)
        report["update_norm"], report["clipped"] = sent.norm, sent.norm > updates.clip
        return sent.values_V

    def _add(self, client: Client, trained: Trained, sent_V: torch.Tensor) -> Finding | None:
        """Add what the client sends to the sum, unless something is wrong with it: that returns, the weights first."""
        flat, max_norm = client.flat, self.trainer.config.fed.max_norm
        found = (
            quarantine.invalid_report(trained.report, max_norm)
            or quarantine.invalid_loss(dict(zip(self.trainer.scheme.terms, trained.loss_by_term)))
            or quarantine.invalid_update(flat, client.received_V, max_norm)
            or quarantine.invalid_test(trained.test.nonfinite, trained.val.nonfinite)
        )
        if found:
            return quarantine.invalid_weights(flat) or found
        rejected = self.sums[client.member].add(sent_V, self.weight_of(client))
        return (quarantine.invalid_weights(flat) or quarantine.invalid_noise(rejected)) if rejected else None

    def weight_of(self, client: Client) -> int:
        """In every average of models (fed.average)."""
        return len(client.y_train) if self.trainer.config.fed.average == "images" else 1

    def weight_of_all(self, images_M: Sequence[int] | np.ndarray) -> int:
        """Of clients with so many images, as in every average; those without any have none."""
        images = np.asarray(images_M)
        return int(images.sum() if self.trainer.config.fed.average == "images" else np.count_nonzero(images))

    def weights_by_member(self, client_M: np.ndarray, images_M: np.ndarray) -> dict[str, float]:
        """The same of each member, of the clients with these numbers."""
        member_M = np.array([self.trainer.config.model.member_of(int(client)) for client in client_M])
        return {name: self.weight_of_all(images_M[member_M == name]) for name in self.sums}

    def measure_statistics(
        self, clients: list[int], weights_V: torch.Tensor, counters: Sequence[torch.Tensor]
    ) -> list[int]:
        """Add BatchNorm's running statistics, measured anew with the global weights by those of these clients here.

        Returns:
            The clients whose statistics are in the sum.
        """
        clear(self.statistics_sums)
        measuring, added = set(clients), []
        for client in self._in_turn(self.clients):
            if client.id in measuring and self.trainer.can_train(client):
                flush(self.statistics_sums)
                self.trainer.flat.load(weights_V, counters)
                evaluate.reestimate_batch_norm(self.trainer.flat.net_of(client.member), client.x_train)
                rejected = self.statistics_sums[client.member].add(
                    self.trainer.flat.statistics_S, self.weight_of(client)
                )
                if rejected:
                    log.warn(
                        f"{log.client_text(client.id, client.name)}: BatchNorm's statistics measured with the global "
                        "weights have "
                        f"{rejected[0]:.6g} to {rejected[1]:.6g}; they count with weight 0"
                    )
                else:
                    added.append(client.id)
        return added

    def test_global(self, weights_V: torch.Tensor, counters: Sequence[torch.Tensor]) -> np.ndarray:
        """(slots, 4) int64: client id (-1: unused), test_n, how many the final global model has right of them, and for
        how many its logits are not finite."""
        rows = np.full((self.slots, 4), -1, np.int64)
        for client, row in zip(self._in_turn(self.clients), rows):
            self.trainer.flat.load(weights_V, counters)
            row[:] = result_row(
                client, evaluate.test(self.trainer.flat.net_of(client.member), client.x_test, client.y_test)
            )
        return rows

    def finetune(self, weights_V: torch.Tensor, counters: Sequence[torch.Tensor], round: int) -> np.ndarray:
        """The same of the global model trained fed.finetune_epochs more on each client, with plain cross-entropy; with
        train.batchnorm=local from the client's own statistics on."""
        plain_scheme = Scheme(SchemeSettings(), self.trainer.scheme.info)
        trainer = self.trainer.with_scheme(plain_scheme, self.trainer.config.finetuning(round))
        self.comm.watch_steps(lambda: trainer.steps)
        rows = np.full((self.slots, 4), -1, np.int64)
        for row, client in zip(rows, self.clients):
            self.comm.at(round, "fine-tuning", client.id)
            row[:] = result_row(client, evaluate.Tested())
            if trainer.can_train(client):
                own = {name: part for name, part in client.state.items() if name == OWN_STATISTICS}
                plain = replace(client, state=own)  # without what else is remembered of it
                given = ClientRound(plain, weights_V, counters, {}, round, initial=self.initial)
                row[:] = result_row(client, trainer.run(given).test)
        return rows

    def _in_turn(self, clients: Iterable[Client]) -> Iterator[Client]:
        """These clients one after the other, each of them a sign of life of this rank."""
        for client in clients:
            self.comm.turn_of(client.id)
            yield client
        self.comm.turn_of(None)


def unit_noise(client: Client) -> torch.Tensor:
    """(V,) float64, N(0, 1) for each float of a client's model, 0 in the gaps."""
    filled_V = client.flat.filled_V
    drawn_V = torch.from_numpy(client.normal("weights", filled_V.shape))
    return filled_V * drawn_V.to(filled_V.device)


def clear(sums: Mapping[str, FixedPointSum]) -> None:
    """Forget what was added to any of them."""
    for total in sums.values():
        total.clear()


def flush(sums: Mapping[str, FixedPointSum]) -> None:
    """The memory of the last vector, whichever took it, is about to be used."""
    for total in sums.values():
        total.flush()


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
