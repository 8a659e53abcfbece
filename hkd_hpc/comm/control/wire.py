"""Messages of the control plane: a length of four bytes, then a JSON object. Never pickle; the length is bounded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypedDict

from hkd_hpc.comm.launchers import MOST_RANKS

LIMIT_BYTES = 1024 * MOST_RANKS  # some messages have a value of each rank, of a few hundred bytes
LENGTH_BYTES = 4


class Message(TypedDict, total=False):
    """A JSON object. While the job starts (handshake.py, rendezvous.py):

    - both send a `challenge` and a `proof`; a newcomer also `size` and `member` (as a dict), and then `ready`;
    - rank 0 sends `members` when all are there, or `error`.

    Then by its kind:

    - to the coordinator: status (`place`), steps (`steps` taken so far), enter (the barrier `key`, with a `value`),
      failed (`text`, `code`, `is_hang`), stack (`stack` of the main thread);
    - from the coordinator: status (its own `place`; also the heartbeat), release (`values` of all at the barrier, empty
      where nobody has one), reject (the barrier; `text` says why), request_stack, abort (`code`).
    """

    challenge: str
    proof: str
    size: int
    member: dict[str, Any]
    ready: bool
    members: list[dict[str, Any]]
    error: str
    kind: str
    place: Sequence[Any]
    steps: int
    key: list[Any]
    value: Any
    values: list[Any]
    text: str
    code: int
    is_hang: bool
    stack: str


def pack(message: Message) -> bytes:
    """The message as bytes. Raises ValueError above LIMIT_BYTES."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LIMIT_BYTES:
        raise ValueError(f"a control message of {len(body)} bytes; at most {LIMIT_BYTES} are allowed")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class Unpacker:
    """Cuts a stream of bytes into messages, of at most so many bytes each; None: LIMIT_BYTES."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._buffer, self._limit_bytes = bytearray(), LIMIT_BYTES if limit_bytes is None else limit_bytes

    @property
    def missing_bytes(self) -> int:
        """What the next message lacks as far as is known, first of its length, then of its body; 0 once it is there.

        Raises ValueError for a length above the limit.
        """
        return max(0, self._end() - len(self._buffer))

    def feed(self, data: bytes) -> list[Message]:
        """The messages completed by `data`. Raises ValueError for anything that is not our format."""
        self._buffer += data
        messages: list[Message] = []
        while not self.missing_bytes:
            end = self._end()
            messages.append(_message(bytes(self._buffer[LENGTH_BYTES:end])))
            del self._buffer[:end]
        return messages

    def _end(self) -> int:
        """Where the next message ends, as far as is known."""
        if len(self._buffer) < LENGTH_BYTES:
            return LENGTH_BYTES
        body_bytes = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
        if body_bytes > self._limit_bytes:
            raise ValueError("a message longer than allowed")
        return LENGTH_BYTES + body_bytes


def _message(body: bytes) -> Message:
    try:
        message: Message = json.loads(body)
    except RecursionError:
        raise ValueError("a message of lists within lists") from None
    if not isinstance(message, dict):
        raise ValueError("a message that is not a JSON object")
    return message
