"""Is what is in a folder the run of some settings?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from hkd_hpc.common.errors import UsageError
from hkd_hpc.config.resuming import changes, told
from hkd_hpc.config.sections import SECTIONS, Config
from hkd_hpc.config.values import DAMAGED, from_json
from hkd_hpc.runtime import revision
from hkd_hpc.runtime.provenance import CONTENT, START, THREADS, short, text_of
from hkd_hpc.store.folder import RunFolder

# settings that may change in the middle of a run, and its rounds are still those of the settings at its end
CHANGE_NO_ROUND = (
    "fed.rounds",
    "run.checkpoint_every",
    "run.evaluate_every",
    "run.client_models",
    "run.target_accuracy",
    THREADS,
)


def code_of(*configs: Config) -> dict[str, str]:
    """{"code.hkd_hpc": SHA-256 of the package's sources, "code.<module>": that of the file of an own scheme, model or
    loader}."""
    names = [name for config in configs for name in (config.scheme.name, *config.model.architectures, config.data.name)]
    own = dict.fromkeys(name.partition(":")[0] for name in names if ":" in name)
    found = {"hkd_hpc": revision.package_sha256(), **{module: revision.module_sha256(module) for module in own}}
    return {f"code.{module}": sha256 for module, sha256 in found.items() if sha256}


def start_of(config: Config) -> dict[str, str]:
    """{"model.init": SHA-256 of that file}; nothing where none is read, or it is not there any more."""
    path = Path(config.model.init)
    return {START: hashlib.sha256(path.read_bytes()).hexdigest()} if config.model.init and path.is_file() else {}


def to_json(config: Config, data_sha256: str) -> str:
    """For the record of a run, beside its settings and versions."""
    return json.dumps({**code_of(config), **start_of(config), CONTENT: data_sha256})


def other_start(record: Mapping[str, str], config: Config) -> str:
    """model.init: stored 1a2b3c4d, now 5e6f7a8b: the file is not what the run of this record began with; empty where
    it is, or nothing is known of either."""
    had, now = json.loads(record.get("identity_json", "{}")).get(START), start_of(config).get(START)
    return f"{START}: stored {short(had)}, now {short(now)}" if had and now and had != now else ""


def other_run(folder: RunFolder, config: Config) -> str:
    """Why what is in a folder is not a run of these settings, in a few words; empty where it is, or where no run is.

    Places may differ; and what changed on the way counts, unless each round is as it would have been.
    """
    record = folder.record()
    try:
        text = record.get("config_json") or folder.read_config()
        differences = (different(from_json(text), config) or other_start(record, config)) if text else ""
    except (UsageError, *DAMAGED) as error:
        return f"its settings cannot be read ({error})"
    return differences or on_the_way(record.get("changes_json", "[]"), config)


def different(stored: Config, config: Config) -> str:
    """fed.rounds: stored 4, asked 2"""
    if stored.scheme.name != config.scheme.name:  # whose settings are others altogether
        return told({"scheme.name": [stored.scheme.name, config.scheme.name]})
    return told(changes(stored, config))


def on_the_way(changes_json: str, config: Config) -> str:
    """What --allow-change changed, of the settings and the data that the rounds before had."""
    counted = [
        {key: pair for key, pair in change.items() if _counts(key, config)} for change in json.loads(changes_json)
    ]
    return ", ".join(f"changed on the way: {text_of(change)}" for change in counted if change)


def _counts(key: str, config: Config) -> bool:
    if key == "fed.rounds" and config.train.lr_schedule == "cosine":
        return True  # each round's learning rate is of all rounds
    return key == CONTENT or (key.partition(".")[0] in ("scheme", *SECTIONS) and key not in CHANGE_NO_ROUND)
