"""`python -m hkd_hpc.data show` and `partition`, in this process."""

from __future__ import annotations

import json

import numpy as np
import pytest
import toy

from hkd_hpc.analysis.distances import total_variation_M
from hkd_hpc.commands.data import main


@pytest.fixture(scope="module")
def natural(tmp_path_factory):
    """Clients of 8, 4, 2 images of classes 0 1 2 ... 9 0 1 2 3."""
    return toy.save_natural(tmp_path_factory.mktemp("natural") / "data.npz", (8, 4, 2))


def told(capsys, *words: object) -> list[str]:
    assert main(["show", *map(str, words)]) == 0
    return capsys.readouterr().out.splitlines()


def test_total_variation_by_hand():
    """Of all, half are of class 0 and half of class 1."""
    count_MC = np.array([[4, 0], [0, 2], [1, 1], [0, 2], [0, 0]])
    assert total_variation_M(count_MC)[:4].tolist() == [0.5, 0.5, 0, 0.5]
    assert np.isnan(total_variation_M(count_MC)[4])


def test_show_says_who_has_what_and_how_far_apart(capsys, natural):
    """Of all, 2/14 are of each class 0..3 and 1/14 of the others; client 0 has 1/8 of 0..7: (4 + 12 + 8) / 56 / 2."""
    found = told(capsys, "data.name=file", f"data.path={natural}", "data.partition=natural", "data.fraction=1")
    assert found[0] == "file: 3 clients, natural, partition's seed 0"
    rows = [line.split() for line in found if line[:6].strip().isdigit()]
    assert rows[0] == ["0", "8", "0", "10", *"1111111100", "0.214"]
    assert rows[2] == ["2", "2", "0", "10", *"0011000000", "0.714"]
    assert found[-2] == "training images of a client: 2 to 8, median 4"
    assert found[-1].startswith("distance of a client's class mix from that of all: mean 0.500, largest 0.714 (total")


def test_show_names_the_chosen_clients_and_what_is_done_to_them(capsys, natural):
    found = told(
        capsys,
        *("data.name=file", f"data.path={natural}", "data.partition=natural", "fed.clients=2", "data.min_images=4"),
        *("data.client_rotation=10", "data.client_noise=.1"),
    )
    assert "data: 1 client with fewer than 4 images left out" in found
    assert found[0].startswith("file: 2 clients, natural, turned by up to 10 degrees, noise up to 0.1, partition")
    assert next(line for line in found if "client  train" in line).split()[-3:] == ["distance", "turned", "noise"]


@pytest.mark.parametrize("ending, head", [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_show_draws_it(capsys, tmp_path, ending, head):
    out = tmp_path / f"p{ending}"
    assert told(capsys, "fed.clients=3", "--out", out)[-1] == f"{out}: clients x classes"
    assert out.read_bytes().startswith(head)


def test_a_partition_goes_out_and_comes_back(capsys, tmp_path):
    path = tmp_path / "p.json"
    settings = ("fed.clients=3", "data.partition=quantity", "run.seed=4")
    assert main(["partition", *settings, "--out", str(path)]) == 0
    before, after = (
        told(capsys, *words) for words in (settings, ("data.partition=file", f"data.partition_file={path}"))
    )
    assert after[-6:] == before[-6:]
    assert json.loads(json.loads(path.read_text())["settings_json"])["data"]["partition"] == "quantity"
    assert main(["partition", *settings, "--out", str(path)]) == 2
    assert "is there already; name another file, or add --force" in capsys.readouterr().err
    assert main(["partition", *settings, "--out", str(path), "--force"]) == 0


@pytest.mark.parametrize(
    "words, told",
    [
        (["show", "--out", "x.gif"], "--out x.gif: found the ending '.gif', allowed are .pdf, .svg, .png"),
        (["show", "--out", "none/x.png"], "--out none/x.png: there is no folder none"),
        (["partition", "--out", "none/x.npz"], "--out none/x.npz: there is no folder none"),
        (["show", "data.nme=x"], "data.nme"),
        (["partition"], "the following arguments are required: --out"),
        (["partition", "--out", "x.txt"], "--out x.txt: found the ending '.txt', allowed are .npz and .json"),
        (["show", "data.partition=file", "data.partition_file=none.npz"], "none.npz: there is no such file"),
        (["sho"], "argument command: invalid choice: 'sho'"),
    ],
)
def test_wrong_words_are_one_line(capsys, words, told):
    assert main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert told in line
