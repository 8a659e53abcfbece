"""What metrics.h5 and every checkpoint say of a run beside its rows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from hkd_hpc.assembly.federation import Federation
from hkd_hpc.assembly.network import inputs_of
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.config import identity
from hkd_hpc.data import assigned, sources
from hkd_hpc.data.partition import Partition
from hkd_hpc.data.skew import FeatureSkew
from hkd_hpc.runtime import versions
from hkd_hpc.state import sessions
from hkd_hpc.training import LocalTrainer


def static_record(federation: Federation, comm: Comm, trainer: LocalTrainer) -> dict[str, Any]:
    """What metrics.h5 and every checkpoint carry beside the rows."""
    asked, dataset, names = federation.asked, federation.dataset, federation.names
    parameters = max(trainer.flat.parameter_counts(asked.model.members).values())
    return {
        "config_json": asked.to_json(),
        "changes_json": "[]",
        "versions_json": json.dumps(versions.found()),
        "identity_json": identity.to_json(asked, dataset.sha256),
        "sessions_json": sessions.begun(comm),
        "partition": assigned.as_tree(federation.partition, dataset) | skew_tree(federation.skew),
        "clients": {"rank": np.array(federation.rank_of, np.int64)} | ({"name": np.array(names)} if names else {}),
        **inputs_of(dataset).record(),
        "parameters": {"model": parameters, "held": trainer.scheme.about.parameters_held(parameters)},
        "baselines": baselines(dataset, federation.assigned),
        "world": {"ranks": comm.size, "plan": comm.plan_line},
    }


def skew_tree(skew: FeatureSkew | None) -> dict[str, np.ndarray]:
    return {"rotation_deg": skew.angle_deg_M, "noise_std": skew.noise_std_M} if skew else {}


def baselines(dataset: sources.DataSet, partition: Partition) -> dict[str, float]:
    """Accuracy without learning: each client's (or the whole) most common training class, and a fair die."""
    train_MC = partition.train_count_MC(dataset.y_train)
    test_MC = partition.test_count_MC(dataset.y_test if partition.test_split == "test" else dataset.y_train)
    hits = test_MC[np.arange(len(train_MC)), train_MC.argmax(1)].sum()
    return {
        "local_majority": float(hits / max(test_MC.sum(), 1)),
        "chance": 1 / dataset.classes,
        "global_majority": float((dataset.y_test == train_MC.sum(0).argmax()).mean()),
    }
