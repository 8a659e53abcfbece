"""Rows out of .csv and .parquet, by pandas: a column of labels, perhaps of splits and of client ids, and numbers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hkd_hpc.common.errors import UsageError
from hkd_hpc.data.raw import RawData
from hkd_hpc.data.settings import DataSettings

if TYPE_CHECKING:
    import pandas

SPLITS = ("train", "test")
_NEEDED = {".csv": ("pandas",), ".parquet": ("pandas", "pyarrow")}


def is_table(data: DataSettings) -> bool:
    """Whether these settings name a file of columns."""
    return data.name == "file" and Path(data.path).suffix in _NEEDED


def check_reader(path: Path) -> None:
    """UsageError unless what reads such a file is installed; imports nothing."""
    missing = [package for package in _NEEDED[path.suffix] if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(f"{path}: needs {missing[0]}, which is not installed here: pip install 'hkd_hpc[tables]'")


def read_table(path: Path, data: DataSettings) -> RawData:
    """Rows (N,F), labels and client ids of a table whose other columns are all numbers.

    Args:
        path: of a .csv or .parquet; the check of `check_reader` has passed.
        data: names of the columns.

    Returns:
        Labels and ids that are text, or numbers with gaps, as text; all rows as the training split where no column
        says which is which.

    Raises:
        UsageError: a column is missing or has no name of its own, a cell is empty, or holds text where numbers belong.
    """
    columns = {"y": data.label_column, "split": data.split_column, "client": data.client_column}
    frame = _frame(path, [name for name in columns.values() if name])
    told = {key: _cells(frame, name, key, path) for key, name in columns.items() if name}
    features = frame.drop(columns=[name for name in columns.values() if name])
    x_NF, y_N = _numbers(features, path), _ids(told["y"], from_zero=True)
    rows = {"x": x_NF, "y": y_N} | ({"client": _ids(told["client"])} if "client" in told else {})
    split_N = _splits(told["split"], path) if "split" in told else np.full(len(frame), "train")
    parts = SPLITS if "split" in told else SPLITS[:1]
    return RawData({f"{key}_{part}": values[split_N == part] for key, values in rows.items() for part in parts})


def _frame(path: Path, told: Sequence[str]) -> pandas.DataFrame:
    """The whole table; of a .csv the columns `told` are text as it stands there: pandas would decide piece by piece
    whether 01 is 1, and take None for an empty cell. UsageError where pandas would give a column another name, or none:
    it would be taken for a feature, perhaps with the labels in it, or be lost."""
    import pandas

    if path.suffix != ".csv":
        return pandas.read_parquet(path)
    first = pandas.read_csv(path, header=None, nrows=2, dtype=str)  # of one length, or pandas says what is wrong
    head = first.iloc[0]
    if head.isna().any():
        raise UsageError(
            f"{path}: column {head.isna().to_numpy().argmax() + 1} has no name; name it, or leave it out (pandas "
            "writes one of row numbers unless index=False)"
        )
    if head.duplicated().any():
        raise UsageError(f"{path}: two columns are called {head[head.duplicated()].iloc[0]!r}; rename one of them")
    as_text = {name: str for name in told if name in set(head)}
    frame = pandas.read_csv(path, dtype=as_text, keep_default_na=False, na_values=[""], low_memory=False)
    return frame.assign(**{name: _integers(frame[name]) for name in as_text})


def _integers(texts_N: pandas.Series) -> pandas.Series:
    """Numbers if every text is an integer as one writes it (7, not 07 or +7, of at most 18 digits), else the texts."""
    stripped_N = texts_N.str.strip()
    is_integer = stripped_N.str.fullmatch("0|-?[1-9][0-9]{0,17}", na=False).all()
    return stripped_N.astype("int64") if is_integer else texts_N


def _cells(frame: pandas.DataFrame, name: str, key: str, path: Path) -> np.ndarray:
    """(N,) of a column that must be there and have no empty cell."""
    setting = "data.label_column" if key == "y" else f"data.{key}_column"
    if name not in frame.columns:
        found = ", ".join(map(str, frame.columns[:20]))
        raise UsageError(f"{path}: there is no column {name!r} (found: {found}); {setting}=NAME names another one")
    empty_N = frame[name].isna().to_numpy()
    if empty_N.any():
        raise UsageError(f"{path}: column {name}: row {empty_N.argmax() + 1} is empty; fill it, or leave the row out")
    return frame[name].to_numpy()


def _ids(values_N: np.ndarray, from_zero: bool = False) -> np.ndarray:
    """Integers >= 0 as they are, with `from_zero` only if they are 0..C-1; all else as text."""
    if values_N.dtype.kind in "iu" and len(values_N) and values_N.min() >= 0:
        present = np.unique(values_N)
        if not from_zero or np.array_equal(present, np.arange(len(present))):
            return values_N
    return np.array([str(value) for value in values_N.tolist()], dtype=str)


def _splits(values_N: np.ndarray, path: Path) -> np.ndarray:
    """(N,) "train" or "test"."""
    texts_N = np.array([str(value) for value in values_N.tolist()], dtype=str)
    for value in np.unique(texts_N):
        if value not in SPLITS:
            raise UsageError(
                f"{path}: the column of data.split_column holds {str(value)!r}; allowed are train and test"
            )
    return texts_N


def _numbers(features: pandas.DataFrame, path: Path) -> np.ndarray:
    """(N,F) float32 of columns that hold numbers, or true and false; UsageError names the first other cell."""
    import pandas

    if features.empty:
        raise UsageError(f"{path}: holds no row of numbers beside labels, splits and client ids")
    for name, column in features.items():
        numbers = pandas.to_numeric(column, errors="coerce")
        bad_N = ~np.isfinite(numbers.to_numpy(np.float64, na_value=np.nan))
        if not pandas.api.types.is_numeric_dtype(column) or bad_N.any():  # dates are none
            at = int(bad_N.argmax()) if bad_N.any() else 0
            cell = "nothing" if pandas.isna(column.iloc[at]) else repr(str(column.iloc[at]))
            raise UsageError(
                f"{path}: column {name}: row {at + 1} holds {cell}, where numbers belong; make it a number, or leave "
                "the column or the row out"
            )
    with np.errstate(over="ignore"):  # what is beyond float32 is told where all inputs are checked
        return features.to_numpy(np.float32)
