"""Trees of named arrays, strings and scalars in HDF5 files that are intact or rejected, never wrong.

The file is plain HDF5: `h5py.File(path)` opens it. Its first 512 bytes, the "user block" that HDF5 leaves to the
application, hold a checksum: the length and the SHA-256 of everything after them. HDF5's own checksums cover neither
scalars nor strings nor all of its bookkeeping, and its library can crash on a damaged file; this one is checked first.
A file whose tables grow (store/growing.py) has a checksum of its own kind and is read in the same way.

HDF5 reaches the disk through a Python file: it then takes no file lock, so that neither a file system without locks
nor HDF5_USE_FILE_LOCKING nor a reader of the older file changes anything, and a full disk is an ordinary OSError.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc.common.errors import RunError
from hkd_hpc.store.atomic import replace_file
from hkd_hpc.store.checksum import CHECKSUM_BYTES, FIRST_BYTES, GrowingChecksum, Snapshot

FORMAT_VERSION = 1
CHUNK_BYTES = 1 << 20
ATTRIBUTE_BYTES = 60_000  # HDF5 ends at 64 KiB, its own header included
HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
HDF5_VERSIONS = ("v110", "v110")  # readable by HDF5 1.10 (2016) and later, with checksums on the bookkeeping
UNCHECKED_VERSIONS = ("earliest", "v110")  # without them, for what has our checksum and changes
DAMAGED = "it is damaged: its bytes do not match its checksum"
STORABLE = "dict, Stream, Leaf, str, bool, int (64 bits), float, or an array of bool, int, float or str"


@dataclass(frozen=True)
class Leaf:
    """A value of a tree together with its HDF5 attributes (unit, model, data, moment: str, bool, int or float)."""

    value: Any
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stream:
    """A group whose members are made one at a time while the file is written: (name, function that gives the value).

    A value may be anything that a tree may hold. It is checked when its turn comes.
    """

    members: Iterable[tuple[str, Callable[[], Any]]]


@dataclass(frozen=True)
class Reserved:
    """An array of this shape and type that has no values yet, nor space in the file."""

    shape: tuple[int, ...]
    dtype: np.dtype


class BadFile(RunError):
    """A file that cannot be trusted; `path` and `reason` say which and why."""

    def __init__(self, path: str | Path, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = Path(path), reason


def save_tree(path: str | Path, tree: dict[str, Any], attributes: dict[str, Any] | None = None) -> None:
    """Write `tree` to `path`: under a temporary name, flushed, read back, renamed.

    Args:
        path: of the file; an older one is replaced at once or not at all.
        tree: by name values (STORABLE), groups, Leafs and Streams.
        attributes: of the root, beside `format_version` and `complete` (the last one written).

    Raises:
        TypeError: before anything is written, naming the key whose value HDF5 cannot store.
        RunError: where the system fails to write; the older file is then untouched.
    """
    attributes = dict(attributes or {})
    _check_attributes(attributes, "the root")
    check_tree(tree, "")
    replace_file(path, lambda temporary: _write(temporary, tree, attributes), verify)


def load_tree(path: str | Path, only: Iterable[str] | None = None) -> dict[str, Any]:
    """Read a tree.

    Args:
        path: of the file.
        only: the parts to read ("a/b", "c"), at their places in the tree; None: all.

    Returns:
        Arrays as np.ndarray, strings as str, 0-d values as Python scalars, names in alphabetical order.

    Raises:
        BadFile: if the file is missing, no HDF5, truncated, changed, incomplete, of another format, or lacks a part.
    """
    with open_tree(path) as file:
        if only is None:
            return file.load()
        parts: dict[str, Any] = {}
        for key in only:
            place(parts, key, file.load(key))
        return parts


@contextlib.contextmanager
def open_tree(path: str | Path) -> Iterator[TreeFile]:
    """Check all of a file once, to read its parts one by one.

    Args:
        path: of the file.

    Yields:
        A TreeFile, open within the `with` block.

    Raises:
        BadFile: as `load_tree` does.
    """
    import h5py

    path = Path(path)
    with contextlib.ExitStack() as stack:
        with _bad_file(path):
            if path.exists() and not path.is_file():  # a pipe would be waited for
                raise BadFile(path, "it is no ordinary file")
            raw = stack.enter_context(open(path, "rb"))
            first = raw.read(FIRST_BYTES)
            growing = GrowingChecksum.of(first)
            if growing:
                _check_growing(path, raw, first, growing)
            else:
                _check_checksum(path, raw, first)
            root = stack.enter_context(h5py.File(Snapshot(raw, first) if growing else raw, "r"))
            _check_root(path, root)
            if growing and not growing.matches_rows(root, raw):
                raise BadFile(path, DAMAGED)
        yield TreeFile(path, root)


def is_intact(path: str | Path) -> bool:
    """Whether `open_tree` opens it."""
    try:
        with open_tree(path):
            return True
    except BadFile:
        return False


class TreeFile:
    """An open, checked file. Keys are paths such as "clients/3/weights"; "" is the root."""

    def __init__(self, path: Path, root: Any):
        self.path, self._root = path, root

    def load(self, key: str = "") -> Any:
        """The value or tree at `key`, read now. Raises BadFile if there is none."""
        with _bad_file(self.path):
            return _load(self._node(key))

    def names(self, key: str = "") -> list[str]:
        """The names of the members of the group at `key`."""
        with _bad_file(self.path):
            return list(self._node(key))

    def attributes(self, key: str = "") -> dict[str, Any]:
        """The attributes of the value or group at `key`, as str and Python scalars."""
        with _bad_file(self.path):
            return {name: _python_scalar(value) for name, value in self._node(key).attrs.items()}

    def shapes(self, key: str = "") -> dict[str, tuple[int, ...]]:
        """The shapes of all values below the group at `key`, by their paths from there on."""
        with _bad_file(self.path):
            found: dict[str, tuple[int, ...]] = {}
            self._node(key).visititems(
                lambda path, node: found.update({path: node.shape} if hasattr(node, "shape") else {})
            )
            return found

    def _node(self, key: str) -> Any:
        if key and key not in self._root:
            raise BadFile(self.path, f"it has no {key!r}")
        return self._root[key] if key else self._root


def chunk_shape(shape: tuple[int, ...], item_bytes: int) -> tuple[int, ...]:
    """Chunks of at most about 1 MiB, complete along the last axes, of equal sizes so that the last wastes little."""
    chunk: list[int] = []
    capacity = max(1, CHUNK_BYTES // item_bytes)
    for size in reversed(shape):
        pieces = -(-size // capacity)
        chunk.append(-(-size // pieces))
        capacity = max(1, capacity // chunk[-1])
    return tuple(reversed(chunk))


# ---- what HDF5 can store ----


def is_name(name: Any) -> bool:
    """Whether a member of a group can have this name."""
    return isinstance(name, str) and name not in ("", ".") and "/" not in name and is_text(name)


def is_text(text: str) -> bool:
    """Whether HDF5 can store it: no NUL, no half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def check_tree(tree: Any, where: str) -> None:
    if not isinstance(tree, dict):
        raise TypeError(f"{where or 'the root'}: {_kind(tree)} is not a dict")
    for name, value in tree.items():
        _check_member(name, value, where)


