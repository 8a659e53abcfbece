"""The metrics of a run, row by row, and their form in metrics.h5. What each column means: analysis/metrics.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hkd_hpc.analysis.metrics import NAN, attributes_of
from hkd_hpc.store.tree import Leaf, place

LAYOUT = {"layout_version": 2}  # attribute of metrics.h5's root: what may be in it (store/layout.py); without it, 1
PHASES = ("train", "weights", "knowledge", "state", "evaluate_and_save")  # of rank 0
PAYLOAD_KINDS = ("weights_up", "weights_down", "knowledge_up", "knowledge_down")
WIRE_KINDS = ("weights", "knowledge_up", "knowledge_down", "state", "control")


class History:
    """Columns of numbers by round (`rounds`), by round and client (`clients`), and of rejected clients (`events`)."""

    def __init__(self, clients: int):
        self.clients_count = clients
        self.rounds: dict[str, list] = {}
        self.clients: dict[str, list[np.ndarray]] = {}
        self.events: dict[str, list] = {}
        self.finalized = self.counts()

    def __len__(self) -> int:
        return len(self.rounds.get("round", []))

    def append(self, row: dict, client_row: dict[str, np.ndarray]) -> None:
        """One round. A name that the rows before lack (of an older version, or before a setting changed) is NaN there,
        and one that they have and this row lacks is NaN in it."""
        before = len(self)
        row = {name: missing(values[-1]) for name, values in self.rounds.items()} | row
        client_row = {name: np.full_like(rows[-1], NAN) for name, rows in self.clients.items()} | client_row
        for name, value in row.items():
            self.rounds.setdefault(name, [missing(value)] * before).append(value)
        for name, value in client_row.items():
            self.clients.setdefault(name, [np.full_like(value, NAN)] * before).append(value)

    def add_event(self, **columns) -> None:
        """A client that was rejected: round, client, what of it, tensor, and the number found there."""
        for name, value in columns.items():
            self.events.setdefault(name, []).append(value)

    def set_last(self, **values) -> None:
        for name, value in values.items():
            self.rounds.setdefault(name, [missing(value)] * len(self))[-1] = value

    def row(self, index: int) -> dict[str, Any]:
        """A row of the rounds, by column."""
        return {name: values[index] for name, values in self.rounds.items()}

    def last(self) -> dict[str, Any]:
        """The last row."""
        return self.row(-1)

    def counts(self) -> dict[str, int]:
        """The rows of each table."""
        return {"rounds": len(self), "clients": len(self), "events": len(self.events.get("round", []))}

    def finalize(self) -> None:
        """From now on the rows that are there stay what they are."""
        self.finalized = self.counts()

    def column(self, name: str) -> np.ndarray:
        return np.array(self.rounds.get(name, []), dtype=float)

    def nonfinite(self, accuracy: str) -> np.ndarray:
        """(rounds,) bool: those in which a measure of the global model was tested, but its logits were not finite."""
        name = "_".join([*accuracy.split("_")[:2], "nonfinite"])  # global_test_nonfinite
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
            place(tree["rounds"], name, Leaf(np.array(values[rounds]), attributes_of(name)))
        for name, rows in self.clients.items():
            place(
                tree["clients"], name, Leaf(np.array(rows[clients]), {"axes": "round, client", **attributes_of(name)})
            )
        if self.counts()["events"] and until.get("events") != 0:
            tree["events"] = {name: np.array(values[events]) for name, values in self.events.items()}
        return tree

    @classmethod
    def from_tree(cls, tree: dict, clients: int) -> History:
        history = cls(clients)
        for name, array in flattened(tree["rounds"]):
            history.rounds[name] = array.tolist()
        for name, array in flattened(tree["clients"]):
            if array.ndim > 1:  # not the rank and the name of each client
                history.clients[name] = list(array)
        history.events = {name: array.tolist() for name, array in tree.get("events", {}).items()}
        return history


def missing(like: Any) -> Any:
    """What stands in a row of /rounds without this text or number, or these numbers by class."""
    if isinstance(like, str):
        return ""
    return [NAN] * len(like) if isinstance(like, list) else NAN


def client_column(clients: int, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(clients, ...) floats, NaN for those that did not take part; `values`: of the clients `ids`, first axis those."""
    column = np.full((clients, *values.shape[1:]), NAN, np.result_type(values, np.float16))
    column[ids] = values
    return column


def flattened(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of a tree, groups in its name: "loss/soft"."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value
