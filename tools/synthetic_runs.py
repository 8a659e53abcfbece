"""Folders of runs that nobody trained, in the store's real layout: for the benchmark of the report, and for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc.analysis.metrics import NAN, SINGLE
from hkd_hpc.config import resolve
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.history import PAYLOAD_KINDS, PHASES, WIRE_KINDS, History
from hkd_hpc.store.tree import save_tree

CLASSES = 10
OF_CLIENTS = (
    *(metric.name for metric in SINGLE if metric.of_clients),
    "loss/cross_entropy",
    *(f"payload_bytes/{kind}" for kind in PAYLOAD_KINDS),
)
OF_ROUNDS = (
    *(metric.name for metric in SINGLE if metric.of_round or metric.of_test),
    "loss/cross_entropy",
    *(f"seconds/{phase}" for phase in (*PHASES, "save")),
    *(f"payload_bytes/{kind}" for kind in PAYLOAD_KINDS),
    *(f"wire_bytes/{kind}" for kind in WIRE_KINDS),
)


def write_run(
    folder: Path,
    overrides: Sequence[str],
    local_R: Sequence[float],
    global_R: Sequence[float],
    status_RM: np.ndarray | None = None,
    warnings: Sequence[str] = (),
    summary: dict[str, Any] | None = None,
    **parts: Any,
) -> Path:
    """Write the config.json and metrics.h5 of a run that has all but a checkpoint.

    Args:
        folder: of the run.
        overrides: "section.key=value".
        local_R: local accuracy of each round, which all clients have.
        global_R: global accuracy of each round.
        status_RM: (rounds, clients) of /clients/status; by default all entered the average.
        warnings: of the first rounds.
        summary: added to that of a complete run; None: the run is not complete.
        parts: of metrics.h5, in place of what stands there by default.

    Returns:
        The folder.
    """
    config = resolve(overrides=list(overrides))
    clients, text = config.fed.clients, config.to_json()
    status_RM = np.zeros((len(local_R), clients)) if status_RM is None else status_RM
    history = History(clients)
    for place, (local, whole) in enumerate(zip(local_R, global_R)):
        told = warnings[place] if place < len(warnings) else ""
        add_round(history, local, whole, status_RM[place], told)
    RunFolder(folder).create()
    RunFolder(folder).write_config(text)
    tree = {
        **static_parts(clients, text),
        **history.tree(),
        **({} if summary is None else {"summary": {**summary_of(local_R, global_R), **summary}}),
        **parts,
    }
    tree["clients"]["rank"] = np.zeros(clients, np.int64)
    save_tree(folder / "metrics.h5", tree)
    return folder


def static_parts(clients: int, config_json: str) -> dict[str, Any]:
    """What metrics.h5 holds beside the rows."""
    return {
        "config_json": config_json,
        "changes_json": "[]",
        "versions_json": json.dumps({"hkd_hpc": "0.1.0", "torch": "2.9.0"}),
        "identity_json": json.dumps({"code.hkd_hpc": "ab" * 32, "data.content": "cd" * 32}),
        "partition": {
            "train_count": np.arange(clients * CLASSES).reshape(clients, CLASSES),
            "global_test_count": np.full(CLASSES, 2),
        },
        "parameters": {"model": 1000, "held": 2000},
        "world": {"ranks": 1, "plan": "one process"},
    }


def add_round(history: History, local: float, whole: float, status_M: np.ndarray, warning: str) -> None:
    """One round in which every client has the same local accuracy, none of its clients is lost, and every other number
    is 1."""
    counted = status_M == 0
    row = dict.fromkeys(OF_ROUNDS, 1.0) | {
        "round": len(history) + 1,
        "clients_refused": 0.0,
        "clients_failed": 0.0,
        "weights_sha256": "ab" * 32,
        "warning": warning,
        "global_test_undefined": "",
        "local_test_accuracy": local,
        "global_test_accuracy": whole,
        "global_test_correct_by_class": [1] * CLASSES,
    }
    columns = {name: np.where(counted, 1.0, NAN) for name in OF_CLIENTS}
    columns["knowledge_classes"] = np.repeat(columns["train_s"][:, None], CLASSES, axis=1)
    history.append(row, {**columns, "status": status_M, "local_test_accuracy": np.where(counted, local, NAN)})


def summary_of(local_R: Sequence[float], global_R: Sequence[float]) -> dict[str, Any]:
    return {
        "local_test_accuracy_last": local_R[-1],
        "global_test_accuracy_last": global_R[-1],
        "warnings": "",
        "remark": "",
        "reproducible": "",
        "changes": "",
        "finished": "2026-01-01T00:00:00+0000",
    }