def _check_member(name: Any, value: Any, where: str) -> None:
    key = f"{where}/{name}" if where else str(name)
    if not is_name(name):
        raise TypeError(f"{key!r}: {name!r} cannot be a name in HDF5 (text without / and NUL, not empty, not '.')")
    if isinstance(value, Leaf):
        _check_attributes(value.attributes, key)
        value = value.value
    if isinstance(value, dict):
        check_tree(value, key)
    elif not isinstance(value, (Stream, Reserved)):
        storable(value, key)


def _check_attributes(attributes: dict[str, Any], where: str) -> None:
    for name, value in attributes.items():
        if not isinstance(name, str) or not name or not is_text(name):
            raise TypeError(f"{where}: {name!r} cannot be the name of an attribute")
        stored = storable(value, f"{where}, attribute {name!r}")
        if not isinstance(stored, str) and stored.ndim:
            raise TypeError(f"{where}, attribute {name!r}: an array belongs into a value of its own")
        if isinstance(stored, str) and len(stored.encode()) > ATTRIBUTE_BYTES:
            raise TypeError(f"{where}, attribute {name!r}: HDF5 limits an attribute to {ATTRIBUTE_BYTES} bytes")


def storable(value: Any, key: str) -> np.ndarray | str:
    """What goes into the file for `value`: a str or an array (0-d for a scalar). Raises TypeError naming `key`."""
    if not isinstance(value, (str, bool, int, float, np.generic, np.ndarray)):
        raise TypeError(f"{key}: HDF5 cannot store {_kind(value)}; allowed: {STORABLE}")
    array = np.asarray(value)
    if array.dtype.kind == "U":
        return _storable_text(value, array, key)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise TypeError(f"{key}: HDF5 cannot store {_kind(value)} of type {array.dtype}; allowed: {STORABLE}")
    return array


