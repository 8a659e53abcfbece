"""Rank 0's half of a round: combine the reports, test the global model, keep the record, save. The only writer of
files.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hkd_hpc import loggers, payload
from hkd_hpc.analysis import metrics, milestones
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.config import Config
from hkd_hpc.console import messages
from hkd_hpc.loggers.guarded import Loggers
from hkd_hpc.models import evaluate
from hkd_hpc.models.evaluate import Tested
from hkd_hpc.privacy.ledger import WHOLE, Ledger, ledger_of
from hkd_hpc.privacy.settings import RELEASE
from hkd_hpc.protection.spending import Spending
from hkd_hpc.quarantine import DROPPED_OUT, INVALID, OK, STATUS, STRAGGLER, TOO_FEW_IMAGES, describe
from hkd_hpc.schemes import contract
from hkd_hpc.schemes.base import Scheme, SchemeServer
from hkd_hpc.schemes.shared_knowledge import shared_knowledge
from hkd_hpc.state import checkpoint
from hkd_hpc.state.checkpoint import RoundState
from hkd_hpc.store.digest import arrays_sha256
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.growing import GrowingTree
from hkd_hpc.store.history import LAYOUT, WIRE_KINDS, History, client_column
from hkd_hpc.store.tree import save_tree
from hkd_hpc.training import LocalTrainer
from hkd_hpc.worker import counter_size

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Images:
    """Images (N,C,H,W) uint8, or inputs of another form, and labels on rank 0's device."""

    x_NCHW: torch.Tensor
    y_N: torch.Tensor


def message_type(scheme: Scheme, counters: int) -> np.dtype:
    """The server's message: the integer buffers of the global model, and what the scheme declares."""
    return payload.record_type({}, {"counters": (counters,)}, scheme.message_shapes())


@dataclass(frozen=True)
class RoundResult:
    """What the round loop hands to the server's record.

    Attributes:
        state: the state after the round.
        reports: of the clients that were sampled, in client order.
        wire_bytes: what the communicator has moved so far, by kind.
        seconds: of the round, by phase, on rank 0.
        wall_s: from the start of the round to the end of its exchange.
    """

    state: RoundState
    reports: np.ndarray
    wire_bytes: dict[str, int]
    seconds: dict[str, float]
    wall_s: float


def is_due(round: int, every: int, last: int) -> bool:
    """Whether something done every so many rounds is due; in the last round everything is."""
    return round % every == 0 or round == last


