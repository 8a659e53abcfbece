"""All settings of a run: nested frozen dataclasses, filled from defaults < presets < TOML file < section.key=value.

Checked completely before torch is imported. A scheme's own settings stand in its file (`schemes/`) and appear here as
section `scheme`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hkd_hpc import schemes
from hkd_hpc.config import presets
from hkd_hpc.config.paths import expanded
from hkd_hpc.config.settings import allowed_text, build, first_paragraph, setting, shown, unknown
from hkd_hpc.errors import LocalUsageError, UsageError

MODELS = ("small", "resnet18", "shufflenet_v2")
CONFIG_BYTES = 1 << 20  # the largest file of settings
OR_STORED = ", nor a run's config.json"  # what --config takes beside TOML
DATA = ("fmnist", "cifar10", "cifar100", "svhn", "file", "folder")


@dataclass(frozen=True)
class DataSettings:
    """Which images, and how they are dealt to the clients (data/)."""

    name: str = setting("fmnist", "data set; fmnist ships with the package", choices=DATA)
    dir: str = setting("data", "folder of the official files of cifar10, cifar100, svhn")
    path: str = setting(
        "",
        "data.name=file: an .npz or .h5 with x_train y_train x_test y_test; data.name=folder: a folder "
        "with images in train/<class>/ and test/<class>/",
    )
    image_size: int | None = setting(
        None,
        "data.name=folder: resize all images to so many pixels square, bilinear; none: they have one size",
        low=8,
        high=4096,
    )
    fraction: float = setting(
        0.9, "share of the official training split dealt to all clients together", above=0, high=1
    )
    public_fraction: float | None = setting(
        None,
        "share of the training split set aside as a public set, for every scheme; "
        "none: as many images as a client trains on, where they fit",
        low=0,
        high=1,
    )
    val_fraction: float = setting(
        0.0, "share of each client's training images held out for validation, stratified by class", low=0, below=1
    )
    partition: str = setting(
        "dirichlet",
        "how it is dealt; shards: each client a few classes; natural: by the client "
        "ids in the file; heuristic: as the code released with FedHKD does, with "
        "unequal sizes and repeated images, for comparison only",
        choices=("dirichlet", "iid", "natural", "shards", "heuristic"),
    )
    beta: float = setting(
        0.5, "concentration of the Dirichlet class mixes (dirichlet, heuristic); smaller is less IID", above=0, high=1e9
    )
    classes_per_client: int = setting(
        2,
        "data.partition=shards: shards of a client, each of one class or across the border of two",
        low=1,
        high=100_000,
    )
    partition_seed: int | None = setting(None, "seed of the partition; none: run.seed", low=0)


@dataclass(frozen=True)
class FedSettings:
    """Clients and rounds (rounds.py)."""

    clients: int = setting(
        10, "number of clients; data.partition=natural: as many as the file names, if not given", low=1, high=100_000
    )
    rounds: int = setting(10, "global rounds", low=1, high=1_000_000)
    participation: float = setting(1.0, "share of the clients sampled in each round", above=0, high=1)
    average: str = setting(
        "images",
        "weight of a client in the average: images: its number of training images; uniform: the same for all",
        choices=("images", "uniform"),
    )
    max_norm: float = setting(
        0.0,
        "largest L2 norm of a client's change of the weights, and of each tensor of its report; 0: "
        "only NaN, infinity and numbers beyond 65,536 are refused",
        low=0,
        high=1e30,
    )
    max_bad_fraction: float = setting(
        0.5, "the run stops when more of a round's clients than this are refused", low=0, high=1
    )
    drop_rate: float = setting(0.0, "chance that a sampled client does not answer in a round", low=0, high=1)
    straggler_rate: float = setting(0.0, "chance that a sampled client is late in a round", low=0, high=1)
    straggler_epochs: int = setting(0, "local epochs that a late client ends; 0: it is left out", low=0, high=100_000)
    finetune_epochs: int = setting(
        0,
        "at the end, also train the global model so many epochs on each client, with plain "
        "cross-entropy, and test it there; 0: not",
        low=0,
        high=100_000,
    )


@dataclass(frozen=True)
class TrainSettings:
    """Local training, the same rule for every scheme (client.py)."""

    epochs: int = setting(5, "local epochs a round", low=1, high=100_000)
    batch_size: int = setting(64, "images a step", low=2, high=1_000_000)
    lr: float = setting(1e-3, "learning rate of Adam in round 1", above=0, high=100)
    lr_schedule: str = setting(
        "halve", "halve: by .5 every lr_halve_every rounds; constant", choices=("halve", "constant")
    )
    lr_halve_every: int = setting(10, "rounds between two halvings", low=1)
    clip_norm: float = setting(0.0, "largest L2 norm of a step's gradient; 0: no clipping", low=0, high=1e9)
    drop_last: bool = setting(False, "leave out an epoch's short last batch, unless it is the only one")
    precision: str = setting(
        "fp32",
        "of products and convolutions; tf32: on GPUs, all of them; bf16: in training's "
        "passes, all else stays fp32; speed and accuracy of both are unmeasured",
        choices=("fp32", "tf32", "bf16"),
    )
    batchnorm: str = setting(
        "average",
        "running statistics: average: like weights; local: each client keeps its own, their "
        "average serves the global test only; reestimate: each round measured anew by the "
        "clients with the new global weights",
        choices=("average", "local", "reestimate"),
    )


@dataclass(frozen=True)
class ModelSettings:
    """The network (models.py)."""

    name: str = setting("small", "small, resnet18, shufflenet_v2, or your own as module:Class")
    latent: int = setting(64, "size d of the feature vector", low=1, high=100_000)
    stem: str = setting(
        "imagenet",
        "first layers of resnet18 and shufflenet_v2; cifar: 3 x 3, no pooling",
        choices=("imagenet", "cifar"),
    )
    norm: str = setting(
        "batch", "normalisation layers; group: GroupNorm of 32 channels or fewer a group", choices=("batch", "group")
    )
    latent_norm: str = setting(
        "none", "batch: BatchNorm without parameters after the feature vector", choices=("none", "batch")
    )
    convolution: str = setting(
        "taps",
        "taps: the built-in networks compute convolutions on small maps as matrix products, "
        "channels last, faster on CPUs; library: all by torch",
        choices=("taps", "library"),
    )


@dataclass(frozen=True)
class RunSettings:
    """How and where it runs; on a CPU, of all these only the seed and the number of threads change the bits of the
    weights.
    """

    seed: int = setting(0, "seed of everything random", low=0)
    threads: int = setting(
        1,
        "CPU threads a rank; another number adds in another order and gives other last bits: keep one "
        "number for all runs that are compared",
        low=1,
        high=4096,
    )
    device: str = setting("auto", "auto: a GPU where one is found", choices=("auto", "cpu", "cuda"))
    deterministic: bool = setting(
        False,
        "on GPUs: only operations that give the same bits in each run, or an error that names "
        "the one that does not; CPUs of one kind always give the same bits",
    )
    graphs: str = setting(
        "off",
        "on GPUs: on: a local epoch is one CUDA or HIP graph, for schemes and models that say "
        "`cuda_graph_safe = True`; its speed is unmeasured",
        choices=("off", "on"),
    )
    lanes: int = setting(
        1,
        "on GPUs: so many clients of a rank are trained side by side, or as many as fit into the "
        "memory; the results are the same, the speed is unmeasured; lanes want graphs",
        low=1,
        high=32,
    )
    checkpoint_every: int = setting(1, "rounds between two checkpoints; the last round always has one", low=1)
    evaluate_every: int = setting(1, "rounds between two tests of the global model; the last is always tested", low=1)
    client_models: bool = setting(True, "keep every client's model of the last round in the last checkpoint")


@dataclass(frozen=True)
class CommSettings:
    """Collectives (comm/)."""

    backend: str = setting("auto", "for the weights; auto: see README, ranks", choices=("auto", "nccl", "gloo", "mpi"))
    timeout_s: float = setting(1800.0, "longest wait for another rank", above=0, high=1e7)
    start_timeout_s: float = setting(120.0, "longest wait for all ranks at the start", above=0, high=1e7)


BEFORE_IT_WAS_A_SETTING = {"model.convolution": "library"}  # what runs did whose stored settings lack the key
PATHS = ("data.dir", "data.path")
FIXED = ("data.", "model.", "scheme.name", "fed.clients", "run.seed", "train.batchnorm")  # even with --allow-change
SECTIONS = {
    "data": DataSettings,
    "fed": FedSettings,
    "train": TrainSettings,
    "model": ModelSettings,
    "run": RunSettings,
    "comm": CommSettings,
}


@dataclass(frozen=True)
class Config:
    """One run's settings, complete and checked. `scheme` is the settings dataclass of the chosen scheme."""

    scheme: Any
    data: DataSettings
    fed: FedSettings
    train: TrainSettings
    model: ModelSettings
    run: RunSettings
    comm: CommSettings

    @property
    def partition_seed(self) -> int:
        return self.run.seed if self.data.partition_seed is None else self.data.partition_seed

    def lr(self, round: int) -> float:
        """Learning rate of a round (1, 2, ...): lr * .5 ** ((round - 1) // lr_halve_every), or constant."""
        train = self.train
        return train.lr * (0.5 ** ((round - 1) // train.lr_halve_every) if train.lr_schedule == "halve" else 1.0)

    def due(self, round: int, every: int) -> bool:
        """Whether something done every so many rounds is due; in the last round everything is."""
        return round % every == 0 or round == self.fed.rounds

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)


def resolve(preset_names=(), file: str | None = None, overrides=()) -> Config:
    """The checked Config. Raises UsageError (one line: key, value, what is allowed)."""
    return from_values(*collect(preset_names, file, overrides))


def collect(preset_names=(), file: str | None = None, overrides=()) -> tuple[dict[str, Any], set[str]]:
    """({"section.key": raw value} of everything that was asked for, the keys that only a preset or a run's config.json
    asked for)."""
    stored, given = read_file(file) if file else ({}, {})
    groups = [*(preset(name) for name in preset_names), stored]
    hard = with_paths({**given, **dict(split_override(text) for text in overrides)})
    scheme = {key: value for group in [*groups, hard] for key, value in group.items()}.get("scheme.name")
    values: dict[str, Any] = {}
    for group in groups:
        alien = group.get("scheme.name", scheme) != scheme  # it speaks of another scheme than the one chosen in the end
        values.update({key: value for key, value in group.items() if not (alien and key.startswith("scheme."))})
    if {**values, **hard}.get("data.partition") == "natural" and "fed.clients" not in stored:
        values.pop("fed.clients", None)  # a preset speaks of another data set's clients
    return {**values, **hard}, set(values) - set(hard)


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


def from_values(values: dict[str, Any], soft=frozenset(), whole: bool = True) -> Config:
    """Config from {"section.key": raw value}; a preset may speak of settings that only some schemes have, so scheme
    keys in `soft` are dropped where the chosen scheme has no such setting."""
    scheme = str_or_shown(values.get("scheme.name", schemes.DEFAULT))
    refuse(wrong_names(scheme, values, soft))
    classes = {"scheme": schemes.settings_of(scheme), **SECTIONS}
    by_section: dict[str, dict[str, Any]] = {section: {} for section in classes}
    for key, value in values.items():
        section, _, name = key.partition(".")
        by_section[section][name] = value
    config = Config(*(build(section, cls, by_section[section]) for section, cls in classes.items()))
    if whole:  # else these are only some of the settings, to be joined with stored ones
        check_together(config)
    return config


def with_clients_of_data(config: Config, asked) -> Config:
    """With data.partition=natural and no fed.clients in `asked`, the same with as many clients as the file names.

    Reads the file's client ids. UsageError where it has none.
    """
    if config.data.partition != "natural" or "fed.clients" in asked:
        return config
    from hkd_hpc.data.sources import natural_clients

    return from_values({**as_values(config), "fed.clients": natural_clients(config.data.path)})


def from_json(text: str) -> Config:
    """The Config that `Config.to_json` wrote, in this version or an earlier one."""
    return from_values(stored_values(text))


def stored_values(text: str) -> dict[str, Any]:
    """{"section.key": value} of what `Config.to_json` wrote."""
    return BEFORE_IT_WAS_A_SETTING | {
        f"{section}.{key}": value for section, keys in json.loads(text).items() for key, value in keys.items()
    }


def str_or_shown(value: Any) -> str:
    """A text as it is; what a TOML file has in its place, as messages show it."""
    return value if isinstance(value, str) else shown(value)


def all_keys(scheme_name: Any) -> list[str]:
    """Every key that can be set, for messages."""
    known = scheme_name if str_or_shown(scheme_name) in {**schemes.REGISTRY, **schemes.CONTROLS} else schemes.DEFAULT
    return keys_of(schemes.settings_of(known))


def keys_of(scheme_class: type) -> list[str]:
    """Every key that can be set with a scheme of these settings."""
    classes = {"scheme": scheme_class, **SECTIONS}
    return [f"{section}.{field.name}" for section, cls in classes.items() for field in dataclasses.fields(cls)]


class NotOfThisScheme(UsageError):
    """A setting that the chosen scheme has not, but `owners` have."""

    def __init__(self, key: str, scheme: str, owners: list[str]) -> None:
        have = "has" if len(owners) == 1 else "have"
        super().__init__(f"{key}: no such setting of {scheme}; {', '.join(owners)} {have} it")
        self.key, self.scheme, self.owners = key, scheme, owners


class Several(UsageError):
    """More than one thing is wrong: all of them in one line, and each by itself in `parts`."""

    def __init__(self, parts: list[UsageError]) -> None:
        super().__init__("; ".join(map(str, parts)))
        self.parts = parts


def parts_of(error: UsageError) -> list[UsageError]:
    """Each thing that is wrong by itself."""
    return error.parts if isinstance(error, Several) else [error]


def refuse(problems: list[UsageError]) -> None:
    """Raises what is wrong, if anything is."""
    if problems:
        raise problems[0] if len(problems) == 1 else Several(problems)


def wrong_names(scheme: str, keys: Iterable[str], soft=frozenset()) -> list[UsageError]:
    """What is wrong with the scheme's name, and with each key that is no setting; without a scheme nothing is known of
    keys of section `scheme`. Those in `soft` may be any."""
    own = {key for key in keys if key.startswith("scheme.")}
    try:
        known, problems, free = keys_of(schemes.settings_of(scheme)), [], own & set(soft)
    except UsageError as error:
        known, problems, free = all_keys(schemes.DEFAULT), [error], own
    return problems + [no_setting(key, scheme, known) for key in keys if key not in known and key not in free]


def no_setting(key: str, scheme: str, known: list[str]) -> UsageError:
    """What is wrong with a key that is none of the `known` ones."""
    owners = owners_of_keys()
    if key in owners:
        return NotOfThisScheme(key, scheme, owners[key])
    of_others = {name: f"{name} (of {', '.join(having)})" for name, having in owners.items() if name not in known}
    return UsageError(unknown(key, known, of_others=of_others))


def owners_of_keys() -> dict[str, list[str]]:
    """{"scheme.mu": ["fedprox", ...]}: which of the schemes and controls here have a setting."""
    owners: dict[str, list[str]] = {}
    for scheme in (*schemes.REGISTRY, *schemes.CONTROLS):
        for field in dataclasses.fields(schemes.settings_of(scheme)):
            owners.setdefault(f"scheme.{field.name}", []).append(scheme)
    return owners


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
        return {}, read_toml(path, OR_STORED)
    from_file(text, f"--config {path}")
    return stored_values(text), {}


def from_file(text: str, where: str) -> Config:
    """The Config in a run's config.json, as `from_json`; UsageError, which begins with `where`, for all that is
    wrong.
    """
    try:
        return from_json(text)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"{where}: is no whole config.json of a run ({error})") from None