def _storable_text(value: Any, array: np.ndarray, key: str) -> np.ndarray | str:
    text = value if isinstance(value, str) else "".join(array.ravel())
    if not is_text(text):
        raise TypeError(f"{key}: HDF5 cannot store text with a NUL or half of a surrogate pair")
    if array.ndim == 0:
        return str(text)
    return np.char.encode(array, "utf-8")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


# ---- writing ----


class DeferredErrorFile(io.FileIO):
    """Keeps the first failure (or Ctrl-C) for later: an HDF5 that fails in mid-file can crash the process."""

    failure: BaseException | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data)
        try:
            while rest and not self.failure:
                rest = rest[super().write(rest) :]
        except BaseException as failure:
            self.failure = failure
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        try:
            return 0 if self.failure else super().truncate(size)
        except BaseException as failure:
            self.failure = failure
            return 0

    def check(self) -> None:
        """Raise the failure, if there was one."""
        if self.failure:
            raise self.failure


def _write(temporary: Path, tree: dict[str, Any], attributes: dict[str, Any]) -> None:
    with DeferredErrorFile(str(temporary), "w+") as disk:
        write_hdf5(disk, tree, {**attributes, "format_version": FORMAT_VERSION, "complete": 1}, HDF5_VERSIONS)
        _write_checksum(disk)
        disk.check()


def write_hdf5(
    disk: DeferredErrorFile, tree: dict[str, Any], attributes: dict[str, Any], versions: tuple[str, str]
) -> None:
    """All but the checksum."""
    import h5py

    try:
        with h5py.File(disk, "w", libver=versions, userblock_size=CHECKSUM_BYTES) as root:
            _write_members(root, tree, disk)
            _write_attributes(root, attributes)
    finally:
        # Whatever HDF5 made of it, the error of the system is the cause.
        disk.check()


def _write_members(group: Any, tree: dict[str, Any] | Stream, disk: DeferredErrorFile) -> None:
    for name, value in _members(group, tree):
        leaf = value if isinstance(value, Leaf) else Leaf(value)
        if isinstance(leaf.value, (dict, Stream)):
            made = group.create_group(name)
            _write_members(made, leaf.value, disk)
        else:
            made = _write_dataset(group, name, leaf.value)
        _write_attributes(made, leaf.attributes)
        disk.check()


def _members(group: Any, tree: dict[str, Any] | Stream) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        yield from tree.items()
        return
    for name, make in tree.members:
        value = make()
        where = group.name.strip("/")
        _check_member(name, value, where)
        if name in group:
            raise TypeError(f"{where}/{name}: the name comes twice")
        yield name, value


def _write_dataset(group: Any, name: str, value: Any) -> Any:
    import h5py

    if isinstance(value, Reserved):
        return group.create_dataset(name, value.shape, _text_or(value.dtype))
    stored = storable(value, name)
    if isinstance(stored, str):
        return group.create_dataset(name, data=stored, dtype=h5py.string_dtype())
    stored = stored.astype(_text_or(stored.dtype))
    if not stored.size or not stored.ndim:
        return group.create_dataset(name, data=stored)
    chunks = chunk_shape(stored.shape, stored.dtype.itemsize)
    return group.create_dataset(name, data=stored, chunks=chunks, fletcher32=True)


def _text_or(dtype: np.dtype) -> np.dtype:
    """As HDF5 knows it: bytes are text in UTF-8."""
    import h5py

    return h5py.string_dtype("utf-8", dtype.itemsize) if dtype.kind == "S" else dtype


