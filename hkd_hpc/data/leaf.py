"""LEAF's JSON (Caldas et al. 2018): DIR/train/*.json and DIR/test/*.json, each {users, num_samples, user_data}.

A sample is 784 numbers 0..1 (FEMNIST: an image of 28 x 28), a text (Shakespeare: its characters become integers by
LEAF's alphabet), or any other number of numbers (a row). Users are natural clients under their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hkd_hpc.common.errors import UsageError, printable
from hkd_hpc.data.raw import RawData, broken
from hkd_hpc.data.settings import DataSettings

# of LEAF's language models; a character's number is its place here
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
IMAGE_SIDE_PX = 28
SPLITS = ("train", "test")
_HEAD_CHARACTERS = 1 << 22


class User(NamedTuple):
    """One user's samples of a split."""

    name: str
    x: np.ndarray
    y: np.ndarray


def json_files(folder: Path, split: str) -> list[Path]:
    """The files of a split, by name. UsageError where there is none."""
    files = sorted((folder / split).glob("*.json"))
    if not files:
        raise UsageError(
            f"{folder / split}: holds no .json file; data.name=leaf needs DIR/train/*.json and DIR/test/*.json"
        )
    return files


def check_leaf(data: DataSettings) -> None:
    """UsageError unless data.path is a folder with files of both splits."""
    folder = Path(data.path)
    if not folder.is_dir():
        raise UsageError(f"data.path={folder}: {'is not a folder' if folder.exists() else 'there is no such folder'}")
    for split in SPLITS:
        json_files(folder, split)


def read_leaf(folders: list[Path], _: object = None) -> RawData:
    """Inputs, labels 0..C-1 and names of users of both splits. UsageError names the file and user that is wrong."""
    [folder] = folders
    train, test = (_read_split(folder, split) for split in SPLITS)
    arrays = {"x_train": _joined(train, "x", folder), "x_test": _joined(test, "x", folder)}
    y_train, y_test, class_names = _numbered(_joined(train, "y", folder), _joined(test, "y", folder), folder)
    arrays |= {"y_train": y_train, "y_test": y_test, "client_train": _names(train)}
    if not {user.name for user in train}.isdisjoint(user.name for user in test):
        return RawData(arrays | {"client_test": _names(test)}, class_names)
    split_by_user = "test/ has users of its own: clients hold their local tests out of their training samples"
    return RawData(arrays, class_names, (split_by_user,))


def read_users(folder: Path) -> np.ndarray:
    """(N,) the names of the training samples' users, from the heads of the files where they stand there."""
    heads = [_head(file) for file in json_files(folder, "train")]
    counts = [(name, count) for head in heads for name, count in zip(head["users"], head["num_samples"])]
    return np.repeat([str(name) for name, _ in counts], [int(count) for _, count in counts])


# ---- one file


def _head(file: Path) -> dict[str, Any]:
    """{users, num_samples}: LEAF writes them before the samples, of which a file may have gigabytes."""
    try:
        with open(file, encoding="utf-8") as text:
            head = json.loads(text.read(_HEAD_CHARACTERS).partition('"user_data"')[0].rstrip(" \n\t,") + "}")
        if _counts_all(head):
            return head
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return _load(file)


def _counts_all(head: dict[str, Any]) -> bool:
    """Whether each user has a number of samples."""
    users, counts = head["users"], head["num_samples"]
    return len(users) == len(counts) and all(type(count) is int and count >= 0 for count in counts)


