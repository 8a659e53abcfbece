"""Verify a run's folder: `python -m hkd_hpc.check RUN [--repair OUT.h5]`.

One line a file: ok, or what is wrong and what to do. A run that was killed is good as long as --resume can resume it.
`--repair` writes a readable metrics file of the rows that can be saved, from metrics.h5, rows.hdf5 and the checkpoints;
nothing in RUN is touched. The code of a run's own scheme is imported, if its settings name one.
Exit code 0: good; 1: something is wrong; 2: there is no run, or wrong usage.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc import config as config_module
from hkd_hpc.command import Parser, exit_code, program_of
from hkd_hpc.config import Config, identity
from hkd_hpc.console.messages import say
from hkd_hpc.data.partition import partition_sha256
from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.jobs.files import read_trials
from hkd_hpc.runtime import versions
from hkd_hpc.runtime.paths import path_argument
from hkd_hpc.runtime.revision import package_sha256
from hkd_hpc.store.digest import weights_sha256
from hkd_hpc.store.folder import NO_ROWS, RECORD, RunFolder, temporary_files
from hkd_hpc.store.history import LAYOUT, History
from hkd_hpc.store.lock import LOCK_NAME, describe_lock, is_held
from hkd_hpc.store.tree import BadFile, TreeFile, is_intact, load_tree, open_tree, save_tree

SHA256 = re.compile(r"[0-9a-f]{64}")
STATIC = (*RECORD, "partition", "image_shape", "input", "baselines", "world", "privacy")


@dataclass(frozen=True)
class FileCheck:
    """What one look at a file gave. `advice`: what to do; a file with a problem is wrong, any other is good."""

    name: str
    text: str
    problem: bool = False
    advice: str = ""

    def __str__(self) -> str:
        text = f"WRONG: {self.text}" if self.problem else self.text
        return f"  {self.name:28s} {text}" + (f"; {self.advice}" if self.advice else "")


class FileProblem(Exception):
    """What is wrong with a file that can be read; `advice` where that is not to remove it."""

    def __init__(self, text: str, advice: str = "") -> None:
        super().__init__(text)
        self.advice = advice


# ---- one look for each kind of file


def check_run(folder: RunFolder) -> list[FileCheck]:
    """All lines about a run."""
    config, settings = check_config(folder)
    lines = [settings, check_metrics(folder, config), *check_earlier_rows(folder)]
    lines += [check_checkpoint(folder, round, path, config) for round, path in folder.checkpoints()]
    return [*lines, *check_trial(folder), *check_versions(folder), *check_leftovers(folder)]


def check_trial(folder: RunFolder) -> Iterator[FileCheck]:
    """In a study, whether this is the run of its trial."""
    place = folder.path.resolve()
    try:
        other = [
            identity.other_run(folder, trial.config())
            for trial in read_trials(place.parent)
            if trial.name == place.name
        ]
    except UsageError as error:
        yield FileCheck("../study.json", str(error), True)
        return
    for text in filter(None, other):
        yield FileCheck(
            "../study.json",
            f"this trial of the study has other settings: {text}",
            True,
            "move the folder away; launch then computes the trial",
        )


def check_config(folder: RunFolder) -> tuple[Config | None, FileCheck]:
    """The settings, if they can be used, and the line about them."""
    name, advice = folder.config_path.name, "config_json in metrics.h5 and in the checkpoints is the same text"
    try:
        text = folder.read_config()
        if text is None:
            return None, FileCheck(name, "it is missing", True, advice)
        config = config_module.from_json(text)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        return None, FileCheck(name, f"it is damaged ({error})", True, advice)
    except (UsageError, RunError) as error:
        return None, FileCheck(name, str(error), True)
    fed = config.fed
    told = f"{config.scheme.name} on {config.data.name}, {fed.clients} clients, {fed.rounds} rounds"
    return config, FileCheck(name, f"ok: {told}")


def check_metrics(folder: RunFolder, config: Config | None) -> FileCheck:
    """Its rows, and whether the run is complete."""
    name = folder.metrics_path.name
    advice = "--resume writes it anew from the newest good checkpoint; --repair OUT.h5 saves the rows that can be saved"
    if not folder.metrics_path.exists():
        if any(round > 1 for round, _ in folder.checkpoints()):  # that of a round follows the row of the round before
            return FileCheck(name, "it is missing", True, advice)
        return FileCheck(name, "ok: none yet, no round has been tested")
    try:
        with open_tree(folder.metrics_path) as file:
            rows = check_rows(file)
            check_partition(file)
            settings = settings_of(file) or config
            told = completeness(file, rows, settings)
            is_complete = told.startswith("complete")
            other = identity.different(settings, config) if settings and config and config.fed.rounds == rows else ""
            if is_complete and other:
                raise FileProblem(
                    f"it is that of another run ({other})",
                    "put back the one that belongs "
                    "to config.json, or remove it to have it written anew from the last checkpoint",
                )
            return FileCheck(name, f"ok: {rows_text(rows)}, {told}{changed_since(file, config)}")
    except (BadFile, FileProblem) as bad:
        return FileCheck(name, reason_of(bad), True, getattr(bad, "advice", "") or advice)


def check_earlier_rows(folder: RunFolder) -> Iterator[FileCheck]:
    """The rows before the checkpoints' own, while a run is not complete."""
    if not folder.rows_path.exists():
        return
    name = str(folder.rows_path.relative_to(folder.path))
    try:
        with open_tree(folder.rows_path) as file:
            yield FileCheck(name, f"ok: {rows_text(check_rows(file))}, for the checkpoints to continue")
    except (BadFile, FileProblem) as bad:
        yield FileCheck(name, reason_of(bad), True, "metrics.h5 has these rows too; --resume writes it anew")


