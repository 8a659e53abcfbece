"""Section privacy: its defaults, what is rejected, and runs of before it was there."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hkd_hpc import config
from hkd_hpc.common.errors import UsageError
from hkd_hpc.privacy.settings import PrivacySettings


def test_by_default_only_the_scheme_says_what_is_clipped_and_has_noise():
    assert dataclasses.asdict(config.resolve().privacy) == {
        "mechanism": "scheme",
        "clip": None,
        "bound": 3.0,
        "multiplier": 7.0,
        "predictions": False,
        "counts": 0.0,
        "extractor": "trained",
        "update_clip": 0.0,
        "update_multiplier": 0.0,
        "mode": "simulation",
        "adjacency": "image",
        "epsilon": None,
        "delta": 1e-5,
        "budget": None,
        "secure_sum": False,
    }


def test_a_stored_run_without_the_section_has_the_defaults():
    stored = json.loads(config.resolve(overrides=["fed.rounds=3"]).to_json())
    del stored["privacy"]
    read = config.from_json(json.dumps(stored))
    assert read.privacy == PrivacySettings()
    assert config.difference(read, {"fed.rounds": "3"}) is None


@pytest.mark.parametrize(
    "setting, allowed",
    [
        ("clip=word", "one of off, box, l2 or none"),
        ("bound=0", "a number > 0 and <= 1000000.0"),
        ("bound=inf", "a number > 0 and <= 1000000.0"),
        ("multiplier=nan", "a number >= 0 and <= 1000000.0"),
        ("epsilon=nan", "a number > 0 and <= 1000000.0 or none"),
        ("delta=0", "a number > 0 and < 1"),
        ("delta=1", "a number > 0 and < 1"),
    ],
)
def test_what_can_be_no_setting_is_one_line(setting, allowed):
    with pytest.raises(UsageError) as caught:
        config.resolve(overrides=[f"privacy.{setting}"])
    assert str(caught.value) == f"privacy.{setting}: not allowed; privacy.{setting.split('=')[0]} must be {allowed}"
