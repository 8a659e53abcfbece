"""Runs whose figures can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hkd_hpc.results import load
from hkd_hpc.store.tree import save_tree

SETTINGS = {"scheme.name": "fedhkd", "scheme.nu": 0.25, "model.latent": 4, "data.beta": 0.5, "run.seed": 0}
STATUS_RM = [[0, 0, 0], [0, 5, 0], [1, 0, np.nan]]  # round 2: client 1 drops out; round 3: 0 rejected, 2 not sampled


NAN = np.nan
SHARED_RMC = np.array(
    [[[1, 1, 0], [0, 1, 1], [1, 0, 0]], [[1, 1, 0], [NAN] * 3, [1, 0, 0]], [[NAN] * 3, [0, 1, 1], [NAN] * 3]],
    np.float16,
)
NEWER_ROUNDS = {
    "global_test_correct_by_class": np.array([[1, 2, 3], [0, 0, 0], [2, 4, 6]]),
    "global_test_n": np.array([14, 0, 14]),
    "noise_std": np.array([2.0, 1.0, 0.5]),
    "signal_rms": np.ones(3),
}
NEWER_CLIENTS = {
    "memory_bytes": np.array([[1.0e9, 2.0e9, 3e9], [1.5e9, NAN, 3e9], [1.5e9, 2.5e9, NAN]]),
    "knowledge_classes": SHARED_RMC,
}


@dataclass
class Record:
    """What figures need of a run."""

    settings: Mapping[str, Any]
    round_columns: Mapping[str, np.ndarray]
    client_columns: Mapping[str, np.ndarray]
    partition: Mapping[str, Any]
    client_ranks: list[int]
    sessions: list[dict[str, Any]] = field(default_factory=list)
    identity: Mapping[str, str] = field(default_factory=dict)
    confusion: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), int))

    def part(self, name: str) -> Mapping[str, Any]:
        summary = {"global_test_confusion": self.confusion} if self.confusion.size else {}
        return {"parameters": {"model": 100, "held": 300}, "summary": summary}.get(name, {})


@pytest.fixture
def newest(recorded):
    """The same as the newest version records it, without the columns named."""

    def make(*lacking: str, **settings: Any) -> Record:
        run = recorded(**settings)
        run.round_columns = {**run.round_columns, **NEWER_ROUNDS}
        run.client_columns = {**run.client_columns, **NEWER_CLIENTS}
        for columns in (run.round_columns, run.client_columns):
            for name in columns.keys() & set(lacking):
                del columns[name]
        run.partition["global_test_count"] = np.array([2, 4, 8])
        run.confusion = np.array([[2, 0, 0], [0, 4, 0], [1, 1, 6]])
        return run

    return make


@pytest.fixture
def saved(newest, tmp_path):
    """The run of `newest` as a file, looked at as any other."""
    run = newest()
    sections: dict[str, Any] = {}
    for key, value in run.settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    tables: dict[str, Any] = {"rounds": {}, "clients": {"rank": np.array(run.client_ranks)}}
    for table, columns in (("rounds", run.round_columns), ("clients", run.client_columns)):
        for name, column in columns.items():
            *group, own = name.split("/")
            (tables[table].setdefault(group[0], {}) if group else tables[table])[own] = column
    parts = {"partition": dict(run.partition), "parameters": run.part("parameters")}
    parts["summary"] = {"global_test_confusion": run.confusion}
    save_tree(tmp_path / "metrics.h5", {"config_json": json.dumps(sections), **tables, **parts})
    return load(tmp_path / "metrics.h5")


@pytest.fixture
def recorded():
    """make(local accuracies, seconds of a round, settings): three rounds of three clients on two ranks."""

    def make(local=(0.2, 0.4, 0.6), wall_s=1.0, sessions=(), **settings: Any) -> Record:
        local, rounds = np.array(local), len(local)
        status_RM = np.array(STATUS_RM)[:rounds]
        took_part = np.where(np.isnan(status_RM), np.nan, 1.0)
        return Record(
            {**SETTINGS, **{key.replace("__", "."): value for key, value in settings.items()}},
            {
                "round": np.arange(1, rounds + 1),
                "local_test_accuracy": local,
                "local_test_accuracy_worst_tenth": local / 2,
                "global_test_accuracy": np.where(np.arange(rounds) % 2, np.nan, local + 0.1),  # every other round
                "wall_s": np.full(rounds, float(wall_s)),
                "loss/cross_entropy": np.arange(rounds, 0, -1.0),
                "seconds/train": np.full(rounds, 3.0),
                "seconds/evaluate_and_save": np.zeros(rounds),
                "payload_bytes/weights_up": np.full(rounds, 1500),
                "payload_bytes/weights_down": np.full(rounds, 1500),
                "payload_bytes/knowledge_up": np.array([192, 128, 64])[:rounds],
                "payload_bytes/knowledge_down": np.array([252, 252, 112])[:rounds],
                "wire_bytes/weights": np.zeros(rounds, int),
            },
            {
                "status": status_RM,
                "train_s": np.array([1.0, 2.0, 4.0]) * took_part,
                "report_s": 0.5 * took_part,
                "local_test_accuracy": np.array([0.1, 0.2, 0.6]) * took_part,
            },
            {"train_count": np.array([[3, 1, 0], [0, 2, 2], [4, 0, 0]]), "public_index": np.array([], int)},
            [1, 1, 2],
            list(sessions),
        )

    return make
