"""A folder that Hugging Face's `datasets` wrote with save_to_disk: Arrow files, read with pyarrow alone.

A DatasetDict has a folder for each split and their names in dataset_dict.json; a Dataset is a split by itself. Which
column holds images, and which labels, is told by their features in dataset_info.json, or by settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc.common.errors import UsageError, printable
from hkd_hpc.data.folder import read_image
from hkd_hpc.data.raw import Arrays, RawData, broken
from hkd_hpc.data.settings import DataSettings

_TESTS = ("test", "validation", "valid", "val")  # which split is the test, the first that is there


def check_path(data: DataSettings) -> None:
    """UsageError unless data.path is such a folder, and pyarrow is installed."""
    split_folders(Path(data.path))
    _arrow()


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise UsageError("data.name=hf needs pyarrow: pip install 'hkd_hpc[tables]'") from None
    return pyarrow


def split_folders(folder: Path) -> dict[str, Path]:
    """The folders of the training split and, if there is one, of the test split."""
    if (folder / "state.json").is_file():
        return {"train": folder}
    if not (folder / "dataset_dict.json").is_file():
        raise UsageError(
            f"data.path={folder}: holds no dataset_dict.json or state.json; data.name=hf reads what save_to_disk wrote"
        )
    names = _part(folder / "dataset_dict.json", "splits", list)
    if "train" not in names:
        raise UsageError(f"{folder}: has no split train (found: {', '.join(map(str, names)) or 'none'})")
    test = next((name for name in _TESTS if name in names), None)
    return {"train": folder / "train"} | ({"test": folder / test} if test else {})


def read_hf(files: list[Path], data: DataSettings) -> RawData:
    """Images (N,3,H,W) uint8, labels, and client ids if data.client_column is set, of the splits that are there."""
    [folder] = files
    folders = split_folders(folder)
    features = _part(folders["train"] / "dataset_info.json", "features", dict)
    columns = _columns(features, data, folder)
    arrays: Arrays = {}
    for split, place in folders.items():
        table = _table(place)
        _require(columns.values(), table.column_names, place)
        shape = arrays["x_train"].shape[1:] if arrays else None
        arrays[f"x_{split}"] = _images(table[columns["x"]], place, columns["x"], data.image_size, shape)
        for key in columns.keys() - {"x"}:
            arrays[f"{key}_{split}"] = _values(table[columns[key]], place, columns[key])
    names = _class_names(features[columns["y"]], arrays["y_train"], f"{folder}: column {columns['y']}")
    return RawData(arrays, names, tuple(_remarks(folder, folders)))


def _class_names(feature: Any, y_train: np.ndarray, where: str) -> tuple[str, ...]:
    """Of the classes that occur, which are the first ones; of labels that are text, none: they are names themselves."""
    names = feature.get("names") if isinstance(feature, dict) else None
    if y_train.dtype.kind == "U" or not isinstance(names, list) or not names:
        return ()
    if y_train.max() >= len(names):
        raise UsageError(f"{where}: found label {y_train.max()}, and its ClassLabel has {len(names)} names")
    return tuple(printable(str(name)) for name in names[: y_train.max() + 1])


def _remarks(folder: Path, folders: dict[str, Path]) -> Iterator[str]:
    if "test" in folders and folders["test"].name != "test":
        yield f"the split {folders['test'].name} is the test split"
    used = {place.name for place in folders.values()}
    others = sorted(p.name for p in folder.iterdir() if (p / "state.json").is_file() and p.name not in used)
    if others:
        yield f"not read: split {', '.join(map(printable, others))}"


# ---- files


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RecursionError) as error:
        raise broken(file, error) from error
    return content


def _part(file: Path, key: str, kind: type) -> Any:
    """A list or an object of a JSON file, empty where there is none."""
    found = _json(file).get(key) or kind()
    if not isinstance(found, kind):
        raise broken(file, f"key {key}: found a {type(found).__name__}, a {kind.__name__} is expected")
    return found


def _table(place: Path) -> Any:
    """All rows of a split, as a memory map."""
    arrow, files = _arrow(), _part(place / "state.json", "_data_files", list)
    names = [str(entry.get("filename", "")) for entry in files if isinstance(entry, dict)]
    if not names or any(Path(name).name != name for name in names):
        raise broken(place / "state.json", "key _data_files: names of Arrow files are expected")
    tables = []
    for name in names:
        try:
            with arrow.memory_map(str(place / name)) as source, arrow.ipc.open_stream(source) as reader:
                tables.append(reader.read_all())
        except (OSError, arrow.ArrowException) as error:
            raise broken(place / name, error) from error
    try:
        return arrow.concat_tables(tables)
    except arrow.ArrowException as error:  # files of other columns
        raise broken(place, error) from error


# ---- columns


def _columns(features: dict[str, Any], data: DataSettings, folder: Path) -> dict[str, str]:
    """{"x", "y" and perhaps "client": the name of the column}."""
    found = {
        "x": _one_of(features, "Image", data.image_column, "image", f"{folder}: data.image_column"),
        "y": _one_of(features, "ClassLabel", data.label_column, "label", f"{folder}: data.label_column"),
    }
    return found | ({"client": data.client_column} if data.client_column else {})


def _one_of(features: dict[str, Any], kind: str, named: str, usual: str, where: str) -> str:
    """The column that is named, else the only one with a feature of this kind, else the usual one."""
    of_kind = [name for name, feature in features.items() if isinstance(feature, dict) and feature.get("_type") == kind]
    chosen = named or usual
    if chosen not in features and chosen == usual and len(of_kind) == 1:
        [chosen] = of_kind
    _require([chosen], features, where)
    return chosen


def _require(wanted: Any, there: Any, where: object) -> None:
    for name in wanted:
        if name not in there:
            raise UsageError(f"{where}: there is no column {name} (found: {', '.join(map(str, there)) or 'none'})")


def _images(column: Any, place: Path, name: str, side_px: int | None, shape: tuple[int, ...] | None) -> np.ndarray:
    """(N,3,H,W) uint8, all of one shape."""
    images: np.ndarray | None = None
    for row, value in enumerate(column):
        where = place / f"{name}[{row}]"
        content = value.as_py()
        if not isinstance(content, dict) or not content.get("bytes"):
            raise UsageError(f"{where}: holds no image as bytes; load and save the set again with its images embedded")
        image, _ = read_image(where, side_px, content["bytes"])
        if images is None:
            images = np.empty((len(column), *(shape or image.shape)), np.uint8)
        if image.shape != images.shape[1:]:
            raise UsageError(
                f"{where}: {image.shape[2]} x {image.shape[1]} px, the first has {images.shape[3]} x "
                f"{images.shape[2]}; data.image_size=N resizes all images to N x N"
            )
        images[row] = image
    if images is None:
        raise UsageError(f"{place}: holds no row")
    return images


def _values(column: Any, place: Path, name: str) -> np.ndarray:
    """Integers or texts."""
    if column.null_count:
        raise UsageError(f"{place}: column {name}: {column.null_count} of {len(column)} rows have no value")
    values = np.asarray(column.to_pylist())
    if values.ndim != 1 or values.dtype.kind not in "iuU":
        raise UsageError(f"{place}: column {name}: found {column.type}, allowed are whole numbers or texts")
    return values
