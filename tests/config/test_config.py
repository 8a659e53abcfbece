"""Settings: who wins, what is rejected and how, what one asks of another; none of it imports torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from hkd_hpc import config, schemes
from hkd_hpc.common.errors import LocalUsageError, UsageError
from hkd_hpc.common.settings import check, nearest, setting
from hkd_hpc.config import presets
from hkd_hpc.config.words import words_of
from hkd_hpc.models.settings import ModelSettings
from hkd_hpc.runtime import versions

FIELDS = {
    f"{section}.{field.name}": field
    for section, cls in {"scheme": schemes.settings_of("fedhkd"), **config.SECTIONS}.items()
    for field in dataclasses.fields(cls)
}
NUMERIC = {key: field for key, field in FIELDS.items() if field.type.split(" | ")[0] in ("int", "float")}


def rejection(*overrides: str, **arguments) -> str:
    """The one line of the error."""
    with pytest.raises(UsageError) as caught:
        config.resolve(overrides=overrides, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def toml(tmp_path, text: str) -> str:
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    return str(tmp_path / "run.toml")


# --- who wins


def test_defaults_of_the_method():
    settings = config.resolve()
    assert settings.scheme == schemes.settings_of("fedhkd")()
    assert (settings.fed.clients, settings.fed.participation) == (10, 1.0)
    train = settings.train
    assert (train.epochs, train.batch_size, train.lr, train.clip_norm) == (5, 64, 1e-3, 0)
    assert (settings.data.beta, settings.data.fraction, settings.data.partition) == (0.5, 0.9, "dirichlet")


def test_order_of_precedence(tmp_path):
    """default 10 < cifar10 (50 rounds, halve) < code-training (constant) < TOML < command line, last one wins."""
    file = toml(tmp_path, "[fed]\nrounds = 7\nclients = 20\n[train]\nlr = 0.01\n")
    assert config.resolve().fed.rounds == 10
    assert config.resolve(["cifar10"]).fed.rounds == 50
    assert config.resolve(["cifar10", "code-training"]).train.lr_schedule == "constant"
    assert config.resolve(["code-training", "cifar10"]).train.lr_schedule == "halve"
    assert config.resolve(["code-training", "cifar10"]).train.clip_norm == 1.1
    assert config.resolve(["cifar10"], file).fed.rounds == 7
    settings = config.resolve(["cifar10"], file, ["fed.rounds=3", "train.lr=0.5", "train.lr=0.25"])
    assert (settings.fed.rounds, settings.fed.clients) == (3, 20)
    assert (settings.train.lr, settings.model.name) == (0.25, "resnet18")


@pytest.mark.parametrize(
    "name, data, model, latent",
    [
        ("cifar10", "cifar10", "resnet18", 64),
        ("cifar100", "cifar100", "resnet18", 64),
        ("svhn", "svhn", "shufflenet_v2", 32),
    ],
)
def test_presets_of_the_paper(name, data, model, latent):
    settings = config.resolve([name])
    assert (settings.data.name, settings.model.name, settings.model.latent) == (data, model, latent)
    assert (settings.fed.clients, settings.fed.rounds) == (10, 50)
    assert (settings.train.epochs, settings.train.batch_size) == (5, 64)
    assert (settings.data.fraction, settings.data.beta, settings.train.lr, settings.train.lr_schedule) == (
        0.1,
        0.5,
        1e-3,
        "halve",
    )


def test_every_preset_is_valid_with_every_scheme():
    for preset in presets.PRESETS:
        for scheme in schemes.REGISTRY:
            assert config.resolve([preset], overrides=[f"scheme.name={scheme}"]).scheme.name == scheme


def test_a_presets_setting_of_another_scheme_is_dropped_but_a_persons_is_rejected(monkeypatch):
    monkeypatch.setitem(presets.PRESETS, "toy", {"scheme.lam": 0.5, "fed.rounds": 2})
    assert config.resolve(["toy"]).scheme.lam == 0.5
    assert not hasattr(config.resolve(["toy"], overrides=["scheme.name=fedavg"]).scheme, "lam")
    assert "scheme.lam" in rejection("scheme.name=fedavg", "scheme.lam=0.5", preset_names=["toy"])


def test_unknown_preset():
    message = rejection(preset_names=["cifar11"])
    assert "cifar11" in message
    assert all(name in message for name in presets.PRESETS)


# --- learning rate


@pytest.mark.parametrize(
    "round, lr",
    [
        (1, 1e-3),
        (10, 1e-3),
        (11, 5e-4),
        (20, 5e-4),
        (21, 2.5e-4),
        (31, 1.25e-4),
        (40, 1.25e-4),
        (41, 6.25e-5),
        (50, 6.25e-5),
    ],
)
def test_learning_rate_is_halved_every_ten_rounds(round, lr):
    assert config.resolve().lr(round) == pytest.approx(lr, rel=1e-12)
    assert config.resolve(overrides=["train.lr_schedule=constant"]).lr(round) == 1e-3


def test_other_learning_rates():
    settings = config.resolve(overrides=["train.lr=0.8", "train.lr_halve_every=1"])
    assert [settings.lr(round) for round in (1, 2, 3, 4)] == [0.8, 0.4, 0.2, 0.1]


@pytest.mark.parametrize(
    "overrides, lrs",
    [
        (["lr_schedule=step", "lr_every=2"], [8, 8, 0.8, 0.8, 0.08]),
        (["lr_schedule=step", "lr_every=1", "lr_factor=0.5"], [8, 4, 2, 1, 0.5]),
        (["lr_schedule=exponential"], [8, 7.92, 7.8408, 7.762392, 7.68476808]),
        (["lr_schedule=exponential", "lr_factor=0.5", "lr_warmup=2"], [8 / 3, 16 / 3, 8, 4, 2]),
        (["lr_schedule=constant", "lr_warmup=3"], [2, 4, 6, 8, 8]),
        (["lr_schedule=halve", "lr_halve_every=2", "lr_warmup=1"], [4, 8, 8, 4, 4]),
        # 1 + cos of 0, 45, 90 and 135 degrees, halved
        (["lr_schedule=cosine", "lr_warmup=1"], [4, 8, 6.8284271247, 4, 1.1715728753]),
        (["lr_schedule=cosine", "lr_warmup=1", "lr_floor=4"], [4, 8, 7.4142135624, 6, 4.5857864376]),
        (["lr_schedule=cosine", "lr_warmup=9"], [0.8, 1.6, 2.4, 3.2, 4]),
    ],
)
def test_schedules_by_hand(overrides, lrs):
    given = ["fed.rounds=5", "train.lr=8", *(f"train.{text}" for text in overrides)]
    assert [config.resolve(overrides=given).lr(round) for round in range(1, 6)] == pytest.approx(lrs, rel=1e-10)


@pytest.mark.parametrize(
    "overrides, lr",
    [
        ([], 4),  # round 11 of a schedule that goes on
        (["train.lr_schedule=exponential", "train.lr_factor=0.5"], 8 / 2**10),
        (["train.lr_schedule=cosine", "fed.rounds=2"], 4),  # which has ended: the last round's, not 0
        (["train.lr_schedule=cosine", "fed.rounds=3", "train.lr_warmup=3"], 6),  # all rounds were of the warm-up
        (["train.lr_schedule=cosine", "fed.finetune_lr=0.25"], 0.25),
        (["train.lr_warmup=20", "fed.finetune_lr=0.25"], 0.25),
    ],
)
def test_learning_rate_of_fine_tuning(overrides, lr):
    settings = config.resolve(overrides=["fed.rounds=10", "train.lr=8", "fed.finetune_epochs=7", *overrides])
    tuned = settings.finetuning(settings.fed.rounds + 1)
    assert tuned.lr(settings.fed.rounds + 1) == pytest.approx(lr, rel=1e-12)
    assert tuned.train.epochs == 7
    assert settings.train.epochs == 5


# --- what is rejected


@pytest.mark.parametrize(
    "text", ["\u0663", "1_0", " 3", "3 ", "0x10", "1e400", "nan", "Infinity", "-inf", "", "1,5", "\uff15", "three"]
)
@pytest.mark.parametrize("key", ["fed.max_norm", "train.lr", "fed.rounds", "fed.clients"])
def test_numbers_are_plain_ones(key, text):
    assert rejection(f"{key}={text}").startswith(f"{key}=")


@pytest.mark.parametrize("value", ["3.0", "true", '"x"', "[3]", "1e2", "nan"])
def test_a_whole_number_in_a_file_is_a_whole_number(tmp_path, value):
    (tmp_path / "own.toml").write_text(f"[fed]\nrounds = {value}\n")
    with pytest.raises(UsageError, match="fed.rounds must be a whole number"):
        config.resolve(file=str(tmp_path / "own.toml"))


@pytest.mark.parametrize(
    "key, near",
    [
        ("fed.cleints", "fed.clients"),
        ("train.batchsize", "train.batch_size"),
        ("scheme.lambda", "scheme.lam"),
        ("model.laten", "model.latent"),
    ],
)
def test_unknown_keys_suggest_the_nearest(key, near):
    assert rejection(f"{key}=3") == f"{key}: no such setting; did you mean {near}?"


@pytest.mark.parametrize(
    "key, told",
    [
        ("lr", "did you mean train.lr?"),
        ("fed.epochs", "did you mean train.epochs?"),
        ("fedd.rounds", "did you mean fed.rounds?"),
        ("train.seed", "did you mean run.seed?"),
        ("size", "did you mean data.image_size or train.batch_size?"),
        ("batch", "did you mean train.batch_size?"),
        ("train.optimiser", "did you mean train.optimizer?"),
        ("train.dropout", "python -m hkd_hpc.train --help lists them"),
        ("train.zoom", "python -m hkd_hpc.train --help lists them"),
    ],
)
def test_unknown_keys_are_matched_by_their_last_part_and_by_nothing_far_fetched(key, told):
    assert rejection(f"{key}=3") == f"{key}: no such setting; {told}"


@pytest.mark.parametrize(
    "key, told",
    [
        ("mu", "scheme.mu (of fedprox, moon, fedalign)"),
        ("train.tau", "scheme.tau (of moon, fedntd)"),
        ("hiden", "scheme.hidden (of fedgen)"),
    ],
)
def test_a_key_that_is_near_settings_of_other_schemes_names_both(key, told):
    assert rejection(f"{key}=3") == f"{key}: no such setting; did you mean {told}?"


def test_every_name_that_is_wrong_is_told_in_one_line():
    assert rejection("lr=.1", "train.dropout=adam", "scheme.mu=1", "fed.rounds=3") == (
        "lr: no such setting; did you mean train.lr?; train.dropout: no such setting; python -m hkd_hpc.train --help "
        "lists "
        "them; scheme.mu: no such setting of fedhkd; fedprox, moon, fedalign have it"
    )
    message = rejection("scheme.name=fedavgg", "scheme.mu=1", "lr=.1")  # whose mu may be right
    assert message.startswith("scheme.name=fedavgg: no such scheme; ")
    assert "scheme.mu" not in message
    assert message.endswith("; lr: no such setting; did you mean train.lr?")


def test_at_most_five_names_are_suggested():
    assert nearest("fed.size", [f"a{i}.size" for i in range(9)] + ["fed.size_x", "fed.size"])[0] == "fed.size"
    assert len(nearest("size", [f"a{i}.size" for i in range(9)])) == 5


def test_a_setting_of_other_schemes_names_them():
    assert rejection("scheme.name=fedavg", "scheme.mu=1") == (
        "scheme.mu: no such setting of fedavg; fedprox, moon, fedalign have it"
    )
    assert rejection("scheme.name=moon", "scheme.zeta=1").startswith("scheme.zeta: no such setting of moon; fedhkd")


@pytest.mark.parametrize("key", ["rounds", "feed.rounds", "fed", "fed.", ".rounds", "fed.rounds.x"])
def test_keys_that_are_no_keys(key):
    assert rejection(f"{key}=3").startswith(f"{key}: no such setting")


@pytest.mark.parametrize("text", ["fed.rounds", "=3", "--fed.rounds", ""])
def test_words_that_are_no_settings(text):
    assert "section.key=value" in rejection(text)


@pytest.mark.parametrize("key", NUMERIC)
@pytest.mark.parametrize("value", ["nan", "NaN", "inf", "-inf", "1e999", "word", "0x10", "1,5", "[1]", "true"])
def test_no_number_setting_takes_what_is_no_finite_number(key, value):
    message = rejection(f"{key}={value}")
    assert message.startswith(f"{key}={value}: not allowed; {key} must be a")


@pytest.mark.parametrize("key", NUMERIC)
def test_every_number_setting_has_a_range_and_keeps_it(key):
    field = NUMERIC[key]
    low, above, high = (field.metadata[name] for name in ("low", "above", "high"))
    assert (low is None) != (above is None), "every number has a lower end"
    step = 1 if field.type.startswith("int") else 1e-6
    outside = [low - step if low is not None else above] + ([high + step * max(1, high)] if high is not None else [])
    for value in outside:
        assert rejection(f"{key}={value!r}").startswith(f"{key}={value!r}: not allowed")
        assert f"{'>=' if low is not None else '>'} {low if low is not None else above}" in rejection(
            f"{key}={value!r}"
        )
    if field.metadata["below"] is not None:
        assert f"< {field.metadata['below']}" in rejection(f"{key}={field.metadata['below']!r}")
    for value in [low if low is not None else above + step] + ([high] if high is not None else []):
        assert check(key, field, value) == value == check(key, field, repr(value))
    assert field.default is None or check(key, field, field.default) == field.default


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", float("nan"), 10**400])
def test_a_number_without_a_range_must_be_finite_too(value):
    field = setting(0.5, "no range")
    field.type = "float"
    with pytest.raises(UsageError, match="must be a number"):
        check("scheme.x", field, value)


@pytest.mark.parametrize("key", [key for key, field in NUMERIC.items() if field.type.startswith("int")])
def test_whole_numbers_are_whole(key):
    for value in ("2.5", "2.0", "1e1"):
        assert "must be a whole number" in rejection(f"{key}={value}")


@pytest.mark.parametrize("key", [key for key, field in FIELDS.items() if field.metadata.get("choices")])
def test_choices_are_listed(key):
    message = rejection(f"{key}=nope")
    assert message.startswith(f"{key}=nope: not allowed")
    assert all(choice in message for choice in FIELDS[key].metadata["choices"])


def test_true_and_false():
    for text, value in (("true", True), ("false", False), ("True", True), ("FALSE", False)):
        assert config.resolve(overrides=[f"run.client_models={text}"]).run.client_models is value
    for text in ("1", "0", "yes", "", "none", "t"):
        assert "true or false" in rejection(f"run.client_models={text}")


def test_none_only_where_it_is_allowed():
    settings = config.resolve(overrides=["data.partition_seed=None", "run.seed=4"])
    assert settings.data.partition_seed is None
    assert settings.partition_seed == 4
    assert config.resolve(overrides=["data.partition_seed=0", "run.seed=4"]).partition_seed == 0
    assert "or none" in rejection("data.partition_seed=x")
    for key in ("run.seed", "train.lr", "comm.timeout_s"):
        assert rejection(f"{key}=none").startswith(f"{key}=none: not allowed")


@pytest.mark.parametrize(
    "name, part",
    [
        ("nope", "known: fedavg, fedprox, moon, fedalign, fedgen, fedmd, fedproto, fedhkd, fedhkd_star"),
        ("no_such_module_x:A", "cannot import"),
        ("hkd_hpc.schemes.fedavg:Nope", "has no Nope"),
        (":A", "module:Class"),
    ],
)
def test_unknown_schemes(name, part):
    message = rejection(f"scheme.name={name}")
    assert message.startswith(f"scheme.name={name}")
    assert part in message


@pytest.mark.parametrize("name", ["json:JSONDecoder", "math:pi", ".relative:A"])
def test_things_that_are_no_schemes(name):
    assert rejection(f"scheme.name={name}").startswith(f"scheme.name={name}")


@pytest.mark.parametrize("first_line", ["from __future__ import annotations", "import dataclasses"])
def test_a_scheme_of_ones_own_brings_its_settings(tmp_path, monkeypatch, first_line):
    """With annotations that are text, as in this package, and with those that are types."""
    monkeypatch.delitem(sys.modules, "toy_own_scheme", raising=False)
    (tmp_path / "toy_own_scheme.py").write_text(
        f"{first_line}\nfrom dataclasses import dataclass\n"
        "from hkd_hpc.schemes.base import Scheme, SchemeSettings\n"
        "from hkd_hpc.common.settings import setting\n@dataclass(frozen=True)\nclass Own(SchemeSettings):\n"
        "    mu: float = setting(0.5, 'strength', low=0, high=1)\n"
        "    rank: int | None = setting(None, 'rank', low=1)\n"
        "class Mine(Scheme):\n    Settings = Own\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = config.resolve(overrides=["scheme.name=toy_own_scheme:Mine", "scheme.mu=0.25"])
    assert settings.scheme.mu == 0.25
    assert settings.scheme.rank is None
    assert settings.scheme.name == "toy_own_scheme:Mine"
    assert config.from_json(settings.to_json()) == settings
    assert rejection("scheme.name=toy_own_scheme:Mine", "scheme.mu=2").startswith("scheme.mu=2: not allowed")


# --- TOML


def test_toml_types(tmp_path):
    text = (
        '[data]\nname = "file"\npath = "é中.npz"\nbeta = 5\n[run]\nclient_models = false\nseed = 3\n[train]\nlr = 1\n'
    )
    settings = config.resolve(file=toml(tmp_path, text))
    assert (settings.data.path, settings.run.client_models, settings.run.seed) == ("é中.npz", False, 3)
    assert settings.data.beta == 5.0
    assert isinstance(settings.data.beta, float)
    assert isinstance(settings.train.lr, float)


@pytest.mark.parametrize(
    "text, part",
    [
        ("[fed\nrounds = 3", "not valid TOML"),
        ("rounds = 3", "rounds must stand in a table"),
        ("[fed]\nrounds = true", "fed.rounds"),
        ("[fed]\nrounds = 2.5", "fed.rounds=2.5"),
        ("[train]\nlr = nan", "train.lr=nan"),
        ("[train]\nlr = inf", "train.lr=inf"),
        ("[train]\nlr = [1]", "train.lr=[1]"),
        ("[fed]\nrounds = 1979-05-27", "fed.rounds=1979-05-27"),
        ("[model]\nname = 3", "model.name=3"),
        ("[run]\nclient_models = 1", "run.client_models=1"),
        ("[fed.rounds]\nx = 3", "fed.rounds"),
        ("[fedd]\nrounds = 3", "fedd.rounds"),
        ("[scheme]\nname = 5", "scheme.name=5"),
        ("[scheme]\nname = 5\n[nope]\nx = 1", "nope.x"),
        ('[model]\nname = "a\\nb"', "model.name="),
        ('[scheme]\nname = "a\\nb"', "scheme.name="),
        ('["fed\\n"]\nrounds = 1', "no such setting"),
    ],
)
def test_toml_errors_are_one_line(tmp_path, text, part):
    assert part in rejection(file=toml(tmp_path, text))


def test_toml_files_that_cannot_be_read(tmp_path):
    with pytest.raises(LocalUsageError, match="No such file"):  # perhaps one rank alone does not see it
        config.resolve(file=str(tmp_path / "no.toml"))
    with pytest.raises(LocalUsageError, match="directory"):
        config.resolve(file=str(tmp_path))
    (tmp_path / "latin.toml").write_bytes(b'[data]\npath = "\xe9"')
    assert "not valid TOML" in rejection(file=str(tmp_path / "latin.toml"))


@pytest.mark.parametrize(
    "text, told",
    [
        ("[fedd]\nrounds = 5", "fedd.rounds: no such setting; did you mean fed.rounds?"),
        ("[fed]\nrounds = 0", "fed.rounds=0: not allowed; fed.rounds must be a whole number >= 1"),
        ("[scheme]\nname = 'moon'\nmuu = 1", "scheme.muu: no such setting; did you mean scheme.mu?"),
    ],
)
def test_what_is_wrong_in_a_toml_file_is_told_with_the_file(tmp_path, text, told):
    (tmp_path / "bad.toml").write_text(text)
    assert rejection(file=str(tmp_path / "bad.toml")).startswith(f"--config {tmp_path}/bad.toml: {told}")


def test_what_is_not_the_files_fault_is_told_without_it(tmp_path):
    (tmp_path / "mine.toml").write_text("[fed]\nrounds = 0\n[scheme]\nmu = 0.5")
    file = str(tmp_path / "mine.toml")
    assert rejection("scheme.name=nope", file=file).startswith("scheme.name=nope: no such scheme")
    assert rejection("scheme.name=moon", "fed.rounds=-1", file=file).startswith("fed.rounds=-1: not allowed")
    assert config.resolve(file=file, overrides=["scheme.name=moon", "fed.rounds=3"]).fed.rounds == 3


@pytest.mark.parametrize("content", [b"\x89HDF\r\n\x1a\n", b"[1,2]", b"\x89HDF\r\n\x1a\n" + bytes(1 << 20)])
def test_what_is_neither_toml_nor_a_config_json_is_told_as_neither(tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    message = rejection(file=str(tmp_path / "other"))
    assert message.startswith(f"--config {tmp_path}/other: ")
    assert "TOML" in message
    assert ", nor a run's config.json" in message


# --- together


@pytest.mark.parametrize(
    "overrides, part",
    [
        (["data.name=file"], "data.path=P"),
        (["data.path=x.npz"], "only data.name=file or folder or leaf or hf reads it"),
        (["data.partition=natural"], "data.partition=natural"),
        (["data.public_fraction=0.2"], "at most 0.1 fits"),
        (["data.name=folder"], "data.path=DIR"),
        (["data.image_size=32"], "only data.name=folder or hf resizes"),
        (["data.val_fraction=1"], "data.val_fraction must be a number >= 0 and < 1"),
        (["model.name=resnet19"], "one of small, resnet18, shufflenet_v2, moon_cnn, or module:Class"),
        (["comm.backend=nccl", "run.device=cpu"], "comm.backend=nccl"),
        (
            ["train.momentum=0.9"],
            "train.momentum=0.9: only train.optimizer=sgd has it; train.optimizer is adam, which wants train.momentum=",
        ),
        (
            ["train.nesterov=true", "train.optimizer=adamw"],
            "train.optimizer is adamw, which wants train.nesterov=false",
        ),
        (["train.nesterov=true", "train.optimizer=sgd"], "train.nesterov=True: needs train.momentum above 0"),
        (["train.lr_schedule=cosine", "train.lr_floor=0.1"], "train.lr_floor=0.1: must not be above train.lr=0.001"),
    ],
)
def test_settings_that_do_not_go_together(overrides, part):
    assert part in rejection(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.name=file", "data.path=x.npz", "data.partition=natural"],
        ["data.public_fraction=0.1"],
        ["data.name=folder", "data.path=x", "data.image_size=32"],
        ["data.fraction=0.7", "data.public_fraction=0.3"],
        ["model.name=mine:Net"],
        ["comm.backend=nccl"],
        ["comm.backend=gloo", "run.device=cpu"],
    ],
)
def test_settings_that_do(overrides):
    config.resolve(overrides=overrides)


# --- stored settings


@pytest.mark.parametrize("scheme", schemes.REGISTRY)
@pytest.mark.parametrize("preset", [[], *([name] for name in presets.PRESETS)])
def test_json_round_trip(scheme, preset):
    overrides = [f"scheme.name={scheme}", "run.seed=7", "train.lr=0.1234567890123456789"]
    settings = config.resolve(preset, overrides=overrides)
    assert config.from_json(settings.to_json()) == settings


def test_json_round_trip_of_unusual_text():
    settings = config.resolve(
        overrides=["data.name=file", "data.path=/tmp/é 中/none.npz", "run.seed=123456789012345678901234567890"]
    )
    assert config.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    "name, given, kept",
    [
        ("my_data:load", "s3://bucket/x", "s3://bucket/x"),
        ("my_data:load", "siteA", "siteA"),
        ("file", "/tmp/a/../b.npz", "/tmp/b.npz"),
    ],
)
def test_paths_are_absolute_but_for_what_a_loader_gets(name, given, kept):
    settings = config.absolute_paths(config.resolve(overrides=[f"data.name={name}", f"data.path={given}"]))
    assert settings.data.path == kept


def test_what_resume_was_asked_to_change():
    stored = config.absolute_paths(config.resolve(["cifar10"], overrides=["fed.rounds=4"]))

    def asked(preset_names, *overrides):
        return config.difference(stored, *config.collect(preset_names, None, overrides))

    assert asked([]) is None
    assert asked([], "fed.rounds=4", "train.lr=0.001", "scheme.lam=5e-2", "data.dir=data") is None
    assert asked([], "fed.rounds=5", "train.epochs=5") == "fed.rounds: stored 4, asked 5"
    assert asked([], "fed.rounds=5", "run.seed=1") == "fed.rounds: stored 4, asked 5; run.seed: stored 0, asked 1"
    assert asked(["cifar10"], "fed.rounds=4") is None


def test_another_scheme_is_told_as_such():
    stored = config.absolute_paths(config.resolve())
    assert config.difference(stored, {"scheme.name": "fedavg"}) == "scheme.name: stored fedhkd, asked fedavg"


# --- help, versions, imports


def test_help_names_every_setting_with_its_range():
    text = config.help_text()
    assert all(f"{key}={field.default}" in text and field.metadata["help"] in text for key, field in FIELDS.items())
    assert (
        "train.lr=0.001\n      learning rate of round 1, or after train.lr_warmup rounds (a number > 0 and <= 100)"
        in text
    )
    assert list(FIELDS) == config.all_keys("fedhkd")


@pytest.mark.parametrize(
    "program",
    [
        "from hkd_hpc import config; config.resolve(overrides=['scheme.name=fedavg'])",
        "from hkd_hpc import config; config.resolve()",
        "from hkd_hpc import config; config.resolve(['cifar10'])",
        "from hkd_hpc import config; config.resolve(overrides=['scheme.name=fedhkd_star'])",
        "from hkd_hpc import schemes; [schemes.settings_of(name) for name in schemes.REGISTRY]",
        "import hkd_hpc.train",
    ],
)
def test_settings_cost_no_import_of_torch(program):
    heavy = "{'torch', 'torchvision', 'h5py', 'mpi4py', 'scipy'} & set(sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}\nprint({heavy} or 'light')"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.strip() == "light", result.stdout + result.stderr


def test_lazy_module_imports_on_first_use():
    program = (
        "import sys; from hkd_hpc.common.lazy import F, torch; assert 'torch' not in sys.modules; "
        "print(torch.zeros(2).tolist(), F.softmax(torch.zeros(2), dim=0).tolist(), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "[0.0, 0.0] [0.5, 0.5] True", result.stderr


@pytest.mark.parametrize(
    "text, numbers", [("2.14.1+cu130", (2, 14, 1)), ("2.4.0a0+f70bd71a48.nv24.06", (2, 4, 0)), ("2.5", (2, 5))]
)
def test_version_numbers(text, numbers):
    assert versions.numbers(text)[: len(numbers)] == numbers


@pytest.mark.parametrize(
    "torch, torchvision, part",
    [
        (None, None, r"torch .* 'hkd_hpc\[torch\]', .*: docs/getting_started.md, Installing \(hkd docs copy docs\)$"),
        ("2.3.1", "0.18.1", "the oldest that fits is 2.4"),
        ("2.4.0", None, "needs torchvision 0.19"),
        ("2.5.1", "0.19.0", "install torchvision 0.20"),
    ],
)
def test_what_is_installed_must_fit(monkeypatch, torch, torchvision, part):
    monkeypatch.setattr(versions, "installed", {"torch": torch, "torchvision": torchvision}.get)
    with pytest.raises(UsageError, match=part) as caught:
        versions.check("resnet18", needs_torchvision=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "torch, torchvision, model",
    [
        ("2.4.0", "0.19.0", "resnet18"),
        ("2.14.1+cu130", "0.29.1+cu130", "shufflenet_v2"),
        ("2.4.0", None, "small"),
        ("2.5.0", "0.1", "m:N"),
    ],
)
def test_what_fits(monkeypatch, torch, torchvision, model):
    monkeypatch.setattr(versions, "installed", {"torch": torch, "torchvision": torchvision}.get)
    versions.check(model, ModelSettings(name=model).needs_torchvision)


@pytest.mark.parametrize(
    "required, fits",
    [
        (["numpy", "torch (>=2.14.0)", "scipy ; extra == 'scipy'"], True),  # torchvision 0.29.2
        (["torch>=2.14.0"], True),
        (["torch>=2.16.0"], False),
        (["torch (==2.14.0)"], False),  # torchvision 0.19 to 0.28 name one
        (["torch"], False),  # a site's own build
        ([], False),
    ],
)
def test_a_torchvision_that_takes_newer_torches_says_so_itself(monkeypatch, required, fits):
    monkeypatch.setattr(versions, "requirements", {"torchvision": required}.get)
    assert versions.belongs("2.15.0", "0.29.2") == fits
    assert versions.belongs("2.14.1+cu130", "0.29.2+cu130")


def test_help_lists_the_settings_of_the_scheme_that_is_asked_for():
    assert "scheme.nu=0.25" in config.help_text()
    assert "scheme.tau" not in config.help_text()
    moon = config.help_text("moon")
    assert "scheme.tau=0.5" in moon
    assert "scheme.nu" not in moon
    assert "controls, as scheme.name: local, central" in moon


# --- the config.json of a run


def stored_at(tmp_path, *overrides, without=()):
    """The path of what a run with these settings stores; an earlier version lacked the keys in `without`."""
    stored = json.loads(config.absolute_paths(config.resolve(overrides=overrides)).to_json())
    for section, key in without:
        del stored[section][key]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    return str(tmp_path / "config.json")


def test_a_run_is_repeated_from_its_own_settings(tmp_path):
    path = stored_at(
        tmp_path, "scheme.name=moon", "scheme.mu=0.5", "fed.rounds=3", "run.seed=7", "data.val_fraction=0.125"
    )
    repeated = config.resolve(file=path)
    assert (repeated.scheme.name, repeated.scheme.mu, repeated.fed.rounds, repeated.run.seed) == ("moon", 0.5, 3, 7)
    assert config.resolve(["cifar10"], path, ["run.seed=8"]) == config.from_json(
        repeated.to_json().replace('"seed": 7', '"seed": 8')
    )


def test_what_a_run_stored_was_given_by_nobody(tmp_path):
    asked, soft = config.collect(file=stored_at(tmp_path, "data.partition=iid"), overrides=["data.beta=0.1"])
    assert asked.keys() - soft.keys() == {"data.beta"}


def test_another_scheme_leaves_the_stored_ones_own_settings_behind(tmp_path):
    other = config.resolve(
        file=stored_at(tmp_path, "scheme.name=moon", "scheme.mu=0.25", "fed.rounds=3"),
        overrides=["scheme.name=fedprox"],
    )
    assert (other.scheme.name, other.scheme.mu, other.fed.rounds) == ("fedprox", 0.5, 3)


def test_config_json_of_an_earlier_version(tmp_path):
    path = stored_at(tmp_path, "fed.rounds=3", without=[("model", "convolution"), ("fed", "drop_rate")])
    assert config.resolve(file=path).model.convolution == "library"  # what was computed then
    assert config.resolve(file=path).fed.drop_rate == 0.0


@pytest.mark.parametrize(
    "text, part",
    [
        ('{"fed": ', "is no complete config.json of a run"),
        ('{"fed": 3}', "is no complete config.json of a run"),
        ('{"fed": {"rounds": -1}}', "fed.rounds=-1: not allowed"),
        ('{"fed": {"gone": 1}}', "fed.gone: no such setting"),
    ],
)
def test_a_damaged_config_json_is_one_line(tmp_path, text, part):
    (tmp_path / "config.json").write_text(text)
    message = rejection(file=str(tmp_path / "config.json"))
    assert message.startswith(f"--config {tmp_path}/config.json: ")
    assert part in message
    assert "\n" not in message


def test_names_in_a_list_are_those_with_commas_between():
    assert words_of({"run": {"loggers": ["csv", "jsonl"]}}) == ["run.loggers=csv,jsonl"]
    assert words_of({"run.loggers": [], "fed.rounds": [3]}) == ["run.loggers=", "fed.rounds=[3]"]
