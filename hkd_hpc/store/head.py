"""The head of a growing file (store/growing.py): what tells HDF5 how many rows each column has.

It is made of object headers of version 1 (HDF5 File Format Specification 3.0, IV.A), which carry no checksum: those of
the columns, of the groups that hold them, and of the root. From one head to the next only numbers of rows and addresses
within the head change, so it is put together once for a file and then filled in.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hkd_hpc.store.checksum import CHECKSUM_BYTES

NOWHERE = 2**64 - 1
NIL, DATASPACE, LINK_INFO, LINK, LAYOUT, GROUP_INFO, ATTRIBUTE, CONTINUATION = (
    0x00,
    0x01,
    0x02,
    0x06,
    0x08,
    0x0A,
    0x0C,
    0x10,
)
MADE_HERE = (NIL, DATASPACE, LAYOUT, CONTINUATION)  # of a column's messages; all others are as h5py wrote them
PREFIX_BYTES, MESSAGE_BYTES = 16, 8  # before the messages of an object header, before the body of a message


@dataclass
class Column:
    """One column of a table: its type, the shape of one row, for how many rows it has space (`capacity`), and where its
    first row is in the file (`offset`).

    `described`: type, attributes and all else that h5py says of it, as messages of an object header (`messages` of
    them), to be put at `described_at` in the file.
    """

    table: str
    dtype: np.dtype
    shape: tuple[int, ...]
    capacity: int
    offset: int = 0
    described: bytes = b""
    messages: int = 0
    described_at: int = 0

    def __post_init__(self) -> None:
        self.row_bytes = self.dtype.itemsize * int(np.prod(self.shape, dtype=int))

    def takes(self, rows: np.ndarray, have: int) -> bool:
        """Whether these rows can follow the `have` that are there."""
        fits = rows.dtype.kind == self.dtype.kind and rows.dtype.itemsize <= self.dtype.itemsize
        return not len(rows) or (fits and rows.shape[1:] == self.shape and have + len(rows) <= self.capacity)


@dataclass
class Head:
    """`content`: its bytes, addresses counted from its start. `addresses`: where those are; `sizes`: (where, table) of
    the numbers of rows; `root`: the address of the root's header. It is as long whatever is filled in."""

    content: bytearray = field(default_factory=bytearray)
    addresses: list[int] = field(default_factory=list)
    sizes: list[tuple[int, str]] = field(default_factory=list)
    root: int = 0

    def at(self, offset: int, counts: dict[str, int]) -> bytes:
        """The head for so many rows of each table, to be written at `offset` in the file."""
        filled, start = bytearray(self.content), address_of(offset)
        for where in self.addresses:
            struct.pack_into("<Q", filled, where, start + struct.unpack_from("<Q", filled, where)[0])
        for where, table in self.sizes:
            struct.pack_into("<Q", filled, where, counts[table])
        return bytes(filled)

    def put_column(self, column: Column) -> int:
        """The address of a column's header: its size, its offset, and where it is described."""
        self.sizes.append((len(self.content) + PREFIX_BYTES + MESSAGE_BYTES + 8, column.table))
        rank = 1 + len(column.shape)
        messages = (
            message(DATASPACE, struct.pack(f"<BBB5x{rank}Q", 1, rank, 0, 0, *column.shape))
            + message(LAYOUT, struct.pack("<BBQQ", 3, 1, address_of(column.offset), column.capacity * column.row_bytes))
            + message(CONTINUATION, struct.pack("<QQ", address_of(column.described_at), len(column.described)))
        )
        return self._put(messages, 3 + column.messages)

    def put_group(self, members: dict[str, int], inner: set[str], attributes: dict[str, int]) -> int:
        """The address of the header of a group. `members`: addresses by name; of those named in `inner`, within this
        head.
        """
        parts = [
            message(LINK_INFO, struct.pack("<BBQQ", 0, 0, NOWHERE, NOWHERE)),
            message(GROUP_INFO, bytes(2)),
            *(attribute(name, value) for name, value in attributes.items()),
        ]
        for name, address in sorted(members.items()):
            text = name.encode()
            if name in inner:
                self.addresses.append(
                    len(self.content) + PREFIX_BYTES + sum(map(len, parts)) + MESSAGE_BYTES + 5 + len(text)
                )
            parts.append(
                message(LINK, struct.pack("<BBBH", 1, 0b10001, 1, len(text)) + text + struct.pack("<Q", address))
            )
        return self._put(b"".join(parts), len(parts))

    def _put(self, messages: bytes, count: int) -> int:
        address = len(self.content)
        self.content += struct.pack("<BxHII4x", 1, count, 1, len(messages)) + messages
        return address


