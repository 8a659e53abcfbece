"""What a run that is resumed may change: its location always, some settings with --allow-change, the others never."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hkd_hpc.common.errors import UsageError
from hkd_hpc.config.sections import Config, absolute_paths, as_values
from hkd_hpc.config.values import from_values

LOCATIONS = ("run.device", "run.graphs", "run.lanes", "run.loggers", "data.dir", "data.path")
HOW = ("run.checkpoint_every", "run.evaluate_every", "run.client_models")  # do not change what a round computes
FIXED = (
    "data.",
    "model.",
    "scheme.name",
    "fed.clients",
    "run.seed",
    "run.stop_",
    "privacy.mode",
    "train.batchnorm",
)  # even with --allow-change


def difference(stored: Config, asked: dict[str, Any], soft: Mapping[str, str] = {}) -> str | None:
    """What `--resume` was asked to change: "key: stored a, asked b", or None. `asked`, `soft`: from `collect`."""
    if asked.get("scheme.name", stored.scheme.name) != stored.scheme.name:  # its settings are others altogether
        return told({"scheme.name": [stored.scheme.name, asked["scheme.name"]]})
    found = changes(stored, absolute_paths(from_values({**as_values(stored), **asked}, soft)))
    return told({key: found[key] for key in asked if key in found}) or None


def told(changes: Mapping[str, list]) -> str:
    """fed.rounds: stored 4, asked 2; empty where nothing changes."""
    return "; ".join(f"{key}: stored {before}, asked {after}" for key, (before, after) in changes.items())


def changes(stored: Config, config: Config) -> dict[str, list]:
    """{"section.key": [before, after]} of two settings of one scheme, the location aside."""
    before, after = as_values(stored), as_values(config)
    return {
        key: [before.get(key), after[key]] for key in after if after[key] != before.get(key) and not is_location(key)
    }


def changed(stored: Config, asked: dict[str, Any], soft: Mapping[str, str] = {}) -> Config:
    """The stored settings with what --allow-change may change in the middle of a run. UsageError for what it may
    not.
    """
    if asked.get("scheme.name", stored.scheme.name) != stored.scheme.name:  # whose own settings would be unknown
        raise UsageError("--allow-change: scheme.name cannot change within a run; start another one")
    config = absolute_paths(from_values({**as_values(stored), **asked}, soft))
    fixed = [key for key in changes(stored, config) if key.startswith(FIXED)]
    if fixed:
        raise UsageError(f"--allow-change: {', '.join(fixed)} cannot change within a run; start another one")
    return config


def is_location(key: str) -> bool:
    """Whether a setting says where a run continues or who is told, not what it computes: it may change on --resume."""
    return key.startswith("comm.") or key in LOCATIONS


def moved(stored: Config, asked: dict[str, Any]) -> Config:
    """The stored settings at the location that was asked for."""
    return absolute_paths(from_values({**as_values(stored), **{k: v for k, v in asked.items() if is_location(k)}}))
