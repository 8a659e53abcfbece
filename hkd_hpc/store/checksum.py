"""What the first bytes of a growing file (store/growing.py) say of the rest, so that damage is noticed before it is
read.

The checksum has two hashes: of all that h5py needs to find the rows (superblock, base, head), checked before HDF5 sees
the file, and of the rows. Of each table the rows are hashed one after the other, so that a new row costs no look at the
older.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

CHECKSUM_BYTES = 512  # the smallest user block of HDF5
FIRST_BYTES = CHECKSUM_BYTES + 96  # with the superblock, version 0, behind it
TEXT = (
    "hkd_hpc rows, {} bytes follow this block, first {} that stay; the head at {} has {}; sha256 {}, of the rows {}\n"
)
PATTERN = re.compile(TEXT.format(*[r"(\d{1,18})"] * 4, *["([0-9a-f]{64})"] * 2).encode())


@dataclass(frozen=True)
class GrowingChecksum:
    """The first bytes of a growing file.

    Attributes:
        size_bytes: of all behind these bytes.
        base_bytes: of the base, behind the first block.
        head_at, head_bytes: of the head that counts, from the file's start.
        fixed_sha256: of superblock, base and head.
        rows_sha256: of the rows.
    """

    size_bytes: int
    base_bytes: int
    head_at: int
    head_bytes: int
    fixed_sha256: str
    rows_sha256: str

    @classmethod
    def of(cls, block: bytes) -> GrowingChecksum | None:
        """What a block says, None if it is no such checksum."""
        found = PATTERN.match(block)
        if not found:
            return None
        size_bytes, base_bytes, head_at, head_bytes = map(int, found.groups()[:4])
        fixed, rows = (sha.decode() for sha in found.groups()[4:])
        return cls(size_bytes, base_bytes, head_at, head_bytes, fixed, rows)

    def block(self) -> bytes:
        """As it stands in the file."""
        return TEXT.format(*vars(self).values()).encode().ljust(CHECKSUM_BYTES, b"\0")

    def matches(self, first: bytes, raw: Any) -> bool:
        """Whether base and head are those that the checksum is of. `first`: the first block of `raw`."""
        if not FIRST_BYTES + self.base_bytes <= self.head_at <= CHECKSUM_BYTES + self.size_bytes - self.head_bytes:
            return False
        raw.seek(FIRST_BYTES)
        base = hashlib.sha256(raw.read(self.base_bytes))
        raw.seek(self.head_at)
        return (
            first[:CHECKSUM_BYTES] == self.block()
            and fixed_sha256(first[CHECKSUM_BYTES:], base.digest(), raw.read(self.head_bytes)) == self.fixed_sha256
        )

    def matches_rows(self, root: Any, raw: Any) -> bool:
        """Whether the rows are those that the checksum is of. `root`: the same file, opened by h5py."""
        tables: dict[str, list[np.ndarray]] = {}
        for path, node in sorted(self._columns(root).items()):
            raw.seek(node.id.get_offset())
            content = raw.read(node.size * node.dtype.itemsize)
            tables.setdefault(path.partition("/")[0], []).append(
                np.frombuffer(content, np.uint8).reshape(len(node), -1)
            )
        return rows_sha256(rows_added(hashlib.sha256(), tables[table]) for table in sorted(tables)) == self.rows_sha256

    def _columns(self, root: Any) -> dict[str, Any]:
        """Path and data set of all columns: what lies behind the base."""
        found: dict[str, Any] = {}
        behind = FIRST_BYTES + self.base_bytes
        root.visititems(lambda path, node: found.update({path: node}) if _offset(node) >= behind else None)
        return found


def _offset(node: Any) -> int:
    offset = node.id.get_offset() if hasattr(node, "dtype") else None
    return -1 if offset is None else offset


def fixed_sha256(superblock: bytes, base_digest: bytes, head: bytes) -> str:
    return hashlib.sha256(superblock + base_digest + head).hexdigest()


def rows_sha256(tables: Iterable[Any]) -> str:
    """Of the digests of all tables, in the order of their names."""
    return hashlib.sha256(b"".join(digest.digest() for digest in tables)).hexdigest()


def rows_added(digest: Any, columns: list[np.ndarray]) -> Any:
    """A copy of a table's digest with these rows added, each with its values in the order of the columns' names."""
    digest = digest.copy()
    if columns and len(columns[0]):
        digest.update(np.hstack([column.reshape(len(column), -1).view(np.uint8) for column in columns]))
    return digest


class Snapshot(io.RawIOBase):
    """A file as it is, but with the first block that was read before: what its writer adds meanwhile is not seen."""

    def __init__(self, raw: Any, first: bytes):
        self._raw, self._first = raw, first

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._raw.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        offset = self._raw.tell()
        length = self._raw.readinto(buffer)
        known = self._first[offset : offset + length]
        memoryview(buffer).cast("B")[: len(known)] = known
        return length
