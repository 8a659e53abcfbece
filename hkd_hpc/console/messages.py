"""What rank 0 prints: plain lines, no escape codes, flushed at once so that a killed job leaves a readable log."""

from __future__ import annotations

import json
import math
import os
import sys
import time

import numpy as np

from hkd_hpc.runtime import provenance
from hkd_hpc.store.history import PAYLOAD_KINDS, PHASES, WIRE_KINDS


def say(text: str) -> None:
    """A line for the log."""
    _write(sys.stdout, text)


def warn(text: str) -> None:
    """A line for people who watch."""
    _write(sys.stderr, f"hkd_hpc: warning: {text}")


def _write(stream, text: str) -> None:
    """A reader that has gone (`| head`) or a full log disk must not end a run of hours: then the rest is not
    printed.
    """
    try:
        print(printable(text, stream), file=stream, flush=True)
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def printable(text: str, stream) -> str:
    """What the stream's encoding lacks (a name of a file that is not UTF-8) becomes an escape."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


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


def progress_line(history, clock: Clock, terms) -> str:
    """round  3/10  loss cross_entropy 1.234 soft 0.012 | local .812 global .455 | 12.3 s, 1 min 02 s left"""
    row = {name: values[-1] for name, values in history.rounds.items()}
    width = len(str(clock.rounds))
    losses = " ".join(f"{term} {row[f'loss/{term}']:.4f}" for term in terms)
    local, whole = number_text(row["local_test_accuracy"]), number_text(row["global_test_accuracy"])
    return (
        f"round {row['round']:{width}d}/{clock.rounds}  loss {losses}  |  local {local}  global {whole}  |  "
        f"{seconds_text(row['wall_s'])}, {seconds_text(clock.left_s(row['round']))} left"
    )


def three_readings(values: np.ndarray, spoilt: np.ndarray | bool = False) -> dict[str, float]:
    """Last round (primary), mean of the last five tested rounds, and the best one: an oracle, chosen on the test set.

    spoilt: (rounds,) bool, tested without finite predictions. A mean over such a round is NaN; it is never the best.
    """
    finite = values[~np.isnan(values)]
    if not len(finite):
        return {"last": math.nan, "mean_last_5": math.nan, "oracle": math.nan}
    tested = values[~np.isnan(values) | spoilt]
    return {"last": float(values[-1]), "mean_last_5": float(tested[-5:].mean()), "oracle": float(finite.max())}


READ_THRICE = (
    "local_test_accuracy",
    "local_test_accuracy_worst_tenth",
    "local_test_accuracy_std",
    "global_test_accuracy",
    "local_val_accuracy",
    "global_val_accuracy",
)

GLOBAL_STATISTICS = {"average": "averaged", "local": "averaged", "reestimate": "re-estimated"}


def warnings_text(warnings: list[str]) -> str:
    """Of all rounds: "in 9 of 10 rounds no class ...", or empty."""
    said = [text for text in warnings if text]
    return f"in {len(said)} of {len(warnings)} rounds: {said[-1]}" if said else ""


def spoilt_text(history) -> str:
    """In how many rounds the global model had no accuracy; empty where it always had one."""
    spoilt = int((history.nonfinite("global_test_accuracy") | history.nonfinite("global_val_accuracy")).sum())
    return (
        f"in {spoilt} of {len(history)} rounds: the global model's logits were not finite, so that it has no accuracy "
        "there"
        if spoilt
        else ""
    )


def nonfinite_text(tested: dict) -> str:
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


def summary_table(history, summary: dict, baselines: dict, folder) -> str:
    """The small table at the end."""
    lines = ["", f"{'accuracy':44s}{'last round':>12s}{'mean last 5':>13s}{'oracle':>9s}"]
    for name, title in (
        ("local_test_accuracy", "local (own model, own test)"),
        ("local_test_accuracy_worst_tenth", "  worst tenth of the clients"),
        ("local_test_accuracy_std", "  spread over the clients (std)"),
        ("local_val_accuracy", "local, on validation images"),
        ("global_test_accuracy", f"global ({GLOBAL_STATISTICS[summary['batchnorm']]} BatchNorm)"),
        ("global_val_accuracy", "global, on validation images"),
    ):
        if math.isnan(summary[f"{name}_mean_last_5"]) and "_val_" in name and not history.nonfinite(name).any():
            continue
        lines.append(
            f"  {title:42s}"
            + "".join(
                f"{number_text(summary[f'{name}_{kind}']):>{width}s}"
                for kind, width in (("last", 12), ("mean_last_5", 13), ("oracle", 9))
            )
        )
    for name, title in (
        ("global_test_accuracy_batchnorm_reestimated", "global, BatchNorm re-estimated by clients"),
        ("global_on_local_test_accuracy", "global model on the clients' own tests"),
        ("finetuned_on_local_test_accuracy", "global model fine-tuned by each client"),
    ):
        if name not in summary:
            continue
        lines.append(f"  {title:44s}{number_text(summary[name]):>10s}")
    lines.append(
        f"  {'baseline: majority class, local / global':44s}"
        f"{number_text(baselines['local_majority']) + ' / ' + number_text(baselines['global_majority']):>10s}"
    )
    lines.append(f"  {'baseline: chance':44s}{number_text(baselines['chance']):>10s}")
    lines += ["  oracle = the best round, chosen on the test set: not a result", ""]
    lines += [f"WARNING {summary['warnings']}", ""] if summary["warnings"] else []
    lines += [f"remark: {summary['remark']}", ""] if summary["remark"] else []
    lines += [summary["reproducible"]] if summary["reproducible"] else []
    lines += [f"changed {summary['changes']}"] if summary["changes"] else []
    lines += bytes_lines(history) + seconds_lines(history) + ["", *files_lines(folder)]
    return "\n".join(lines)


def bytes_lines(history) -> list[str]:
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


def seconds_lines(history) -> list[str]:
    parts = [f"{phase} {history.column(f'seconds/{phase}').sum():.1f}" for phase in PHASES]
    parts += [f"writing files {np.nansum(history.column('seconds/save')):.1f}"]
    return [f"seconds by phase (rank 0, {len(history)} rounds): {', '.join(parts)}"]


def files_lines(folder) -> list[str]:
    newest = folder.checkpoints()[0][1] if folder.checkpoints() else "none"
    return [
        f"metrics     {folder.metrics_path}",
        f"checkpoint  {newest}",
        f"models      python -m hkd_hpc.export {folder.path} --out global.pt",
    ]
