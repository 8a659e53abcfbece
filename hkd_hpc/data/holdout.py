"""A test split for own data that have none: a share of each class, drawn once for all runs (data.test_fraction)."""

from __future__ import annotations

import numpy as np

from hkd_hpc.common import rng
from hkd_hpc.common.errors import UsageError
from hkd_hpc.data.raw import Arrays
from hkd_hpc.data.settings import DataSettings


def with_test_split(raw: Arrays, data: DataSettings, where: object) -> Arrays:
    """The same arrays if they have a test split, else with a part of the training split as one.

    Args:
        raw: as a reader found them.
        data: section `data`.
        where: file or loader, for messages.

    Returns:
        x and y of both splits; of client ids those of the training split alone: local tests are taken from it.

    Raises:
        UsageError: there are two test splits, or none.
    """
    if "x_test" in raw:
        require_no_fraction(data, where)
        return raw
    if data.test_fraction is None:
        raise UsageError(f"{where}: has no test split; data.test_fraction=0.2 holds one out")
    held_N = held_out(raw["y_train"], data, where, raw.get("client_train"))
    arrays = {key: values[~held_N] for key, values in raw.items()}
    return arrays | {f"{name}_test": raw[f"{name}_train"][held_N] for name in ("x", "y")}


def require_no_fraction(data: DataSettings, where: object) -> None:
    """UsageError if a test split is to be held out of data that have one."""
    if data.test_fraction is not None:
        raise UsageError(f"data.test_fraction={data.test_fraction:g}: {where} has a test split; leave one of them out")


def held_out(y_N: np.ndarray, data: DataSettings, where: object, client_N: np.ndarray | None = None) -> np.ndarray:
    """(N,) bool: the inputs of the test split, data.test_fraction of each class, rounded; at least one stays.

    All inputs of a client that would lose its last one stay. UsageError where nothing can be held out.
    """
    if data.test_fraction is None or y_N.ndim != 1 or (client_N is not None and client_N.shape != y_N.shape):
        raise UsageError(f"{where}: labels and client ids need one entry for each input")
    draw = rng.stream(data.test_seed, "test split")
    held_N = np.zeros(len(y_N), bool)
    for label in np.unique(y_N):
        own = draw.permutation(np.flatnonzero(y_N == label))
        held_N[own[: min(len(own) - 1, int(len(own) * data.test_fraction + 0.5))]] = True
    if client_N is not None:
        held_N &= np.isin(client_N, client_N[~held_N])
    if not held_N.any():
        raise UsageError(f"data.test_fraction={data.test_fraction:g}: holds nothing out of {where}; raise it")
    return held_N
