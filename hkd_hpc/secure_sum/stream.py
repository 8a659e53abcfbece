"""Masks: numbers modulo 2^64 out of a stream cipher, AES-256 in counter mode, which any place of can be had at once.

(ChaCha20 is the other choice of `cryptography`; where the CPU has instructions for AES that is the faster one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

CHUNK = 1 << 15  # numbers at a time: they stay in the core's own cache until they are added
BLOCK = 2  # numbers of a block of AES


@dataclass(frozen=True)
class Mask:
    """What one client of a pair adds and the other subtracts.

    Attributes:
        key: of the pair, 32 bytes.
        sign: 1, or -1 for the other of the two.
    """

    key: bytes
    sign: int

    def fill(self, out_N: np.ndarray, start: int) -> None:
        """Write numbers start, start + 1, ... of the stream; `start` is even, out_N uint64 of at most CHUNK."""
        encryptor = Cipher(AES(self.key), CTR((start // BLOCK).to_bytes(16, "big"))).encryptor()
        encryptor.update_into(zeros()[: out_N.nbytes], out_N.data.cast("B"))


def add(into_N: np.ndarray, masks: Sequence[Mask], fresh: bool = False) -> None:
    """Add masks to whole numbers modulo 2^64.

    Args:
        into_N: uint64, changed in place.
        masks: each added or subtracted, as its sign says.
        fresh: whether into_N is to be zero before.
    """
    scratch_N = np.empty(CHUNK, np.uint64)
    for start in range(0, len(into_N), CHUNK):
        part = into_N[start : start + CHUNK]
        words = scratch_N[: len(part)]
        if fresh:
            part.fill(0)
        for mask in masks:
            mask.fill(words, start)
            (np.add if mask.sign > 0 else np.subtract)(part, words, out=part)


@cache
def zeros() -> memoryview:
    """What is encrypted: the stream is what comes out."""
    return memoryview(bytes(8 * CHUNK))
