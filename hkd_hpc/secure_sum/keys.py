"""Key pairs of one client for one cohort: X25519 (RFC 7748), and secrets of two clients by HKDF-SHA256 (RFC 5869)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32
TAG_BYTES = 16  # by which a sealed text is longer
NONCE = bytes(12)  # the same for all, since each key seals one text


@dataclass(frozen=True)
class KeyPair:
    """A secret key and the public one that belongs to it, 32 bytes each."""

    secret: bytes
    public: bytes

    @cached_property
    def _private(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.secret)

    @classmethod
    def of(cls, secret: bytes) -> KeyPair:
        """The pair of this secret key."""
        return cls(secret, X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw())

    @classmethod
    def new(cls) -> KeyPair:
        """A pair from the operating system's entropy: nothing that a run's seed could tell again."""
        return cls.of(os.urandom(KEY_BYTES))

    def shared(self, public: bytes, purpose: str) -> bytes:
        """A secret of 32 bytes that this pair and the holder of `public` have in common, another for each purpose.

        Raises:
            ValueError: `public` is no key that two could agree with.
        """
        agreed = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose.encode()).derive(agreed)


def seal(key: bytes, text: bytes) -> bytes:
    """Encrypt, so that a change is noticed; a key seals one text alone."""
    return ChaCha20Poly1305(key).encrypt(NONCE, text, None)


def unseal(key: bytes, sealed: bytes) -> bytes:
    """The text. cryptography's InvalidTag where it was sealed with another key, or changed."""
    return ChaCha20Poly1305(key).decrypt(NONCE, sealed, None)
