"""What is compared: a spec with the tables [study] (schemes, controls, seeds), [settings] and perhaps [tuning]."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from hkd_hpc import schemes
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import read_toml
from hkd_hpc.config.words import flat

GRID, LATIN, OPTUNA = "grid", "latin", "optuna"
SAMPLERS = (GRID, LATIN, OPTUNA)


@dataclass(frozen=True)
class Tuning:
    """The budget of every scheme.

    Attributes:
        trials: Runs of a scheme, the one with the paper's settings among them.
        seed: Of these runs, and of what they try.
        val_fraction: Of each client's training images, held out to choose by.
        lr_low: Learning rates are within [lr_low, lr_high].
        lr_high: As above.
        sampler: How they are found: one of SAMPLERS.
    """

    trials: int
    seed: int
    val_fraction: float
    lr_low: float
    lr_high: float
    sampler: str = GRID


@dataclass(frozen=True)
class Spec:
    """What is compared. settings: "section.key" to value, of hkd_hpc.train."""

    schemes: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    tuning: Tuning | None


KEYS = ("study.schemes", "study.controls", "study.seeds", *(f"tuning.{name}" for name in Tuning.__dataclass_fields__))
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "trials": ((int,), "a whole number"),
    "seed": ((int,), "a whole number"),
    "val_fraction": ((float,), "a number"),
    "lr_low": ((int, float), "a number"),
    "lr_high": ((int, float), "a number"),
    "sampler": ((str,), f"one of {', '.join(SAMPLERS)}"),
}


def read_spec(path: str) -> Spec:
    """The spec in a file. UsageError (one line) for what cannot be meant."""
    values = read_toml(path, "spec")
    for key in values:
        if key not in KEYS and not key.startswith("settings."):
            raise UsageError(f"{path}: {key}: not known; known: {', '.join(sorted(KEYS))}, and [settings]")
    seeds = _seeds(path, values.get("study.seeds"))
    settings = flat(_table(values, "settings."))
    return Spec(_schemes(path, values), seeds, settings, _tuning(_table(values, "tuning."), path, seeds))


def _table(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _schemes(path: str, values: dict[str, Any]) -> tuple[str, ...]:
    given, has_controls = values.get("study.schemes", "all"), values.get("study.controls", True)
    if given != "all" and not (isinstance(given, list) and all(isinstance(name, str) for name in given)):
        raise UsageError(f'{path}: study.schemes={given}: must be "all" or a list of names, for example ["fedavg"]')
    if not isinstance(has_controls, bool):
        raise UsageError(f"{path}: study.controls={has_controls}: must be true or false")
    names = tuple(schemes.PAPER) if given == "all" else tuple(given)
    names += tuple(schemes.CONTROLS) if has_controls else ()
    if not names:
        raise UsageError(f"{path}: study.schemes=[]: name one scheme at least")
    for name in names:
        schemes.get(name)
    return tuple(dict.fromkeys(names))


def _seeds(path: str, seeds: Any) -> tuple[int, ...]:
    are_seeds = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not are_seeds or not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(
            f"{path}: study.seeds={seeds}: must be a list of different whole numbers >= 0, for example [0, 1, 2]"
        )
    return tuple(seeds)


def _tuning(given: dict[str, Any], path: str, seeds: tuple[int, ...]) -> Tuning | None:
    if not given:
        return None
    missing = {field.name for field in fields(Tuning) if field.default is MISSING} - set(given)
    if missing:
        raise UsageError(f"{path}: [tuning] lacks {', '.join(sorted(missing))}")
    for name, value in given.items():
        kinds, allowed = KINDS[name]
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise UsageError(f"{path}: tuning.{name}={value}: must be {allowed}")
    tuning = Tuning(**given)
    for name, holds, allowed in _bounds(tuning, seeds):
        if not holds:
            raise UsageError(f"{path}: tuning.{name}={given[name]}: must be {allowed}")
    return tuning


def _bounds(tuning: Tuning, seeds: tuple[int, ...]) -> list[tuple[str, bool, str]]:
    """(key, whether its value is allowed, what is)."""
    is_free = tuning.seed >= 0 and tuning.seed not in seeds
    return [
        ("trials", tuning.trials >= 1, ">= 1"),
        ("val_fraction", 0 < tuning.val_fraction < 1, "> 0 and < 1"),
        ("lr_low", tuning.lr_low > 0, "> 0"),
        ("lr_high", tuning.lr_high >= tuning.lr_low, ">= tuning.lr_low"),
        ("seed", is_free, ">= 0 and none of study.seeds, whose data it must not see"),
        ("sampler", tuning.sampler in SAMPLERS, KINDS["sampler"][1]),
    ]