def make_head(members: dict[str, Any], columns: dict[str, Column], attributes: dict[str, int]) -> Head:
    """`members`: name to an address (what does not grow), to the path of a column, or to the same of a group;
    `attributes` of the root."""
    head = Head()

    def put(members: dict[str, Any], attributes: dict[str, int]) -> int:
        inner = {name for name, member in members.items() if not isinstance(member, int)}
        return head.put_group({name: put_member(member) for name, member in members.items()}, inner, attributes)

    def put_member(member: Any) -> int:
        if isinstance(member, dict):
            return put(member, {})
        return head.put_column(columns[member]) if isinstance(member, str) else member

    head.root = put(members, attributes)
    return head


def message(kind: int, body: bytes) -> bytes:
    """A message of an object header."""
    body = body.ljust(aligned(len(body)), b"\0")
    return struct.pack("<HHB3x", kind, len(body), 0) + body


def attribute(name: str, value: int) -> bytes:
    """The message of an attribute that is one 64-bit number."""
    import h5py

    kind, text, space = h5py.h5t.STD_I64LE.encode()[2:], name.encode() + b"\0", struct.pack("<B7x", 1)
    parts = b"".join(part.ljust(aligned(len(part)), b"\0") for part in (text, kind, space))
    return message(ATTRIBUTE, struct.pack("<BxHHH", 1, len(text), len(kind), 8) + parts + struct.pack("<q", value))


# ---- what h5py wrote


def describe(content: bytes, columns: dict[str, Column]) -> dict[str, Any]:
    """The members of the root of a file, for make_head; what h5py says of each column goes into `columns`."""
    import h5py

    with h5py.File(io.BytesIO(content), "r") as root:
        for name, column in columns.items():
            start = CHECKSUM_BYTES + _address(root[name])
            (size,) = struct.unpack_from("<I", content, start + 8)
            messages = [raw for kind, raw in messages_in(content, start + PREFIX_BYTES, size) if kind not in MADE_HERE]
            column.described, column.messages = b"".join(messages), len(messages)
        return _members(root, "", columns)


def _members(group: Any, where: str, columns: dict[str, Column]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, node in group.items():
        path = where + name
        if path in columns:
            members[name] = path
        elif any(other.startswith(path + "/") for other in columns):
            members[name] = _members(node, path + "/", columns)
        else:
            members[name] = _address(node)
    return members


def _address(node: Any) -> int:
    import h5py

    return h5py.h5o.get_info(node.id).addr


def messages_in(content: bytes, start: int, size: int) -> Iterator[tuple[int, bytes]]:
    """(kind, bytes) of the messages of an object header, also of those in its continuations."""
    offset = start
    while offset + MESSAGE_BYTES <= start + size:
        kind, length = struct.unpack_from("<HH", content, offset)
        yield kind, content[offset : offset + MESSAGE_BYTES + length]
        if kind == CONTINUATION:
            address, more = struct.unpack_from("<QQ", content, offset + MESSAGE_BYTES)
            yield from messages_in(content, CHECKSUM_BYTES + address, more)
        offset += MESSAGE_BYTES + length


def address_of(offset: int) -> int:
    """HDF5 counts from the superblock on."""
    return offset - CHECKSUM_BYTES


def table_of(path: str) -> str:
    return path.partition("/")[0]


def aligned(size: int) -> int:
    return -(-size // 8) * 8
