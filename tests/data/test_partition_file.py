"""A partition as a file: what is written is read back, by plain NumPy too, and what does not fit is one line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import snippets
import toy

from hkd_hpc import config
from hkd_hpc.common.errors import UsageError
from hkd_hpc.data import assigned, partition_file, sources
from hkd_hpc.data.partition import Partition

LABELS = np.arange(90) % 3
DATA = replace(sources.DataSet("file", 3, *(None,) * 4), y_train=LABELS, y_test=LABELS[:30])


def made(*overrides: str, data=DATA) -> Partition:
    settings = config.resolve(overrides=["fed.clients=4", *overrides])
    return assigned.partition_of(settings.data, settings.fed.clients, settings.partition_seed, data)


def save(path: Path, *overrides: str, data=DATA, **changes) -> Path:
    tree = assigned.exported("{}", made(*overrides, data=data), data)
    partition_file.write(path, {key: value for key, value in (tree | changes).items() if value is not None})
    return path


def read(path: Path, *overrides: str, data=DATA) -> Partition:
    return made("data.partition=file", f"data.partition_file={path}", *overrides, data=data)


@pytest.mark.parametrize("ending", [".npz", ".json"])
@pytest.mark.parametrize(
    "overrides",
    [
        ("data.val_fraction=.2", "data.public_fraction=.1"),
        ("data.partition=quantity", "data.fraction=1"),
        ("data.partition=heuristic", "data.public_fraction=0"),
    ],
    ids=" ".join,
)
def test_the_same_clients_come_back(tmp_path, ending, overrides):
    before, after = made(*overrides), read(save(tmp_path / f"p{ending}", *overrides))
    assert after.sha256 == before.sha256
    assert after.test_split == before.test_split
    for part in ("train", "val", "test"):
        assert [own.tolist() for own in getattr(after, part)] == [own.tolist() for own in getattr(before, part)]
    assert after.public.tolist() == before.public.tolist()


def test_natural_clients_keep_their_names(tmp_path):
    data = replace(DATA, client_train=np.arange(90) // 18, client_names=("a", "b", "c", "d", "e"))
    natural = ("data.name=file", "data.path=x.npz", "data.partition=natural")
    names = made(*natural, data=data).names
    assert len(names) == 4
    assert read(save(tmp_path / "p.npz", *natural, data=data)).names == names


def test_the_hash_of_the_labels_is_as_documented(tmp_path):
    found = json.loads(save(tmp_path / "p.json").read_text())
    raw = np.concatenate([LABELS, LABELS[:30]]).astype("<i8").tobytes()
    assert found["labels_sha256"] == hashlib.sha256(raw).hexdigest()


def test_plain_numpy_reads_it_as_the_docs_say(tmp_path):
    path, scope = save(tmp_path / "partition.npz"), {"y_train": LABELS, "y_test": LABELS[:30]}
    [code] = snippets.cells_of_page(toy.PROJECT / "docs/partitions.md")
    exec(code.replace("partition.npz", str(path)), scope)
    assert [own.tolist() for own in scope["train"]] == [own.tolist() for own in made().train]
    assert [own.tolist() for own in scope["test"]] == [own.tolist() for own in made().test]


# ---- what does not fit


def rejection(path: Path, *overrides: str, data=DATA) -> str:
    with pytest.raises(UsageError) as caught:
        read(path, *overrides, data=data)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("data.partition_file=")
    return str(caught.value).partition(": ")[2]


def moved(name: str, at: int, value: int) -> dict[str, np.ndarray]:
    """An array of the file with one number changed."""
    array = assigned.as_tree(made(), DATA)[name].copy()
    array[at] = value
    return {name: array}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"train_index": None}, "key train_index is missing; make it anew"),
        ({"train_index": np.array([0.5])}, "is no partition that can be read (key train_index: found float64"),
        (moved("train_offset", 1, 9999), "its offsets do not cut its indices into one piece for each client"),
        (moved("train_index", 0, 90), "index 90 of the train split, which has 90 images"),
        (moved("train_index", 0, -1), "index -1 of the train split, which has 90 images"),
        (moved("train_index", 0, int(made().test[2][0])), "of the train split is given twice; make it anew"),
        (moved("train_index", 0, int(made().train[0][1])), "of the train split is given twice; make it anew"),
        ({"sha256": "0" * 64}, "its indices have hash"),
        ({"test_split": "public"}, "key test_split is public; allowed are train and test"),
    ],
)
def test_a_file_that_is_wrong_is_one_line(tmp_path, changes, words):
    assert words in rejection(save(tmp_path / "p.npz", **changes))


def test_a_file_of_other_data_is_one_line(tmp_path):
    path = save(tmp_path / "p.npz")
    other = replace(DATA, y_train=LABELS[::-1].copy())
    assert rejection(path, data=other).startswith("it divides data with other labels, or in another order")
    fewer = replace(DATA, y_train=LABELS[:60])
    assert rejection(path, data=fewer) == "it divides 90 + 30 images, the data have 60 + 30"
    assert rejection(path, "fed.clients=5") == "it has 4 clients; set fed.clients=4"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nothing", b"{}", b"\x93NUMPY"])
@pytest.mark.parametrize("ending", [".npz", ".json"])
def test_what_is_no_such_file_is_one_line(tmp_path, ending, content):
    path = tmp_path / f"p{ending}"
    path.write_bytes(content)
    assert "make it anew: python -m hkd_hpc.data partition" in rejection(path)
    path.unlink()
    assert rejection(path) == "there is no such file"


def test_settings_that_do_not_go_together():
    for wrong in ("data.partition=file", "data.partition_file=p.npz"):
        with pytest.raises(UsageError, match="goes with data.partition=file alone, and that with it"):
            config.resolve(overrides=[wrong])
    with pytest.raises(UsageError, match=r"p.txt: found the ending '.txt', allowed are .npz and .json"):
        read(Path("p.txt"))