def check_checkpoint(folder: RunFolder, round: int, path: Path, config: Config | None) -> FileCheck:
    """Whether it is intact, of this round, and holds the weights that the rows speak of."""
    name = str(path.relative_to(folder.path))
    try:
        with open_tree(path) as file:
            if file.load("round") != round:
                raise FileProblem(f"it is of round {file.load('round')}, not of {round}")
            check_partition(file)
            check_same_partition(folder, file)
            if "before" in file.names() and not folder.with_all_rows({"before": file.load("before")}):
                raise FileProblem(NO_ROWS)
            return FileCheck(name, f"ok: {check_weights(folder, round, file)}{changed_since(file, config)}")
    except (BadFile, FileProblem) as bad:
        advice = bad.advice if isinstance(bad, FileProblem) else ""
        return FileCheck(name, reason_of(bad), True, advice or f"remove it; {fallback(folder, path)}")


def fallback(folder: RunFolder, bad: Path) -> str:
    """What --resume does without this checkpoint."""
    good = next((path.name for _, path in folder.checkpoints() if path != bad and is_intact(path)), None)
    return f"--resume continues from {good}" if good else "no other checkpoint is good, so the run has to begin anew"


def reason_of(bad: Exception) -> str:
    """Without the path, which stands before it."""
    return bad.reason if isinstance(bad, BadFile) else str(bad)


# ---- what must hold inside a file


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
    return f"{count} row{'s' * (count != 1)}"


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
    except (UsageError, ValueError, AttributeError, TypeError, RecursionError) as error:
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
    found = weights_sha256({name: np.asarray(tensors[name]) for name in names})
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


# ---- what else lies there


def check_versions(folder: RunFolder) -> Iterator[FileCheck]:
    """A line where the run was written with other packages than are here; worth knowing, not wrong."""
    written = json_in(folder.metrics_path, "versions_json")
    if json_in(folder.metrics_path, "identity_json").get("code.hkd_hpc") == package_sha256():
        written.pop(versions.REVISION, None)  # of docs and tests, perhaps: the code is the same
    other = [
        f"{name} {written[name]} (here {here})"
        for name, here in versions.found().items()
        if written.get(name, here) != here
    ]
    if other:
        yield FileCheck("versions", f"written with {', '.join(other)}")


def json_in(path: Path, key: str) -> dict[str, Any]:
    """A table that is stored as text; empty where it is not there or cannot be read."""
    try:
        found = json.loads(value_in(path, key) or "{}")
    except (ValueError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def check_leftovers(folder: RunFolder) -> Iterator[FileCheck]:
    """The lock and its holder, and what killed processes left."""
    holder = describe_lock(folder.path)
    if holder and is_held(folder.path):
        yield FileCheck(LOCK_NAME, f"in use by {holder}: files change while they are looked at")
    elif holder:
        yield FileCheck(LOCK_NAME, f"left by {holder}, which does not run any more; --resume takes it over")
    for path in (*temporary_files(folder.path), *temporary_files(folder.checkpoint_folder)):
        yield FileCheck(str(path.relative_to(folder.path)), "left by a process that was killed; --resume removes it")


# ---- repair


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


# ---- the command


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog=program_of("hkd_hpc.check"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=path_argument, help="the run's folder")
    parser.add_argument(
        "--repair", type=path_argument, metavar="OUT.h5", help="write the rows that can be saved to this new file"
    )
    return parser.parse_args(arguments)


def look(options: argparse.Namespace) -> int:
    """Check, repair if asked to; the exit code."""
    folder = RunFolder(options.run, warn=lambda text: None)
    try:
        if not folder.holds_run():
            nothing = "holds no run (neither config.json nor metrics.h5 nor a checkpoint)"
            raise UsageError(f"{options.run}: {nothing}{below(options.run)}")
        lines = check_run(folder)
    except OSError as error:
        raise UsageError(f"{options.run}: cannot be looked at ({error.strerror})") from None
    wrong = sum(line.problem for line in lines)
    say("\n".join([f"{options.run}:", *map(str, lines), f"{wrong} of {len(lines)} wrong" if wrong else "good"]))
    if options.repair:
        say(repair(folder, options.repair))
    return 1 if wrong else 0


def below(folder: Path) -> str:
    """What to do with the folder of a study: one run is checked at a time. Empty where there is none below."""
    runs = sorted(path for path in folder.iterdir() if RunFolder(path).holds_run()) if folder.is_dir() else []
    return f"; {len(runs)} below it hold one each: name one, such as {runs[0]}" if runs else ""


@exit_code
def main(arguments: list[str] | None = None) -> int:
    return look(parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
