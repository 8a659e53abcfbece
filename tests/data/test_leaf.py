"""LEAF's folders: what is read, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from leaf_folder import save_leaf

from hkd_hpc.common.errors import UsageError
from hkd_hpc.data import leaf, sources
from hkd_hpc.data.settings import DataSettings

DARK, LIGHT = [0.0] * 784, [1.0] * 783 + [0.2]


def small(**changes) -> dict:
    """Writers zoe, ann and bob, of classes 3, 7 and 9."""
    splits = {
        "train": {"zoe": ([DARK, LIGHT], [3, 7]), "ann": ([LIGHT], [9]), "bob": ([], [])},
        "test": {"zoe": ([LIGHT], [7]), "ann": ([DARK], [9])},
    }
    return splits | changes


def read(folder: Path) -> sources.DataSet:
    return sources.load("leaf", "", folder)


def test_images_labels_and_writers(tmp_path):
    data = read(save_leaf(tmp_path / "leaf", small()))
    assert data.x_train.shape == (3, 3, 32, 32)
    assert data.x_train[1, 0, 2:30, 2:30].reshape(-1)[-2:].tolist() == [255, 51]
    assert data.y_train.tolist() == [0, 1, 2]
    assert data.class_names == ("3", "7", "9")
    assert data.client_names == ("ann", "zoe")
    assert data.client_train.tolist() == [1, 1, 0]
    assert data.client_test.tolist() == [1, 0]
    assert data.y_test.tolist() == [1, 2]


def test_users_are_counted_from_the_heads(tmp_path):
    folder = save_leaf(tmp_path / "leaf", small())
    assert leaf.read_users(folder).tolist() == ["zoe", "zoe", "ann"]
    assert sources.natural_clients(DataSettings("leaf", path=str(folder))) == 2
    [file] = (folder / "train").iterdir()
    content = json.loads(file.read_text())
    file.write_text(json.dumps({"user_data": content.pop("user_data"), **content}))
    assert leaf.read_users(folder).tolist() == ["zoe", "zoe", "ann"]


def test_a_split_by_user_leaves_local_tests_to_the_training_samples(tmp_path):
    data = read(save_leaf(tmp_path / "leaf", small(test={"max": ([DARK], [3])})))
    assert data.client_test is None
    assert "test/ has users of its own" in data.remarks[0]


def test_texts_become_the_numbers_of_leafs_alphabet(tmp_path):
    """letter_to_vec of LEAF's language_utils: the index in ALL_LETTERS, 80 of them."""
    assert len(leaf.ALPHABET) == 80
    splits = {"train": {"ROMEO": (["\n }a", "Juli"], ["e", "\n"])}, "test": {"ROMEO": (["abcd"], ["e"])}}
    data = read(save_leaf(tmp_path / "leaf", splits))
    assert data.x_train.dtype == np.int64
    assert data.x_train.tolist() == [[0, 1, 79, 53], [34, 73, 64, 61]]
    assert data.class_names == ("\\n", "e")
    assert data.y_test.tolist() == [1]


def test_other_numbers_are_rows(tmp_path):
    splits = {"train": {"a": ([[0.5, -1, 2], [1, 2, 3]], [0, 1])}, "test": {"a": ([[1, 1, 1]], [0])}}
    data = read(save_leaf(tmp_path / "leaf", splits))
    assert data.x_train.dtype == np.float32
    assert data.x_train.tolist() == [[0.5, -1, 2], [1, 2, 3]]


# ---- what is wrong


@pytest.mark.parametrize(
    "train, told",
    [
        ({"a": ([[2.0] * 784], [0])}, "user a: pixels must be numbers 0..1, found 2..2"),
        ({"a": ([[float("nan")] * 784], [0])}, "user a: pixels must be numbers 0..1, found nan..nan"),
        ({"a": ([["x"] * 784], [0])}, "user a: x must be lists of equally many numbers, or texts"),
        ({"a": ([[1, 2], [1]], [0, 1])}, "user a: x must be lists of equally many numbers, or texts"),
        ({"a": (["ab", "a"], ["b", "c"])}, "user a: texts must have one length; LEAF's Shakespeare has 80"),
        ({"a": (["ä"], ["b"])}, "user a: the character 'ä' is not in LEAF's alphabet of 80"),
        ({"a": ([DARK], [0.5])}, "user a: y must be whole numbers, or texts, one for each sample"),
        ({"a": ([DARK, DARK], [[1], [1, 2]])}, "user a: y must be whole numbers, or texts, one for each sample"),
        ({"a": ([DARK], [0]), "b": ([[1, 2]], [1])}, "the x of user b are float32 (2,), those of a uint8 (28, 28)"),
        ({"a": ([DARK], [0])}, "test/ has the label 7, which no sample of train/ has"),
        ({}, "train: holds no sample"),
    ],
)
def test_wrong_samples_are_one_line(tmp_path, train, told):
    folder = save_leaf(tmp_path / "leaf", small(train=train))
    if not train:
        (folder / "train/none.json").write_text('{"users": [], "num_samples": [], "user_data": {}}')
    with pytest.raises(UsageError) as caught:
        read(folder)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "content, told",
    [
        ("{", "truncated or not what its name says"),
        ("[]", "truncated or not what its name says"),
        ('{"users": ["a"], "num_samples": [1]}', "key user_data is missing; LEAF's are users, num_samples, user_data"),
        ('{"users": ["a"], "num_samples": [1], "user_data": {}}', "user a: user_data has no x and y of it"),
        (
            '{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": 5, "y": null}}}',
            "user a: x and y must be lists, one entry for each sample",
        ),
        (
            '{"users": ["a"], "num_samples": ["1"], "user_data": {}}',
            "(num_samples must have one whole number for each of users)",
        ),
        (
            '{"users": ["a", "b"], "num_samples": [1], "user_data": {}}',
            "(num_samples must have one whole number for each of users)",
        ),
        (
            '{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[1]], "y": [1]}}}',
            "user a: 1 x and 1 y, num_samples says 2",
        ),
        (
            '{"users": ["zoe"], "num_samples": [1], "user_data": {"zoe": {"x": [[1]], "y": [1]}}}',
            "user zoe is in another file of train/ too",
        ),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, content, told):
    folder = save_leaf(tmp_path / "leaf", small())
    (folder / "train/more.json").write_text(content)
    with pytest.raises(UsageError) as caught:
        read(folder)
    assert str(caught.value).startswith(str(folder / "train/more.json"))
    assert told in str(caught.value)


def test_what_is_no_such_folder_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="there is no such folder"):
        read(tmp_path / "none")
    (tmp_path / "train").mkdir()
    with pytest.raises(UsageError, match=r"train: holds no .json file; data.name=leaf needs DIR/train/"):
        read(tmp_path)
