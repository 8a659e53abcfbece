"""What else gets each round's numbers (run.loggers): one line each here, or a user's own as module:Class.

A logger is any class with the methods of `base.Logger`. It lives on rank 0 alone, is called once a round is saved, and
changes nothing: what it raises is told once (`guarded.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.settings import nearest, shown
from hkd_hpc.common.stop import handlers_kept
from hkd_hpc.runtime.own_code import load_object

REGISTRY = {
    "tensorboard": "hkd_hpc.loggers.tensorboard:TensorBoardLogger",
    "csv": "hkd_hpc.loggers.files:CsvLogger",
    "jsonl": "hkd_hpc.loggers.files:JsonLinesLogger",
}


def names_of(text: str) -> list[str]:
    """The loggers that a value of run.loggers names, each once.

    Args:
        text: names with commas between; empty: none.

    Returns:
        The names, built-in ones and module:Class.

    Raises:
        UsageError: one of them can be no logger's name. Nothing is imported for it.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in REGISTRY and ":" not in name:
            near = nearest(name, REGISTRY)
            hint = (
                f"did you mean {near[0]}?" if near else f"there are {', '.join(REGISTRY)}, or your own as module:Class"
            )
            raise UsageError(f"run.loggers={shown(name)}: no such logger; {hint}")
    return names


def classes_of(names: Iterable[str], asked: str = "run.loggers=") -> dict[str, Any]:
    """Import the loggers.

    Args:
        names: from `names_of`.
        asked: what stands before a name where it was asked for.

    Returns:
        Their classes, by name.

    Raises:
        UsageError: one is not installed, cannot be imported, or is no logger.
    """
    with handlers_kept():
        return {name: _class_of(name, f"{asked}{name}") for name in names}


def _class_of(name: str, asked: str) -> Any:
    """One logger's class; UsageError where it cannot be used."""
    found = load_object(REGISTRY.get(name, name), asked)
    package = getattr(found, "needs", "")
    if package and importlib.util.find_spec(package) is None:
        raise UsageError(f"{asked}: {package} is not installed; pip install 'hkd_hpc[{package}]'")
    if not callable(getattr(found, "log_round", None)):
        raise UsageError(f"{asked}: is no logger; it needs a method log_round(round, values)")
    return found