class Server:
    """Rank 0: combines the reports, tests the global model, and owns the record and the run's folder."""

    def __init__(
        self,
        config: Config,
        trainer: LocalTrainer,
        folder: RunFolder,
        test: Images,
        val: Images,
        static: dict[str, Any],
        uninterrupted: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        spending: Spending | None = None,
    ):
        """
        Args:
            config: the settings that the rounds use.
            trainer: its model is the one that is tested.
            folder: where the record goes.
            test: the official test split.
            val: what all clients hold out together, may be empty.
            static: what metrics.h5 and every checkpoint carry beside the rows (settings, partition, versions).
            uninterrupted: a context in which the failure of another rank does not cut off what is written.
            spending: what the rounds cost of the clients' privacy; None: no ledger and no budget.
        """
        self.config, self.trainer, self.folder, self.static = config, trainer, folder, static
        self.spending = spending
        self.restarts_by_round = self._rounds_begun()  # by other processes
        self.uninterrupted = uninterrupted
        self.test_images, self.val_images = test, val
        self.history = History(config.fed.clients)
        self.scheme_server = SchemeServer(trainer.flat.net, config.run.seed)
        self.message_type = message_type(trainer.scheme, counter_size(trainer.flat.counters))
        self.pending: RoundState | None = None  # recorded, and not yet tested
        self.last_test = Tested()  # of the global model, on the test split
        self.warning = ""
        self.wire_before: dict[str, int] = {}
        self.metrics_file = GrowingTree(folder.metrics_path, attributes=LAYOUT)
        self.rows_file = GrowingTree(folder.rows_path, sync_every_s=0)  # what a checkpoint needs outlasts all
        self.write_s = 0.0  # of the last row
        self.clock = messages.Clock(config.fed.rounds)
        self.loggers = Loggers({}, folder.path, [], messages.warn_of_loss)

    def open_loggers(self) -> None:
        """Of run.loggers, which get each round from now on. UsageError where one of them cannot be used."""
        classes = loggers.classes_of(loggers.names_of(self.config.run.loggers))
        done = len(self.history) - (self.pending is not None)
        rows = [self.history.row(index) for index in range(done if classes else 0)]
        self.loggers = Loggers(classes, self.folder.loggers_folder, rows, messages.warn_of_loss)

    def require_round(self) -> None:
        """Before anything is written of a run that begins. UsageError where the budget allows no round."""
        if not self.last_round():
            raise UsageError(f"{self.why_early()}; raise it, or the noise multipliers")

    # --- within a round

    def begin_round(self, round: int) -> None:
        """Of a release, before the training of a round: from here on something of it may be released."""
        self.folder.record_begun(round)

    def combine(self, round: int, gathered: np.ndarray) -> np.ndarray:
        """Let the scheme combine the reports of the clients that delivered.

        Args:
            round: from 1 on.
            gathered: (clients,) records of `worker.report_type`, in client order.

        Returns:
            The message of this round, (1,) record of `message_type`.

        Raises:
            RunError: the scheme does not keep its contract, or its message is not finite.
        """
        good = gathered[gathered["status"] == OK]
        server = self.scheme_server
        server.round, server.client_ids = round, good["client"].tolist()
        message = np.zeros(1, self.message_type)
        scheme = self.trainer.scheme
        combined = scheme.combine(server, payload.tensors_of(good))
        contract.check_tensors(scheme, "combine", combined, scheme.message_shapes())
        contract.check_server_state(scheme, server.state)
        payload.fill(message[0], combined)
        tensors = payload.tensors_of(message[0])
        bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
        if bad:
            raise RunError(
                f"the message that scheme {self.config.scheme.name} combined has NaN or infinity in {', '.join(bad)}, "
                "although all reports were finite; see its combine()"
            )
        self.warning = scheme.warning(tensors)
        contract.check_text(scheme, "what warning() returns", self.warning)
        if self.warning:
            messages.warn(f"round {round}: {self.warning}")
        message[0]["counters"] = good["counters"].max(0) if len(good) else 0
        return message

    def record_round(self, result: RoundResult) -> None:
        """Append the row of this round; `save` and `run_pending_evaluation` follow.

        Args:
            result: of the round.
        """
        numbers = self._numbers_of(result)
        self.wire_before = result.wire_bytes
        client_row = {
            name: client_column(self.config.fed.clients, result.reports["client"], values)
            for name, values in metrics.clients_of(numbers).items()
        }
        self.history.append(metrics.row_of(numbers), client_row)
        self.pending = result.state

    def _numbers_of(self, result: RoundResult) -> metrics.RoundNumbers:
        """What the columns are computed from."""
        status = result.reports["status"]
        is_accepted = status == OK
        return metrics.RoundNumbers(
            round=result.state.round,
            wall_s=result.wall_s,
            warning=self.warning,
            reports=result.reports,
            is_accepted=is_accepted,
            invalid=int(np.isin(status, INVALID).sum()),
            failed=int(np.isin(status, (DROPPED_OUT, STRAGGLER)).sum()),
            terms=self.trainer.scheme.terms,
            classes=self.trainer.scheme.info.classes,
            pools_data=self.trainer.scheme.pools_data,
            payload_bytes=self._payload_bytes(result.reports, result.state.message),
            wire_bytes={kind: result.wire_bytes.get(kind, 0) - self.wire_before.get(kind, 0) for kind in WIRE_KINDS},
            seconds={**result.seconds, "save": self.write_s},
            knowledge=shared_knowledge(self.trainer.scheme, result.reports[is_accepted]),
            privacy_mu=self._privacy_mu(result),
            begun=self._times_begun(result.state.round),
        )

    def _times_begun(self, round: int) -> int:
        """How often the present round of a release was begun; 0 where nothing is released."""
        return self.restarts_by_round[round] + 1 if self.config.privacy.mode == RELEASE else 0

    def _privacy_mu(self, result: RoundResult) -> dict[str, np.ndarray]:
        """What the clients of the round released; a round that was begun twice counts twice."""
        if self.spending is None or not (self.spending.is_told or WHOLE in self.history.clients):
            return {}  # a record that has begun goes on
        return self.spending.of_reports(result.reports, self._times_begun(result.state.round) or 1)

    def _payload_bytes(self, reports: np.ndarray, message: np.ndarray) -> dict[str, np.ndarray]:
        """What the paper counts, by kind, of each sampled client: weights and knowledge, up and down."""
        scheme, delivered = self.trainer.scheme, reports["status"] == OK
        weights = np.array([self.trainer.payload_floats_of(self.member_of(client)) for client in reports["client"]])
        up = [
            scheme.traffic(payload.tensors_of(report), "up") if good else 0 for report, good in zip(reports, delivered)
        ]
        floats = {
            "weights_up": delivered * weights,
            "knowledge_up": np.array(up, np.int64),
            "weights_down": weights,
            "knowledge_down": np.full(len(reports), scheme.traffic(payload.tensors_of(message[0]), "down")),
        }
        return {kind: count * FLOAT_BYTES for kind, count in floats.items()}

    def report_rejected(self, round: int, gathered: np.ndarray, names: list[str]) -> None:
        """Say and record which clients do not count in this round, and why.

        Args:
            round: from 1 on.
            gathered: (clients,) records of `worker.report_type`, in client order.
            names: of what may be bad (quarantine.names).

        Raises:
            RunError: they are more than fed.max_bad_fraction of those that trained.
        """
        bad = gathered[np.isin(gathered["status"], INVALID)]
        for record in bad:
            client, value = int(record["client"]), float(record["invalid_value"])
            tensor = names[record["invalid_tensor"]]
            messages.warn(
                f"round {round}: {self.client_text(client)} rejected: {describe(tensor, value)}; "
                "it counts with weight 0"
            )
            self.history.add_event(
                round=round, client=client, what=STATUS[int(record["status"])], tensor=tensor, value=value
            )
        if round == 1 and (gathered["status"] == TOO_FEW_IMAGES).any():
            ids = gathered["client"][gathered["status"] == TOO_FEW_IMAGES].tolist()
            named = f" ({', '.join(str(self.client_names[i]) for i in ids)})" if len(self.client_names) else ""
            messages.warn(f"clients {ids}{named} have {STATUS[TOO_FEW_IMAGES]}; they take part with weight 0")
        self.stop_if_too_many(f"round {round}", len(bad), int(np.isin(gathered["status"], (OK, *INVALID)).sum()))

    def stop_if_too_many(self, where: str, bad: int, trained: int) -> None:
        most = self.config.fed.max_bad_fraction
        if bad > most * trained:
            self.write_metrics()  # with the events
            raise RunError(
                f"{where}: {bad} of {trained} clients were rejected, more than fed.max_bad_fraction={most:g} "
                "allows; the warnings above say why. The checkpoint of the last saved round is good"
            )

    @property
    def client_names(self) -> np.ndarray:
        """Of natural clients, by their numbers; empty where they have none."""
        return self.static["clients"].get("name", np.array([], str))

    def client_text(self, client: int) -> str:
        """client 3, or client 3 (its name)"""
        return messages.client_text(client, self.client_names[client] if len(self.client_names) else "")

    # --- privacy

    @property
    def ledger(self) -> Ledger | None:
        """Of the rounds so far; None where there is none, or no round."""
        if self.spending is None:
            return None
        return ledger_of(
            self.spending.terms, self.history.clients, self._rounds_begun(), self.history.rounds.get("begun")
        )

    @property
    def _ledger_of_rows(self) -> Ledger | None:
        """The same without the rounds that were begun and not finished."""
        return ledger_of(self.spending.terms, self.history.clients) if self.spending else None

    def _rounds_begun(self) -> Counter[int]:
        """How often each round of a release was begun."""
        return self.folder.rounds_begun() if self.config.privacy.mode == RELEASE else Counter()

    # --- the last round

    @property
    def validation_accuracy(self) -> np.ndarray:
        """(rounds,) what run.stop_patience looks at."""
        return self.history.column(f"{self.config.run.stop_on}_val_accuracy")

    def last_round(self) -> int:
        """The last round, as far as the rows tell it: patience or the budget may make it an earlier one than
        fed.rounds."""
        return min(self._patience_ends(), self._budget_ends())

    def _patience_ends(self) -> int:
        rounds, patience = self.config.fed.rounds, self.config.run.stop_patience
        return milestones.last_round(self.validation_accuracy, patience, rounds) if patience else rounds

    def _budget_ends(self) -> int:
        if self.spending is None:
            return self.config.fed.rounds
        return self.spending.last_round(self._ledger_of_rows, len(self.history), self.restarts_by_round)

    def tell_last(self, last: int) -> None:
        """Say that patience or the budget has ended, once."""
        if last < self.clock.rounds:
            self.clock.rounds = last
            messages.say(f"{self.why_early()}; round {last} is the last")

    def why_early(self) -> str:
        """Why an earlier round is the last: no better global accuracy ..."""
        settings = self.config.run
        if self.spending and self._budget_ends() < self._patience_ends():
            return self.spending.why_early(self._ledger_of_rows, len(self.history), self.restarts_by_round)
        return messages.patience_text(self.validation_accuracy, settings.stop_on, settings.stop_patience)

    # --- beside the next round

    def save(self, state: RoundState, is_due: bool) -> None:
        """Hash the weights of the recorded round, and write its checkpoint.

        Args:
            state: after the round.
            is_due: whether a checkpoint is written.

        Raises:
            RunError: the checkpoint cannot be written.
        """
        start_s = time.perf_counter()
        arrays = self.trainer.flat.arrays(state.weights_V, state.counters)
        self.history.set_last(weights_sha256=arrays_sha256(arrays))
        if is_due:
            save_s = time.perf_counter()
            self._save_checkpoint(state, arrays)
            self._add_seconds(save_s, "save")
        self._add_seconds(start_s)

    def _save_checkpoint(self, state: RoundState, arrays: dict[str, np.ndarray]) -> None:
        """The state after a round, and in another file the rows before it: a checkpoint with all rows would cost more
        in each round. That of the last round has them all, and stands for itself."""
        history = self.history
        if state.round == self.last_round() or not history.finalized["rounds"]:
            rows = history.tree()
        else:
            self.folder.make_checkpoint_folder()
            self.rows_file.save(self.static, lambda since: history.tree(since, history.finalized))
            rows = history.tree(history.finalized)
            rows["before"] = {
                **history.finalized,
                "weights_sha256": history.rounds["weights_sha256"][history.finalized["rounds"] - 1],
            }
        tree = {**self.static, **rows, **checkpoint.pack(state, arrays, self.scheme_server.state)}
        self.folder.save_checkpoint(state.round, tree)

    def run_pending_evaluation(self) -> None:
        """Test the model after the last round and write its row, if that is still to be done.

        Raises:
            RunError: metrics.h5 cannot be written.
        """
        if self.pending is None:
            return
        start_s = time.perf_counter()
        state, self.pending = self.pending, None
        if is_due(state.round, self.config.run.evaluate_every, self.last_round()):
            self._test_round(state)
        self._add_seconds(start_s)
        self.history.finalize()
        start_s = time.perf_counter()
        self.write_metrics()
        self.write_s = time.perf_counter() - start_s
        messages.say(messages.progress_line(self.history, self.clock, self.trainer.scheme.terms))
        messages.detail(lambda: messages.round_details(self.history, self.static["clients"]["rank"].tolist()))
        self.loggers.log_round(self.history.last())

    def _test_round(self, state: RoundState) -> None:
        """Test the global model of the last row; logits that are not finite are told, and no accuracy."""
        test, val = (
            self.test(state.weights_V, state.counters, images) for images in (self.test_images, self.val_images)
        )
        self.last_test = test
        self.history.set_last(**metrics.of_test(test, val))
        nonfinite = messages.nonfinite_text({"the test split": test, "the validation images": val})
        if nonfinite:
            messages.warn(f"round {state.round}: the global model has {nonfinite}: no accuracy")

    def _add_seconds(self, start_s: float, phase: str = "evaluate_and_save") -> None:
        """Add the seconds since then to the row."""
        name = f"seconds/{phase}"
        self.history.set_last(**{name: self.history.rounds[name][-1] + time.perf_counter() - start_s})

    def test(self, weights_V: torch.Tensor, counters: Iterable[torch.Tensor], images: Images) -> Tested:
        """Test a global model.

        Args:
            weights_V: its weights, V floats.
            counters: its integer buffers.
            images: N of them.

        Returns:
            How many were tested, and how many it has right; of unequal models those of all architectures together.
        """
        return evaluate.pooled(list(self.test_members(weights_V, counters, images).values()))

    def test_members(
        self, weights_V: torch.Tensor, counters: Iterable[torch.Tensor], images: Images
    ) -> dict[str, Tested]:
        """The same by member of the network (models/family.py); arguments as `test`."""
        flat = self.trainer.flat
        flat.load(weights_V, counters)
        return {
            name: evaluate.test_with_auc(flat.net_of(name), images.x_NCHW, images.y_N)
            for name in self.config.model.members
        }

    def member_of(self, client: int) -> str:
        """Of unequal models, which one a client has."""
        return self.config.model.member_of(int(client))

    def restore(self, history: History, tree: dict[str, Any], evaluation: dict[str, Any] | None) -> RoundState:
        """Resume from a checkpoint.

        Args:
            history: its rows.
            tree: the checkpoint.
            evaluation: what is stored of the test of the last row; None: that is done again.

        Returns:
            What the next round starts from.
        """
        state, self.scheme_server.state = checkpoint.unpack(tree, self.trainer.flat, self.message_type)
        self.history = history
        if evaluation is None:
            self.pending = state
        else:
            history.set_last(**evaluation)
            history.finalize()
        return state

    def write_metrics(self) -> None:
        """Bring metrics.h5 up to date with all rows that are finalized, and all events."""
        with self.uninterrupted():
            self.metrics_file.save(self.static, self.history.tree)

    def write_complete_metrics(self, summary: dict[str, Any]) -> None:
        """metrics.h5 of a complete run, in one piece; then no checkpoint needs the rows elsewhere."""
        tree = {**self.static, **self.history.tree(), "summary": summary}
        tree["clients"] |= self.static["clients"]
        with self.uninterrupted():
            save_tree(self.folder.metrics_path, tree, LAYOUT)
            self.folder.remove_rows()
