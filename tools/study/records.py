"""The finished runs of one table as a file of text: first the settings that all share, then a line a run."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc.analysis.metrics import NAN, summarise
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import is_location
from hkd_hpc.console import messages
from hkd_hpc.jobs import Study, load_study
from hkd_hpc.report.trials import order_of
from hkd_hpc.results import Run
from hkd_hpc.runtime.machine import cpu_kind
from hkd_hpc.runtime.provenance import CONTENT
from hkd_hpc.store.atomic import replace_text

ACCURACIES = ("local_test_accuracy", "local_test_accuracy_worst_tenth", "global_test_accuracy")
NOISE = ("signal_rms", "noise_std")  # of a shared class mean, a coordinate
SCHEME, SEED, ROUNDS = "scheme.name", "run.seed", "fed.rounds"
DIGITS = 6  # behind the point; accuracies are multiples of 1 / 1,250 and 1 / 10,000
KERNELS_OF = ("torch", "numpy")  # packages whose float kernels are part of a result
PAPERS = "-paper"  # in the names of runs of a comparison: with the settings of the scheme's paper


@dataclass(frozen=True)
class Record:
    """One finished run, without what it says of single clients.

    Attributes:
        row: of its table: a scheme, or a variant of one.
        settings: "section.key" to value, of all that its numbers depend on.
        rounds: column to one number a round, None where nothing was measured: accuracies and terms of the loss as in
            /rounds of metrics.h5, NOISE of schemes that add some, "shared_classes" of a client (mean), "known_classes"
            that any client shared.
        summary: the numbers of /summary of metrics.h5.
        made: hashes of weights, partition, data and code, versions, CPU, devices, payload of the last round, seconds of
            all rounds (wall_s).
    """

    row: str
    settings: Mapping[str, Any]
    rounds: Mapping[str, Sequence[float | None]]
    summary: Mapping[str, float]
    made: Mapping[str, Any]

    @property
    def scheme(self) -> str:
        return str(self.settings[SCHEME])

    @property
    def seed(self) -> int:
        return int(self.settings[SEED])


# ---------------------------------------------------------------------------------------------- from runs


def collected(root: Path) -> list[Record]:
    """The finished runs below the root of a comparison or a sweep. UsageError where there is none, and for one that is
    incomplete."""
    study = load_study(root)
    trials = study.trials if isinstance(study, Study) else []
    rows = {trial.name: variant_of(trial.labels) for trial in trials if not trial.folder}  # of a comparison: by names
    records = [record_of(run, rows.get(run.path.name) or row_of(run)) for run in study.runs if run.state == "complete"]
    if not records:
        raise UsageError(f"{root}: no run has come to its end yet")
    return records


def variant_of(labels: Mapping[str, str]) -> str:
    """The labels of a sweep's trial, its seed aside."""
    return ", ".join(label for axis, label in labels.items() if axis != "seed")


def row_of(run: Run) -> str:
    """Of a comparison: fedhkd-paper-s0 is in the row fedhkd, fedhkd-tuned3-s0 in fedhkd-tuned3."""
    return run.path.name.removesuffix(f"-s{run.settings[SEED]}").removesuffix(PAPERS)


def record_of(run: Run, row: str) -> Record:
    """What the study keeps of a finished run. UsageError for one that is incomplete."""
    if why := unfit(run):
        raise UsageError(f"{run.path}: {why}; the study takes runs of one code and one setting, of all clients")
    columns = {name: values for name, values in run.round_columns.items() if is_kept(name)} | shared(run)
    return Record(
        row,
        {key: value for key, value in run.settings.items() if not is_location(key)},
        {name: [number(value) for value in values] for name, values in columns.items()},
        {name: found for name, value in run.summary.items() if (found := number(value)) is not None},
        made(run),
    )


def unfit(run: Run) -> str:
    """Why a finished run is no evidence: something was changed on the way, or a client was rejected; else empty."""
    if run.changes:
        return f"was resumed with changes ({messages.changes_text(json.dumps(run.changes))})"
    columns = {"rejected": "clients_refused", "failed": "clients_failed"}
    lost = {what: int(run.round_columns[column].sum()) for what, column in columns.items()}
    return ", ".join(f"clients {what}: {count}" for what, count in lost.items() if count)


def is_kept(column: str) -> bool:
    return column in (*ACCURACIES, *NOISE) or column.startswith("loss/")


def shared(run: Run) -> dict[str, np.ndarray]:
    """(rounds,) of classes: shared by a client (mean), and by any; nothing of a scheme that shares none by class."""
    if "knowledge_classes" not in run.client_columns:
        return {}
    shared_RMC = np.asarray(run.client_columns["knowledge_classes"], float) == 1
    return {"shared_classes": shared_RMC.sum(2).mean(1), "known_classes": shared_RMC.any(1).sum(1)}


