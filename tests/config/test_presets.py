"""Presets that change a scheme: what they set, and which schemes they leave alone."""

from __future__ import annotations

import pytest

from hkd_hpc import config
from hkd_hpc.common.errors import UsageError


def changed(preset: str, scheme: str) -> dict:
    """{"section.key": value} of everything in which a preset differs from the defaults of a scheme."""
    default, found = (config.resolve(names, overrides=[f"scheme.name={scheme}"]) for names in ([], [preset]))
    return {
        f"{section}.{key}": value
        for section in ("scheme", *config.SECTIONS)
        for key, value in vars(getattr(found, section)).items()
        if value != getattr(getattr(default, section), key)
    }


def test_a_preset_of_one_scheme_chooses_it():
    prox, gen = config.resolve(["fedprox-code"]).scheme, config.resolve(["fedgen-paper"]).scheme
    assert (prox.name, prox.mu) == ("fedprox", 0.01)
    assert (gen.name, gen.form, gen.alpha, gen.beta, gen.decay) == ("fedgen", "paper", 1.0, 0.0, 1.0)


@pytest.mark.parametrize("scheme", ["fedhkd", "fedhkd_star"])
def test_repaired_fedhkd(scheme):
    assert changed("repaired", scheme) == {"scheme.nu_rule": "relative", "scheme.nu": 1.0}
    assert changed("repaired", "fedavg") == {}


TRAINING = {"train.lr_schedule": "constant", "train.clip_norm": 1.1, "train.drop_last": True, "fed.average": "uniform"}


@pytest.mark.parametrize("scheme", ["fedavg", "fedhkd", "fedgen", "moon"])
def test_the_codes_training_is_the_same_for_all_schemes(scheme):
    assert changed("code-training", scheme) == TRAINING


CODE = {
    **TRAINING,
    "data.partition": "heuristic",
    "scheme.nu": 0.0,
    "scheme.noise": "code",
    "scheme.aggregation": "last",
}


@pytest.mark.parametrize(
    "preset, own, gamma",
    [
        ("code-S", {"scheme.lam": 0.1, "scheme.soft_loss": "kl_wrong_sign"}, {"scheme.gamma": 0.1}),
        ("code-H", {"scheme.soft_loss": "kl"}, {}),
    ],
)  # lam and gamma .05 are the paper's, too
def test_the_published_code(preset, own, gamma):
    """beta .5 is the default as well; FedHKD* has no gamma, FedAvg nothing but the training and the partition."""
    assert changed(preset, "fedhkd_star") == CODE | own
    assert changed(preset, "fedhkd") == CODE | own | gamma | {"scheme.feature_loss": "mse"}
    assert changed(preset, "fedavg") == {**TRAINING, "data.partition": "heuristic"}
    assert changed(preset, "fedmd")["scheme.public_batchnorm"] == "train"
    assert changed(preset, "fedproto")["scheme.aggregation"] == "last"


def test_a_preset_that_names_its_scheme_speaks_of_that_one_alone():
    """mu is a setting of MOON too, but .01 is FedProx's."""
    assert config.resolve(["fedprox-code"]).scheme.mu == 0.01
    moon = config.resolve(["fedprox-code"], overrides=["scheme.name=moon"])
    assert (moon.scheme.name, moon.scheme.mu) == ("moon", 1.0)
    assert config.resolve(["fedprox-code", "fedgen-paper"]).scheme.form == "paper"
    assert (
        config.resolve(["code-H"], overrides=["scheme.name=fedmd"]).scheme.lam == 0.05
    )  # names none: for all that have it


def test_moon_as_in_its_own_paper():
    """Section 4.1, and mu = 5 of its table of CIFAR-10."""
    settings = config.resolve(["moon-paper"])
    train, scheme = settings.train, settings.scheme
    assert (train.optimizer, train.lr, train.momentum, train.weight_decay) == ("sgd", 0.01, 0.9, 1e-5)
    assert (train.batch_size, train.epochs, settings.fed.rounds, settings.fed.clients) == (64, 10, 100, 10)
    assert (scheme.name, scheme.mu, scheme.tau, settings.data.beta) == ("moon", 5, 0.5, 0.5)
    assert {settings.lr(round) for round in (1, 50, 100)} == {0.01}


def test_fedavg_as_in_its_own_paper():
    """Section 3: C = .1, E = 5, B = 50, and a decay of .99 a round."""
    settings = config.resolve(["fedavg-paper"])
    assert (settings.fed.clients, settings.fed.participation, settings.data.partition) == (100, 0.1, "iid")
    assert (settings.train.optimizer, settings.train.epochs, settings.train.batch_size) == ("sgd", 5, 50)
    assert settings.lr(3) == pytest.approx(0.1 * 0.9801, rel=1e-12)


@pytest.mark.parametrize("preset", ["moon-paper", "fedavg-paper"])
def test_a_papers_training_serves_every_scheme(preset):
    own, other = config.resolve([preset]), config.resolve([preset], overrides=["scheme.name=fedhkd"])
    assert other.train == own.train
    assert other.scheme == config.resolve().scheme


def test_a_setting_of_a_preset_that_others_make_void_is_told_as_such(tmp_path):
    with pytest.raises(UsageError) as told:
        config.resolve(["moon-paper"], overrides=["train.optimizer=adam"])
    assert str(told.value) == (
        "train.momentum=0.9: only train.optimizer=sgd has it; train.optimizer is adam, which wants train.momentum=0 "
        "(train.momentum is of --preset moon-paper; give it anew beside the others)"
    )
    assert config.resolve(["moon-paper"], overrides=["train.optimizer=adam", "train.momentum=0"]).train.momentum == 0
    with pytest.raises(UsageError) as told:
        config.resolve(overrides=["train.momentum=0.9", "train.optimizer=adam"])
    assert "preset" not in str(told.value)
    stored = tmp_path / "config.json"
    stored.write_text(config.resolve(["moon-paper"]).to_json())
    with pytest.raises(UsageError, match=rf"train.momentum is of --config {stored}; give it anew beside the others"):
        config.resolve(["cifar10"], str(stored), ["train.optimizer=adam"])
