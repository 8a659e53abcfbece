"""Settings that a person gave but that nothing reads, beside the other ones: worth a warning, not an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hkd_hpc import schemes
from hkd_hpc.config import protection
from hkd_hpc.config.sections import Config, as_values
from hkd_hpc.data.readers import PLAIN
from hkd_hpc.data.registry import OFFICIAL, find_source
from hkd_hpc.models.registry import MODELS
from hkd_hpc.schemes.base import SchemeSettings

OF_SCHEDULES = {
    "lr_halve_every": ("halve",),
    "lr_every": ("step",),
    "lr_factor": ("step", "exponential"),
    "lr_floor": ("cosine",),
}
OF_SERVER_OPTIMIZERS = {
    "server_lr": ("avgm", "adam", "yogi"),
    "server_momentum": ("avgm", "adam", "yogi"),
    "server_beta2": ("adam", "yogi"),
    "server_epsilon": ("adam", "yogi"),
}


def without_effect(config: Config, given: Iterable[str]) -> list[str]:
    """One line for each of the keys in `given` that changes nothing: "data.beta=0.1 has no effect with ..."."""
    values, given = as_values(config), set(given)
    return [
        f"{key}={values[key]} has no effect with {reason}"
        for key, reason in _unread(config)
        if key in given & set(values)
    ]


def _unread(config: Config) -> Iterator[tuple[str, str]]:
    """(key, the setting because of which it is not read)."""
    yield from _unread_data(config)
    yield from _unread_training(config)
    of_scheme = config.scheme.without_effect() if isinstance(config.scheme, SchemeSettings) else {}  # else an own class
    yield from {**of_scheme, **dict(protection.without_effect(config))}.items()


def _unread_data(config: Config) -> Iterator[tuple[str, str]]:
    data = config.data
    if data.partition not in ("dirichlet", "quantity", "heuristic"):
        yield "data.beta", f"data.partition={data.partition}"
    if data.partition != "shards":
        yield "data.classes_per_client", f"data.partition={data.partition}"
    if data.partition == "file":
        for key in ("fraction", "public_fraction", "val_fraction", "min_images"):
            yield f"data.{key}", "data.partition=file"
    if data.name not in OFFICIAL:
        yield "data.dir", f"data.name={data.name}"
    if data.test_fraction is None:
        yield "data.test_seed", "data.test_fraction=none"
    source = find_source(data.name)
    if data.name != "hf":
        yield "data.image_column", f"data.name={data.name}"
    if source is None or not source.has_columns or data.path.endswith(PLAIN):
        for key in ("data.label_column", "data.split_column", "data.client_column"):
            yield key, f"data.name={data.name} data.path={data.path}, which has no columns"


def _unread_training(config: Config) -> Iterator[tuple[str, str]]:
    fed, train, model = config.fed, config.train, config.model
    for name, schedules in OF_SCHEDULES.items():
        if train.lr_schedule not in schedules:
            yield f"train.{name}", f"train.lr_schedule={train.lr_schedule}"
    if train.lr_warmup >= fed.rounds:
        yield "train.lr_schedule", f"train.lr_warmup={train.lr_warmup}, which lasts all of fed.rounds={fed.rounds}"
    for name, optimizers in OF_SERVER_OPTIMIZERS.items():
        if fed.server_optimizer not in optimizers:
            yield f"fed.{name}", f"fed.server_optimizer={fed.server_optimizer}"
    if train.augment in ("none", "flip"):
        yield "train.augment_padding", f"train.augment={train.augment}"
    if not config.run.stop_patience:
        yield "run.stop_on", "run.stop_patience=0"
    if not fed.finetune_epochs:
        yield "fed.finetune_lr", "fed.finetune_epochs=0"
    if not fed.straggler_rate:
        yield "fed.straggler_epochs", "fed.straggler_rate=0"
    asked = f"model.names={model.names}" if model.names else f"model.name={model.name}"
    known = [MODELS[name] for name in model.architectures if name in MODELS]
    if model.names:
        yield "model.name", asked
    if not any(each.has_stem for each in known):
        yield "model.stem", asked
    if len(known) == len(model.architectures) and not any(each.has_norm for each in known):
        yield "model.norm", asked
    if not known:
        yield "model.latent_norm", asked
        yield "model.convolution", asked
    if not model.init:
        yield "model.init_head", "no model.init"
    if has_no_batchnorm(config):
        why = "model.norm=group, which leaves" if model.norm == "group" else f"model.name={model.name}, which has"
        yield "train.batchnorm", f"{why} no BatchNorm"
        yield "scheme.public_batchnorm", f"{why} no BatchNorm"
    if not protection.shares_weights(config):
        for key in ("privacy.update_clip", "privacy.update_multiplier"):
            yield key, f"scheme.name={config.scheme.name}, whose clients' weights stay at home"
    if getattr(schemes.get(config.scheme.name), "pools_data", False):
        keys = ["participation", "average", "drop_rate", "straggler_rate", "finetune_epochs", "finetune_lr"]
        for key in keys + ["straggler_epochs"] * (fed.straggler_rate > 0):
            yield f"fed.{key}", f"scheme.name={config.scheme.name}, which has one client"


def has_batchnorm(config: Config) -> bool:
    """Whether a network is known to have it."""
    model = config.model
    known = [MODELS[name] for name in model.architectures if name in MODELS]
    return bool(known) and (model.latent_norm != "none" or (model.norm == "batch" and any(k.has_norm for k in known)))


def has_no_batchnorm(config: Config) -> bool:
    """Whether the networks are known, and known to have none."""
    model = config.model
    if not set(model.architectures) <= set(MODELS) or model.latent_norm != "none":
        return False
    return model.norm == "group" or not any(MODELS[name].has_norm for name in model.architectures)
