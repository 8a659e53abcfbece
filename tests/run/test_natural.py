"""Runs with the data's own clients: how many there are is read from the file, and names stay names."""

from __future__ import annotations

import json

import numpy as np
import pytest
import toy

from hkd_hpc import config
from jobs import Sweep

WRITERS = ("Zoë", "ann", "bob")  # in the order of their characters
SIZES = (24, 1, 30)
LABELS = tuple("jihgfedcba")  # class 0 of the numbers is "j", the last of the names


def save(path, named: bool):
    """Ten classes; the same images with writers and labels as text, or as the numbers that these get."""
    ids, test_ids = np.repeat(range(3), SIZES), np.repeat(range(3), 10)
    labels, test_labels = np.arange(sum(SIZES)) % 10, np.arange(30) % 10
    if not named:
        more = dict(client_train=ids, client_test=test_ids, y_train=9 - labels, y_test=9 - test_labels)
    else:
        more = dict(
            client_train=np.array(WRITERS)[ids],
            client_test=np.array(WRITERS)[test_ids],
            y_train=np.array(LABELS)[labels],
            y_test=np.array(LABELS)[test_labels],
        )
    return toy.save_data(path, sum(SIZES), 30, **more)


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    return save(tmp_path_factory.mktemp("named") / "data.npz", True)


def arguments(data, *more: str) -> list[str]:
    settings = toy.settings(data, "data.partition=natural", "scheme.name=fedavg", *more)
    return [word for word in settings if word != "fed.clients=3"]


def test_names_and_their_number_come_from_the_file_and_are_kept(tmp_path, named):
    """The bits are those of a run with numbers in their place; the number is stored, so that a resume has it too."""
    output = "\n".join(toy.train_ok(2, *arguments(named), "fed.rounds=1", "--out", tmp_path / "named"))
    assert "3 clients, natural" in output
    assert "warning: clients [1] (ann) have too few images to train; they take part with weight 0" in output
    assert json.loads((tmp_path / "named/config.json").read_text())["fed"]["clients"] == 3
    toy.train_ok(1, "--resume", "--allow-change", *arguments(named), "fed.rounds=2", "--out", tmp_path / "named")
    found = toy.metrics(tmp_path / "named")
    assert found["clients/name"].tolist() == list(WRITERS)
    assert found["partition/class_name"].tolist() == sorted(LABELS)
    numbers = save(tmp_path / "numbers.npz", False)
    toy.train_ok(1, *arguments(numbers), "fed.clients=3", "--out", tmp_path / "numbers")
    assert toy.last_sha(tmp_path / "numbers") == toy.last_sha(tmp_path / "named")
    assert not {"clients/name", "partition/class_name"} & set(toy.metrics(tmp_path / "numbers"))


def test_a_dry_run_shows_names_and_counts(named):
    (output,) = toy.train_ok(1, *arguments(named), "--dry-run")
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert (
        "images: 55 in the training split, 30 in the test split, 10 classes; assigned: 55 training, 30 local tests"
        in lines
    )
    assert "classes: 0 a, 1 b, 2 c, 3 d, 4 e, 5 f, 6 g, 7 h, 8 i, 9 j" in lines
    assert "1 0 1 0 10 0 0 0 0 0 1 0 0 0 0 ann" in lines  # its one image is the 25th: label 24 % 10, "f"


@pytest.mark.parametrize(
    "more, words",
    [
        (("fed.clients=4",), "fed.clients=4: client_train names 3 clients; set fed.clients=3"),
        ((), "key client_train is missing; data.partition=natural needs a client id for each image in it"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(tmp_path, named, more, words):
    data = named if more else toy.save_data(tmp_path / "data.npz")
    (result,) = toy.train(1, *arguments(data), *more, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert words in result.output
    assert not (tmp_path / "run").exists()


def test_a_preset_speaks_of_other_clients(named):
    given, _ = config.collect(["cifar10"], None, arguments(named))
    assert "fed.clients" not in given
    assert config.collect(["cifar10"], None, arguments(named, "fed.clients=7"))[0]["fed.clients"] == "7"


def test_a_sweep_counts_them_too(named):
    trials, problems = Sweep(seed=[0, 1], overrides=arguments(named)).trials()
    assert not problems
    assert [trial.settings["fed.clients"] for trial in trials] == [3, 3]
    trials, problems = Sweep(seed=[0], overrides=arguments(named.with_name("none.npz"))).trials()
    assert not trials
    assert "there is no such file" in problems[0]
