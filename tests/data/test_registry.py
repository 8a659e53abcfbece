"""The entries of the data sets: what they name exists, and what they say of files and sizes is so."""

from __future__ import annotations

from pathlib import Path

import pytest

from hkd_hpc import config
from hkd_hpc.data import sources
from hkd_hpc.data.registry import SOURCES, Sizes
from hkd_hpc.runtime.own_code import load_object


@pytest.mark.parametrize("source", SOURCES.values(), ids=lambda source: source.name)
def test_every_function_that_an_entry_names_exists(source):
    named = [source.read, source.check, source.sizes]
    for address in named:
        if isinstance(address, str) and address:
            assert callable(load_object(address, source.name)), address


@pytest.mark.parametrize("source", SOURCES.values(), ids=lambda source: source.name)
def test_every_entry_lies_in_one_place(source):
    assert [bool(source.bundled), bool(source.downloads), source.is_own].count(True) == 1
    assert bool(source.needs and source.path_help) == source.is_own


def test_files_of_each_kind():
    assert SOURCES["cifar100"].files("d", "p") == [Path("d/cifar-100-python/train"), Path("d/cifar-100-python/test")]
    assert SOURCES["svhn"].files("d", "p") == [Path("d/train_32x32.mat"), Path("d/test_32x32.mat")]
    assert SOURCES["file"].files("d", "p.h5") == [Path("p.h5")]
    assert SOURCES["fmnist"].files("d", "p") == [Path(sources.__file__).with_name("fmnist.h5")]


def test_known_sizes_are_those_of_the_files():
    data = sources.load("fmnist", "", "")
    assert SOURCES["fmnist"].sizes == Sizes(len(data.x_train), len(data.x_test), data.classes, data.x_train.shape[1:])


def test_settings_and_their_help_follow_the_entries():
    text = config.help_text()
    assert "(one of fmnist, cifar10, cifar100, svhn, mnist, fashion_mnist, emnist_byclass, " in text
    assert "folder of the official files of cifar10, cifar100, svhn, mnist, fashion_mnist, " in text
    assert "data.name=file: an .npz or .h5 with x_train y_train x_test y_test, a .csv or .parquet of rows;" in text
    assert "; data.name=folder: a folder with" in text
