"""The folder of one run: config.json, metrics.h5, checkpoints/round_NNNN.h5 and, until it is complete,
checkpoints/rows.hdf5.

Only rank 0 uses it. A checkpoint has the row of its own round. The rows before it are in rows.hdf5, and in metrics.h5
too: one of the two has to be good. Checkpoints of the last round, and those that earlier versions wrote, have all rows.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc.common.errors import UsageError
from hkd_hpc.store.atomic import append_durably, replace_text, temporary_path
from hkd_hpc.store.tree import BadFile, load_tree, open_tree, save_tree

TEMPORARY_NAME = re.compile(
    r"\.(config\.json|status\.json|metrics\.h5|round_\d+\.h5|rows\.hdf5|rounds\.(csv|jsonl)|probe)\.[0-9a-f]+\.tmp"
    r"|\.(run|job)\.lock\.[0-9a-f]{16}"
)
RECORD = ("config_json", "changes_json", "versions_json", "identity_json", "sessions_json")  # what the rows come from
FINAL_PARTS = (
    "config_json",
    "global",
    "global_names",
    "identity_json",
    "image_shape",
    "input",
    "round",
    "versions_json",
)  # of a checkpoint
TABLES = ("rounds", "clients", "events")
NO_ROWS = "the rows before its own are in no file: neither rows.hdf5 nor metrics.h5 is good"
CREATE_TRIES = 100  # each is undone by another job at most, which comes to its end
Mark = tuple[int, int]  # what changes where a file does, see _mark
CHECKPOINT_NAME = re.compile(r"round_(\d{4,})\.h5")


def to_standard_error(text: str) -> None:
    """Print one warning."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    Args:
        path: of the folder.
        warn: gets one line for each checkpoint that had to be skipped.
    """

    path: Path
    warn: Callable[[str], None] = to_standard_error
    _saved: dict[Path, Mark | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @property
    def metrics_path(self) -> Path:
        """One row a round, added when the round is done."""
        return self.path / "metrics.h5"

    @property
    def config_path(self) -> Path:
        """The settings as JSON text, written before round 1."""
        return self.path / "config.json"

    @property
    def log_path(self) -> Path:
        """What the run said, each line with time and rank."""
        return self.path / "log.txt"

    @property
    def loggers_folder(self) -> Path:
        """Where the loggers write (run.loggers)."""
        return self.path / "loggers"

    @property
    def checkpoint_folder(self) -> Path:
        """Where the checkpoints are."""
        return self.path / "checkpoints"

    @property
    def begun_path(self) -> Path:
        """Of a run with privacy.mode=release: a line for each round that was begun, also by processes that were
        killed.
        """
        return self.path / "rounds_begun.txt"

    def record_begun(self, round: int) -> None:
        """Record a round before anything of it is released, on the disk.

        Args:
            round: from 1 on.

        Raises:
            RunError: where the system fails to write.
        """
        append_durably(self.begun_path, f"\n{round}\n".encode())  # never beside digits that a killed process left

    def rounds_begun(self) -> Counter[int]:
        """How often each round was begun, as far as recorded.

        Returns:
            Times by round; a last line that was cut off counts for nothing, one within the file as it stands.
        """
        try:
            lines = self.begun_path.read_text(encoding="utf-8").split("\n")[:-1]
        except (FileNotFoundError, NotADirectoryError):
            return Counter()
        return Counter(int(line) for line in lines if line.isdigit())

    @property
    def rows_path(self) -> Path:
        """The rows before the newest checkpoint's, while the run is not complete; the same kind of file as
        metrics.h5.
        """
        return self.checkpoint_folder / "rows.hdf5"

    def create(self) -> None:
        """Make the folder and its parents and try to write there.

        Raises:
            UsageError: a file is in the way, or the system does not let us.
        """
        try:
            for left in reversed(range(CREATE_TRIES)):
                try:
                    self.checkpoint_folder.mkdir(parents=True, exist_ok=True)
                    for folder in (self.path, self.checkpoint_folder):
                        _try_to_write(folder)
                    return
                except FileNotFoundError:  # a job that failed at its start is taking away what it made
                    if not left:
                        raise
        except (FileExistsError, NotADirectoryError):
            paths = (self.checkpoint_folder, *self.checkpoint_folder.parents)
            file = next((path for path in paths if os.path.lexists(path) and not path.is_dir()), self.path)
            raise UsageError(
                f"--out {self.path}: a file is in the way ({file}); name a folder, or one that is new"
            ) from None
        except OSError as error:
            raise UsageError(
                f"--out {self.path}: {error.strerror} ({error.filename}); name a folder that can be made and written to"
            ) from None

    def holds_run(self) -> bool:
        """Whether a run has begun here."""
        return self.config_path.exists() or self.metrics_path.exists() or bool(self.checkpoints())

    def write_config(self, text: str) -> None:
        """Store the settings.

        Args:
            text: JSON.

        Raises:
            RunError: where the system fails to write.
        """
        replace_text(self.config_path, text)

    def read_config(self) -> str | None:
        """Read the stored settings.

        Returns:
            JSON text; None if there are none.

        Raises:
            UsageError: they cannot be read.
        """
        try:
            if self.config_path.exists() and not self.config_path.is_file():  # a pipe would be waited for
                raise UsageError(f"cannot read {self.config_path}: it is no ordinary file")
            return self.config_path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {self.config_path}: {getattr(error, 'strerror', None) or error}") from error

    def summary(self) -> dict[str, Any] | None:
        """Read the summary in metrics.h5, the last thing that a run writes.

        Returns:
            Numbers and texts by name; None for a run that is not complete, or whose metrics.h5 is damaged.
        """
        try:
            return load_tree(self.metrics_path, only=["summary"])["summary"] or None
        except BadFile:
            return None

    def damage(self) -> str:
        """Check metrics.h5.

        Returns:
            What is wrong, in one line; empty where it is intact, or not there.
        """
        try:
            with open_tree(self.metrics_path):
                return ""
        except BadFile as bad:
            return str(bad) if self.metrics_path.exists() else ""

    def rounds(self) -> dict[str, Any]:
        """Read the rounds in metrics.h5.

        Returns:
            By name each column, (rounds, ...), or a group of columns; empty while there are none.
        """
        try:
            return load_tree(self.metrics_path, only=["rounds"])["rounds"]
        except BadFile:
            return {}

    def record(self) -> dict[str, str]:
        """Read what the rows in metrics.h5 come from.

        Returns:
            JSON texts by the names of RECORD, as far as they are there.
        """
        try:
            with open_tree(self.metrics_path) as file:
                return {name: file.load(name) for name in RECORD if name in file.names()}
        except BadFile:
            return {}

    def checkpoint_path(self, round: int) -> Path:
        """Where the checkpoint after a round is or will be.

        Args:
            round: from 1 on.

        Returns:
            checkpoints/round_NNNN.h5 in this folder.
        """
        return self.checkpoint_folder / f"round_{round:04d}.h5"

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Find the checkpoints.

        Returns:
            (round, path) of each, good or not, newest first.
        """
        if not self.checkpoint_folder.is_dir():
            return []
        named = ((CHECKPOINT_NAME.fullmatch(path.name), path) for path in self.checkpoint_folder.iterdir())
        return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)

    def newest_good_path(self) -> tuple[int, Path] | None:
        """Find the newest checkpoint that is intact; others are skipped with a warning.

        Returns:
            (round, path), for `open_tree`; None if there is none.
        """
        return next(((round, path) for round, path in self.checkpoints() if self._is_good(path, round)), None)

    def newest_good_checkpoint(self) -> tuple[int, dict[str, Any]] | None:
        """Read the newest checkpoint that is intact; others are skipped with a warning.

        Returns:
            (round, tree), with all rows up to its round; None if there is none.
        """
        for round, path in self.checkpoints():
            if self._is_good(path, round):
                tree = self.with_all_rows(load_tree(path))
                if tree:
                    return round, tree
                self.warn(f"checkpoint skipped: {path}: {NO_ROWS}")
        return None

    def with_all_rows(self, tree: dict[str, Any]) -> dict[str, Any] | None:
        """Add the rows before a checkpoint's own.

        Args:
            tree: of the checkpoint.

        Returns:
            The tree with all rows up to its round; None where no file has them.
        """
        if "before" not in tree:
            return tree
        before = tree["before"]
        for path in (self.rows_path, self.metrics_path, *(path for _, path in self.checkpoints())):
            earlier = earlier_rows(path, before)
            if earlier:
                tables = {table: joined(earlier.get(table, {}), tree.get(table, {}), before[table]) for table in TABLES}
                return {**tree, **{table: columns for table, columns in tables.items() if columns}}
        return None

    def save_checkpoint(self, round: int, tree: dict[str, Any], attributes: dict[str, Any] | None = None) -> Path:
        """Write the state after `round`, then keep the last two good ones.

        Args:
            round: its number.
            tree: the state, as save_tree takes it.
            attributes: of the file.

        Returns:
            The path of the checkpoint.

        Raises:
            RunError: where the system fails to write.
            TypeError: naming a value that HDF5 cannot store.
        """
        path = self.checkpoint_path(round)
        self.make_checkpoint_folder()
        save_tree(path, tree, attributes)
        self._prune(path)
        self._saved.clear()
        self._saved[path] = _mark(path)
        return path

    def make_checkpoint_folder(self) -> None:
        """Where it has vanished."""
        with contextlib.suppress(OSError):  # then the write says what is wrong
            self.checkpoint_folder.mkdir(exist_ok=True)

    def remove_rows(self) -> None:
        """Of a complete run, whose metrics.h5 and last checkpoint have them all."""
        self._remove(self.rows_path)

    def keep_final_weights(self) -> bool:
        """Of a complete run keep the last round's global model alone, without what only resuming needs.

        Only for the holder of the run's lock. Killed anywhere, the folder has an intact checkpoint of the last round,
        and the same again ends it.

        Returns:
            Whether that is so now; a run that is not complete, or whose last checkpoint is damaged, stays as it is.

        Raises:
            RunError: where the system fails to write.
        """
        last, newest = list(self.rounds().get("round", ()))[-1:], self.newest_good_path()
        if not self.summary() or newest is None or [newest[0]] != last:
            return False
        with open_tree(newest[1]) as file:
            parts = {name: file.load(name) for name in FINAL_PARTS if name in file.names()}
            is_small = len(parts) == len(file.names())
        if not is_small:
            save_tree(newest[1], parts)
        for _, path in self.checkpoints():
            if path != newest[1]:
                self._remove(path)
        return True

    def clean(self) -> None:
        """Remove what dead processes left: temporary files, and a complete run's rows.hdf5. Only for the holder of the
        lock.
        """
        for folder in (self.path, self.checkpoint_folder):
            for path in temporary_files(folder):
                with contextlib.suppress(OSError):
                    path.unlink()
        if self.rows_path.exists() and self.summary():
            self.remove_rows()

    def _prune(self, saved: Path) -> None:
        others = [(round, path) for round, path in self.checkpoints() if path != saved]
        second = next((path for round, path in others if self._is_as_saved(path) or self._is_good(path, round)), None)
        for _, path in others if second else ():
            if path != second:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self.warn(f"cannot remove the old checkpoint {path}: {error.strerror}")

    def _is_as_saved(self, path: Path) -> bool:
        """Whether it is what this process saved last: it read it back then, and need not again."""
        mark = self._saved.get(path)
        return mark is not None and mark == _mark(path)

    def _is_good(self, path: Path, round: int) -> bool:
        """Whether it is intact, and of the round that its name says: one under another name would lose or repeat
        rounds.
        """
        try:
            with open_tree(path) as file:
                found = file.load("round") if "round" in file.names() else round
                if found != round:
                    raise BadFile(path, f"it is of round {found}, not of {round}")
                return True
        except BadFile as bad:
            self.warn(f"checkpoint skipped: {bad}")
            return False


