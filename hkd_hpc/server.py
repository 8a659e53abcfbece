"""Rank 0's half of a round: combine the reports, test the global model, keep the record, save. The only writer of
files.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import numpy as np
import torch

from hkd_hpc import payload
from hkd_hpc.console import messages
from hkd_hpc.errors import RunError
from hkd_hpc.models import evaluate
from hkd_hpc.models.evaluate import Tested
from hkd_hpc.quarantine import BAD, BAD_TEST, DROPPED, LATE, NO_DATA, NONFINITE, OK, STATUS, words
from hkd_hpc.schemes import contract
from hkd_hpc.schemes.base import SchemeServer
from hkd_hpc.store.digest import weights_sha256
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.growing import GrowingTree
from hkd_hpc.store.history import NAN, WIRE_KINDS, History, client_column
from hkd_hpc.store.tree import BadFile, load_tree, save_tree
from hkd_hpc.training import LocalTrainer
from hkd_hpc.worker import counter_size, unpack_counters

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Images:
    """Images (N,C,H,W) uint8 and labels on rank 0's device."""

    x_NCHW: torch.Tensor
    y_N: torch.Tensor


def accuracy_of(reports: np.ndarray, kind: str) -> np.ndarray:
    """Each client's accuracy on its own "test" or "val" images, NaN where it has none."""
    n, correct = reports[f"{kind}_n"], reports[f"{kind}_correct"]
    return np.where(n > 0, correct / np.maximum(n, 1), NAN)


