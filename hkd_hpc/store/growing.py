"""A tree in HDF5 whose tables grow at their end, each time for the price of the new rows alone.

Plain h5py opens the file at any moment and finds the rows of all additions that are complete, whatever kills the writer
and whoever reads meanwhile. The file is

    first block | base | space for rows | space for heads

- first block: the checksum (store/checksum.py), and HDF5's superblock, in which 8 bytes change: where the root is;
- base: what h5py wrote: all that does not grow, and of every column its type and attributes;
- space for rows: each column in one piece, with space for as many rows again;
- space for heads: a head (store/head.py) is the root and all below it that changes with the number of rows.

An addition writes its rows behind the others, a new head behind the older ones, and then, at once, the first block:
from that moment on it counts. Nothing that an older head speaks of is ever written again, so that whoever has the file
open goes on reading what was there. When the space is used up the file is made anew, by rename, with space for twice
the rows: over a run this too is a constant price for each row.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc.common.errors import RunError
from hkd_hpc.common.groups import grouped
from hkd_hpc.common.stop import interrupts_held
from hkd_hpc.store.atomic import replace_file
from hkd_hpc.store.checksum import CHECKSUM_BYTES, FIRST_BYTES, GrowingChecksum, fixed_sha256, rows_added, rows_sha256
from hkd_hpc.store.head import Column, Head, address_of, aligned, describe, make_head, table_of
from hkd_hpc.store.tree import (
    FORMAT_VERSION,
    UNCHECKED_VERSIONS,
    DeferredErrorFile,
    Leaf,
    Reserved,
    check_tree,
    storable,
    verify,
    write_hdf5,
)

MIN_CAPACITY = 64  # rows
END_AT, ROOT_AT = CHECKSUM_BYTES + 40, CHECKSUM_BYTES + 64  # where the superblock names the file's end, and the root


@dataclass
class State:
    """The file as it was left. `counts` and `digests`: of the rows of each table; `next_head`: where the next head
    goes.
    """

    columns: dict[str, Column]
    counts: dict[str, int]
    digests: dict[str, Any]
    head: Head = field(default_factory=Head)
    base: bytes = b""  # its SHA-256
    base_bytes: int = 0
    next_head: int = 0
    inode: int = 0
    first: bytes = b""  # the first block

    def first_block(self, head: bytes, digests: dict[str, Any]) -> bytes:
        """What makes this head, at `next_head`, the one that counts."""
        root = struct.pack("<Q", address_of(self.next_head) + self.head.root)
        superblock = self.first[CHECKSUM_BYTES:ROOT_AT] + root + self.first[ROOT_AT + 8 :]
        return (
            GrowingChecksum(
                end_of(self.first) - CHECKSUM_BYTES,
                self.base_bytes,
                self.next_head,
                len(head),
                fixed_sha256(superblock, self.base, head),
                rows_sha256(digests[table] for table in sorted(digests)),
            ).block()
            + superblock
        )


class GrowingTree:
    """The file at `path`, whose one writer this is.

    Args:
        path: of the file, which need not be there.
        sync_every_s: additions are flushed to the disk, so that they outlast a power cut too, at most so often; a
            writer that is killed needs no flush.
        attributes: of the root, beside `format_version` and `complete`.
    """

    def __init__(self, path: Path, sync_every_s: float = 1.0, attributes: Mapping[str, int] = {}):
        self.path, self._sync_every_s, self._synced_s, self._attributes = path, sync_every_s, 0.0, attributes
        self._state: State | None = None

    def save(self, rest: dict[str, Any], rows_from: Callable[[dict[str, int]], dict[str, Any]]) -> None:
        """Bring the file up to date.

        Args:
            rest: what does not grow; it is written where the file is made anew.
            rows_from: from {table: rows that are saved} to the tables, a group each of columns (arrays or Leafs of
                them, first axis rows) from that row on; all rows of a table that is not named. A table comes with its
                first row. Rows once saved must stay what they are.

        Raises:
            RunError: where the system fails to write; what was there before is then untouched.
            TypeError: naming a value that HDF5 cannot store.
        """
        with interrupts_held():
            state = self._state
            if state is None or not self._add(state, columns_of(rows_from(state.counts))):
                self._make(rest, rows_from({}))

    def _add(self, state: State, new: dict[str, np.ndarray]) -> bool:
        """Append these rows; False where the file has to be made anew for them."""
        if state.columns.keys() != new.keys() or not all(
            column.takes(new[path], state.counts[column.table]) for path, column in state.columns.items()
        ):
            return False
        try:
            disk = DeferredErrorFile(str(self.path), "r+")
        except OSError:  # gone, or not ours to write: making it anew tells
            return False
        self._state = None  # until all is done
        try:
            with disk:
                added = self._add_to(disk, state, new)
        except OSError as error:
            raise RunError(
                f"cannot write {self.path}: {error.strerror or error}; the rows before are untouched"
            ) from error
        self._state = state if added else None
        return added

    def _add_to(self, disk: Any, state: State, new: dict[str, np.ndarray]) -> bool:
        status = os.fstat(disk.fileno())
        if (
            status.st_ino != state.inode
            or status.st_size != end_of(state.first)
            or disk.read(FIRST_BYTES) != state.first
        ):
            return False
        new = {path: rows.astype(state.columns[path].dtype, copy=False) for path, rows in new.items()}
        tables = by_table(new)
        counts = {table: state.counts[table] + len(parts[0]) for table, parts in tables.items()}
        head = state.head.at(state.next_head, counts)
        if state.next_head + len(head) > status.st_size:
            return False
        for path, column in state.columns.items():
            write_at(disk, column.offset + state.counts[column.table] * column.row_bytes, new[path].tobytes())
        write_at(disk, state.next_head, head)
        digests = {table: rows_added(state.digests[table], parts) for table, parts in tables.items()}
        first = state.first_block(head, digests)
        is_due = time.monotonic() - self._synced_s >= self._sync_every_s
        flush(disk, is_due)
        write_at(disk, 0, first)
        flush(disk, is_due)
        self._synced_s = time.monotonic() if is_due else self._synced_s
        state.counts, state.digests, state.first = counts, digests, first
        state.next_head += len(head)
        return True

    def _make(self, rest: dict[str, Any], tables: dict[str, Any]) -> None:
        """Write the whole file, with space for as many rows again."""
        made: list[State] = []
        self._state = None
        write = lambda temporary: made.append(write_new(temporary, rest, tables, self._attributes))
        replace_file(self.path, write, verify)
        self._state, self._synced_s = made[0], time.monotonic()


# ---- a new file


def write_new(path: Path, rest: dict[str, Any], tables: dict[str, Any], attributes: Mapping[str, int]) -> State:
    """Write the tree to `path`, its tables with space to grow."""
    new = columns_of(tables)
    columns = {
        name: Column(table_of(name), growable(rows.dtype), rows.shape[1:], max(MIN_CAPACITY, 2 * len(rows)))
        for name, rows in new.items()
    }
    new = {name: rows.astype(columns[name].dtype, copy=False) for name, rows in new.items()}
    skeleton = merged(rest, emptied(tables, columns))
    check_tree(skeleton, "")
    state = State(
        columns,
        {table: len(parts[0]) for table, parts in by_table(new).items()},
        {table: rows_added(hashlib.sha256(), parts) for table, parts in by_table(new).items()},
    )
    with DeferredErrorFile(str(path), "w+") as disk:
        write_hdf5(disk, skeleton, {}, UNCHECKED_VERSIONS)
        state.inode = os.fstat(disk.fileno()).st_ino
        members = lay_out(disk, state)
        state.head = make_head(members, columns, {**attributes, "format_version": FORMAT_VERSION, "complete": 1})
        write_rows_and_head(disk, state, new)
    return state


def lay_out(disk: Any, state: State) -> dict[str, Any]:
    """Complete the base that h5py wrote with what the columns are, and say where columns and the first head go, behind
    it.

    Returns the members of the root, for make_head.
    """
    disk.seek(0)
    content = disk.read()
    members = describe(content, state.columns)
    content = content.ljust(aligned(len(content)), b"\0")
    for column in state.columns.values():
        column.described_at = len(content)
        content += column.described
    write_at(disk, FIRST_BYTES, content[FIRST_BYTES:])
    state.first, state.base_bytes = content[:FIRST_BYTES], len(content) - FIRST_BYTES
    state.base = hashlib.sha256(content[FIRST_BYTES:]).digest()
    state.next_head = len(content)
    for column in state.columns.values():
        column.offset, state.next_head = state.next_head, aligned(state.next_head + column.capacity * column.row_bytes)
    return members


def write_rows_and_head(disk: Any, state: State, new: dict[str, np.ndarray]) -> None:
    """The rows, the first head, and space for a head for each row to come. What is not used takes no disk."""
    head = state.head.at(state.next_head, state.counts)
    more = max((column.capacity - state.counts[column.table] for column in state.columns.values()), default=0)
    end = state.next_head + (1 + more) * len(head)
    disk.truncate(end)
    for path, column in state.columns.items():
        write_at(disk, column.offset, new[path].tobytes())
    write_at(disk, state.next_head, head)
    state.first = state.first[:END_AT] + struct.pack("<Q", end) + state.first[END_AT + 8 : ROOT_AT] + bytes(32)
    state.first = state.first_block(head, state.digests)
    state.next_head += len(head)
    write_at(disk, 0, state.first)


def write_at(disk: Any, offset: int, content: bytes) -> None:
    disk.seek(offset)
    disk.write(content)
    disk.check()


def flush(disk: Any, is_due: bool) -> None:
    """To the disk itself: what is written later reaches it later."""
    if is_due:
        os.fsync(disk.fileno())


def end_of(first: bytes) -> int:
    """The size of the file with this first block."""
    return struct.unpack_from("<Q", first, END_AT)[0]


# ---- tables and their columns


def columns_of(tables: dict[str, Any], where: str = "") -> dict[str, np.ndarray]:
    """Path to rows as they are stored, in the order of the paths."""
    found: dict[str, np.ndarray] = {}
    for name, value in tables.items():
        value = value.value if isinstance(value, Leaf) else value
        if isinstance(value, dict):
            found |= columns_of(value, f"{where}{name}/")
        else:
            found[where + name] = np.ascontiguousarray(storable(value, where + name))
    return dict(sorted(found.items()))


def emptied(tables: dict[str, Any], columns: dict[str, Column], where: str = "") -> dict[str, Any]:
    """The same tree with reserved space in the place of rows."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        leaf = value if isinstance(value, Leaf) else Leaf(value)
        if isinstance(leaf.value, dict):
            found[name] = emptied(leaf.value, columns, f"{where}{name}/")
        else:
            column = columns[where + name]
            found[name] = Leaf(Reserved((column.capacity, *column.shape), column.dtype), leaf.attributes)
    return found


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both trees; where both have a group, the members of both."""
    return {
        **one,
        **{
            name: merged(one[name], value) if isinstance(one.get(name), dict) else value
            for name, value in other.items()
        },
    }


def by_table(columns: dict[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
    """The columns of each table."""
    return grouped((table_of(path), rows) for path, rows in columns.items())


def growable(dtype: np.dtype) -> np.dtype:
    """Text may become longer: space up to the next power of two, so that it seldom needs a new file."""
    return np.dtype(f"S{1 << (dtype.itemsize - 1).bit_length()}") if dtype.kind == "S" else dtype