def earlier_rows(path: Path, before: dict[str, Any]) -> dict[str, Any] | None:
    """The tables in a file of rows, None unless it has those that a checkpoint says were before its own."""
    try:
        with open_tree(path) as file:
            tables = {table: file.load(table) for table in TABLES if table in file.names()}
    except BadFile:
        return None
    rounds, events = tables.get("rounds", {}), tables.get("events", {})
    last = before["rounds"] - 1
    is_same = len(rounds.get("round", ())) > last and rounds["weights_sha256"][last] == before["weights_sha256"]
    return tables if is_same and len(events.get("round", ())) >= before["events"] else None


def joined(earlier: dict[str, Any], later: dict[str, Any], count: int) -> dict[str, Any]:
    """The columns of a table: the first `count` rows of `earlier`, then `later`, which may have none."""
    columns: dict[str, Any] = {}
    for name, rows in (later or earlier).items():
        if isinstance(rows, dict):
            columns[name] = joined(earlier.get(name, {}), rows if later else {}, count)
        elif later and len(rows):
            before = earlier[name][:count] if name in earlier else absent(rows, count)
            columns[name] = np.concatenate([before, rows]) if count else rows
        else:
            columns[name] = earlier[name][:count]
    return columns


def absent(like: np.ndarray, count: int) -> np.ndarray:
    """So many rows of a column that an earlier version had not: NaN, or empty texts."""
    return np.full((count, *like.shape[1:]), np.nan if np.issubdtype(like.dtype, np.number) else "")


def _mark(path: Path) -> Mark | None:
    """Time of change, ns, and size, bytes; None where there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _try_to_write(folder: Path) -> None:
    probe = temporary_path(folder / "probe")
    probe.write_bytes(b"")
    probe.unlink()


def temporary_files(folder: Path) -> Iterator[Path]:
    """What a process that died while it wrote there has left."""
    if folder.is_dir():
        yield from (path for path in list(folder.iterdir()) if TEMPORARY_NAME.fullmatch(path.name))
