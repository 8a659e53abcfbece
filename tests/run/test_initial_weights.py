"""Runs that begin with the weights of a file: the same on any number of ranks, resumed without it, and recorded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal

import pytest
import toy

from hkd_hpc import config
from hkd_hpc.config import identity
from hkd_hpc.export.models import export_model
from hkd_hpc.results import load
from hkd_hpc.store.folder import RunFolder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz", 120, 40, side=8)


def base(data, *more):
    """Without BatchNorm, whose statistics one round changes however small its steps are."""
    return toy.settings(data, "model.norm=group", *more)


@pytest.fixture(scope="module")
def first(tmp_path_factory, data):
    """A run of one round, and the export of its global model."""
    folder = tmp_path_factory.mktemp("first")
    toy.train_ok(1, *base(data, "fed.rounds=1"), "--out", folder / "run")
    export_model(folder / "run", folder / "start.pt", None)
    return folder


def arguments(data, start, *more):
    """FedMD's clients keep their weights at home: they too begin with the file's."""
    return base(data, f"model.init={start}", "scheme.name=fedmd", "data.fraction=.8", *more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data, first):
    folder = tmp_path_factory.mktemp("whole") / "run"
    toy.train_ok(1, *arguments(data, first / "start.pt"), "--out", folder)
    return folder


def test_a_run_begins_with_the_weights_of_an_export(tmp_path, data, first):
    """Steps of 1e-9 change no accuracy: the first round tests what the export was."""
    start = f"model.init={first / 'start.pt'}"
    toy.train_ok(1, *base(data, start, "train.lr=1e-9", "fed.rounds=1"), "--out", tmp_path / "run")
    again, before = (toy.metrics(path)["rounds/global_test_loss"][0] for path in (tmp_path / "run", first / "run"))
    assert again == pytest.approx(before, rel=1e-3)
    toy.train_ok(1, *base(data, "train.lr=1e-9", "fed.rounds=1"), "--out", tmp_path / "seeds")
    assert toy.metrics(tmp_path / "seeds")["rounds/global_test_loss"][0] > before + 0.01


def test_the_number_of_ranks_changes_nothing_and_a_killed_run_needs_no_file(tmp_path, data, first, whole):
    shutil.copy(first / "start.pt", tmp_path / "start.pt")
    folder = tmp_path / "run"

    def die(rank):
        toy.note_pid(tmp_path / "pids", 3)
        if rank == 1:
            toy.on_place(2, "weights", lambda: toy.kill_all(tmp_path / "pids"))

    toy.train(3, *arguments(data, tmp_path / "start.pt"), "--out", folder, patch=die)
    (tmp_path / "start.pt").unlink()
    toy.train_ok(2, "--resume", "--out", folder)
    assert toy.rows(folder) == toy.rows(whole)
    assert load(folder).identity["model.init"] == load(whole).identity["model.init"]


def test_a_client_that_joins_after_a_resume_without_the_file_begins_with_its_weights(tmp_path, data, first):
    """Of `local` 2 of 4 clients take part in round 1, the others in round 2."""
    shutil.copy(first / "start.pt", tmp_path / "start.pt")
    asked = base(
        data, f"model.init={tmp_path / 'start.pt'}", "scheme.name=local", "fed.clients=4", "fed.participation=.5"
    )
    toy.train_ok(1, *asked, "--out", tmp_path / "straight")
    stop = lambda rank: toy.on_place(1, "training", lambda: os.kill(os.getpid(), signal.SIGUSR1))
    toy.train(1, *asked, "--out", tmp_path / "run", patch=stop)
    (tmp_path / "start.pt").unlink()
    outputs = toy.train_ok(2, "--resume", "--out", tmp_path / "run")
    assert "resuming after round 1" in outputs[0]
    assert toy.rows(tmp_path / "run") == toy.rows(tmp_path / "straight")
    kept, expected = (toy.checkpoint(tmp_path / name, 2) for name in ("run", "straight"))
    for client in range(4):
        name = f"client_states/{client}/model"
        assert kept[name].tobytes() == expected[name].tobytes()


def test_the_hash_of_the_file_is_recorded_and_a_changed_one_is_another_run(tmp_path, data, first, whole):
    start = first / "start.pt"
    assert load(whole).identity["model.init"] == hashlib.sha256(start.read_bytes()).hexdigest()
    settings = config.resolve(overrides=arguments(data, start))
    assert identity.other_run(RunFolder(whole), settings) == ""
    (tmp_path / "other.pt").write_bytes(b"other")
    record = {"identity_json": json.dumps({"model.init": "ab" * 32})}
    other = config.resolve(overrides=arguments(data, tmp_path / "other.pt"))
    sha256 = hashlib.sha256(b"other").hexdigest()
    assert identity.other_start(record, other) == f"model.init: stored abababab, now {sha256[:8]}"
    assert identity.other_start({}, other) == ""


def test_a_file_that_changed_is_told_on_resume(tmp_path, data, first):
    shutil.copy(first / "start.pt", tmp_path / "start.pt")
    folder = tmp_path / "run"
    stop = lambda rank: toy.on_place(1, "training", lambda: os.kill(os.getpid(), signal.SIGUSR1))
    toy.train(1, *arguments(data, tmp_path / "start.pt"), "--out", folder, patch=stop)
    before = load(folder).identity["model.init"]
    (tmp_path / "start.pt").write_bytes(b"other")
    [output] = toy.train_ok(1, "--resume", "--out", folder)
    assert "warning: the file of model.init is another one now" in output
    assert load(folder).identity["model.init"] == before


@pytest.mark.parametrize("name", ["absent.pt", "data.npz"])
def test_a_file_that_is_none_is_one_line_and_nothing_is_left(tmp_path, data, name):
    results = toy.train(2, *arguments(data, data.parent / name), "--out", tmp_path / "run")
    assert [result.exit_code for result in results] == [2, 2]
    [line] = toy.our_lines(result.output for result in results)
    assert line.startswith(f"hkd_hpc: model.init={data.parent / name}: ")
    assert not (tmp_path / "run").exists()
