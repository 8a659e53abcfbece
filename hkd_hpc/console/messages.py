"""What rank 0 says, in plain lines: their text. Where they go: output.py."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hkd_hpc.analysis.metrics import FINAL, SUMMARISED, SUMMARY_WAYS, TestResult
from hkd_hpc.analysis.milestones import TARGETS, patience_ends
from hkd_hpc.common.words import counted
from hkd_hpc.console import output
from hkd_hpc.console.output import Level
from hkd_hpc.runtime import provenance
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.history import PAYLOAD_KINDS, PHASES, WIRE_KINDS, History


def say(text: str) -> None:
    """A line of what goes on."""
    output.current().say(text)


def warn(text: str) -> None:
    """A line for people who watch."""
    output.current().warn(text)


def warn_of_loss(text: str) -> None:
    """A warning of what a run should have made and does not: --quiet shows it too."""
    output.current().warn(text, Level.QUIET)


def detail(text: Callable[[], str]) -> None:
    """What only --verbose shows, and only then costs anything."""
    out = output.current()
    if out.level == Level.VERBOSE:
        out.say(text(), Level.VERBOSE)


def answer(text: str, essential: str | None = None) -> None:
    """What the command was for: --quiet shows it too, or its `essential` part where that is given."""
    out = output.current()
    if essential is None or out.level > Level.QUIET:
        out.say(text, Level.QUIET)
    else:
        out.record(text)
        output.write(sys.stdout, essential)


def client_text(client: int, name: str = "") -> str:
    """client 3, or client 3 (its name)"""
    return f"client {client} ({name})" if name else f"client {client}"


class Clock:
    """Seconds left, from the rounds done in this process."""

    def __init__(self, rounds: int):
        self.rounds, self.start_s = rounds, time.perf_counter()
        self.done_before: int | None = None  # rounds of earlier processes

    def left_s(self, round: int) -> float:
        """After this round, until the last is done."""
        if self.done_before is None:
            self.done_before = round - 1
        return (time.perf_counter() - self.start_s) / (round - self.done_before) * (self.rounds - round)


def seconds_text(seconds: float) -> str:
    """12.3 s, 4 min 05 s, 3 h 20 min"""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def bytes_text(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def number_text(value: float) -> str:
    """0.812 for an accuracy; - for one that was not measured"""
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def progress_line(history: History, clock: Clock, terms: Iterable[str]) -> str:
    """round  3/10  loss cross_entropy 1.234 soft 0.012 | local .812 global .455 | 12.3 s, 1 min 02 s left"""
    row = history.last()
    return round_line(row, clock.rounds, clock.left_s(row["round"]), terms)


def round_line(row: Mapping[str, Any], rounds: int, left_s: float | None, terms: Iterable[str]) -> str:
    """The line of a round, of its row in /rounds; `rounds`: all that there will be; `left_s`: until their end, None
    where nothing trains. Its seconds are rank 0's, with those of saving and of the test, in which other ranks begin the
    next round.
    """
    width = len(str(rounds))
    seconds = row["wall_s"] + row["seconds/evaluate_and_save"]
    losses = " ".join(f"{term} {row[f'loss/{term}']:.4f}" for term in terms)
    local, whole = number_text(row["local_test_accuracy"]), number_text(row["global_test_accuracy"])
    return (
        f"round {row['round']:{width}d}/{rounds}  loss {losses}  |  local {local}  global {whole}  |  "
        f"{seconds_text(seconds)}{'' if left_s is None else f', {seconds_text(left_s)} left'}"
    )


def round_details(history: History, rank_of: Sequence[int]) -> str:
    """Of the last round, what --verbose shows: seconds by phase on rank 0, and of each rank with clients how many it
    trained and for how long.
    """
    row = history.last()
    seconds = ", ".join(f"{phase} {row[f'seconds/{phase}']:.2f}" for phase in PHASES)
    lines = [f"round {row['round']}: seconds by phase (rank 0): {seconds}"]
    train_s, report_s = history.clients["train_s"][-1], history.clients["report_s"][-1]
    for rank in sorted(set(rank_of)):
        here = np.array(rank_of) == rank
        lines.append(
            f"round {row['round']}: rank {rank}: {np.count_nonzero(train_s[here] > 0)} clients, training "
            f"{np.nansum(train_s[here]):.2f} s, tests and reports {np.nansum(report_s[here]):.2f} s"
        )
    return "\n".join(lines)


GLOBAL_STATISTICS = {"average": "averaged", "local": "averaged", "reestimate": "re-estimated"}


def warnings_text(warnings: list[str]) -> str:
    """Of all rounds: "in 9 of 10 rounds no class ...", or empty."""
    said = [text for text in warnings if text]
    return f"in {len(said)} of {len(warnings)} rounds: {said[-1]}" if said else ""


def nonfinite_rounds_text(history: History) -> str:
    """In how many rounds the global model had no accuracy; empty where it always had one."""
    nonfinite = int((history.nonfinite("global_test_accuracy") | history.nonfinite("global_val_accuracy")).sum())
    return (
        f"in {nonfinite} of {len(history)} rounds: the global model's logits were not finite, so that it has no "
        "accuracy there"
        if nonfinite
        else ""
    )


def nonfinite_text(tested: Mapping[str, TestResult]) -> str:
    """logits that are not finite on 3 of 100 images of the test split; empty where all are finite. `tested`:
    evaluate.Tested by the name of the images."""
    parts = [f"{test.nonfinite} of {test.n} images of {name}" for name, test in tested.items() if test.nonfinite]
    return f"logits that are not finite on {', '.join(parts)}" if parts else ""


def changes_text(changes_json: str) -> str:
    """after round 2: fed.rounds 2 -> 4; what changed in the middle of the run, by --allow-change or beside the
    settings
    """
    return "; ".join(
        f"after round {change.pop('after_round')}: {provenance.text_of(change)}" for change in json.loads(changes_json)
    )


def patience_text(value_R: np.ndarray, whose: str, patience: int) -> str:
    """no better global accuracy on validation images in 5 tests after round 3 (0.512); value_R: those accuracies."""
    best = int(np.nanargmax(value_R[: patience_ends(value_R, patience)]))
    return (
        f"no better {whose} accuracy on validation images in {counted(patience, 'test')} "
        f"after round {best + 1} ({number_text(value_R[best])})"
    )


def target_lines(summary: Mapping[str, Any]) -> list[str]:
    """reached 0.60: local in round 4 (1.2 MB payload, 3.1 s), global not; nothing where no target was asked for."""
    target = summary.get("target_accuracy")
    return [f"reached {target:g}: {', '.join(reached_text(summary, kind) for kind in TARGETS)}"] if target else []


def reached_text(summary: Mapping[str, Any], kind: str) -> str:
    """local in round 4 (1.2 MB payload, 3.1 s), or: local not"""
    round, payload_bytes, wall_s = (summary[f"target_{kind}_{name}"] for name in ("round", "payload_bytes", "wall_s"))
    if math.isnan(round):
        return f"{kind} not"
    return f"{kind} in round {round:.0f} ({bytes_text(payload_bytes)} payload, {seconds_text(wall_s)})"


def summary_table(
    history: History,
    summary: Mapping[str, Any],
    baselines: Mapping[str, float],
    folder: RunFolder,
    architecture: str = "",
) -> str:
    """The small table at the end; `architecture`: one of the unequal models, if they are."""
    lines = ["", *summary_lines(history, summary), *final_lines(summary, baselines)]
    lines += ["  best = the best round, selected on the test set: not a result", ""]
    lines += target_lines(summary)
    lines += [summary["stopped_early"], ""] if summary.get("stopped_early") else []
    lines += [f"WARNING {summary['warnings']}", ""] if summary["warnings"] else []
    lines += [f"remark: {summary['remark']}", ""] if summary["remark"] else []
    lines += [summary["reproducible"]] if summary["reproducible"] else []
    lines += [f"changed {summary['changes']}"] if summary["changes"] else []
    lines += bytes_lines(history) + seconds_lines(history) + ["", *files_lines(folder, architecture)]
    return "\n".join(lines)


SUMMARY_WIDTHS = {"last": 12, "mean_last_5": 13, "oracle": 9}


def summary_essentials(history: History, summary: Mapping[str, Any], folder: RunFolder) -> str:
    """What --quiet shows of it: the accuracies, and where all else is."""
    return "\n".join([*summary_lines(history, summary), f"metrics     {folder.metrics_path}"])


def summary_lines(history: History, summary: Mapping[str, Any]) -> list[str]:
    """The accuracies of the rounds, each read in three ways; validation images only where there are any."""
    names = SUMMARY_WAYS | {"mean_last_5": f"mean last {min(len(history), 5)}"}  # of fewer rounds fewer
    heads = "".join(f"{names[kind]:>{width}s}" for kind, width in SUMMARY_WIDTHS.items())
    lines = [f"{'accuracy':44s}{heads}"]
    for metric in SUMMARISED:
        is_measured = not math.isnan(summary[f"{metric.name}_mean_last_5"]) or history.nonfinite(metric.name).any()
        if is_measured or "_val_" not in metric.name:
            title = metric.title.format(batchnorm=GLOBAL_STATISTICS[summary["batchnorm"]])
            values = {kind: number_text(summary[f"{metric.name}_{kind}"]) for kind in SUMMARY_WIDTHS}
            lines.append(
                f"  {title:42s}" + "".join(f"{values[kind]:>{width}s}" for kind, width in SUMMARY_WIDTHS.items())
            )
    return lines


def final_lines(summary: Mapping[str, Any], baselines: Mapping[str, float]) -> list[str]:
    """What was measured once, and what one gets without learning."""
    majority = " / ".join(number_text(baselines[kind]) for kind in ("local_majority", "global_majority"))
    return [
        *(
            f"  {metric.title:44s}{number_text(summary[metric.name]):>10s}"
            for metric in FINAL
            if metric.name in summary
        ),
        *architecture_lines(summary.get("architectures", {})),
        f"  {'baseline: majority class, local / global':44s}{majority:>10s}",
        f"  {'baseline: chance':44s}{number_text(baselines['chance']):>10s}",
    ]


def architecture_lines(table: Mapping[str, np.ndarray]) -> list[str]:
    """Of unequal models: what each architecture came to (evaluation/by_architecture.py)."""
    return [
        f"  {f'{name}: {clients} clients, {parameters:,} parameters':43s} local {number_text(local)}  "
        f"global {number_text(whole)}"
        for name, clients, parameters, local, whole in zip(*(column.tolist() for column in table.values()))
    ]


def bytes_lines(history: History) -> list[str]:
    """Bytes a round by kind: what the paper counts, and what the communicator moved."""
    lines = []
    for group, kinds, title in (
        ("payload_bytes", PAYLOAD_KINDS, "payload a round (paper's count, all clients)"),
        ("wire_bytes", WIRE_KINDS, "wire a round (communicator, all ranks)"),
    ):
        means = {kind: history.column(f"{group}/{kind}").sum() / max(len(history), 1) for kind in kinds}
        parts = [f"{kind} {bytes_text(mean)}" for kind, mean in means.items() if mean]
        lines.append(f"{title}: {', '.join(parts) or 'nothing'}")
    return lines


def seconds_lines(history: History) -> list[str]:
    parts = [f"{phase} {history.column(f'seconds/{phase}').sum():.1f}" for phase in PHASES]
    parts += [f"writing files {np.nansum(history.column('seconds/save')):.1f}"]
    return [f"seconds by phase (rank 0, {len(history)} rounds): {', '.join(parts)}"]


def files_lines(folder: RunFolder, architecture: str) -> list[str]:
    which = f" --architecture {architecture}" if architecture else ""
    newest = folder.checkpoints()[0][1] if folder.checkpoints() else "none"
    return [
        f"metrics     {folder.metrics_path}",
        f"checkpoint  {newest}",
        f"models      python -m hkd_hpc.export {shlex.quote(str(folder.path))} --out global.pt{which}",
    ]
