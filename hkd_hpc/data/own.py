"""Data that a function or class of the user's own gives: data.name=module:function.

It is called with data.path if that is given, else with nothing, and gives arrays by name (x_train y_train x_test
y_test, perhaps client_train client_test), in a dict or as attributes; or a training and a test torch `Dataset`, each
item of which is (x, y) or (x, y, client). It is called once a node, and must give the same on each.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.stop import FROM_OUTSIDE
from hkd_hpc.data.raw import Arrays, RawData
from hkd_hpc.data.readers import OPTIONAL_KEYS, REQUIRED_KEYS
from hkd_hpc.data.settings import DataSettings
from hkd_hpc.runtime.frames import place_of
from hkd_hpc.runtime.own_code import load_object

ITEM_KEYS = ("x", "y", "client")  # of an item of a Dataset
GIVES = "arrays by name (x_train y_train x_test y_test), or a training and a test Dataset"


def check_own(data: DataSettings) -> None:
    """UsageError unless the module is there. It is not imported: it may import torch, for which it is too early."""
    module = data.name.partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError) as error:
        raise UsageError(f"data.name={data.name}: cannot import {module} ({error})") from None
    if found is None:
        raise UsageError(f"data.name={data.name}: cannot import {module}; is it on PYTHONPATH?")


def read_own(_: list[Path], data: DataSettings) -> RawData:
    """What the loader gives, as arrays; UsageError, with the place in the user's code, where it gives none."""
    what = f"data.name={data.name}"
    load = load_object(data.name, what)
    if not callable(load):
        raise UsageError(f"{what}: is a {type(load).__name__}; it must be a function or class that gives {GIVES}")
    try:
        return RawData(arrays_of(load(data.path) if data.path else load(), what))
    except (UsageError, *FROM_OUTSIDE):
        raise
    except BaseException as error:  # sys.exit too
        raise UsageError(f"{what}: {place_of(error)}{type(error).__name__}: {error}") from error


def arrays_of(found: Any, what: str) -> Arrays:
    """Arrays by name of what a loader gave. UsageError, which begins with `what`, for anything else."""
    if isinstance(found, (tuple, list)):
        return _of_datasets(list(found), what)
    keys = REQUIRED_KEYS + OPTIONAL_KEYS
    get = found.get if isinstance(found, Mapping) else lambda key: getattr(found, key, None)
    given = {key: value for key in keys if (value := get(key)) is not None}
    missing = [key for key in ("x_train", "y_train") if key not in given]
    if missing or ("x_test" in given) != ("y_test" in given):
        raise UsageError(f"{what}: gave a {type(found).__name__} without {_missing(given)}; it must give {GIVES}")
    return {key: _as_array(value, f"{what}: {key}") for key, value in given.items()}


def _missing(given: Mapping[str, Any]) -> str:
    return ", ".join(key for key in REQUIRED_KEYS if key not in given)


def _of_datasets(datasets: list, what: str) -> Arrays:
    """Of a training and a test Dataset, or of the first alone."""
    if len(datasets) not in (1, 2) or not all(map(_is_dataset, datasets)):
        kinds = ", ".join(type(dataset).__name__ for dataset in datasets[:5])
        raise UsageError(f"{what}: gave {len(datasets)} of {kinds or 'nothing'}; it must give {GIVES}")
    return {
        f"{key}_{split}": values
        for split, dataset in zip(("train", "test"), datasets)
        for key, values in _items(dataset, f"{what}: {split} dataset").items()
    }


def _is_dataset(found: Any) -> bool:
    return hasattr(found, "__getitem__") and hasattr(found, "__len__") and not isinstance(found, Mapping)


def _items(dataset: Any, where: str) -> Arrays:
    """All items of a Dataset, in order: x (N, ...), y (N,), and client (N,) where items have one."""
    count = len(dataset)
    if not count:
        raise UsageError(f"{where}: is empty")
    first = _item(dataset, 0, where)
    x = np.empty((count, *first[0].shape), first[0].dtype)
    rest: list[list] = [[] for _ in first[1:]]
    for index in range(count):
        own, *others = _item(dataset, index, where) if index else first
        if (own.shape, own.dtype, len(others)) != (first[0].shape, first[0].dtype, len(rest)):
            raise UsageError(
                f"{where}: item {index} is {own.dtype} {own.shape}, item 0 is {first[0].dtype} {first[0].shape}; "
                "all must be alike"
            )
        x[index] = own
        for values, value in zip(rest, others):
            values.append(value.item())
    return {"x": x} | {key: _as_array(values, f"{where}: {key}") for key, values in zip(ITEM_KEYS[1:], rest)}


def _item(dataset: Any, index: int, where: str) -> list[np.ndarray]:
    """The parts of one item, x first; the others are one number or text each."""
    item = dataset[index]
    parts = [np.asarray(part) for part in item] if isinstance(item, (tuple, list)) else []
    if len(parts) not in (2, 3) or any(part.size != 1 for part in parts[1:]):
        raise UsageError(f"{where}: item {index} is a {type(item).__name__}, not (x, y) or (x, y, client)")
    if parts[0].dtype.hasobject:
        raise UsageError(f"{where}: item {index}: x is a {type(item[0]).__name__}, no array of numbers")
    return parts


def _as_array(value: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{where}: cannot be made an array ({error})") from error
    if array.dtype.hasobject and all(isinstance(item, str) for item in array.flat):  # of pandas
        array = array.astype(str)
    if array.dtype.hasobject or not array.ndim:
        raise UsageError(
            f"{where}: is a {type(value).__name__} of Python objects; it must be one array of numbers, or of texts for "
            "labels and client ids"
        )
    return array