def spread_of(accuracy_M: np.ndarray) -> tuple[float, float]:
    """(mean over the worst tenth of the clients, one at least; standard deviation over all) of those with a test."""
    tested = np.sort(accuracy_M[~np.isnan(accuracy_M)])
    return (float(tested[: -(-len(tested) // 10)].mean()), float(tested.std())) if len(tested) else (NAN, NAN)


def accuracy_of_rows(rows: np.ndarray) -> float:
    """Over all images of the rows (Worker.examine); NaN without any, and where one has no finite prediction."""
    _, n, correct, nonfinite = map(int, rows.sum(0))
    return Tested(n, correct, nonfinite=nonfinite).accuracy


def message_type(scheme, counters: int) -> np.dtype:
    """The server's message: the integer buffers of the global model, and what the scheme declares."""
    return payload.record_type({}, {"counters": (counters,)}, scheme.message_shapes())


class Server:
    """Owns the global test, the history and the run folder."""

    def __init__(
        self,
        config,
        trainer: LocalTrainer,
        folder: RunFolder,
        test: Images,
        val: Images,
        history: History,
        static: dict,
        uninterrupted=contextlib.nullcontext,
    ):
        """`test`: the official test split; `val`: what all clients hold out together, may be empty.

        `static`: what metrics.h5 and every checkpoint carry beside the rows (settings, partition, versions).
        `uninterrupted()`: a context in which the failure of another rank does not cut off what is written.
        """
        self.uninterrupted = uninterrupted
        self.config, self.trainer, self.folder, self.history, self.static = config, trainer, folder, history, static
        self.test_images, self.val_images = test, val
        self.scheme_server = SchemeServer(trainer.flat.net, config.run.seed)
        self.message_type = message_type(trainer.scheme, counter_size(trainer.flat.counters))
        self.pending: dict | None = None
        self.warning = ""
        self.wire_before: dict[str, int] = {}
        self.summary: dict = {}
        self.metrics = GrowingTree(folder.metrics_path) if folder else None
        self.rows = (
            GrowingTree(folder.rows_path, sync_every_s=0) if folder else None
        )  # what a checkpoint needs outlasts all
        self.write_s = 0.0  # of the last row
        self.clock = messages.Clock(config.fed.rounds)

    # --- within a round

    def combine(self, round: int, gathered: np.ndarray) -> np.ndarray:
        """The message of this round (one record), from the reports of the clients that delivered."""
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

    def note(self, round: int, gathered: np.ndarray, states: dict, job, wall_s: float) -> None:
        """Append the row of this round; `save` and `settle` follow."""
        wire = {kind: job.comm.wire_bytes.get(kind, 0) - self.wire_before.get(kind, 0) for kind in WIRE_KINDS}
        self.wire_before = dict(job.comm.wire_bytes)
        row = {
            "round": round,
            "wall_s": wall_s,
            "weights_sha256": "",
            "warning": self.warning,
            "global_test_accuracy": NAN,
            "global_test_loss": NAN,
            "global_test_n": 0,
            "global_test_nonfinite": 0,
            "global_val_accuracy": NAN,
            "global_val_nonfinite": 0,
        }
        payload_bytes = self._payload_bytes(gathered, job.message)
        row |= self._local_numbers(gathered) | {name: int(count.sum()) for name, count in payload_bytes.items()}
        row |= {f"wire_bytes/{kind}": count for kind, count in wire.items()}
        row |= {f"seconds/{phase}": seconds for phase, seconds in job.seconds.items()} | {"seconds/save": self.write_s}
        self.history.append(row, self._client_row(gathered, payload_bytes))
        self.pending = {
            "weights_V": job.weights_V.detach().clone(),
            "counters": [c.clone() for c in job.counters],
            "message": job.message.copy(),
            "states": states,
        }

    def _local_numbers(self, gathered: np.ndarray) -> dict:
        good = gathered[gathered["status"] == OK]
        images, tests = good["weight"].sum(), good["test_n"].sum()
        worst_tenth, spread = (NAN, NAN) if self.trainer.scheme.pools_data else spread_of(accuracy_of(good, "test"))
        row = {
            "local_test_accuracy": good["test_correct"].sum() / tests if tests else NAN,
            "local_test_n": int(tests),
            "local_test_accuracy_worst_tenth": worst_tenth,
            "local_test_accuracy_std": spread,
            "local_val_accuracy": good["val_correct"].sum() / good["val_n"].sum() if good["val_n"].any() else NAN,
            "train_n": int(images),
            "clients_sampled": len(gathered),
            "clients_refused": int(np.isin(gathered["status"], BAD).sum()),
            "clients_failed": int(np.isin(gathered["status"], (DROPPED, LATE)).sum()),
        }
        for j, term in enumerate(self.trainer.scheme.terms):
            row[f"loss/{term}"] = float((good["loss"][:, j] * good["weight"]).sum() / images) if images else NAN
        return row

    def _payload_bytes(self, gathered: np.ndarray, message: np.ndarray) -> dict[str, np.ndarray]:
        """What the paper counts, by kind, of each sampled client: weights and knowledge, up and down."""
        scheme = self.trainer.scheme
        weights, delivered = self.trainer.payload_floats, gathered["status"] == OK
        up = [
            scheme.report_floats(payload.tensors_of(report)) if good else 0 for report, good in zip(gathered, delivered)
        ]
        down = np.full(len(gathered), scheme.message_floats(payload.tensors_of(message[0])))
        floats = {
            "weights_up": delivered * weights,
            "knowledge_up": np.array(up, np.int64),
            "weights_down": np.full(len(gathered), weights),
            "knowledge_down": down,
        }
        return {f"payload_bytes/{kind}": count * FLOAT_BYTES for kind, count in floats.items()}

    def _client_row(self, gathered: np.ndarray, payload_bytes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        column = lambda values, who=gathered: client_column(self.config.fed.clients, who["client"], values)
        good = gathered[gathered["status"] == OK]
        row = {
            "local_test_accuracy": column(accuracy_of(good, "test"), good),
            "local_test_n": column(gathered["test_n"]),
            "local_val_accuracy": column(accuracy_of(good, "val"), good),
            "local_val_n": column(gathered["val_n"]),
            "train_n": column(gathered["weight"]),
            "train_s": column(gathered["train_s"]),
            "report_s": column(gathered["report_s"]),
            "status": column(gathered["status"]),
        }
        for j, term in enumerate(self.trainer.scheme.terms):
            row[f"loss/{term}"] = column(good["loss"][:, j], good)
        return row | {name: column(count) for name, count in payload_bytes.items()}

    def complain(self, round: int, gathered: np.ndarray, names: list[str]) -> None:
        """Say and record which clients do not count in this round, and why; `names` of what may be bad
        (quarantine.names).

        RunError when they are more than fed.max_bad_fraction of those that trained.
        """
        bad = gathered[np.isin(gathered["status"], BAD)]
        for record in bad:
            client, tensor, value = int(record["client"]), names[record["bad_tensor"]], float(record["bad_value"])
            messages.warn(
                f"round {round}: {self.client_text(client)} refused: {words(tensor, value)}; it counts with weight 0"
            )
            self.history.add_event(
                round=round, client=client, what=STATUS[int(record["status"])], tensor=tensor, value=value
            )
        if round == 1 and (gathered["status"] == NO_DATA).any():
            ids = gathered["client"][gathered["status"] == NO_DATA].tolist()
            named = f" ({', '.join(str(self.client_names[i]) for i in ids)})" if len(self.client_names) else ""
            messages.warn(f"clients {ids}{named} have {STATUS[NO_DATA]}; they take part with weight 0")
        self._stop_if_too_many(f"round {round}", len(bad), int(np.isin(gathered["status"], (OK, *BAD)).sum()))

    def _stop_if_too_many(self, where: str, bad: int, trained: int) -> None:
        most = self.config.fed.max_bad_fraction
        if bad > most * trained:
            self.write_metrics()  # with the events
            raise RunError(
                f"{where}: {bad} of {trained} clients were refused, more than fed.max_bad_fraction={most:g} "
                "allows; the warnings above say why. The checkpoint of the last saved round is good"
            )

    @property
    def client_names(self) -> np.ndarray:
        """Of natural clients, by their numbers; empty where they have none."""
        return self.static["clients"].get("name", np.array([], str))

    def client_text(self, client: int) -> str:
        """client 3, or client 3 (its name)"""
        return messages.client_text(client, self.client_names[client] if len(self.client_names) else "")

    # --- beside the next round

    def save(self, checkpoint: bool) -> None:
        """Hash the noted round and write its checkpoint, if it has one."""
        start_s = time.perf_counter()
        round = int(self.history.rounds["round"][-1])
        arrays = self.trainer.flat.arrays(self.pending["weights_V"], self.pending["counters"])
        self.history.set_last(weights_sha256=weights_sha256(arrays))
        if checkpoint:
            save_s = time.perf_counter()
            self._save_checkpoint(round, arrays)
            self._book(save_s, "save")
        self._book(start_s)

    def _save_checkpoint(self, round: int, arrays: dict) -> None:
        """The state after a round, and in another file the rows before it: a checkpoint with all rows would cost more
        in each round. That of the last round has them all, and stands for itself."""
        history = self.history
        if round == self.config.fed.rounds or not history.settled["rounds"]:
            rows = history.tree()
        else:
            self.folder.make_checkpoint_folder()
            self.rows.save(self.static, lambda since: history.tree(since, history.settled))
            rows = history.tree(history.settled)
            rows["before"] = {
                **history.settled,
                "weights_sha256": history.rounds["weights_sha256"][history.settled["rounds"] - 1],
            }
        self.folder.save_checkpoint(round, self._checkpoint(round, arrays, rows))

    def settle(self) -> None:
        """Test and record the last round, if that is still to be done."""
        if self.pending is None:
            return
        start_s = time.perf_counter()
        pending, self.pending = self.pending, None
        if self.config.due(int(self.history.rounds["round"][-1]), self.config.run.evaluate_every):
            self._test_round(pending)
        self._book(start_s)
        self.history.settle()
        start_s = time.perf_counter()
        self.write_metrics()
        self.write_s = time.perf_counter() - start_s
        messages.say(messages.progress_line(self.history, self.clock, self.trainer.scheme.terms))

    def _test_round(self, pending: dict) -> None:
        """Test the global model of the last row; logits that are not finite are told, and no accuracy."""
        test, val = (
            self.test(pending["weights_V"], pending["counters"], images)
            for images in (self.test_images, self.val_images)
        )
        self.history.set_last(
            global_test_accuracy=test.accuracy,
            global_test_loss=test.loss / test.n if test.n else NAN,
            global_test_n=test.n,
            global_test_nonfinite=test.nonfinite,
            global_val_accuracy=val.accuracy,
            global_val_nonfinite=val.nonfinite,
        )
        spoilt = messages.nonfinite_text({"the test split": test, "the validation images": val})
        if spoilt:
            messages.warn(f"round {self.history.rounds['round'][-1]}: the global model has {spoilt}: no accuracy")

    def _book(self, start_s: float, phase: str = "evaluate_and_save") -> None:
        """Add the seconds since then to the row."""
        name = f"seconds/{phase}"
        self.history.set_last(**{name: self.history.rounds[name][-1] + time.perf_counter() - start_s})

    def test(self, weights_V: torch.Tensor, counters, images: Images) -> Tested:
        """A global model on these images."""
        self.trainer.flat.load(weights_V, counters)
        return evaluate.test(self.trainer.flat.net, images.x_NCHW, images.y_N)

    def _checkpoint(self, round: int, arrays: dict, rows: dict) -> dict:
        """The complete state after a round."""
        pending = self.pending
        message = pending["message"][0]
        tree = {
            **self.static,
            **rows,
            "round": round,
            "global": arrays,
            "global_names": np.array(list(arrays)),
            "message": {"counters": message["counters"]},
            "server": {name: tensor.cpu().numpy() for name, tensor in self.scheme_server.state.items()},
            "client_states": {str(client): state for client, state in sorted(pending["states"].items())},
        }
        for name, tensor in payload.tensors_of(message).items():
            tree["message"][name] = tensor.numpy()
        return tree

    def restore(self, round: int, tree: dict) -> dict:
        """Go on after `round` from a checkpoint; its row is tested again if it was not. Returns what `note` would
        keep.
        """
        self.history = History.from_tree(tree, self.config.fed.clients)
        self.scheme_server.state = {name: torch.as_tensor(np.array(a)) for name, a in tree.get("server", {}).items()}
        flat = self.trainer.flat
        message = np.zeros(1, self.message_type)
        stored = dict(tree["message"])
        message[0]["counters"] = stored.pop("counters")
        payload.fill(message[0], stored)
        weights_V = torch.zeros_like(flat.values_V)
        counters = flat.load_arrays(tree["global"], weights_V)
        states = {int(c): state for c, state in tree.get("client_states", {}).items()}
        kept = {"weights_V": weights_V, "counters": counters, "message": message, "states": states}
        if self._take_over_test():
            self.history.settle()
        else:
            self.pending = kept
        return kept

    def _take_over_test(self) -> bool:
        """Whether metrics.h5 has the last row complete, so that it need not be tested again; then its test is taken."""
        try:
            stored = History.from_tree(load_tree(self.folder.metrics_path, only=["rounds", "clients"]), 0).rounds
            row = stored["round"].index(self.history.rounds["round"][-1])
        except (BadFile, KeyError, ValueError):
            return False
        if stored["weights_sha256"][row] != self.history.rounds["weights_sha256"][-1]:
            return False
        if "global_test_nonfinite" not in stored:  # an older version took NaN for a prediction
            return False
        tested = [name for name in stored if name.startswith(("global_test_", "global_val_"))]
        self.history.set_last(**{name: stored[name][row] for name in tested})
        return True

    def _reproducible(self) -> str:
        """Empty where another run of these settings gives the same bits."""
        is_free = self.trainer.flat.values_V.is_cuda and not self.config.run.deterministic
        return "not bit-reproducible: on a GPU without run.deterministic=true" if is_free else ""

    def write_metrics(self) -> None:
        """Bring metrics.h5 up to date with all rows that are settled, and all events."""
        with self.uninterrupted():
            self.metrics.save(self.static, self.history.tree)

    def _write_complete_metrics(self) -> None:
        """metrics.h5 of a complete run, in one piece; then no checkpoint needs the rows elsewhere."""
        tree = {**self.static, **self.history.tree(), "summary": self.summary}
        tree["clients"] |= self.static["clients"]
        with self.uninterrupted():
            save_tree(self.folder.metrics_path, tree)
            self.folder.remove_rows()

    # --- at the end

    def finish(self, found: dict[str, np.ndarray], reestimated_V: torch.Tensor) -> None:
        """found: the clients' local tests of the final global model, fine-tuned or not, as rows of Worker.examine.

        RunError, and no summary, where the final global model's logits are not finite (fed.max_bad_fraction=1: a
        summary with NaN), or too many fine-tuned clients'.
        """
        counters = unpack_counters(
            np.zeros(counter_size(self.trainer.flat.counters), np.int64), self.trainer.flat.counters
        )
        tested = self.test(reestimated_V, counters, self.test_images)
        if "finetuned" in found:
            found["finetuned"] = self._accepted(found["finetuned"])
        spoilt = self._final_spoilt(tested, found["global"])
        summary = self._summary(found, tested, spoilt)
        self.summary = {} if spoilt and self.config.fed.max_bad_fraction < 1 else summary
        if self.summary:
            self._write_complete_metrics()
        else:
            self.write_metrics()
        messages.say(messages.summary_table(self.history, summary, self.static["baselines"], self.folder))
        if not self.summary:
            raise RunError(
                f"the final global model has {spoilt}: the run has no result. All its rounds are saved; "
                "--resume --allow-change fed.max_bad_fraction=1 ends it without these accuracies"
            )

    def _accepted(self, rows: np.ndarray) -> np.ndarray:
        """The rows of fine-tuned clients that predict finite numbers; the others are told and recorded."""
        bad, round = rows[rows[:, 3] > 0], int(self.history.rounds["round"][-1])
        for client, _, _, nonfinite in bad.tolist():
            messages.warn(
                f"{self.client_text(client)}, fine-tuned, refused: local test has {nonfinite} {NONFINITE}; it does not "
                "count"
            )
            self.history.add_event(
                round=round,
                client=client,
                what=STATUS[BAD_TEST],
                tensor="local test, fine-tuned",
                value=float(nonfinite),
            )
        self._stop_if_too_many("fine-tuning", len(bad), int((rows[:, 1] > 0).sum()))
        return rows[rows[:, 3] == 0]

    def _final_spoilt(self, reestimated: Tested, rows: np.ndarray) -> str:
        """Where the logits of the final global model are not finite; `rows`: on the clients' own tests."""
        row = {name: values[-1] for name, values in self.history.rounds.items()}
        return messages.nonfinite_text(
            {
                "the test split": Tested(row["global_test_n"], nonfinite=row["global_test_nonfinite"]),
                "the validation images": Tested(len(self.val_images.y_N), nonfinite=row["global_val_nonfinite"]),
                "the test split with BatchNorm re-estimated": reestimated,
                "the clients' own tests": Tested(int(rows[:, 1].sum()), nonfinite=int(rows[:, 3].sum())),
            }
        )

    def _summary(self, found: dict[str, np.ndarray], reestimated: Tested, spoilt: str) -> dict:
        history = self.history
        readings = {
            name: messages.three_readings(history.column(name), history.spoilt(name)) for name in messages.READ_THRICE
        }
        warnings = (
            messages.warnings_text(history.rounds["warning"]),
            messages.spoilt_text(history),
            spoilt and f"the final global model has {spoilt}",
        )
        return {
            "global_test_accuracy_batchnorm_reestimated": reestimated.accuracy,
            **{f"{name}_on_local_test_accuracy": accuracy_of_rows(rows) for name, rows in found.items()},
            **{f"{name}_on_local_test": rows for name, rows in found.items()},
            **{f"{name}_{kind}": value for name, three in readings.items() for kind, value in three.items()},
            "warnings": "; ".join(filter(None, warnings)),
            "remark": self.trainer.scheme.remark,
            "batchnorm": self.config.train.batchnorm,
            "reproducible": self._reproducible(),
            "changes": messages.changes_text(self.static.get("changes_json", "[]")),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
