"""Shamir's shares of a secret (CACM 1979): any `threshold` of them give it back, fewer tell nothing about it.

The secret is the value at 0 of a random polynomial of degree threshold - 1 over the integers modulo PRIME; a share is
its value at another place.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

PRIME = 2**256 + 297  # the smallest above all secrets of 32 bytes
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, threshold: int, places: Iterable[int]) -> dict[int, bytes]:
    """Shares of 33 bytes.

    Args:
        secret: 32 bytes.
        threshold: how many shares give it back.
        places: one for each share, positive and below PRIME.

    Returns:
        The shares by place.
    """
    polynomial = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {place: value_at(place, polynomial).to_bytes(SHARE_BYTES, "big") for place in places}


def value_at(place: int, polynomial: list[int]) -> int:
    """By Horner's rule; the constant comes first."""
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * place + coefficient) % PRIME
    return value


def joined(shares: Mapping[int, bytes]) -> bytes:
    """The secret again, by Lagrange's interpolation at 0.

    Args:
        shares: by place, at least `threshold` of them; fewer, or wrong ones, give something else.

    Raises:
        ValueError: what comes out is no secret of 32 bytes.
    """
    total = 0
    for place, share in shares.items():
        top, bottom = 1, 1
        for other in shares.keys() - {place}:
            top, bottom = top * other % PRIME, bottom * (other - place) % PRIME
        total += int.from_bytes(share, "big") * top * pow(bottom, -1, PRIME)
    value = total % PRIME
    if value >> 8 * SECRET_BYTES:
        raise ValueError("these shares give no secret of 32 bytes")
    return value.to_bytes(SECRET_BYTES, "big")