def _write_attributes(node: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        node.attrs[name] = storable(value, name)


# ---- the checksum ----


def _write_checksum(disk: io.FileIO) -> None:
    block = _checksum_block(*_digest(disk))
    disk.seek(0)
    disk.write(block)


def _checksum_block(size_bytes: int, digest: str) -> bytes:
    return f"hkd_hpc tree, {size_bytes} bytes follow this block, sha256 {digest}\n".encode().ljust(
        CHECKSUM_BYTES, b"\0"
    )


def _digest(file: Any) -> tuple[int, str]:
    """Number and SHA-256 of the bytes after the checksum."""
    file.seek(CHECKSUM_BYTES)
    digest, size_bytes = hashlib.sha256(), 0
    while block := file.read(CHUNK_BYTES):
        digest.update(block)
        size_bytes += len(block)
    return size_bytes, digest.hexdigest()


def _check_checksum(path: Path, raw: Any, head: bytes) -> None:
    recorded = re.match(rb"hkd_hpc tree, (\d+) bytes", head)
    if not recorded:
        is_hdf5 = HDF5_SIGNATURE in (head[:8], head[CHECKSUM_BYTES : CHECKSUM_BYTES + 8])
        raise BadFile(path, "it was not written to its end, or not by hkd_hpc" if is_hdf5 else "it is not an HDF5 file")
    _check_size(path, raw, int(recorded[1]))
    if head[:CHECKSUM_BYTES] != _checksum_block(*_digest(raw)):
        raise BadFile(path, DAMAGED)


def _check_growing(path: Path, raw: Any, head: bytes, checksum: GrowingChecksum) -> None:
    _check_size(path, raw, checksum.size_bytes)
    if not checksum.matches(head, raw):
        raise BadFile(path, DAMAGED)


def _check_size(path: Path, raw: Any, recorded_bytes: int) -> None:
    size_bytes = os.fstat(raw.fileno()).st_size - CHECKSUM_BYTES
    if size_bytes < recorded_bytes:
        raise BadFile(path, f"it is truncated: {size_bytes} of {recorded_bytes} bytes are there")
    if size_bytes > recorded_bytes:  # said before it is read: it may be huge
        raise BadFile(path, f"{DAMAGED}: {size_bytes} are there, {recorded_bytes} were written")


# ---- reading ----


@contextlib.contextmanager
def _bad_file(path: Path) -> Iterator[None]:
    """Turn what the system and h5py raise on an unusable file into BadFile."""
    try:
        yield
    except BadFile:
        raise
    except FileNotFoundError:
        raise BadFile(path, "there is no such file") from None
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise BadFile(path, f"it cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _check_root(path: Path, root: Any) -> None:
    if root.attrs.get("complete") != 1:
        raise BadFile(path, "it is incomplete: the mark that is written last is missing")
    version = root.attrs.get("format_version")
    if version != FORMAT_VERSION:
        raise BadFile(path, f"its format is {version}; this version of hkd_hpc reads {FORMAT_VERSION}")


def verify(temporary: Path) -> None:
    try:
        with open_tree(temporary) as file, _bad_file(temporary):
            _read_all(file._root)
    except BadFile as bad:
        raise OSError(errno.EIO, f"what was written does not read back ({bad.reason})") from bad


def _read_all(group: Any) -> None:
    """Read every value, one at a time."""
    for node in group.values():
        if hasattr(node, "keys"):
            _read_all(node)
        else:
            _load(node)


def _load(node: Any) -> Any:
    import h5py

    if isinstance(node, h5py.Group):
        return {name: _load(member) for name, member in node.items()}
    if h5py.check_string_dtype(node.dtype):
        text = node.asstr()[()]
        return text if node.shape == () else np.asarray(text, dtype=str)
    value = node[()]
    exact = isinstance(value, np.ndarray) or value.dtype not in (np.int64, np.uint64, np.float64, np.bool_)
    return value if exact else _python_scalar(value)  # a float32 must not come back as a float64


def _python_scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def place(tree: dict[str, Any], key: str, value: Any) -> None:
    """Put a value at its place in a tree: "a/b" into the group "a", which is made where there is none."""
    *groups, name = key.split("/")
    for group in groups:
        tree = tree.setdefault(group, {})
    tree[name] = value
