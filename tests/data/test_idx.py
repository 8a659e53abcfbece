"""MNIST, Fashion-MNIST and EMNIST from small files of their official form."""

from __future__ import annotations

import string

import numpy as np
import pytest
from idx_files import FOLDERS, as_idx, parts, save_emnist, save_mnist

from hkd_hpc.common.errors import UsageError
from hkd_hpc.data import idx, sources


@pytest.mark.parametrize("ending", [".gz", ""])
@pytest.mark.parametrize("name", FOLDERS)
def test_mnist_and_fashion_mnist_gzipped_or_not(tmp_path, name, ending):
    data, expected = sources.load(name, save_mnist(tmp_path, name, ending), ""), parts(10)
    assert np.array_equal(data.x_train[:, 1, 2:30, 2:30], expected["x_train"])
    assert np.array_equal(data.x_test[:, 0, 2:30, 2:30], expected["x_test"])
    assert data.y_train.tolist() == [*range(10)] * 2
    assert data.classes == 10


@pytest.mark.parametrize("split", idx.EMNIST_CLASSES)
def test_each_split_of_emnist_is_upright_and_labelled_from_0(tmp_path, split):
    data = sources.load(f"emnist_{split}", save_emnist(tmp_path, split), "")
    classes = len(idx.EMNIST_CLASSES[split])
    assert np.array_equal(data.x_train[:, 0, 2:30, 2:30], parts(classes)["x_train"])
    assert data.y_train.tolist() == [*range(classes)] * 2
    assert data.y_test.tolist() == [*range(classes)]


def test_emnists_classes_are_torchvisions():
    datasets = pytest.importorskip("torchvision.datasets")
    for split, names in datasets.EMNIST.classes_split_dict.items():
        assert idx.EMNIST_CLASSES[split] == [name for name in names if name != "N/A"]
    assert len(idx.EMNIST_CLASSES["balanced"]) == 47
    assert "".join(idx.EMNIST_CLASSES["letters"]) == string.ascii_lowercase


@pytest.mark.parametrize(
    "content, told",
    [
        (b"\0\0\x08\x01\0\0\0\x02ab", "begins with 00000801, an IDX file of 3 axes with 00000803"),
        (as_idx(np.zeros((2, 28, 28)))[:-1], "has 1567 numbers, its head announces 1568"),
        (b"", "begins with , an IDX file"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, content, told):
    with pytest.raises(UsageError) as caught:
        sources.load("mnist", save_mnist(tmp_path, "mnist", x_test=content), "")
    assert str(caught.value).startswith(str(tmp_path / "MNIST/raw/t10k-images-idx3-ubyte.gz: truncated or not"))
    assert told in str(caught.value)


def test_what_is_cut_or_missing_is_one_line(tmp_path):
    file = save_mnist(tmp_path, "mnist") / "MNIST/raw/train-labels-idx1-ubyte.gz"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(UsageError, match="train-labels-idx1-ubyte.gz: truncated or not what its name says"):
        sources.load("mnist", tmp_path, "")
    file.unlink()
    with pytest.raises(UsageError, match="is missing; get it on a machine with internet: .* prepare mnist --dir"):
        sources.load("mnist", tmp_path, "")
    with pytest.raises(UsageError, match=r"gzip.zip: truncated or not what its name says \(.*emnist-digits-train"):
        sources.load("emnist_digits", save_emnist(tmp_path, "mnist"), "")
