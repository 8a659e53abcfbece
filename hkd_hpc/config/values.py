"""From {"section.key": raw value} to a checked Config; a run's stored settings are such values too."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

from hkd_hpc import loggers, schemes
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.settings import build
from hkd_hpc.config.keys import raise_all, str_or_shown, wrong_names
from hkd_hpc.config.privacy import check_privacy
from hkd_hpc.config.sections import SECTIONS, Config, TrainSettings, as_values
from hkd_hpc.data.normalise import check_given
from hkd_hpc.data.partition_file import clients_of
from hkd_hpc.data.registry import OWN, SOURCES
from hkd_hpc.data.sources import natural_clients, source_of
from hkd_hpc.models.registry import MODELS

BEFORE_IT_WAS_A_SETTING = {"model.convolution": "library"}  # what runs did whose stored settings lack the key
DAMAGED = (ValueError, AttributeError, TypeError, RecursionError)  # of from_json where a text is no settings at all


def from_values(values: dict[str, Any], soft: Mapping[str, str] = {}, complete: bool = True) -> Config:
    """The settings of a run from raw values.

    Args:
        values: {"section.key": raw value}, text or of its type.
        soft: who gave the keys that the command line did not (`collect`); of section `scheme` they are dropped where
            the chosen scheme has no such setting.
        complete: whether these are all; else they are only some, to be joined with stored ones.

    Returns:
        The settings, each of its type and in its range.

    Raises:
        UsageError: one line with all unknown names, or the first value that is not allowed.
    """
    scheme = str_or_shown(values.get("scheme.name", schemes.DEFAULT))
    raise_all(wrong_names(scheme, values, soft))
    classes = {"scheme": schemes.settings_of(scheme), **SECTIONS}
    by_section: dict[str, dict[str, Any]] = {section: {} for section in classes}
    for key, value in values.items():
        section, _, name = key.partition(".")
        by_section[section][name] = value
    config = Config(*(build(section, cls, by_section[section]) for section, cls in classes.items()))
    if complete:
        try:
            check_together(config)
        except UsageError as error:
            raise told_of_preset(error, soft) from None
    return config


def told_of_preset(error: UsageError, soft: Mapping[str, str]) -> UsageError:
    """The same, with who gave the setting that it begins with, where the command line did not."""
    key = str(error).partition("=")[0]
    if key not in soft:
        return error
    return UsageError(f"{error} ({key} is of {soft[key]}; give it anew beside the others)")


def check_together(config: Config) -> None:
    """What one setting asks of another."""
    check_training(config.train)
    check_privacy(config)
    data = config.data
    source = source_of(data.name)
    if source.needs and not data.path:
        raise UsageError(f"data.path=: data.name={data.name} needs {source.needs}")
    if data.path and not source.is_own:
        raise UsageError(f"data.path={data.path}: only data.name={' or '.join(OWN)} reads it; data.name is {data.name}")
    if data.image_size and not source.resizes:
        names = " or ".join(name for name in OWN if SOURCES[name].resizes)
        raise UsageError(f"data.image_size={data.image_size}: only data.name={names} resizes; data.name is {data.name}")
    check_given(data)
    if data.test_fraction is not None and not source.is_own:
        raise UsageError(f"data.test_fraction={data.test_fraction}: data.name={data.name} has a test split")
    if data.partition == "natural" and not source.has_clients:
        names = " or ".join(name for name in OWN if SOURCES[name].has_clients)
        raise UsageError(f"data.partition=natural: needs client ids, which only data.name={names} can bring")
    if (data.partition == "file") != bool(data.partition_file):
        raise UsageError(
            f"data.partition_file={data.partition_file}: goes with data.partition=file alone, and that with it; "
            f"data.partition is {data.partition}"
        )
    if data.fraction + (data.public_fraction or 0) > 1 + 1e-12:
        raise UsageError(
            f"data.public_fraction={data.public_fraction}: with data.fraction={data.fraction} at most "
            f"{1 - data.fraction:.4g} fits"
        )
    _check_models(config)
    if config.run.stop_patience and not data.val_fraction and data.partition != "file":
        raise UsageError(
            f"run.stop_patience={config.run.stop_patience}: needs validation images; set data.val_fraction, which is 0"
        )
    loggers.names_of(config.run.loggers)
    if config.comm.backend == "nccl" and config.run.device == "cpu":
        raise UsageError("comm.backend=nccl: needs GPUs, but run.device=cpu; allowed here: auto, gloo, mpi")


def check_training(train: TrainSettings) -> None:
    """What the optimizer and the schedule of local training ask."""
    for name, without in {"momentum": "0", "nesterov": "false"}.items():
        if getattr(train, name) and train.optimizer != "sgd":
            raise UsageError(
                f"train.{name}={getattr(train, name)}: only train.optimizer=sgd has it; train.optimizer is "
                f"{train.optimizer}, which wants train.{name}={without}"
            )
    if train.nesterov and not train.momentum:
        raise UsageError("train.nesterov=True: needs train.momentum above 0")
    if train.lr_schedule == "cosine" and train.lr_floor > train.lr:
        raise UsageError(f"train.lr_floor={train.lr_floor:g}: must not be above train.lr={train.lr:g}")


def _check_models(config: Config) -> None:
    """UsageError for a name of no model, and for names that are not those of unequal models of these clients."""
    model = config.model
    key, given = ("model.names", model.names) if model.names else ("model.name", model.name)
    for name in model.assigned:
        if name not in MODELS and ":" not in name:
            said = "" if name == given else f": {name or 'an empty name'}"
            raise UsageError(
                f"{key}={given}{said}: not allowed; {key} must be one of {', '.join(MODELS)}, or module:Class"
                + ", with commas between" * bool(model.names)
            )
    if not model.names:
        return
    if len(model.architectures) == 1:
        raise UsageError(f"model.names={model.names}: is one model for all; give model.name={model.architectures[0]}")
    if len(model.assigned) > config.fed.clients:
        raise UsageError(
            f"model.names={model.names}: has {len(model.assigned)} names for fed.clients={config.fed.clients}; "
            "name at most as many as there are clients"
        )
    if model.init:
        raise UsageError(f"model.init={model.init}: is of one model, and model.names={model.names} has several")
    if getattr(schemes.get(config.scheme.name), "pools_data", False):
        raise UsageError(f"model.names={model.names}: scheme.name={config.scheme.name} has one client; give model.name")


def with_clients_of_data(config: Config, asked: Container[str]) -> Config:
    """The same with as many clients as the data name, or the file of a partition, where `asked` has no fed.clients.

    Reads the file's client ids. UsageError where it has none.
    """
    data = config.data
    if data.partition == "file":
        clients = clients_of(data.partition_file, config.fed.clients if "fed.clients" in asked else None)
    elif data.partition == "natural" and "fed.clients" not in asked:
        clients = natural_clients(data)
    else:
        return config
    return from_values({**as_values(config), "fed.clients": clients})


def from_json(text: str) -> Config:
    """The Config that `Config.to_json` wrote, in this version or an earlier one."""
    return from_values(stored_values(text))


def stored_values(text: str) -> dict[str, Any]:
    """{"section.key": value} of what `Config.to_json` wrote."""
    return BEFORE_IT_WAS_A_SETTING | {
        f"{section}.{key}": value for section, keys in json.loads(text).items() for key, value in keys.items()
    }


def from_file(text: str, where: str) -> Config:
    """The Config in a run's config.json, as `from_json`; UsageError, which begins with `where`, for all that is
    wrong.
    """
    try:
        return from_json(text)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except DAMAGED as error:
        raise UsageError(f"{where}: is no complete config.json of a run ({error})") from None
