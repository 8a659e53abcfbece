"""Hashes of arrays: of a model's weights, of data. Imports no torch: files are checked on login nodes too."""

from __future__ import annotations

import hashlib

import numpy as np


def arrays_sha256(arrays: dict[str, np.ndarray]) -> str:
    """64 hex digits over names, dtypes, shapes and bytes (little-endian, C order) in the order of the dict."""
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
