"""MedMNIST's .npz as it is downloaded: train_images, train_labels, val_images ... test_labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hkd_hpc.common.errors import UsageError
from hkd_hpc.data import sources
from hkd_hpc.data.settings import DataSettings
from hkd_hpc.data.sizes import sizes_of


def save(path: Path, shape: tuple[int, ...] = (28, 28), columns: int = 1) -> Path:
    """Eight training images of four classes, four for validation, four to test; labels in a column, as there."""
    random = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 8), ("val", 4), ("test", 4)):
        arrays[f"{split}_images"] = random.integers(0, 256, (count, *shape), np.uint8)
        arrays[f"{split}_labels"] = np.repeat(np.arange(count, dtype=np.uint8)[:, None] % 4, columns, 1)
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("shape", [(28, 28), (28, 28, 3), (64, 64, 3)])
def test_grey_and_rgb_of_any_size(tmp_path, shape):
    path = save(tmp_path / "bloodmnist.npz", shape)
    data = sources.load("file", "", path)
    side = max(32, shape[0])
    assert data.x_train.shape == (8, 3, side, side)
    assert data.y_train.tolist() == [0, 1, 2, 3] * 2
    assert data.y_test.tolist() == [0, 1, 2, 3]
    with np.load(path) as file:
        raw = file["test_images"]
    border = (side - shape[0]) // 2
    inner = data.x_test[:, 0, border : border + shape[0], border : border + shape[0]]
    assert np.array_equal(inner, raw if raw.ndim == 3 else raw[..., 0])
    assert "not read: key val_images, val_labels" in data.remarks
    found = sizes_of(DataSettings("file", path=str(path)))
    assert (found.train, found.test, found.classes, found.shape) == (8, 4, 4, (3, side, side))


def test_what_has_several_labels_or_three_dimensions_is_one_line(tmp_path):
    """ChestMNIST has 14 labels an image; the 3D sets have volumes."""
    with pytest.raises(UsageError, match=r"key y_train: found shape \(8, 14\), allowed is \(8,\)"):
        sources.load("file", "", save(tmp_path / "chestmnist.npz", columns=14))
    with pytest.raises(UsageError, match=r"found shape \(8, 28, 28, 28\), which is not an image shape"):
        sources.load("file", "", save(tmp_path / "organmnist3d.npz", (28, 28, 28)))


def test_a_file_without_its_test_split_is_one_line(tmp_path):
    path = tmp_path / "cut.npz"
    np.savez(path, train_images=np.zeros((2, 28, 28), np.uint8), train_labels=np.arange(2)[:, None])
    with pytest.raises(UsageError, match="key x_test, y_test is missing"):
        sources.load("file", "", path)
