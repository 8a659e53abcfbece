"""Named random streams: every draw is a function of (seed, purpose, round, client), never of a rank or of an order."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

import numpy as np


def derive(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """A 128-bit integer that names one stream; two different names give unrelated integers (SHA-256)."""
    name = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:16], "little")


def stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """The generator of one stream, at its beginning. Calling it again gives the same numbers again."""
    return np.random.Generator(np.random.Philox(key=derive(seed, purpose, round, client)))


def torch_seed(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """A seed of 63 bits for torch.manual_seed, for the draws that only torch can make (initial weights, dropout)."""
    return derive(seed, purpose, round, client) >> 65


def seed_globals(seed: int) -> None:
    """Python's and numpy's own generators: nothing here draws from them, but a model of one's own may."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def globals_kept() -> Iterator[None]:
    """After it they are what they were before: their other draws are somebody else's."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
