"""The rows that can be saved, in a new file."""

from __future__ import annotations

from pathlib import Path

from hkd_hpc.check.contents import complete_rows, history_in, row_sha, rows_text
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.store.folder import RECORD, RunFolder
from hkd_hpc.store.history import LAYOUT, History
from hkd_hpc.store.tree import open_tree, save_tree

STATIC = (*RECORD, "partition", "image_shape", "input", "baselines", "world", "privacy")


def repair(folder: RunFolder, out: Path) -> str:
    """Write the rows that can be saved to `out`; the line that says what was done. UsageError, RunError without any."""
    if out.exists() or out.suffix != ".h5":
        raise UsageError(f"--repair {out}: name a new file that ends in .h5; nothing is written over")
    files = (folder.metrics_path, folder.rows_path, *(path for _, path in folder.checkpoints()))
    sources = [path for path in files if len(saved_rows(folder, path))]
    if not sources:
        raise RunError(f"{folder.path}: neither metrics.h5 nor a checkpoint holds a row that can be saved")
    history, used = saved_rows(folder, sources[0]), [sources[0]]
    for path in sources[1:]:
        if extend(history, saved_rows(folder, path)):
            used.append(path)
    with open_tree(sources[0]) as file:
        tree = {name: file.load(name) for name in STATIC if name in file.names()}
    told = ", ".join(str(path.relative_to(folder.path)) for path in used)
    save_tree(out, {**tree, **history.tree(), "repaired_from": told}, LAYOUT)
    return f"{out}: {rows_text(len(history))} saved from {told}"


def saved_rows(folder: RunFolder, path: Path) -> History:
    """The complete rows in a file, from the first on; a checkpoint's with those before its own, wherever they are."""
    history = history_in(path, folder.with_all_rows)
    complete = complete_rows(history)
    kept = History(0)
    kept.rounds = {name: column[:complete] for name, column in history.rounds.items()}
    kept.clients = {name: column[:complete] for name, column in history.clients.items()}
    kept.events = history.events
    return kept


def extend(history: History, other: History) -> bool:
    """Append the later rows of the same run; whether there were any."""
    have = len(history)
    same = other.rounds.keys() == history.rounds.keys() and other.clients.keys() == history.clients.keys()
    if not same or len(other) <= have or row_sha(other, have) != row_sha(history, have):
        return False
    for mine, theirs in ((history.rounds, other.rounds), (history.clients, other.clients)):
        for name, column in theirs.items():
            mine[name] = [*mine[name], *column[have:]]
    history.events = other.events
    return True