def _load(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
        if not _counts_all(content):
            raise ValueError("num_samples must have one whole number for each of users")
        if not isinstance(content["user_data"], dict):
            raise ValueError("user_data is no object")
    except KeyError as error:
        raise UsageError(f"{file}: key {error.args[0]} is missing; LEAF's are users, num_samples, user_data") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise broken(file, error) from error
    return content


def _read_split(folder: Path, split: str) -> list[User]:
    """All users with samples, in the order of the files; each in one file alone."""
    users: dict[str, User] = {}
    for file in json_files(folder, split):
        for user in _users_of(file):
            if user.name in users:
                raise UsageError(f"{file}: user {printable(user.name)} is in another file of {split}/ too")
            users[user.name] = user
    if not users:
        raise UsageError(f"{folder / split}: holds no sample")
    return list(users.values())


def _users_of(file: Path) -> Iterator[User]:
    content = _load(file)
    for name, count in zip(content["users"], content["num_samples"]):
        where = f"{file}: user {printable(str(name))}"
        try:
            samples = content["user_data"].pop(name)  # freed once it is an array
            x, y = samples["x"], samples["y"]
        except (KeyError, TypeError):
            raise UsageError(f"{where}: user_data has no x and y of it") from None
        if not isinstance(x, list) or not isinstance(y, list):
            raise UsageError(f"{where}: x and y must be lists, one entry for each sample")
        if not len(x) == len(y) == count:
            raise UsageError(f"{where}: {len(x)} x and {len(y)} y, num_samples says {count}")
        if count:
            yield User(str(name), _inputs(x, where), _labels(y, where))


# ---- samples


def _inputs(x: list, where: str) -> np.ndarray:
    """(n,28,28) uint8 images, (n,T) int64 texts or (n,F) float32 rows."""
    if isinstance(x[0], str):
        return _texts(x, where)
    try:
        numbers = np.array(x, np.float64)
        if numbers.ndim != 2:
            raise ValueError
    except (ValueError, TypeError):
        raise UsageError(f"{where}: x must be lists of equally many numbers, or texts") from None
    return _images(numbers, where) if numbers.shape[1] == IMAGE_SIDE_PX**2 else numbers.astype(np.float32)


def _images(numbers: np.ndarray, where: str) -> np.ndarray:
    if not ((numbers >= 0) & (numbers <= 1)).all():
        raise UsageError(f"{where}: pixels must be numbers 0..1, found {numbers.min():g}..{numbers.max():g}")
    return np.rint(255 * numbers).astype(np.uint8).reshape(-1, IMAGE_SIDE_PX, IMAGE_SIDE_PX)


def _texts(x: list, where: str) -> np.ndarray:
    if not all(isinstance(text, str) and len(text) == len(x[0]) for text in x) or not x[0]:
        raise UsageError(f"{where}: texts must have one length; LEAF's Shakespeare has 80 characters each")
    unknown = set("".join(x)) - set(ALPHABET)
    if unknown:
        raise UsageError(f"{where}: the character {min(unknown)!r} is not in LEAF's alphabet of {len(ALPHABET)}")
    return np.array([[ALPHABET.index(character) for character in text] for text in x], np.int64)


def _labels(y: list, where: str) -> np.ndarray:
    """Whole numbers or texts."""
    try:
        labels = np.array(y)
    except ValueError:  # lists of several lengths
        labels = np.empty(0)
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        raise UsageError(f"{where}: y must be whole numbers, or texts, one for each sample")
    return labels


# ---- all users


def _joined(users: list[User], part: str, folder: Path) -> np.ndarray:
    arrays = [getattr(user, part) for user in users]
    for user, array in zip(users, arrays):
        if array.shape[1:] != arrays[0].shape[1:] or array.dtype.kind != arrays[0].dtype.kind:
            raise UsageError(
                f"{folder}: the {part} of user {printable(user.name)} are {array.dtype} {array.shape[1:]}, "
                f"those of {printable(users[0].name)} {arrays[0].dtype} {arrays[0].shape[1:]}; all must have one form"
            )
    return np.concatenate(arrays)


def _names(users: list[User]) -> np.ndarray:
    return np.repeat([user.name for user in users], [len(user.y) for user in users])


def _numbered(train: np.ndarray, test: np.ndarray, folder: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Labels as 0..C-1 and what these were: some users need not have all of LEAF's classes."""
    values, numbers = np.unique(train, return_inverse=True)
    unknown = np.setdiff1d(test, values)
    if len(unknown):
        raise UsageError(f"{folder}: test/ has the label {unknown[0]!s}, which no sample of train/ has")
    names = () if np.array_equal(values, np.arange(len(values))) else tuple(printable(str(v)) for v in values)
    return numbers, np.searchsorted(values, test), names
