"""What must hold in the folder of a run after each attempt of tools.fault_injection, against a reference run."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hkd_hpc.store.digest import arrays_sha256
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.history import flattened
from hkd_hpc.store.tree import BadFile, load_tree

from ..forked_ranks import Result
from .faults import EXIT_0, KILL_ALL, KINDS, REMOVED, USR1, Fault, Notes
from .scenarios import Scenario

HUNG, LOST, WRONG, UNREPORTED = "hung", "lost", "wrong", "unreported"
FILES_OF_A_RUN = r"config\.json|log\.txt|metrics\.h5|checkpoints/round_\d+\.h5"
TIMES = ("seconds/", "wire_bytes/", "memory_bytes")  # columns that depend on the layout or the hour
REJECTED = 1  # the status of a client whose weights are bad, in clients/status
TRACE = "Traceback (most recent call last)"
STOPPED = 75


class Verdict(NamedTuple):
    """What is wrong: one of HUNG, LOST, WRONG, UNREPORTED, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended: ranks that had to be killed when time was up, how each rank ended, and its notes."""

    unresponsive: list[int]
    results: list[Result]
    notes: Notes

    @property
    def output(self) -> str:
        return "\n".join(result.output for result in self.results)

    @property
    def succeeded(self) -> bool:
        return all(result.exit_code == 0 for result in self.results)


@dataclass
class Known:
    """Of a run's files: `saved`, the last round that must not be trained again, and what was damaged here."""

    saved: int = 0
    damaged: dict[Path, str] = field(default_factory=dict)

    def damage(self, path: Path, folder: Path) -> None:
        self.damaged[path] = digest(path)
        good = [round for round, checkpoint in RunFolder(folder).checkpoints() if not self.is_damaged(checkpoint)]
        self.saved = min(self.saved, max(good, default=0))

    def is_damaged(self, path: Path) -> bool:
        return path in self.damaged and self.damaged[path] == digest(path)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def columns(folder: Path) -> dict[str, np.ndarray]:
    """The columns of rounds and clients that do not depend on time or layout, first axis rounds. Raises BadFile."""
    tree = load_tree(RunFolder(folder).metrics_path, only=("rounds", "clients"))
    return {name: np.asarray(value) for name, value in flattened(tree) if is_result(name)}


def is_result(name: str) -> bool:
    column = name.partition("/")[2]
    return not column.endswith("_s") and name != "clients/rank" and not column.startswith(TIMES)


def summary(folder: Path) -> dict[str, object]:
    """What depends on no time, {} for a run that is not complete."""
    found = RunFolder(folder).summary() or {}
    return {name: value for name, value in found.items() if name != "finished"}


@dataclass(frozen=True)
class Expected:
    """What a reference run in one process gave."""

    columns: dict[str, np.ndarray]
    summary: dict[str, object]

    @classmethod
    def of(cls, folder: Path) -> Expected:
        return cls(columns(folder), summary(folder))

    def sha256(self, round: int) -> str:
        return str(self.columns["rounds/weights_sha256"][round - 1])


def same(one: object, other: object) -> bool:
    """Bit for bit, NaN like NaN."""
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


# ---- after an attempt ----


def judge(
    scenario: Scenario, fault: Fault | None, attempt: Attempt, folder: Path, known: Known, expected: Expected
) -> list[Verdict]:
    """All that is wrong after an attempt; `known` is brought up to date."""
    if attempt.unresponsive:
        return [Verdict(HUNG, f"ranks {attempt.unresponsive} had to be killed")]
    complete = bool(summary(folder))
    struck = fault if attempt.notes.has("struck") else None
    found = judge_training(attempt, known) + judge_end(struck, attempt, complete)
    found += judge_rows(folder, known, expected, complete)
    known.saved = max([known.saved, *saved_rounds(scenario, struck, attempt)])
    found += judge_checkpoints(folder, known, expected)
    if struck and KINDS[struck.kind].ends and not complete:
        found += judge_report(struck, attempt)
    return found


def judge_training(attempt: Attempt, known: Known) -> list[Verdict]:
    again = sorted({round for round, _ in attempt.notes.numbers("trained") if round <= known.saved})
    return [Verdict(LOST, f"rounds {again} were saved and trained again")] if again else []


def saved_rounds(scenario: Scenario, struck: Fault | None, attempt: Attempt) -> list[int]:
    """Rounds whose checkpoint must be there: those that rank 0 has left behind, where one was due."""
    past = [round for (round,) in attempt.notes.numbers("saved")]
    if struck and struck.kind == REMOVED:
        return []
    stopped = [past[-1]] if past and struck and struck.kind == USR1 and attempt.results[0].exit_code == STOPPED else []
    return [round for round in past if round % scenario.checkpoint_every == 0 or round == scenario.rounds] + stopped


