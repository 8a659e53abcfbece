"""Folders as Hugging Face's `datasets` saves them (save_to_disk of 3.x), written here with pyarrow."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image

from hkd_hpc import config
from hkd_hpc.common.errors import UsageError
from hkd_hpc.data import sources

FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    "writer": {"dtype": "string", "_type": "Value"},
}
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), np.uint8)


def png(pixels: np.ndarray) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def rows(at: slice, **changes: list) -> dict[str, list]:
    labels, writers = [0, 1, 0, 1, 1, 0], ["bo", "al", "bo", "al", "al", "bo"]
    return {"image": [png(image) for image in PIXELS[at]], "label": labels[at], "writer": writers[at], **changes}


def save_split(folder: Path, columns: dict[str, list], features=FEATURES, shards: int = 2) -> None:
    folder.mkdir(parents=True)
    table = pyarrow.table(columns)
    names = [f"data-{shard:05d}-of-{shards:05d}.arrow" for shard in range(shards)]
    for shard, name in enumerate(names):
        part = table.slice(
            shard * len(table) // shards, (shard + 1) * len(table) // shards - shard * len(table) // shards
        )
        with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))


def save(folder: Path, **splits: dict[str, list]) -> Path:
    """A DatasetDict; by default four rows to train on and two for the test."""
    splits = splits or {"train": rows(slice(0, 4)), "test": rows(slice(4, 6))}
    for name, columns in splits.items():
        save_split(folder / name, columns)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def read(folder: Path, *more: str) -> sources.DataSet:
    return sources.read(config.resolve(overrides=["data.name=hf", f"data.path={folder}", *more]).data)


def test_columns_are_found_by_their_features(tmp_path):
    data = read(save(tmp_path / "set"))
    assert np.array_equal(data.x_train[:, :, 12:20, 12:20], PIXELS[:4].transpose(0, 3, 1, 2))
    assert np.array_equal(data.x_test[:, :, 12:20, 12:20], PIXELS[4:].transpose(0, 3, 1, 2))
    assert data.y_train.tolist() == [0, 1, 0, 1]
    assert data.y_test.tolist() == [1, 0]
    assert data.class_names == ("cat", "dog")
    assert data.client_train is None


def test_a_column_names_natural_clients(tmp_path):
    folder = save(tmp_path / "set")
    data = read(folder, "data.client_column=writer")
    assert data.client_names == ("al", "bo")
    assert data.client_train.tolist() == [1, 0, 1, 0]
    assert data.client_test.tolist() == [0, 1]
    natural = ["data.name=hf", f"data.path={folder}", "data.client_column=writer", "data.partition=natural"]
    found = config.with_clients_of_data(config.resolve(overrides=natural), {})
    assert found.fed.clients == 2


def test_one_split_alone_and_other_columns(tmp_path):
    """A Dataset, whose test split is held out; two columns of images, of which one is named."""
    columns = rows(slice(0, 6), other=[png(image) for image in 255 - PIXELS])
    features = FEATURES | {"other": {"_type": "Image"}}
    save_split(tmp_path / "set", columns, features)
    more = ("data.test_fraction=.34", "data.image_column=other", "data.label_column=writer")
    data = read(tmp_path / "set", *more)
    assert len(data.x_train) == 4
    assert data.class_names == ("al", "bo")
    found = {image.tobytes() for image in np.concatenate([data.x_train, data.x_test])[:, :, 12:20, 12:20]}
    assert found == {image.tobytes() for image in np.ascontiguousarray(255 - PIXELS.transpose(0, 3, 1, 2))}


def test_validation_stands_in_for_a_test_split(tmp_path):
    splits = {"train": rows(slice(0, 4)), "validation": rows(slice(4, 6)), "extra": rows(slice(0, 2))}
    data = read(save(tmp_path / "set", **splits))
    assert "the split validation is the test split" in data.remarks
    assert "not read: split extra" in data.remarks


def test_images_are_resized_where_asked(tmp_path):
    small = rows(slice(4, 6), image=[png(PIXELS[0]), png(PIXELS[0][:4])])
    folder = save(tmp_path / "set", train=rows(slice(0, 4)), test=small)
    with pytest.raises(UsageError, match=r"test.image\[1\]: 8 x 4 px, the first has 8 x 8; data.image_size=N"):
        read(folder)
    assert read(folder, "data.image_size=40").x_test.shape == (2, 3, 40, 40)


@pytest.mark.parametrize(
    "changes, more, told",
    [
        ({"image": [{"bytes": b"no", "path": None}] * 2}, (), "test/image[0]: truncated or not what its name says"),
        ({"image": [{"bytes": None, "path": "x.png"}] * 2}, (), "test/image[0]: holds no image as bytes"),
        ({"label": [0.5, 1.0]}, (), "test: column label: found double, allowed are whole numbers or texts"),
        ({"label": [None, 1]}, (), "test: column label: 1 of 2 rows have no value"),
        ({}, ("data.label_column=species",), "there is no column species (found: image, label, writer)"),
        ({}, ("data.client_column=hospital",), "there is no column hospital (found: image, label, writer)"),
    ],
)
def test_wrong_columns_are_one_line(tmp_path, changes, more, told):
    folder = save(tmp_path / "set", train=rows(slice(0, 4)), test=rows(slice(4, 6), **changes))
    with pytest.raises(UsageError) as caught:
        read(folder, *more)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_files_are_one_line(tmp_path):
    folder = save(tmp_path / "set")
    [shard, *_] = sorted((folder / "train").glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"data-00000-of-00002.arrow: truncated or not what its name says"):
        read(folder)
    (folder / "train/state.json").write_text("{}")
    with pytest.raises(UsageError, match=r"state.json: .*key _data_files: names of Arrow files are expected"):
        read(folder)
    (folder / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(UsageError, match=r"has no split train \(found: test\)"):
        read(folder)
    with pytest.raises(UsageError, match=r"holds no dataset_dict.json or state.json; data.name=hf reads what save_to"):
        read(tmp_path)


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("dataset_dict.json", '{"splits": 5}', "key splits: found a int, a list is expected"),
        ("train/state.json", '{"_data_files": 5}', "key _data_files: found a int, a list is expected"),
        ("train/state.json", "[]", "(no object)"),
        ("train/dataset_info.json", '{"features": [1]}', "key features: found a list, a dict is expected"),
        ("train/dataset_info.json", '{"a":' * 100_000, "truncated or not what its name says"),
        (
            "train/dataset_info.json",
            '{"features": {"image": "Image", "label": {"_type": "ClassLabel", "names": ["cat"]}}}',
            "column label: found label 1, and its ClassLabel has 1 names",
        ),
    ],
)
def test_descriptions_that_say_nothing_of_use_are_one_line(tmp_path, name, content, told):
    folder = save(tmp_path / "set")
    (folder / name).write_text(content)
    with pytest.raises(UsageError) as caught:
        read(folder)
    assert told in str(caught.value)


def test_arrow_files_of_other_columns_are_one_line(tmp_path):
    folder = save(tmp_path / "set")
    save_split(tmp_path / "other", {"age": [1, 2]}, shards=1)
    [shard, *_] = sorted((folder / "train").glob("*.arrow"))
    (tmp_path / "other/data-00000-of-00001.arrow").replace(shard)
    with pytest.raises(UsageError, match=r"set/train: truncated or not what its name says \(Schema"):
        read(folder)
