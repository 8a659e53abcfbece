"""Early stopping on validation images: where it ends, on any number of ranks, killed and resumed; and targets."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import toy

from hkd_hpc import check, config
from hkd_hpc.commands.data import main as data_command
from hkd_hpc.config import identity
from hkd_hpc.results import load
from hkd_hpc.store.folder import RunFolder

LAST = 5  # steps of 1e-9 change no accuracy: no better one in rounds 2 and 3, of which patience ends
TEXT = "no better {} accuracy on validation images in 2 tests after round 1 ({:.3f})"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz", 120, 40, side=8)


def arguments(data, *more):
    """Without BatchNorm, whose statistics would go on changing."""
    patience = ("run.stop_patience=2", "data.val_fraction=.2", "run.target_accuracy=.02")
    return toy.settings(data, "fed.rounds=9", "train.lr=1e-9", "model.norm=group", *patience, *more)


@pytest.fixture(scope="module")
def early(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("early") / "run"
    outputs = toy.train_ok(1, *arguments(data), "--out", folder)
    return folder, outputs[0]


def test_it_ends_as_a_complete_run_that_says_so(early):
    folder, output = early
    found, run = toy.metrics(folder), load(folder)
    assert found["rounds/round"].tolist() == [1, 2, 3, 4, 5]
    why = TEXT.format("global", found["rounds/global_val_accuracy"][0])
    assert f"{why}; round {LAST} is the last" in output
    assert run.summary["stopped_early"] == f"stopped early after round {LAST} of 9: {why}"
    assert output.count(why) == 2
    assert run.state == "complete"
    assert found["rounds/global_test_n"].tolist() == [40] * 5
    assert run.confusion.sum() == 40
    kept = {name.split("/")[1] for name in toy.checkpoint(folder, LAST) if name.startswith("client_states/")}
    assert kept == {"0", "1", "2"}  # their own models
    assert run.model(client=1) is not None
    assert check.main([str(folder)]) == 0


def test_its_rows_are_the_first_of_a_run_without_patience(tmp_path, early, data):
    toy.train_ok(1, *arguments(data, "run.stop_patience=0", "fed.rounds=5"), "--out", tmp_path / "run")
    assert toy.rows(tmp_path / "run") == toy.rows(early[0])


def test_the_other_accuracy_and_tests_every_other_round(tmp_path, data):
    """Tested are 2, 4 and 6: no better in 4 and 6; the local one is there in every round."""
    toy.train_ok(1, *arguments(data, "run.evaluate_every=2"), "--out", tmp_path / "global")
    assert toy.rounds_done(tmp_path / "global") == 8
    assert toy.metrics(tmp_path / "global")["rounds/global_test_n"].tolist() == [0, 40] * 4
    toy.train_ok(1, *arguments(data, "run.evaluate_every=2", "run.stop_on=local"), "--out", tmp_path / "local")
    assert toy.rounds_done(tmp_path / "local") == LAST
    assert toy.metrics(tmp_path / "local")["rounds/global_test_n"].tolist() == [0, 40, 0, 40, 40]


PLACES = {
    "when patience has ended": ((4, "weights"), 3, 2),
    "after the last": ((5, "final evaluation"), 3, 1),
}


@pytest.mark.parametrize("name", PLACES)
def test_killed_and_resumed_on_other_ranks_it_ends_where_it_would_have(tmp_path, early, data, name):
    place, before, after = PLACES[name]

    def die(rank):
        toy.note_pid(tmp_path / "pids", before)
        if rank == 0:
            toy.on_place(*place, lambda: toy.kill_all(tmp_path / "pids"))

    toy.train(before, *arguments(data), "--out", tmp_path / "run", patch=die)
    assert not load(tmp_path / "run").summary
    toy.train_ok(after, "--resume", "--out", tmp_path / "run")
    assert toy.rows(tmp_path / "run") == toy.rows(early[0])
    assert load(tmp_path / "run").summary["stopped_early"] == load(early[0]).summary["stopped_early"]


def test_a_run_that_stopped_early_is_left_alone(tmp_path, early, data):
    folder = shutil.copytree(early[0], tmp_path / "run")
    before = toy.file_hashes(folder)
    [output] = toy.train_ok(1, "--resume", "--out", folder)
    assert output.endswith(f"{folder}: already complete (5 rounds, stopped early); nothing to do\n")
    [result] = toy.train(1, "--resume", "--out", folder, "--allow-change", "fed.rounds=20")
    assert result.exit_code == 2
    assert toy.our_lines([result.output]) == [
        f"hkd_hpc: --allow-change: fed.rounds: {folder} is already complete (5 rounds, stopped early); it does not go "
        "on, start another run"
    ]
    assert toy.file_hashes(folder) == before
    assert identity.other_run(RunFolder(folder), config.resolve(overrides=arguments(data))) == ""
    [result] = toy.train(1, "--resume", "--out", folder, "--allow-change", "run.stop_patience=3")
    assert result.exit_code == 2
    assert "run.stop_patience cannot change within a run" in result.output


def test_patience_needs_validation_images(tmp_path, data):
    [result] = toy.train(1, *arguments(data, "data.val_fraction=0"), "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert toy.our_lines([result.output]) == [
        "hkd_hpc: run.stop_patience=2: needs validation images; set data.val_fraction, which is 0"
    ]


def test_a_share_that_rounds_to_no_image_is_rejected(tmp_path, data):
    [result] = toy.train(1, *arguments(data, "data.val_fraction=0.001"), "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert toy.our_lines([result.output]) == [
        "hkd_hpc: run.stop_patience=2: no client has a validation image; raise data.val_fraction"
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("share, code", [("0.3", 0), ("0", 2)])
def test_the_validation_images_may_be_those_of_a_partition_file(tmp_path, data, share, code):
    made = toy.settings(data, f"data.val_fraction={share}", "--out", str(tmp_path / "p.npz"))
    assert data_command(["partition", *made]) == 0
    words = ("data.val_fraction=0", "data.partition=file", f"data.partition_file={tmp_path / 'p.npz'}", "--dry-run")
    [result] = toy.train(1, *arguments(data, *words))
    assert result.exit_code == code, result.output
    assert ("make data.partition_file anew with data.val_fraction" in result.output) == bool(code)


def test_a_target_is_told(early):
    """No accuracy changes: the local one is there in round 1, or never."""
    folder, output = early
    found, run = toy.metrics(folder), load(folder)
    assert found["rounds/local_test_accuracy"][0] >= 0.02
    payload = sum(values[0] for name, values in found.items() if name.startswith("rounds/payload_bytes/"))
    told = [run.summary[f"target_local_{name}"] for name in ("round", "payload_bytes", "wall_s")]
    assert told == [1, payload, found["rounds/wall_s"][0]]
    assert "reached 0.02: local in round 1 (" in output
    assert run.reached(0.02)["local"].round == 1
    assert np.isnan(run.reached(0.99)["global"].round)
