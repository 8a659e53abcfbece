"""Augmentation: crops and mirror images by hand and by NumPy, and what is drawn for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hkd_hpc.common import rng
from hkd_hpc.models.augmentation import NAMES, Augmentation, augmentation

IMAGE = torch.tensor([[[[1, 2, 3], [4, 5, 6], [7, 8, 9]]]], dtype=torch.uint8)


@pytest.mark.parametrize(
    "drawn, black, reflected",
    [
        ([0, 0, 0], [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        ([0, 0, 1], [[3, 2, 1], [6, 5, 4], [9, 8, 7]], [[3, 2, 1], [6, 5, 4], [9, 8, 7]]),
        ([-1, 0, 0], [[0, 0, 0], [1, 2, 3], [4, 5, 6]], [[4, 5, 6], [1, 2, 3], [4, 5, 6]]),
        ([1, -1, 0], [[0, 4, 5], [0, 7, 8], [0, 0, 0]], [[5, 4, 5], [8, 7, 8], [5, 4, 5]]),
        ([0, 1, 1], [[0, 3, 2], [0, 6, 5], [0, 9, 8]], [[2, 3, 2], [5, 6, 5], [8, 9, 8]]),
    ],
)
def test_a_border_of_one_by_hand(drawn, black, reflected):
    """(row, column, mirrored): the crop is taken first, then mirrored."""
    drawn_B3 = torch.tensor([drawn])
    assert Augmentation(1, False)(IMAGE, drawn_B3)[0, 0].tolist() == black
    assert Augmentation(1, True)(IMAGE, drawn_B3)[0, 0].tolist() == reflected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("name, mode", [("crop_flip", "constant"), ("crop_flip_reflect", "reflect")])
def test_many_images_equal_numpys_padding(name, mode, dtype):
    images = np.random.default_rng(0).integers(0, 256, (64, 3, 9, 7), dtype=np.uint8)
    rule = augmentation(name, 4)
    drawn_B3 = rule.draw(rng.stream(0, "augment", 1, 2), 64)
    padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)), mode)
    crops = [image[:, y + 4 : y + 13, x + 4 : x + 11] for image, (y, x, _) in zip(padded, drawn_B3.tolist())]
    expected = [crop[:, :, ::-1] if mirrored else crop for crop, mirrored in zip(crops, drawn_B3[:, 2].tolist())]
    got = rule(torch.from_numpy(images).to(dtype), drawn_B3)
    assert got.dtype == dtype
    assert np.array_equal(got.numpy(), np.stack(expected))


def test_flip_moves_nothing_else():
    drawn_N3 = augmentation("flip", 4).draw(rng.stream(0, "augment", 1, 0), 200)
    assert drawn_N3[:, :2].unique().tolist() == [0]
    assert 60 < int(drawn_N3[:, 2].sum()) < 140
    assert augmentation("flip", 4)(IMAGE, torch.tensor([[0, 0, 1]]))[0, 0].tolist() == [[3, 2, 1], [6, 5, 4], [9, 8, 7]]


def test_every_crop_is_drawn_about_as_often_as_any_other():
    drawn_N3 = augmentation("crop_flip", 4).draw(rng.stream(0, "augment", 1, 0), 9 * 9 * 100)
    count = np.bincount(((drawn_N3[:, 0] + 4) * 9 + drawn_N3[:, 1] + 4).numpy(), minlength=81)
    assert len(count) == 81
    assert 60 < count.min() <= count.max() < 140


def test_none_is_no_augmentation():
    assert augmentation("none", 4) is None
    assert all(augmentation(name, 4) for name in NAMES if name != "none")
