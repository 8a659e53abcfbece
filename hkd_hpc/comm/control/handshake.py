"""How a newcomer and rank 0 prove to each other that they know the job's token, which never travels itself.

    rank 0 -> newcomer   challenge: a random text
    newcomer -> rank 0   challenge of its own, proof of both, and who it is
    rank 0 -> newcomer   proof of both
    newcomer -> rank 0   ready: only now it belongs to the job, for it may have given up and come again meanwhile

So nobody joins who does not know the token, nobody plays rank 0, and who listens in the place of either learns nothing
to come back with. What travels afterwards is neither signed nor secret.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from hkd_hpc.comm.control.watch import Problem
from hkd_hpc.comm.control.wire import Message, Unpacker, pack
from hkd_hpc.common.errors import RunError

POLL_S = 0.25  # how often a wait looks whether the guard sees a problem
SEND_S = 2.0
ANSWER_S = 10.0  # who says nothing for so long is not one of ours
FIRST_BYTES = 4096  # of a message from somebody who has not proved anything
NEWCOMER, RANK_0 = "newcomer", "rank 0"


def proof(token: str, who: str, own: str, other: str) -> str:
    """That `who` knows the token, by both challenges; `own`: the one that it made."""
    return hmac.new(token.encode(), f"{who} {own} {other}".encode(errors="replace"), hashlib.sha256).hexdigest()


def is_proof(said: object, token: str, who: str, own: object, other: str) -> bool:
    """Whether somebody has proved to be `who`; what was said may be anything."""
    if not isinstance(said, str) or not isinstance(own, str):
        return False
    return hmac.compare_digest(said.encode(errors="replace"), proof(token, who, own, other).encode())


class Newcomer:
    """Rank 0's end of a connection until it is known whose it is; never waits.

    Attributes:
        link: the connection.
        hello: what it said of itself once it has proved to know the token.
        is_ready: whether it has answered rank 0's proof.
    """

    def __init__(self, link: socket.socket, token: str) -> None:
        self.link, self._token, self._challenge = link, token, secrets.token_hex(16)
        self.hello: Message | None = None
        self.is_ready = False
        self._until_s, self._unpacker = time.monotonic() + ANSWER_S, Unpacker(FIRST_BYTES)
        link.settimeout(0)
        send(link, {"challenge": self._challenge})

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._until_s

    def read(self, check: Callable[[Message], Any]) -> bool:
        """Take what has come; False once it is none of ours, or has left.

        Args:
            check: of the hello of one who knows the token: raises where it does not fit the job.
        """
        try:
            data = self.link.recv(self._unpacker.missing_bytes)
            messages = self._unpacker.feed(data)
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            return False
        for message in messages:
            if self.hello:
                self.is_ready = True
            elif is_proof(message.get("proof"), self._token, NEWCOMER, message.get("challenge"), self._challenge):
                self.hello = message
                send(self.link, {"proof": proof(self._token, RANK_0, self._challenge, message["challenge"])})
                check(message)
            else:
                return False
        return bool(data)


def introduce(link: socket.socket, token: str, who: Message, problem: Problem) -> bool:
    """The newcomer's end: whether rank 0 of this job is at the other one, and lets it in.

    Args:
        link: connected.
        token: the job's.
        who: what to say of itself.
        problem: as of `receive`.
    """
    asked = (receive(link, problem, ANSWER_S, FIRST_BYTES) or {}).get("challenge")
    if not isinstance(asked, str):
        return False
    own = secrets.token_hex(16)
    send(link, {"challenge": own, "proof": proof(token, NEWCOMER, own, asked), **who})
    answer = receive(link, problem, ANSWER_S, FIRST_BYTES) or {}
    if not is_proof(answer.get("proof"), token, RANK_0, asked, own):
        return False
    send(link, {"ready": True})
    return True


def receive(
    link: socket.socket, problem: Problem, wait_s: float = math.inf, limit_bytes: int | None = None
) -> Message | None:
    """One message and not a byte more: what follows is for the control plane.

    Args:
        link: connected.
        problem: RunError with what it says.
        wait_s: for the whole message.
        limit_bytes: of its body; None: wire.LIMIT_BYTES.

    Returns:
        None if the other side hangs up, sends something else, or nothing within wait_s.
    """
    deadline_s = time.monotonic() + wait_s
    unpacker, messages = Unpacker(limit_bytes), list[Message]()
    link.settimeout(POLL_S)
    while not messages:
        if text := problem():
            raise RunError(text)
        if time.monotonic() > deadline_s:
            return None
        try:
            data = link.recv(unpacker.missing_bytes)
            messages = unpacker.feed(data)
        except TimeoutError:
            continue
        except (OSError, ValueError):
            return None
        if not data:
            return None
    return messages[0]


def send(link: socket.socket, message: Message) -> None:
    """Within SEND_S; to one that has gone nothing, which whoever reads next will see."""
    before_s = link.gettimeout()
    try:
        link.settimeout(SEND_S)
        link.sendall(pack(message))
    except OSError:
        pass
    finally:
        if link.fileno() >= 0:
            link.settimeout(before_s)
