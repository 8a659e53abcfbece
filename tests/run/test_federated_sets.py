"""A LEAF folder of 100 writers, trained with ten of them on any number of ranks; and its partition as a file."""

from __future__ import annotations

import json

import pytest
import toy
from leaf_folder import femnist, save_leaf

from hkd_hpc.commands.data import main

SETTINGS = ("data.name=leaf", "data.partition=natural", "data.client_rotation=20", "data.client_noise=.1")


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    """(the folder, what each of two runs on 1 and 3 ranks said, the runs' folders)."""
    root = tmp_path_factory.mktemp("leaf")
    folder = save_leaf(root / "femnist", femnist(100))
    runs = {ranks: root / f"run{ranks}" for ranks in (1, 3)}
    settings = [*toy.SMALL, *SETTINGS, f"data.path={folder}", "fed.clients=10", "scheme.name=fedhkd"]
    said = {ranks: "\n".join(toy.train_ok(ranks, *settings, "--out", run)) for ranks, run in runs.items()}
    return folder, said, runs


def test_the_bits_are_the_same_on_1_and_3_ranks(writers):
    _, _, runs = writers
    assert toy.rows(runs[1])["rounds/weights_sha256"] == toy.rows(runs[3])["rounds/weights_sha256"]
    assert toy.rows(runs[1]) == toy.rows(runs[3])


def test_ten_of_the_writers_are_chosen_and_keep_their_names(writers):
    _, said, runs = writers
    assert "data: 10 of 100 clients chosen (seed 0)" in said[3]
    found = toy.metrics(runs[3])
    names = found["clients/name"].tolist()
    assert len(set(names)) == 10
    assert all(name[0] == "f" and name[5] == "_" for name in names)
    assert found["partition/train_count"].shape == (10, 62)
    assert abs(found["partition/rotation_deg"]).max() <= 20
    assert found["partition/noise_std"].shape == (10,)


def test_the_partition_as_a_file_is_the_runs(writers, tmp_path):
    folder, _, runs = writers
    out = tmp_path / "p.json"
    words = [*SETTINGS, f"data.path={folder}", "fed.clients=10", "data.fraction=1", "--out", str(out)]
    assert main(["partition", *words]) == 0
    written, found = json.loads(out.read_text()), toy.metrics(runs[1])
    assert written["sha256"] == found["partition/sha256"]
    assert written["client_name"] == found["clients/name"].tolist()
    from_file = [*toy.SMALL, *SETTINGS, f"data.path={folder}", "data.partition=file", f"data.partition_file={out}"]
    from_file = [word for word in from_file if word not in ("fed.clients=3", "data.partition=natural")]
    toy.train_ok(2, *from_file, "scheme.name=fedhkd", "fed.rounds=1", "--out", tmp_path / "run")
    again = toy.metrics(tmp_path / "run")
    assert again["rounds/weights_sha256"][0] == found["rounds/weights_sha256"][0]
    assert again["clients/name"].tolist() == found["clients/name"].tolist()


def test_a_partition_of_other_data_ends_with_one_line_and_nothing_written(writers, tmp_path):
    out = tmp_path / "p.npz"
    assert main(["partition", "fed.clients=3", "--out", str(out)]) == 0
    data = toy.save_data(tmp_path / "data.npz")
    settings = toy.settings(data, "data.partition=file", f"data.partition_file={out}")
    results = toy.train(2, *settings, "--out", tmp_path / "run")
    assert [result.exit_code for result in results] == [2, 2]
    assert toy.our_lines(result.output for result in results) == [
        f"hkd_hpc: data.partition_file={out}: it divides 5000 + 1000 images, the data have 300 + 100"
    ]
    assert not (tmp_path / "run").exists()