def made(run: Run) -> dict[str, Any]:
    """How it came about, and what its weights are."""
    columns, versions = run.round_columns, dict(run.versions)
    return {
        "weights_sha256": str(columns["weights_sha256"][-1]),
        "partition_sha256": str(run.partition.get("sha256", "")),
        "data_sha256": run.identity.get(CONTENT, ""),
        "code_sha256": run.identity.get("code.hkd_hpc", ""),
        "revision": versions.pop("revision", ""),
        "versions": versions,
        "cpu": cpu_of(run),
        "devices": sorted({device for session in run.sessions for device in session.get("devices", {})}),
        "wall_s": number(columns["wall_s"].sum()),
        "payload_bytes": {kind: int(values[-1]) for kind, values in payload(columns).items()},
        "finished": str(run.summary["finished"]),
    }


def payload(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    prefix = "payload_bytes/"
    return {name.removeprefix(prefix): values for name, values in columns.items() if name.startswith(prefix)}


def cpu_of(run: Run) -> dict[str, str]:
    """As the run's processes recorded it. A run of an older version did not: then this machine's, if it is the host."""
    kinds = [session["cpu"] for session in run.sessions if "cpu" in session]
    if kinds:
        return kinds[-1] if all(kind == kinds[-1] for kind in kinds) else {"model": "several"}
    hosts = {host for session in run.sessions for host in session.get("hosts", {})}
    return cpu_kind({}) if hosts == {platform.node()} else {}


def number(value: Any) -> float | None:
    """Rounded; None for NaN and for what is no number."""
    is_number = isinstance(value, float | int | np.floating | np.integer) and not isinstance(value, bool)
    return round(float(value), DIGITS) if is_number and np.isfinite(value) else None


# ---------------------------------------------------------------------------------------------- the file


def read(path: Path) -> list[Record]:
    """The runs of a table; none where there is no file yet. UsageError for a file that is damaged."""
    if not path.exists():
        return []
    try:
        common, *lines = map(json.loads, path.read_text().splitlines())
        found = [Record(**{**line, "settings": {**common, **line["settings"]}}) for line in lines]
        wrong = {(record.row, record.seed): problem for record in found if (problem := problem_of(record))}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path}: is no table of the study ({error}); get it back from git") from None
    counted = Counter((record.row, record.seed) for record in found)
    wrong |= {place: f"is there {count} times" for place, count in counted.items() if count > 1}
    for (row, seed), problem in wrong.items():
        raise UsageError(f"{path}: {row}, seed {seed}: {problem}; get it back from git")
    return found


def problem_of(record: Record) -> str:
    """What of a record does not fit together; empty where all does."""
    for name in ACCURACIES:
        values = np.array([NAN if value is None else value for value in record.rounds[name]], float)
        if len(values) != record.settings[ROUNDS]:
            return f"{name} has {len(values)} rounds, it was trained for {record.settings[ROUNDS]}"
        if ((values < 0) | (values > 1)).any():
            return f"{name} has numbers beyond 0 and 1"
        for way, value in summarise(values).items():
            kept = record.summary.get(f"{name}_{way}", value)
            if not abs(kept - value) < 2 * 10**-DIGITS and not np.isnan(kept):
                return f"{name}_{way} is {kept}, its rounds say {number(value)}"
    return ""


def write(path: Path, records: Iterable[Record]) -> None:
    """The table's file, whatever order the runs came in."""
    ordered = sorted(records, key=lambda record: (order_of(record.scheme), record.row, record.seed))
    common = common_settings(ordered)
    own = [{key: value for key, value in one.settings.items() if key not in common} for one in ordered]
    lines = [common, *(asdict(replace(one, settings=settings)) for one, settings in zip(ordered, own))]
    replace_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def common_settings(records: Sequence[Record]) -> dict[str, Any]:
    """Those that all have, scheme and seed aside."""
    first = records[0].settings
    return {
        key: value
        for key, value in first.items()
        if key not in (SCHEME, SEED) and all(key in one.settings and one.settings[key] == value for one in records)
    }


def merged(known: Sequence[Record], found: Sequence[Record]) -> list[Record]:
    """Those of both. UsageError where one row and seed has two different runs: neither may be picked."""
    by_place = {(record.row, record.seed): record for record in known}
    for record in found:
        other = by_place.setdefault((record.row, record.seed), record)
        if other.made["weights_sha256"] != record.made["weights_sha256"]:
            raise UsageError(
                f"{record.row}, seed {record.seed}: the table has this run with other weights "
                f"({other.made['weights_sha256'][:12]}, not {record.made['weights_sha256'][:12]}); a table is of one "
                "code and one kind of CPU: remove its file to begin it anew"
            )
    return list(by_place.values())
