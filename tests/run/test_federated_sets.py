"""A LEAF folder of 100 writers, trained with ten of them on any number of ranks; and its partition as a file."""

from __future__ import annotations

import json

import pytest
import toy
from leaf_folder import femnist, save_leaf

from hkd_hpc.data.__main__ import main

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
