"""Results of unequal models, architecture by architecture, computed by rank 0 at the end."""

from __future__ import annotations

import numpy as np

from hkd_hpc.server import Server
from hkd_hpc.state.checkpoint import RoundState

Table = dict[str, np.ndarray]  # columns, a row for each architecture


def by_architecture(server: Server, state: RoundState) -> Table:
    """What each architecture came to.

    Args:
        server: with the row of the last round.
        state: after the last round.

    Returns:
        By column (architectures,): name, clients, parameters, local_test_accuracy (of their own clients after the last
        local training, weighted by images; NaN where none took part) and global_test_accuracy (of their average, on the
        test split). Empty where all models are alike.
    """
    model = server.config.model
    if not model.names:
        return {}
    member_M = np.array([model.member_of(client) for client in range(server.config.fed.clients)])
    tests = server.test_members(state.weights_V, state.counters, server.test_images)
    counts = server.trainer.flat.parameter_counts(model.members)
    return {
        "name": np.array(model.members),
        "clients": np.array([np.count_nonzero(member_M == name) for name in model.members]),
        "parameters": np.array([counts[name] for name in model.members]),
        "local_test_accuracy": np.array([local_accuracy(server, member_M == name) for name in model.members]),
        "global_test_accuracy": np.array([tests[name].accuracy for name in model.members]),
    }


def local_accuracy(server: Server, is_in_M: np.ndarray) -> float:
    """Of these clients in the last round, weighted by images; NaN where none of them has a test."""
    columns = server.history.clients
    accuracy_M, n_M = (np.asarray(columns[name][-1])[is_in_M] for name in ("local_test_accuracy", "local_test_n"))
    tested = ~np.isnan(accuracy_M)
    return float(np.average(accuracy_M[tested], weights=n_M[tested])) if tested.any() else float("nan")
