"""Who wins: defaults < presets < file < section.key=value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.settings import shown
from hkd_hpc.config import presets
from hkd_hpc.config.files import file_text, read_toml
from hkd_hpc.config.sections import Config
from hkd_hpc.config.values import from_file, from_values, stored_values
from hkd_hpc.runtime.paths import expanded

OR_STORED = ", nor a run's config.json"  # what --config takes beside TOML
PATHS = ("data.dir", "data.path", "data.partition_file", "model.init")


def resolve(preset_names: Iterable[str] = (), file: str | None = None, overrides: Iterable[str] = ()) -> Config:
    """All settings of a run, checked.

    Args:
        preset_names: names of presets; later ones win.
        file: a TOML file with one table a section, or the config.json of a run; wins over presets.
        overrides: "section.key=value"; these win over all.

    Returns:
        The settings; what nobody gave has its default.

    Raises:
        UsageError: one line: key, value, what is allowed.
    """
    return from_values(*collect(preset_names, file, overrides))


def collect(
    preset_names: Iterable[str] = (), file: str | None = None, overrides: Iterable[str] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """({"section.key": raw value} of everything that was asked for, {"section.key": which preset or config.json of a
    run gave it} of what nothing else asked for)."""
    stored, given = read_file(file) if file else ({}, {})
    groups = [*((f"--preset {name}", preset(name)) for name in preset_names), (f"--config {file}", stored)]
    over = dict(split_override(text) for text in overrides)
    hard = with_paths({**given, **over})
    scheme = {key: value for group in [*(own for _, own in groups), hard] for key, value in group.items()}.get(
        "scheme.name"
    )
    if file and given:
        check_given(file, {key: value for key, value in given.items() if key not in over}, scheme)
    values: dict[str, Any] = {}
    giver: dict[str, str] = {}
    for who, group in groups:
        alien = group.get("scheme.name", scheme) != scheme  # it speaks of another scheme than the one chosen in the end
        own = {key: value for key, value in group.items() if not (alien and key.startswith("scheme."))}
        values.update(own)
        giver.update(dict.fromkeys(own, who))
    if {**values, **hard}.get("data.partition") in ("natural", "file") and "fed.clients" not in stored:
        values.pop("fed.clients", None)  # a preset speaks of another data set's clients
    return {**values, **hard}, {key: giver[key] for key in values if key not in hard}


def check_given(file: str, given: dict[str, Any], scheme: Any) -> None:
    """UsageError, which names the file, for a wrong name or value that it gives and nothing else overrides."""
    chosen = {} if scheme is None else {"scheme.name": scheme}
    if "scheme.name" not in given:
        from_values(chosen, complete=False)  # what is wrong with the scheme's name is not the file's fault
    try:
        from_values({**given, **chosen}, complete=False)
    except UsageError as error:
        raise UsageError(f"--config {file}: {error}") from None


def with_paths(values: dict[str, Any]) -> dict[str, Any]:
    """The same with ~ and $VARIABLES replaced in the settings that are paths."""
    return {
        key: expanded(value, f"{key}=") if key in PATHS and isinstance(value, str) else value
        for key, value in values.items()
    }


def preset(name: str) -> dict[str, Any]:
    if name not in presets.PRESETS:
        raise UsageError(f"--preset {name}: no such preset; known: {', '.join(presets.PRESETS)}")
    return presets.PRESETS[name]


def split_override(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(
            f"{shown(text)}: not understood; settings are given as section.key=value, for example fed.rounds=5"
        )
    return key, value


def read_file(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what a run stored in its config.json, what a TOML file gives), one of them empty."""
    text = file_text(path, "--config", OR_STORED)
    if not text.lstrip().startswith("{"):  # as no TOML does
        return {}, read_toml(path, "--config", OR_STORED)
    from_file(text, f"--config {path}")
    return stored_values(text), {}
