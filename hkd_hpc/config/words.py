"""Settings as Python code gives them, as the words of a command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hkd_hpc.common.errors import UsageError


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """["fed.rounds=3"] of {"fed.rounds": 3} or {"fed": {"rounds": 3}}. UsageError for what is no mapping."""
    return [f"{key}={as_text(value)}" for key, value in flat(settings).items()]


def as_text(value: Any) -> str:
    """A value as on the command line: texts in a list, such as the names of loggers, with commas between."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """{"fed": {"rounds": 3}} as {"fed.rounds": 3}, which stays as it is. UsageError for what is no mapping."""
    if not isinstance(settings, Mapping):
        raise UsageError(
            f"settings={settings!r}: must be a dict of settings and values, for example {{'fed.rounds': 3}}"
        )
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, Mapping) else {key: value}
    return found
