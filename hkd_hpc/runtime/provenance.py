"""What the numbers of a run come from beside its settings: code, content of the data, versions of packages, CPU
threads.

Every run stores it in metrics.h5 and its checkpoints. It is compared where a run is resumed, believed to be the run of
some settings, or put beside others. A run of an earlier version has no hashes: what is unknown differs from nothing.
Imports no torch.

Provenance of a run: {"code.hkd_hpc": [values], ...}, of each key all values that the run had, the latest last. Keys:
code.<module>, data.content, model.init (all SHA-256), version.<package>, run.threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from hkd_hpc.runtime.versions import REVISION

CONTENT, START, THREADS = "data.content", "model.init", "run.threads"
Provenance = dict[str, list[str]]


def from_record(record: Mapping[str, Any]) -> Provenance:
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


def changes(before: Provenance, now: Provenance) -> dict[str, list[str]]:
    """{key: [before, now]} of what both know, and is not the same."""
    return {key: [before[key][-1], now[key][-1]] for key in now if key in before and before[key][-1] != now[key][-1]}


def unknown(before: Mapping[str, Any], now: Provenance) -> dict[str, list]:
    """{key: [None, now]} of the hashes that a record of an earlier version lacks; nothing of a record that has any."""
    return (
        {}
        if "identity_json" in before
        else {key: [None, now[key][-1]] for key in now if is_code(key) or key == CONTENT}
    )


def is_code(key: str) -> bool:
    return key.startswith("code.")


def has_other_code(before: Provenance, now: Provenance) -> bool:
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


def mixed(
    runs: Mapping[str, Provenance], which: Callable[[str], bool] = lambda key: True
) -> dict[str, dict[str, list[str]]]:
    """{key: {value: [names of the runs that have it]}} of the keys, of those asked for, in which the runs differ."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, provenance in runs.items():
        for key in filter(which, provenance):
            for value in provenance[key]:
                found.setdefault(key, {}).setdefault(value, []).append(name)
    return {key: by_value for key, by_value in found.items() if len(by_value) > 1}


WHAT_TO_DO = {
    "code": "for one code remove the others' folders and run them again",
    "data": "they cannot be compared; put the data back, remove the folders of one kind and run them again",
    "model": "they began with other weights; put the file back and run those of one kind again",
    "version": "for one version run the others again",
    "run": "the number of threads changes the bits",
}


def lines(differences: Mapping[str, Mapping[str, list[str]]], rejected: bool = False) -> list[str]:
    """One for each key in which runs differ: what, which runs, what to do; unless `rejected`, that code can be."""
    return [
        f"runs differ in {key}: "
        + ", ".join(f"{short(value)} in {_named(names)}" for value, names in by_value.items())
        + "; --strict-code rejects it" * (is_code(key) and not rejected)
        + f"; {WHAT_TO_DO[key.partition('.')[0]]}"
        for key, by_value in differences.items()
    ]


def _named(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")
