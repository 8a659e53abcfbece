"""Feature skew: what is done to each client's images, and what does not change it."""

from __future__ import annotations

import numpy as np
import pytest

from hkd_hpc import config
from hkd_hpc.common.errors import UsageError
from hkd_hpc.data import skew
from hkd_hpc.data.partition import Labels, Rule, make_partition, pooled

LABELS = np.arange(60) % 3
IMAGES = {
    "train": np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8), np.uint8),
    "test": np.full((30, 3, 64, 64), 128, np.uint8),
}


def of(*overrides: str, partition=None, images=IMAGES, val_fraction=0.0):
    data = config.resolve(overrides=overrides).data
    rule = Rule(3, "iid", 5, 1.0, val_fraction=val_fraction)
    made = partition or make_partition(Labels(LABELS, LABELS[:30], 3), rule)
    return made, skew.skew_of(data, 5, made, images)


def test_without_the_settings_there_is_none():
    assert of()[1] is None


def test_a_quarter_turn_is_numpys():
    assert np.array_equal(skew.turned(IMAGES["train"], 90), np.rot90(IMAGES["train"], axes=(2, 3)))


def test_a_turn_leaves_the_middle_and_blackens_the_corners():
    turned = skew.turned(IMAGES["test"][:2], 45)
    assert (turned[:, :, 24:40, 24:40] == 128).all()
    assert not turned[:, :, [0, 0, -1, -1], [0, -1, 0, -1]].any()


def test_angles_and_strengths_are_the_clients_own():
    _, found = of("data.client_rotation=30", "data.client_noise=.2")
    assert len(set(found.angle_deg_M)) == 3
    assert (abs(found.angle_deg_M) <= 30).all()
    assert ((found.noise_std_M >= 0) & (found.noise_std_M <= 0.2)).all()
    _, twice = of("data.client_rotation=60", "data.client_noise=.1")
    assert np.allclose(twice.angle_deg_M, 2 * found.angle_deg_M)  # one draw, whatever the strength
    assert np.allclose(twice.noise_std_M, found.noise_std_M / 2)


def test_noise_has_the_strength_of_the_client_and_mean_zero():
    """Grey 128 is 128 / (255 * .1) = 5 standard deviations from either end: hardly anything is cut."""
    partition = make_partition(
        Labels(LABELS, LABELS[:30], 3, np.arange(60) % 3, np.arange(30) % 3), Rule(3, "natural", 5, 1.0)
    )
    _, found = of("data.client_noise=.1", partition=partition)
    for client in range(3):
        noise = found.changed(IMAGES["test"], "test", partition.test[client]).astype(float) - 128
        assert noise.std() == pytest.approx(255 * found.noise_std_M[client], rel=0.02)
        assert abs(noise.mean()) < 0.5
    assert (IMAGES["test"] == 128).all()


def test_an_image_is_changed_alike_wherever_it_comes():
    """Alone or among others, held out or not, of one client or of all clients' pool."""
    partition, found = of("data.client_rotation=30", "data.client_noise=.2")
    index = partition.train[1]
    together = found.changed(IMAGES["train"], "train", index)
    assert np.array_equal(found.changed(IMAGES["train"], "train", index[4:5]), together[4:5])
    assert not np.array_equal(together, IMAGES["train"][index])
    pool = pooled(partition).train[0]
    assert np.array_equal(found.changed(IMAGES["train"], "train", pool)[np.isin(pool, index)], together)
    other, held = of("data.client_rotation=30", "data.client_noise=.2", val_fraction=0.5)
    assert len(other.val[1]) == len(index) // 2
    expected = together[np.isin(index, other.val[1])]
    assert np.array_equal(held.changed(IMAGES["train"], "train", other.val[1]), expected)


@pytest.mark.parametrize("shape, dtype", [((60, 3, 8, 8), np.float32), ((60, 7), np.uint8)])
def test_what_is_no_image_of_8_bits_is_rejected(shape, dtype):
    with pytest.raises(UsageError, match="data.client_noise=0.1: changes images of 8 bits; data.name=fmnist has"):
        of("data.client_noise=.1", images={"train": np.zeros(shape, dtype), "test": np.zeros(shape, dtype)})
