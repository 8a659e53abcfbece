"""What the numbers of a run come from beside its settings: code, content of the data, versions of packages, CPU
threads.

Every run stores it in metrics.h5 and its checkpoints. It is compared where a run is gone on with, believed to be the
run of some settings, or put beside others. A run of an earlier version has no hashes: what is unknown differs from
nothing. Imports no torch.

RunInfo of a run: {"code.hkd_hpc": [values], ...}, of each fact all values that the run had, the latest last. Keys:
code.<module>, data.content (both SHA-256), version.<package>, run.threads.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hkd_hpc.config import config as config_module
from hkd_hpc.config.config import Config
from hkd_hpc.errors import UsageError
from hkd_hpc.runtime.revision import package_sha256, sources_sha256
from hkd_hpc.runtime.versions import REVISION
from hkd_hpc.store.folder import RunFolder

CONTENT, THREADS = "data.content", "run.threads"
RunInfo = dict[str, list[str]]
# settings that may change in the middle of a run, and its rounds are still those of the settings at its end
CHANGE_NO_ROUND = ("fed.rounds", "run.checkpoint_every", "run.evaluate_every", "run.client_models", THREADS)


# ---- the code


def code_of(*configs: Config) -> dict[str, str]:
    """{"code.hkd_hpc": SHA-256 of the package's sources, "code.<module>": that of an own scheme's or model's file}."""
    names = [name for config in configs for name in (config.scheme.name, config.model.name)]
    own = dict.fromkeys(name.partition(":")[0] for name in names if ":" in name)
    found = {"hkd_hpc": package_sha256(), **{module: module_sha256(module) for module in own}}
    return {f"code.{module}": sha256 for module, sha256 in found.items() if sha256}


def module_sha256(module: str) -> str:
    """Of the file of a module, of all sources of a package; empty where there is none."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return ""
    file = Path(found.origin) if found and found.has_location and found.origin else None
    return sources_sha256(file.parent if file.name == "__init__.py" else file) if file else ""


# ---- the facts of a run


def to_json(config: Config, data_sha256: str) -> str:
    """For the record of a run, beside its settings and versions."""
    return json.dumps({**code_of(config), CONTENT: data_sha256})


def facts_of(record: Mapping[str, Any]) -> RunInfo:
    """Of the record in metrics.h5 or a checkpoint: config_json, versions_json, identity_json, changes_json, as far as
    they are there."""
    text = lambda part, empty: json.loads(record.get(f"{part}_json", empty))
    versions = {f"version.{package}": version for package, version in text("versions", "{}").items()}
    versions.pop(f"version.{REVISION}", None)  # the hash of the code says the same, and of docs and tests nothing
    threads = text("config", "{}").get("run", {}).get("threads")
    now = {**versions, **text("identity", "{}"), **({} if threads is None else {THREADS: str(threads)})}
    changes = text("changes", "[]")
    had = {
        key: [value, *(str(change[key][0]) for change in reversed(changes) if change.get(key, [None])[0] is not None)]
        for key, value in now.items()
    }
    return {key: list(dict.fromkeys(values))[::-1] for key, values in had.items()}


def changes(before: RunInfo, now: RunInfo) -> dict[str, list[str]]:
    """{key: [before, now]} of what both know, and is not the same."""
    return {key: [before[key][-1], now[key][-1]] for key in now if key in before and before[key][-1] != now[key][-1]}


def unknown(before: Mapping[str, Any], now: RunInfo) -> dict[str, list]:
    """{key: [None, now]} of the hashes that a record of an earlier version lacks; nothing of a record that has any."""
    return (
        {}
        if "identity_json" in before
        else {key: [None, now[key][-1]] for key in now if is_code(key) or key == CONTENT}
    )


def is_code(key: str) -> bool:
    return key.startswith("code.")


def has_other_code(before: RunInfo, now: RunInfo) -> bool:
    """Whether any round before, as far as is known, had other code than there is now."""
    return any(set(before[key]) - {now[key][-1]} for key in filter(is_code, now) if key in before)


def text_of(changed: Mapping[str, list[str]]) -> str:
    """code.hkd_hpc 1a2b3c4d -> 5e6f7a8b, version.torch 2.4.0 -> 2.5.0; "unknown" for what an earlier version did not
    store
    """
    return ", ".join(f"{key} {short(before)} -> {short(after)}" for key, (before, after) in changed.items())


def short(value: Any) -> str:
    """The first digits of a hash; anything else as it is."""
    if value is None:
        return "unknown"
    return str(value)[:8] if re.fullmatch("[0-9a-f]{64}", str(value)) else str(value)


# ---- runs side by side


def mixed(runs: Mapping[str, RunInfo]) -> dict[str, dict[str, list[str]]]:
    """{key: {value: [names of the runs that have it]}} of the facts in which the runs differ."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, facts in runs.items():
        for key, values in facts.items():
            for value in values:
                found.setdefault(key, {}).setdefault(value, []).append(name)
    return {key: by_value for key, by_value in found.items() if len(by_value) > 1}


def mixed_code(runs: Mapping[str, RunInfo]) -> dict[str, dict[str, list[str]]]:
    """Of `mixed`, the code alone."""
    return {key: by_value for key, by_value in mixed(runs).items() if is_code(key)}


WHAT_TO_DO = {
    "code": "for one code remove the others' folders and run them again",
    "data": "they cannot be compared; put the data back, remove the folders of one kind and run them again",
    "version": "for one version run the others again",
    "run": "the number of threads changes the bits",
}


def lines(differences: Mapping[str, Mapping[str, list[str]]], refused: bool = False) -> list[str]:
    """One for each fact in which runs differ: what, which runs, what to do; unless `refused`, that code can be."""
    return [
        f"runs differ in {key}: "
        + ", ".join(f"{short(value)} in {_named(names)}" for value, names in by_value.items())
        + "; --strict-code refuses" * (is_code(key) and not refused)
        + f"; {WHAT_TO_DO[key.partition('.')[0]]}"
        for key, by_value in differences.items()
    ]


def _named(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")


# ---- is it the run of these settings?


def other_run(folder: RunFolder, config: Config) -> str:
    """Why what is in a folder is not a run of these settings, in a few words; empty where it is, or where no run is.

    Places may differ; and what changed on the way counts, unless each round is as it would have been.
    """
    record = folder.record()
    try:
        text = record.get("config_json") or folder.read_config()
        differences = different(config_module.from_json(text), config) if text else ""
    except (UsageError, ValueError, AttributeError, TypeError, RecursionError) as error:
        return f"its settings cannot be read ({error})"
    return differences or on_the_way(record.get("changes_json", "[]"))


def different(stored: Config, config: Config) -> str:
    """fed.rounds: stored 4, asked 2"""
    if stored.scheme.name != config.scheme.name:  # whose settings are others altogether
        return f"scheme.name: stored {stored.scheme.name}, asked {config.scheme.name}"
    return "; ".join(
        f"{key}: stored {before}, asked {after}"
        for key, (before, after) in config_module.changes(stored, config).items()
    )


def on_the_way(changes_json: str) -> str:
    """What --allow-change changed, of the settings and the data that the rounds before had."""
    counted = [{key: pair for key, pair in change.items() if _counts(key)} for change in json.loads(changes_json)]
    return ", ".join(f"changed on the way: {text_of(change)}" for change in counted if change)


def _counts(key: str) -> bool:
    return key == CONTENT or (
        key.partition(".")[0] in ("scheme", *config_module.SECTIONS) and key not in CHANGE_NO_ROUND
    )
