"""The metrics of a run, row by row, and their form in metrics.h5. Names say model, data and moment; attributes the rest."""
from __future__ import annotations

import numpy as np

from hkd_hpc.store.tree import Leaf

NAN = float("nan")
_GLOBAL = {"model": "global", "data": "official test split", "moment": "after aggregation", "clients": "none"}
_LOCAL = {"model": "personalised (the client's own)", "data": "clients' local test sets",
          "moment": "after local training, before aggregation", "clients": "sampled"}
ATTRIBUTES = {
    "round": {"unit": "1", "meaning": "rounds completed"},
    "wall_s": {"unit": "s", "meaning": "from the start of the round to the end of its exchange, on rank 0"},
    "global_test_accuracy": {"unit": "1", **_GLOBAL}, "global_test_loss": {"unit": "nat", **_GLOBAL},
    "global_test_n": {"unit": "images", **_GLOBAL},
    "local_test_accuracy": {"unit": "1", "weighting": "by images", **_LOCAL},
    "local_test_n": {"unit": "images", **_LOCAL},
    "weights_sha256": {"meaning": "names, dtypes, shapes and bytes of the global state dict after the round"},
    "train_n": {"unit": "images", "meaning": "training images of the clients that entered the average"},
    "clients_refused": {"unit": "clients", "meaning": "sampled, but weights or report were not finite or too large"},
}


class History:
    """Columns of per-round numbers (`rounds`) and per-round, per-client numbers (`clients`)."""

    def __init__(self, clients: int):
        self.clients_count = clients
        self.rounds: dict[str, list] = {}
        self.clients: dict[str, list[np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self.rounds.get("round", []))

    def append(self, row: dict, client_row: dict[str, np.ndarray]) -> None:
        """One round. Every row has the same names."""
        if len(self) and set(row) | set(client_row) != set(self.rounds) | set(self.clients):
            raise KeyError(f"a row must hold {sorted(set(self.rounds) | set(self.clients))}")
        for name, value in row.items():
            self.rounds.setdefault(name, []).append(value)
        for name, value in client_row.items():
            self.clients.setdefault(name, []).append(value)

    def set_last(self, **values) -> None:
        for name, value in values.items():
            self.rounds[name][-1] = value

    def column(self, name: str) -> np.ndarray:
        return np.array(self.rounds.get(name, []), dtype=float)

    def tree(self) -> dict:
        """For store.save_tree; slashes in a column's name make groups."""
        tree: dict = {"rounds": {}, "clients": {}}
        for name, values in self.rounds.items():
            _put(tree["rounds"], name, Leaf(np.array(values), _attributes(name)))
        for name, rows in self.clients.items():
            _put(tree["clients"], name, Leaf(np.stack(rows), {"axes": "round, client", **_attributes(name)}))
        return tree

    @classmethod
    def from_tree(cls, tree: dict, clients: int) -> "History":
        history = cls(clients)
        for name, array in _flatten(tree["rounds"]):
            history.rounds[name] = array.tolist()
        for name, array in _flatten(tree["clients"]):
            if array.ndim == 2:
                history.clients[name] = list(array)
        return history


def client_column(clients: int, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(clients,) float64 with NaN for those that did not take part."""
    column = np.full(clients, NAN)
    column[ids] = values
    return column


def _attributes(name: str) -> dict[str, str]:
    if name in ATTRIBUTES:
        return ATTRIBUTES[name]
    group = name.split("/")[0]
    return {"unit": {"loss": "nat", "seconds": "s"}.get(group, "B" if "bytes" in group else "s" if name.endswith("_s")
                                                        else "1")}


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
