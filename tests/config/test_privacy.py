"""Section privacy beside the others: what is rejected, what nothing reads, and what is said of it."""

from __future__ import annotations

import pytest

from hkd_hpc import config
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import protection
from hkd_hpc.config.effects import without_effect


def resolved(*overrides: str) -> config.Config:
    return config.resolve(overrides=overrides)


def test_a_release_keeps_the_models_of_clients_from_rank_0():
    with pytest.raises(UsageError) as caught:
        resolved("privacy.mode=release")
    assert str(caught.value) == (
        "privacy.mode=release: run.client_models=true sends every client's own model, without noise, to rank 0; give "
        "run.client_models=false"
    )


def test_the_mode_cannot_change_within_a_run():
    stored = resolved("run.client_models=false")
    with pytest.raises(UsageError, match="privacy.mode cannot change within a run"):
        config.changed(stored, {"privacy.mode": "release"})


@pytest.mark.parametrize(
    "overrides, unread",
    [
        (["privacy.mechanism=vector", "privacy.bound=1", "privacy.multiplier=2", "privacy.counts=1"], []),
        (["privacy.multiplier=2", "privacy.predictions=true"], []),
        (["privacy.clip=l2", "privacy.bound=1", "privacy.multiplier=2"], ["clip", "bound", "multiplier"]),
        (["privacy.mechanism=off", "privacy.bound=1", "privacy.multiplier=2"], ["bound", "multiplier"]),
        (["privacy.mechanism=off", "privacy.clip=box", "privacy.bound=1"], []),
        (["privacy.mechanism=off", "privacy.mode=simulation"], ["mode"]),
        (["scheme.name=fedproto", "privacy.predictions=true"], ["predictions"]),
        (["scheme.name=fedavg", "privacy.mechanism=vector", "privacy.extractor=received"], ["mechanism", "extractor"]),
        (["scheme.name=fedavg", "privacy.epsilon=4", "privacy.mode=simulation", "privacy.update_clip=1"], []),
        (["scheme.name=fedavg", "privacy.mode=simulation", "privacy.update_clip=1"], ["mode"]),
        (["scheme.name=fedavg", "privacy.counts=1", "privacy.predictions=true"], ["predictions", "counts"]),
    ],
)
def test_settings_that_nothing_reads(overrides, unread):
    found = without_effect(resolved(*overrides), [text.partition("=")[0] for text in overrides])
    assert sorted(line.partition("=")[0] for line in found) == sorted(f"privacy.{name}" for name in unread)


def test_the_mechanism_replaces_the_schemes_own_settings():
    overrides = ["privacy.mechanism=vector", "scheme.sigma=2", "scheme.noise=off", "scheme.clip=box", "scheme.zeta=1"]
    found = without_effect(resolved(*overrides), [text.partition("=")[0] for text in overrides])
    assert sorted(found) == [
        "scheme.clip=box has no effect with privacy.mechanism=vector",
        "scheme.noise=off has no effect with privacy.mechanism=vector",
        "scheme.sigma=2.0 has no effect with privacy.mechanism=vector",
        "scheme.zeta=1.0 has no effect with privacy.mechanism=vector",
    ]


@pytest.mark.parametrize("name", ["off", "paper", "vector"])
def test_a_preset_for_each_mechanism(name):
    assert config.resolve([f"privacy-{name}"]) == resolved(f"privacy.mechanism={name}")


SIMULATION = "; simulation, no privacy: noise is a stream of the seed"


@pytest.mark.parametrize(
    "overrides, text",
    [
        ([], ""),
        (["scheme.name=fedavg"], ""),
        (
            ["privacy.mechanism=vector", "privacy.counts=1"],
            "privacy: features of the trained model: l2 clip 3, noise multiplier 7 (vector); counts: noise multiplier "
            "1" + SIMULATION,
        ),
        (
            ["privacy.mechanism=paper", "privacy.clip=off"],
            "privacy: features of the trained model: no clip, so no bound, noise multiplier 7 (paper)" + SIMULATION,
        ),
        (
            ["privacy.mode=release", "run.client_models=false", "scheme.clip=box", "privacy.predictions=true"],
            "privacy: features of the trained model: box clip 3, noise multiplier 7 (paper); predictions: noise "
            "multiplier 7; release: noise is of the operating system's entropy",
        ),
        (
            ["privacy.mechanism=off", "privacy.clip=l2", "privacy.extractor=received"],
            "privacy: features of the received model: l2 clip 3, no noise",
        ),
        (
            ["scheme.name=fedavg", "privacy.update_clip=2"],
            "privacy: changes of the weights: l2 clip 2, no noise",
        ),
        (
            ["scheme.name=fedavg", "privacy.secure_sum=true", "run.client_models=false"],
            "privacy: weights: summed under masks",
        ),
        (["scheme.name=local", "privacy.update_clip=2"], "privacy: nothing that a client reports is changed"),
        (["scheme.name=fedavg", "privacy.counts=1"], "privacy: nothing that a client reports is changed"),
    ],
)
def test_what_is_said_at_the_beginning(overrides, text):
    assert protection.told(resolved(*overrides)) == text
