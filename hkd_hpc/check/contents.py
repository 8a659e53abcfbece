"""What must hold inside a file of a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc import config as config_module
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.words import counted
from hkd_hpc.config import DAMAGED, Config
from hkd_hpc.data.partition import partition_sha256
from hkd_hpc.store.digest import arrays_sha256
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.history import History
from hkd_hpc.store.tree import BadFile, TreeFile, load_tree, open_tree

SHA256 = re.compile(r"[0-9a-f]{64}")


class FileProblem(Exception):
    """What is wrong with a file that can be read; `advice` where that is not to remove it."""

    def __init__(self, text: str, advice: str = "") -> None:
        super().__init__(text)
        self.advice = advice


def check_rows(file: TreeFile) -> int:
    """The number of rows; FileProblem unless they are complete, consecutive and hashed."""
    history = history_of(file)
    rows = len(history)
    if complete_rows(history) < rows or not rows:
        raise FileProblem(
            f"of its {rows_text(rows)} the first {complete_rows(history)} are complete, consecutive and hashed"
        )
    return rows


def rows_text(count: int) -> str:
    return counted(count, "row")


def complete_rows(history: History) -> int:
    """How many rows from the first on have every column, the right number, and the hash of their weights."""
    columns = [*history.rounds.values(), *history.clients.values()]
    complete = min(map(len, columns), default=0)
    rounds, hashes = history.rounds.get("round", []), history.rounds.get("weights_sha256", [])
    good = [
        round == row and bool(SHA256.fullmatch(str(sha)))
        for row, (round, sha) in enumerate(zip(rounds[:complete], hashes), start=1)
    ]
    return [*good, False].index(False)


def history_of(file: TreeFile, complete: Callable[[dict], dict | None] = lambda tree: tree) -> History:
    """The rows in a metrics file or a checkpoint; none in one that keeps the weights alone. `complete` may add to
    them.
    """
    names = file.names()
    tree = {part: file.load(part) for part in ("rounds", "clients", "events", "before") if part in names}
    try:
        return History.from_tree({"rounds": {}, "clients": {}, **(complete(tree) or {})}, 0)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FileProblem(f"its rows cannot be read ({error})") from None


def completeness(file: TreeFile, rows: int, config: Config | None) -> str:
    """Complete, or how far; FileProblem for a summary of too few rounds."""
    wanted = config.fed.rounds if config else rows
    if "summary" not in file.names():
        return f"of {wanted}: not complete, --resume continues"
    early = file.load("summary").get("stopped_early", "")
    if rows != wanted and not early:
        raise FileProblem(f"it has a summary, but {rows_text(rows)} of {wanted}")
    return "complete" + ", stopped early" * bool(early)


def check_partition(file: TreeFile) -> None:
    """FileProblem unless the stored indices have the stored hash."""
    if "partition" not in file.names():
        return
    part = file.load("partition")
    try:
        train, val, test = (
            np.split(part[f"{kind}_index"], part[f"{kind}_offset"][1:-1]) for kind in ("train", "val", "test")
        )
        found = partition_sha256(train, val, test, part["public_index"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileProblem(f"its partition cannot be read ({error})") from None
    if found != part.get("sha256"):
        raise FileProblem(f"its partition has hash {found[:16]}, and says {str(part.get('sha256'))[:16]}")


def settings_of(file: TreeFile) -> Config | None:
    """The settings that a file was written with, None in one that keeps none; FileProblem if they cannot be read."""
    if "config_json" not in file.names():
        return None
    try:
        return config_module.from_json(file.load("config_json"))
    except (UsageError, *DAMAGED) as error:
        raise FileProblem(f"its settings cannot be read ({error})") from None


def changed_since(file: TreeFile, config: Config | None) -> str:
    """What config.json has since been given that a checkpoint was written without."""
    stored = settings_of(file)
    changes = config_module.changes(stored, config) if stored and config else {}
    if not changes:
        return ""
    fixed = [key for key in changes if key.startswith(config_module.FIXED)]
    if fixed:
        raise FileProblem(
            f"it was written with another {', '.join(fixed)} than config.json has, which nothing of ours changes",
            "put back config.json: config_json in this file is the text",
        )
    return f"; written with another {', '.join(changes)} than config.json has: only --allow-change resumes it"


def check_same_partition(folder: RunFolder, file: TreeFile) -> None:
    """FileProblem for a checkpoint of another partition than the metrics."""
    told = value_in(folder.metrics_path, "partition/sha256")
    if told and "partition" in file.names() and file.load("partition/sha256") != told:
        raise FileProblem("its partition is another one than that of metrics.h5")


def check_weights(folder: RunFolder, round: int, file: TreeFile) -> str:
    """Compute the hash of the global weights; FileProblem if a row of this round has another, here or in metrics.h5."""
    tensors = file.load("global")
    names = file.load("global_names").tolist()
    if set(names) != set(tensors):
        other = ", ".join(sorted(set(names) ^ set(tensors)))[:200]
        raise FileProblem(f"its global weights are not those that it names ({other})")
    found = arrays_sha256({name: np.asarray(tensors[name]) for name in names})
    rows = {
        "its own row": row_sha(history_of(file), round),
        "metrics.h5": row_sha(history_in(folder.metrics_path), round),
    }
    for where, sha in rows.items():
        if sha and sha != found:
            raise FileProblem(f"its weights have hash {found[:16]}, {where} says {sha[:16]} for round {round}")
    return f"weights {found[:16]}, " + ("as in its row" if any(rows.values()) else "no row to compare them with")


def row_sha(history: History, round: int) -> str | None:
    """The hash in the row of a round, None if there is no such row."""
    rounds = history.rounds.get("round", [])
    return str(history.rounds["weights_sha256"][rounds.index(round)]) if round in rounds else None


def history_in(path: Path, complete: Callable[[dict], dict | None] = lambda tree: tree) -> History:
    """The rows in a file; none where it cannot be read, which its own line says. `complete` as in history_of."""
    try:
        with open_tree(path) as file:
            return history_of(file, complete)
    except (BadFile, FileProblem):
        return History(0)


def value_in(path: Path, key: str) -> Any:
    try:
        tree: Any = load_tree(path, only=[key])
        for name in key.split("/"):
            tree = tree[name]
        return tree
    except BadFile:
        return None
