"""Messages of the control plane: a length of four bytes, then a JSON object. Never pickle; the length is bounded."""

from __future__ import annotations

import json
from typing import Any

LIMIT_BYTES = 1 << 20


def pack(message: dict[str, Any]) -> bytes:
    """The message as bytes. Raises ValueError above LIMIT_BYTES."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LIMIT_BYTES:
        raise ValueError(f"a control message of {len(body)} bytes; at most {LIMIT_BYTES} are allowed")
    return len(body).to_bytes(4, "big") + body


class Unpacker:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages completed by `data`. Raises ValueError for anything that is not our format."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= 4:
            end = 4 + int.from_bytes(self._buffer[:4], "big")
            if end > 4 + LIMIT_BYTES:
                raise ValueError("a message longer than allowed")
            if len(self._buffer) < end:
                break
            messages.append(_message(bytes(self._buffer[4:end])))
            del self._buffer[:end]
        return messages


def _message(body: bytes) -> dict[str, Any]:
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError("a message that is not a JSON object")
    return message
