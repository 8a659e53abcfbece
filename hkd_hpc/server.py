"""Rank 0's half of a round: combine the reports, test the global model, keep the record, save. The only writer of files."""
from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from hkd_hpc import evaluate, payload, report, rng
from hkd_hpc.client import Workbench
from hkd_hpc.flat import weights_sha256
from hkd_hpc.history import NAN, WIRE_KINDS, History, client_column
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.tree import BadFile, load_tree, save_tree
from hkd_hpc.worker import BAD_REPORT, NO_DATA, OK, REFUSED, STATUS, counter_size, unpack_counters

FLOAT_BYTES = 4


@dataclass
class SchemeServer:
    """The server as a scheme sees it. `state` survives rounds and checkpoints; `net` holds the newest global weights."""

    net: torch.nn.Module
    seed: int
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    round: int = 0
    client_ids: list[int] = field(default_factory=list)

    def random(self, purpose: str) -> np.random.Generator:
        return rng.stream(self.seed, purpose, self.round)


def message_type(scheme, counters: int) -> np.dtype:
    """The server's message: the integer buffers of the global model, and what the scheme declares."""
    return payload.record_type({}, {"counters": (counters,)}, scheme.message_shapes())


class Server:
    """Owns the global test, the history and the run folder."""

    def __init__(self, config, bench: Workbench, folder: RunFolder, test_x: torch.Tensor, test_y: torch.Tensor,
                 history: History, static: dict, uninterrupted=contextlib.nullcontext):
        """`static`: what metrics.h5 and every checkpoint carry beside the rows (settings, partition, versions).

        `uninterrupted()`: a context in which the failure of another rank does not cut off what is written.
        """
        self.uninterrupted = uninterrupted
        self.config, self.bench, self.folder, self.history, self.static = config, bench, folder, history, static
        self.test_x, self.test_y = test_x, test_y
        self.scheme_server = SchemeServer(bench.flat.net, config.run.seed)
        self.message_type = message_type(bench.scheme, counter_size(bench.flat.counters))
        self.pending: dict | None = None
        self.wire_before: dict[str, int] = {}
        self.summary: dict = {}
        self.clock = report.Clock(config.fed.rounds)

    # --- within a round

    def combine(self, round: int, gathered: np.ndarray) -> np.ndarray:
        """The message of this round (one record), from the reports of the clients that delivered."""
        good = gathered[gathered["status"] == OK]
        server = self.scheme_server
        server.round, server.client_ids = round, good["client"].tolist()
        message = np.zeros(1, self.message_type)
        payload.fill(message[0], self.bench.scheme.combine(server, payload.tensors_of(good)))
        message[0]["counters"] = good["counters"].max(0) if len(good) else 0
        return message

    def note(self, round: int, gathered: np.ndarray, states: dict, job, wall_s: float) -> None:
        """Append the row of this round; `save` and `settle` follow."""
        wire = {kind: job.comm.wire_bytes.get(kind, 0) - self.wire_before.get(kind, 0) for kind in WIRE_KINDS}
        self.wire_before = dict(job.comm.wire_bytes)
        row = {"round": round, "wall_s": wall_s, "weights_sha256": "", "global_test_accuracy": NAN,
               "global_test_loss": NAN, "global_test_n": 0}
        row |= self._local_numbers(gathered) | self._payload_bytes(gathered, job.message)
        row |= {f"wire_bytes/{kind}": count for kind, count in wire.items()}
        row |= {f"seconds/{phase}": seconds for phase, seconds in job.seconds.items()}
        self.history.append(row, self._client_row(gathered))
        self.pending = {"weights_V": job.weights_V.detach().clone(), "counters": [c.clone() for c in job.counters],
                        "message": job.message.copy(), "states": states}

    def _local_numbers(self, gathered: np.ndarray) -> dict:
        good = gathered[gathered["status"] == OK]
        images, tests = good["weight"].sum(), good["test_n"].sum()
        row = {"local_test_accuracy": good["test_correct"].sum() / tests if tests else NAN, "local_test_n": int(tests),
               "train_n": int(images), "clients_sampled": len(gathered),
               "clients_refused": int(np.isin(gathered["status"], (REFUSED, BAD_REPORT)).sum())}
        for j, term in enumerate(self.bench.scheme.terms):
            row[f"loss/{term}"] = float((good["loss"][:, j] * good["weight"]).sum() / images) if images else NAN
        return row

    def _payload_bytes(self, gathered: np.ndarray, message: np.ndarray) -> dict:
        """What the paper counts, summed over the sampled clients: weights and knowledge, up and down."""
        scheme, flat = self.bench.scheme, self.bench.flat
        good = gathered[gathered["status"] == OK]
        up = sum(scheme.report_floats(payload.tensors_of(report)) for report in good)
        down = scheme.message_floats(payload.tensors_of(message[0])) * len(gathered)
        floats = {"weights_up": flat.payload_floats * len(good), "weights_down": flat.payload_floats * len(gathered),
                  "knowledge_up": up, "knowledge_down": down}
        return {f"payload_bytes/{kind}": count * FLOAT_BYTES for kind, count in floats.items()}

    def _client_row(self, gathered: np.ndarray) -> dict[str, np.ndarray]:
        column = lambda values, who=gathered: client_column(self.config.fed.clients, who["client"], values)  # noqa: E731
        good = gathered[gathered["status"] == OK]
        accuracy = np.where(good["test_n"] > 0, good["test_correct"] / np.maximum(good["test_n"], 1), NAN)
        row = {"local_test_accuracy": column(accuracy, good), "local_test_n": column(gathered["test_n"]),
               "train_n": column(gathered["weight"]), "train_s": column(gathered["train_s"]),
               "report_s": column(gathered["report_s"]), "status": column(gathered["status"])}
        for j, term in enumerate(self.bench.scheme.terms):
            row[f"loss/{term}"] = column(good["loss"][:, j], good)
        return row

    def complain(self, round: int, gathered: np.ndarray) -> None:
        """Say which clients do not count in this round, and why."""
        for record in gathered[np.isin(gathered["status"], (REFUSED, BAD_REPORT))]:
            low, high = record["weights_range"]
            found = f" (from {low:.3g} to {high:.3g})" if record["status"] == REFUSED else ""
            report.warn(f"round {round}: client {record['client']} {STATUS[int(record['status'])]}{found}; it counts with "
                        "weight 0")
        if round == 1 and (gathered["status"] == NO_DATA).any():
            ids = gathered["client"][gathered["status"] == NO_DATA].tolist()
            report.warn(f"clients {ids} have {STATUS[NO_DATA]}; they take part with weight 0")

    # --- beside the next round

    def save(self) -> None:
        """Hash the noted round and write its checkpoint, if one is due."""
        start_s = time.perf_counter()
        round = int(self.history.rounds["round"][-1])
        arrays = self.bench.flat.arrays(self.pending["weights_V"], self.pending["counters"])
        self.history.set_last(weights_sha256=weights_sha256(arrays))
        if self.config.due(round, self.config.run.checkpoint_every):
            self.folder.save_checkpoint(round, self._checkpoint(round, arrays, self.pending))
        self._book(start_s)

    def settle(self) -> None:
        """Test and record the last round, if that is still to be done."""
        if self.pending is None:
            return
        start_s = time.perf_counter()
        pending, self.pending = self.pending, None
        if self.config.due(int(self.history.rounds["round"][-1]), self.config.run.evaluate_every):
            accuracy, loss = self.test(pending["weights_V"], pending["counters"])
            self.history.set_last(global_test_accuracy=accuracy, global_test_loss=loss, global_test_n=len(self.test_y))
        self._book(start_s)
        self.write_metrics()
        report.say(report.progress_line(self.history, self.clock, self.bench.scheme.terms))

    def _book(self, start_s: float) -> None:
        """Add the seconds since then to the row."""
        name = "seconds/evaluate_and_save"
        self.history.set_last(**{name: self.history.rounds[name][-1] + time.perf_counter() - start_s})

    def test(self, weights_V: torch.Tensor, counters) -> tuple[float, float]:
        """(accuracy, mean cross-entropy) of a global model on the official test split."""
        self.bench.flat.load(weights_V, counters)
        correct, loss = evaluate.test(self.bench.flat.net, self.test_x, self.test_y)
        return correct / len(self.test_y), loss / len(self.test_y)

    def _checkpoint(self, round: int, arrays: dict, pending: dict) -> dict:
        """The complete state after a round."""
        message = pending["message"][0]
        tree = {**self.static, **self.history.tree(), "round": round, "global": arrays, "global_names": np.array(list(arrays)),
                "message": {"counters": message["counters"]},
                "server": {name: tensor.cpu().numpy() for name, tensor in self.scheme_server.state.items()},
                "client_states": {str(client): state for client, state in sorted(pending["states"].items())}}
        for name, tensor in payload.tensors_of(message).items():
            tree["message"][name] = tensor.numpy()
        return tree

    def restore(self, round: int, tree: dict) -> dict:
        """Go on after `round` from a checkpoint; its row is tested again if it was not. Returns what `note` would keep."""
        self.history = History.from_tree(tree, self.config.fed.clients)
        self.scheme_server.state = {name: torch.as_tensor(np.array(a)) for name, a in tree.get("server", {}).items()}
        flat = self.bench.flat
        message = np.zeros(1, self.message_type)
        stored = dict(tree["message"])
        message[0]["counters"] = stored.pop("counters")
        payload.fill(message[0], stored)
        weights_V = torch.zeros_like(flat.values_V)
        counters = flat.load_arrays(tree["global"], weights_V)
        states = {int(c): state for c, state in tree.get("client_states", {}).items()}
        kept = {"weights_V": weights_V, "counters": counters, "message": message, "states": states}
        if not self._take_over_test():
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
        self.history.set_last(**{name: stored[name][row] for name in stored if name.startswith("global_test_")})
        return True

    def write_metrics(self) -> None:
        tree = {**self.static, **self.history.tree()}
        tree["clients"] |= self.static["clients"]
        with self.uninterrupted():
            save_tree(self.folder.metrics_path, tree | ({"summary": self.summary} if self.summary else {}))

    # --- at the end

    def finish(self, found: np.ndarray, reestimated_V: torch.Tensor) -> None:
        """found: (clients, 3) id, test_n, correct of the final global model on the local tests; writes the summary."""
        counters = unpack_counters(np.zeros(counter_size(self.bench.flat.counters), np.int64), self.bench.flat.counters)
        accuracy, _ = self.test(reestimated_V, counters)
        history, tests = self.history, found[:, 1].sum()
        self.summary = {
            "global_test_accuracy_batchnorm_reestimated": accuracy,
            "global_on_local_test_accuracy": float(found[:, 2].sum() / tests) if tests else NAN,
            **{f"{name}_{kind}": value for name in ("local_test_accuracy", "global_test_accuracy")
               for kind, value in report.three_readings(history.column(name)).items()},
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        self.write_metrics()
        report.say(report.summary_table(self.history, self.summary, self.static["baselines"], self.folder))