def judge_end(struck: Fault | None, attempt: Attempt, complete: bool) -> list[Verdict]:
    """Exit codes: 0 of all ranks for a complete run, of none otherwise (but a victim that chose it)."""
    codes = [result.exit_code if result.signal is None else -result.signal for result in attempt.results]
    told = [code for rank, code in enumerate(codes) if not (struck and struck.kind == EXIT_0 and rank == struck.victim)]
    if not complete and 0 in told:
        return [Verdict(LOST, f"exit codes {codes}, but the run is not complete")]
    if not struck and not attempt.succeeded:
        return [Verdict(LOST, f"exit codes {codes} of a run that nothing struck\n{attempt.output}")]
    return []


def judge_rows(folder: Path, known: Known, expected: Expected, complete: bool) -> list[Verdict]:
    """The rows so far are the reference run's first ones; all of them, and its summary, when the run is complete."""
    path = RunFolder(folder).metrics_path
    if not path.exists() or known.is_damaged(path):
        return [Verdict(LOST, "metrics.h5 is damaged, and the run is complete")] if complete else []
    try:
        found = columns(folder)
    except BadFile as bad:
        return [Verdict(LOST, f"cannot be read: {bad}")]
    rounds = found["rounds/round"].tolist()
    wanted = expected.columns["rounds/round"].tolist()
    if rounds != (wanted if complete else wanted[: len(rounds)]):
        return [Verdict(LOST, f"rows of rounds {rounds}")]
    different = [
        name
        for name in expected.columns
        if name not in found or not same(found[name], expected.columns[name][: len(rounds)])
    ]
    if complete:
        now = summary(folder)
        different += [f"summary/{name}" for name, value in expected.summary.items() if not same(now.get(name), value)]
    return [Verdict(WRONG, f"other numbers than the reference run's: {', '.join(different[:8])}")] if different else []


def judge_checkpoints(folder: Path, known: Known, expected: Expected) -> list[Verdict]:
    """All are intact, the newest is not older than what was saved, and has the reference run's weights."""
    found: list[Verdict] = []
    good = [(round, path) for round, path in RunFolder(folder).checkpoints() if not known.is_damaged(path)]
    if max([0, *(round for round, _ in good)]) < known.saved:
        found.append(Verdict(LOST, f"the checkpoint of round {known.saved} is gone"))
    for round, path in good:
        try:
            tree = load_tree(path)
        except BadFile as bad:
            found.append(Verdict(LOST, f"cannot be read: {bad}"))
            continue
        known.saved = max(known.saved, round)
        weights = {str(name): np.asarray(tree["global"][name]) for name in tree["global_names"]}
        if arrays_sha256(weights) != expected.sha256(round):
            found.append(Verdict(WRONG, f"the weights in {path.name} are not the reference run's"))
    return found


def judge_report(struck: Fault, attempt: Attempt) -> list[Verdict]:
    """One line of ours, and a traceback only where it is the user's code that failed."""
    kind, output = KINDS[struck.kind], attempt.output
    if struck.kind == USR1:
        told = f"stopped by {USR1} after round" in output and attempt.results[0].exit_code == STOPPED
        return [] if told else [Verdict(UNREPORTED, f"exit code {attempt.results[0].exit_code} after {USR1}\n{output}")]
    lines = [line for line in output.splitlines() if line.startswith("hkd_hpc: ")]
    lines = [line for line in lines if not line.startswith("hkd_hpc: warning:")]
    silent = struck.kind == KILL_ALL or (len(attempt.results) == 1 and not kind.reported_alone)
    if len(lines) != 1 and not silent:
        return [Verdict(UNREPORTED, f"{len(lines)} lines of ours\n{output}")]
    allowed = 1 if struck.kind.startswith("exception") else 0
    return [Verdict(UNREPORTED, f"a traceback\n{output}")] if output.count(TRACE) > allowed else []


# ---- at the end of a scenario ----


def judge_nan(client: int, round: int, folder: Path) -> list[Verdict]:
    """The client counted with weight 0 in that round, and the row says so."""
    status = columns(folder)["clients/status"][round - 1, client]
    why = f"client {client} has status {status:g} in round {round}, not {REJECTED}"
    return [] if status == REJECTED else [Verdict(WRONG, why)]


def judge_leftovers(folder: Path) -> list[Verdict]:
    """Nothing is left but the run."""
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    other = [name for name in left if not re.fullmatch(FILES_OF_A_RUN, name)]
    return [Verdict(WRONG, f"left behind: {', '.join(other)}")] if other else []