def read_toml(path: str, else_what: str = "") -> dict[str, Any]:
    """{"section.key": value} of a TOML file with one table per section."""
    tables = load_toml(path, "--config", else_what)
    for section, keys in tables.items():
        if not isinstance(keys, dict):
            raise UsageError(f"--config {path}: {section} must stand in a table, for example [fed] rounds = 5")
    return {f"{section}.{key}": value for section, keys in tables.items() for key, value in keys.items()}


def load_toml(path: str, option: str, else_what: str = "") -> dict[str, Any]:
    """A TOML file as it stands; UsageError names the option that gave it, and what else it takes."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    try:
        return tomllib.loads(file_text(path, option, else_what))
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a number of thousands of digits
        raise UsageError(f"{option} {path}: not valid TOML{else_what} ({error})") from None


def file_text(path: str, option: str, else_what: str = "") -> str:
    """The text of a file of settings; UsageError names the option that gave it, and what else it takes."""
    try:
        return small_file(path, option, else_what).decode()
    except OSError as error:
        raise LocalUsageError(f"{option} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {path}: not valid TOML{else_what} ({error})") from None


def small_file(path: str, option: str, else_what: str = "") -> bytes:
    """The content of a file of settings. A device or a pipe might never end: LocalUsageError. Raises OSError."""
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise UsageError(f"{option} {path}: is not a name of a file")
    found = os.stat(name := expanded(path, f"{option} "))
    if found.st_size > CONFIG_BYTES or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise LocalUsageError(f"{option} {path}: is no TOML file of at most {CONFIG_BYTES} bytes{else_what}")
    with open(name, "rb") as file:
        return file.read(CONFIG_BYTES)


def check_together(config: Config) -> None:
    """What one setting asks of another."""
    data, model = config.data, config.model
    if data.name == "file" and not data.path:
        raise UsageError("data.path=: data.name=file needs data.path=P, an .npz or .h5 file")
    if data.name == "folder" and not data.path:
        raise UsageError(
            "data.path=: data.name=folder needs data.path=DIR with DIR/train/<class>/ and DIR/test/<class>/"
        )
    if data.name not in ("file", "folder") and data.path:
        raise UsageError(f"data.path={data.path}: only data.name=file reads it, or folder; data.name is {data.name}")
    if data.name != "folder" and data.image_size:
        raise UsageError(f"data.image_size={data.image_size}: only data.name=folder resizes; data.name is {data.name}")
    if data.partition == "natural" and data.name != "file":
        raise UsageError("data.partition=natural: needs client ids, which only data.name=file can bring")
    if data.fraction + (data.public_fraction or 0) > 1 + 1e-12:
        raise UsageError(
            f"data.public_fraction={data.public_fraction}: with data.fraction={data.fraction} at most "
            f"{1 - data.fraction:.4g} fits"
        )
    if model.name not in MODELS and ":" not in model.name:
        raise UsageError(
            f"model.name={model.name}: not allowed; model.name must be one of {', '.join(MODELS)}, or module:Class"
        )
    if config.comm.backend == "nccl" and config.run.device == "cpu":
        raise UsageError("comm.backend=nccl: needs GPUs, but run.device=cpu; allowed here: auto, gloo, mpi")


def difference(stored: Config, asked: dict[str, Any], soft=frozenset()) -> str | None:
    """What `--resume` was asked to change: "key: stored a, asked b", or None. `asked`, `soft`: from `collect`."""
    before = as_values(stored)
    if asked.get("scheme.name", before["scheme.name"]) != before["scheme.name"]:  # its settings are others altogether
        return f"scheme.name: stored {before['scheme.name']}, asked {asked['scheme.name']}"
    after = as_values(absolute_paths(from_values({**before, **asked}, soft)))
    return (
        "; ".join(
            f"{key}: stored {before[key]}, asked {after[key]}"
            for key in asked
            if key in after and after[key] != before.get(key) and not is_place(key)
        )
        or None
    )


def changes(stored: Config, config: Config) -> dict[str, list]:
    """{"section.key": [before, after]} of two settings of one scheme, places aside."""
    before, after = as_values(stored), as_values(config)
    return {key: [before.get(key), after[key]] for key in after if after[key] != before.get(key) and not is_place(key)}


def changed(stored: Config, asked: dict[str, Any], soft=frozenset()) -> Config:
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


def is_place(key: str) -> bool:
    """Whether a setting says where a run goes on, not what it computes: these may change on --resume."""
    return key.startswith("comm.") or key in ("run.device", "run.graphs", "run.lanes", "data.dir", "data.path")


def moved(stored: Config, asked: dict[str, Any]) -> Config:
    """The stored settings at the place that was asked for."""
    return absolute_paths(from_values({**as_values(stored), **{k: v for k, v in asked.items() if is_place(k)}}))


def as_values(config: Config) -> dict[str, Any]:
    return {
        f"{section}.{key}": value for section, keys in dataclasses.asdict(config).items() for key, value in keys.items()
    }


def help_text(scheme: Any = None) -> str:
    """All settings, of this scheme too, with defaults and what is allowed, for --help. UsageError: no such scheme."""
    lines = []
    for section, cls in {"scheme": schemes.settings_of(str_or_shown(scheme or schemes.DEFAULT)), **SECTIONS}.items():
        lines += [f"{section}: {first_paragraph(cls.__doc__)}"]
        lines += [
            f"  {section}.{f.name}={f.default}\n      {f.metadata['help']} ({allowed_text(f)})"
            for f in dataclasses.fields(cls)
        ]
    return "\n".join(
        [
            *lines,
            f"schemes: {', '.join(schemes.REGISTRY)}, or your own as module:Class",
            f"controls, as scheme.name: {', '.join(schemes.CONTROLS)}",
        ]
    )


def absolute_paths(config: Config) -> Config:
    """The same with data.dir and data.path absolute, so that a run can be resumed from another folder."""
    data = config.data
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            data, dir=os.path.abspath(data.dir), path=os.path.abspath(data.path) if data.path else ""
        ),
    )
