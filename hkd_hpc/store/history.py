"""The metrics of a run, row by row, and their form in metrics.h5. Names say model, data and moment; attributes the
rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hkd_hpc.store.tree import Leaf

NAN = float("nan")
PHASES = ("train", "weights", "knowledge", "state", "evaluate_and_save")  # of rank 0
PAYLOAD_KINDS = ("weights_up", "weights_down", "knowledge_up", "knowledge_down")
WIRE_KINDS = ("weights", "knowledge_up", "knowledge_down", "state", "control")
_GLOBAL = {"model": "global", "data": "official test split", "moment": "after aggregation", "clients": "none"}
_LOCAL = {
    "model": "personalised (the client's own)",
    "data": "clients' local test sets",
    "moment": "after local training, before aggregation",
    "clients": "sampled",
}
_VAL = "validation images held out of the clients' training images (data.val_fraction)"
_LOSS = "a term of the loss, its weight included; mean over the images of the last local epoch"
_PAYLOAD = "what the paper counts as traffic; /rounds: summed over the sampled clients"
_WIRE = "buffers handed to the communicator, summed over the ranks; 0 in one process"
ATTRIBUTES = {
    "round": {"unit": "1", "meaning": "rounds completed"},
    "wall_s": {"unit": "s", "meaning": "from the start of the round to the end of its exchange, on rank 0"},
    "global_test_accuracy": {"unit": "1", **_GLOBAL},
    "global_test_loss": {"unit": "nat", **_GLOBAL},
    "global_test_n": {"unit": "images", "meaning": "0 in a round without a test", **_GLOBAL},
    "global_test_nonfinite": {
        "unit": "images",
        "meaning": "without finite logits; where there are any there is no accuracy",
        **_GLOBAL,
    },
    "global_val_nonfinite": {"unit": "images", "meaning": "the same of the validation images", **_GLOBAL, "data": _VAL},
    "local_test_accuracy": {"unit": "1", "weighting": "by images", **_LOCAL},
    "local_test_n": {"unit": "images", **_LOCAL},
    "local_test_accuracy_worst_tenth": {
        "unit": "1",
        "weighting": "mean over the tenth of the clients (one at least) that have the lowest accuracy",
        **_LOCAL,
    },
    "local_test_accuracy_std": {"unit": "1", "weighting": "standard deviation over the clients", **_LOCAL},
    "local_val_accuracy": {"unit": "1", "weighting": "by images", **_LOCAL, "data": _VAL},
    "local_val_n": {"unit": "images", **_LOCAL, "data": _VAL},
    "global_val_accuracy": {"unit": "1", **_GLOBAL, "data": f"{_VAL}, all together"},
    "warning": {"meaning": "what the scheme said about the message of this round; empty when all was well"},
    "weights_sha256": {
        "meaning": "SHA-256 over the global state dict after the round, in its own order: for each tensor "
        "f'{name} {numpy dtype.str} {shape}\\n' in UTF-8, then its bytes (little-endian, C order)"
    },
    "train_n": {"unit": "images", "meaning": "training images that entered the average"},
    "train_s": {"unit": "s", "meaning": "local training"},
    "report_s": {"unit": "s", "meaning": "local test and report"},
    "clients_sampled": {"unit": "clients"},
    "clients_refused": {
        "unit": "clients",
        "meaning": "sampled, but weights, report or loss were not finite or too "
        "large, or logits on its own test not finite",
    },
    "clients_failed": {
        "unit": "clients",
        "meaning": "sampled, but did not answer or came too late (fed.drop_rate, fed.straggler_rate)",
    },
    "status": {
        "unit": "1",
        "meaning": "0 entered the average, 1 weights rejected, 2 too few images, 3 report rejected, 4 loss "
        "rejected, 5 did not answer, 6 came too late, 7 predictions rejected; NaN not sampled",
    },
    "loss": {"unit": "1", "meaning": _LOSS},
    "loss/cross_entropy": {"unit": "nat", "meaning": _LOSS},
    "seconds": {"unit": "s", "meaning": "on rank 0; train: training or waiting for it"},
    "seconds/evaluate_and_save": {"unit": "s", "meaning": "on rank 0, beside the training of the next round"},
    "seconds/save": {
        "unit": "s",
        "meaning": "on rank 0; writing the checkpoint of this round (part of evaluate_and_save too) and "
        "the row of the round before (which is not)",
    },
    "payload_bytes": {"unit": "B", "meaning": _PAYLOAD},
    "wire_bytes": {"unit": "B", "meaning": _WIRE},
}


class History:
    """Columns of numbers by round (`rounds`), by round and client (`clients`), and of rejected clients (`events`)."""

    def __init__(self, clients: int):
        self.clients_count = clients
        self.rounds: dict[str, list] = {}
        self.clients: dict[str, list[np.ndarray]] = {}
        self.events: dict[str, list] = {}
        self.settled = self.counts()

    def __len__(self) -> int:
        return len(self.rounds.get("round", []))

    def append(self, row: dict, client_row: dict[str, np.ndarray]) -> None:
        """One round. It must have all names of the rows before; a name that those lack (a run that an older version
        began) is NaN there."""
        if (set(self.rounds) | set(self.clients)) - (set(row) | set(client_row)):
            raise KeyError(f"a row must hold {sorted(set(self.rounds) | set(self.clients))}")
        before = len(self)
        for name, value in row.items():
            self.rounds.setdefault(name, [NAN] * before).append(value)
        for name, value in client_row.items():
            self.clients.setdefault(name, [np.full(self.clients_count, NAN)] * before).append(value)

    def add_event(self, **columns) -> None:
        """A client that was rejected: round, client, what of it, tensor, and the number found there."""
        for name, value in columns.items():
            self.events.setdefault(name, []).append(value)

    def set_last(self, **values) -> None:
        for name, value in values.items():
            self.rounds.setdefault(name, [NAN] * len(self))[-1] = value

    def last(self) -> dict[str, Any]:
        """The last row."""
        return {name: values[-1] for name, values in self.rounds.items()}

    def counts(self) -> dict[str, int]:
        """The rows of each table."""
        return {"rounds": len(self), "clients": len(self), "events": len(self.events.get("round", []))}

    def settle(self) -> None:
        """From now on the rows that are there stay what they are."""
        self.settled = self.counts()

    def column(self, name: str) -> np.ndarray:
        return np.array(self.rounds.get(name, []), dtype=float)

    def nonfinite(self, accuracy: str) -> np.ndarray:
        """(rounds,) bool: those in which this accuracy of the global model was tested, but its logits were not
        finite.
        """
        name = accuracy.replace("accuracy", "nonfinite")
        return self.column(name) > 0 if name in self.rounds else np.zeros(len(self), bool)

    def tree(self, since: Mapping[str, int] = {}, until: Mapping[str, int] = {}) -> dict:
        """For store.save_tree; slashes in a column's name make groups. Of each table the rows since[table] to
        until[table].
        """
        tree: dict = {"rounds": {}, "clients": {}}
        rounds, clients, events = (
            slice(since.get(table, 0), until.get(table)) for table in ("rounds", "clients", "events")
        )
        for name, values in self.rounds.items():
            _put(tree["rounds"], name, Leaf(np.array(values[rounds]), _attributes(name)))
        for name, rows in self.clients.items():
            _put(tree["clients"], name, Leaf(np.array(rows[clients]), {"axes": "round, client", **_attributes(name)}))
        if self.counts()["events"] and until.get("events") != 0:
            tree["events"] = {name: np.array(values[events]) for name, values in self.events.items()}
        return tree

    @classmethod
    def from_tree(cls, tree: dict, clients: int) -> History:
        history = cls(clients)
        for name, array in _flatten(tree["rounds"]):
            history.rounds[name] = array.tolist()
        for name, array in _flatten(tree["clients"]):
            if array.ndim == 2:
                history.clients[name] = list(array)
        history.events = {name: array.tolist() for name, array in tree.get("events", {}).items()}
        return history


def client_column(clients: int, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(clients,) float64 with NaN for those that did not take part."""
    column = np.full(clients, NAN)
    column[ids] = values
    return column


def _attributes(name: str) -> dict[str, str]:
    """Of a column, or of the group that it belongs to."""
    return ATTRIBUTES[name] if name in ATTRIBUTES else ATTRIBUTES[name.split("/")[0]]


def _put(tree: dict, name: str, value) -> None:
    *groups, leaf = name.split("/")
    for group in groups:
        tree = tree.setdefault(group, {})
    tree[leaf] = value


def _flatten(tree: dict, prefix: str = ""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value
