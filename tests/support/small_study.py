"""A small study whose numbers are worked out by hand, beside a run that is broken and one that is not complete."""

from __future__ import annotations

import numpy as np

from tools.synthetic_runs import write_run

PAPER = ["data.name=cifar10", "data.fraction=0.1", "model.name=resnet18", "model.latent=64", "fed.rounds=2"]
EVIL = "<img src=x onerror=alert(1)>"
LOCAL = {"fedavg": (0.5, 0.6, 0.7), "fedhkd": (0.55, 0.66, 0.77)}  # last round, by seed
GLOBAL = {"fedavg": (0.30, 0.31, 0.32), "fedhkd": (0.32, 0.34, 0.36)}
SESSION = (
    '[{"started_unix_s": 1700000000, "after_round": 0, "command_line": "python -m hkd_hpc.train", "ranks": 3, '
    '"hosts": {"node1": 3}, "devices": {"cpu": 3}, "launcher": "MPI"}, '
    '{"started_unix_s": 1700003600, "after_round": 1, "command_line": "python -m hkd_hpc.train --resume", "ranks": 3, '
    '"hosts": {"node2": 3}, "devices": {"cpu": 3}, "launcher": "MPI"}]'
)


def write_study(root):
    for scheme in LOCAL:
        for seed in range(3):
            overrides = [*PAPER, f"scheme.name={scheme}", f"run.seed={seed}"]
            local, whole = LOCAL[scheme][seed], GLOBAL[scheme][seed]
            write_run(root / f"{scheme}-s{seed}", overrides, [0.1, local], [0.1, whole], summary={})
    return root


def write_restless(root):
    """A run that is not complete, with everything that can happen to clients."""
    status_RM = np.zeros((2, 10))
    status_RM[0, :5] = 1, 5, 6, 2, 3
    status_RM[1, 0] = np.nan
    events = {"round": [1, 1], "client": [0, 4], "what": ["weights", EVIL], "tensor": ["conv1", "count_C"]}
    write_run(
        root / "restless",
        [*PAPER, "scheme.name=fedhkd", "run.seed=7", "fed.rounds=5"],
        [0.1, 0.2],
        [0.1, 0.2],
        status_RM,
        warnings=["no class is shared"],
        sessions_json=SESSION,
        events={**{name: np.array(values) for name, values in events.items()}, "value": np.array([np.inf, 2.5])},
    )


def write_broken(root):
    """The first part of a run's file."""
    (root / "broken").mkdir()
    (root / "broken/metrics.h5").write_bytes((root / "fedavg-s0/metrics.h5").read_bytes()[:5000])
