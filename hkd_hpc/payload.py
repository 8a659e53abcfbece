"""What travels beside the weights: fixed-size records of named arrays (numpy structured types), never pickled.

A client's report and the server's message are each one record; a rank hosting k clients sends k records. Absent classes
are rows of zeros with count 0, so that sizes never depend on the data.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from hkd_hpc.common.errors import UsageError
from hkd_hpc.models.precision import real_type

LIMIT_BYTES = 2**31 - 1  # numpy counts a record's bytes in a C int: beyond it, it refuses, or wraps without a word

Shapes = dict[str, tuple[int, ...]]


def record_type(numbers: Shapes, integers: Shapes, tensors: Shapes) -> np.dtype:
    """A structured type: float64 `numbers`, int64 `integers`, float32 `tensors` under the field "tensors".

    UsageError for more than LIMIT_BYTES.
    """
    nbytes = real_type().itemsize * numbers_in(tensors) + 8 * (numbers_in(numbers) + numbers_in(integers))
    if nbytes > LIMIT_BYTES:
        largest = max(tensors, key=lambda name: math.prod(tensors[name]), default="")
        raise UsageError(
            f"a report or message of the scheme has {nbytes:,} bytes, the most in {largest!r}, and at most "
            f"{LIMIT_BYTES:,} can travel beside the weights; use fewer classes or public images, or a "
            "smaller model.latent"
        )
    fields = [(name, "<i8", shape) for name, shape in integers.items()]
    fields += [(name, "<f8", shape) for name, shape in numbers.items()]
    inner = [(name, real_type(), shape) for name, shape in tensors.items()]
    return np.dtype(fields + ([("tensors", inner)] if inner else []))


def numbers_in(shapes: Shapes) -> int:
    """How many numbers arrays of these shapes hold together."""
    return sum(map(math.prod, shapes.values()))


def fill(record: np.void, tensors: dict[str, torch.Tensor]) -> None:
    """Copy named tensors into a record. KeyError / ValueError when a name or a shape was not declared."""
    declared = _names(record.dtype["tensors"]) if "tensors" in _names(record.dtype) else ()
    if set(tensors) != set(declared):
        raise KeyError(f"declared to travel: {sorted(declared)}; given: {sorted(tensors)}")
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().numpy() if isinstance(tensor, torch.Tensor) else np.asarray(tensor)
        if value.shape != record["tensors"][name].shape:
            raise ValueError(f"{name}: declared shape {record['tensors'][name].shape}, given {value.shape}")
        record["tensors"][name] = value


def tensors_of(records: np.ndarray, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """{name: float32 tensor} of a record, or stacked (records first) of an array of records."""
    if "tensors" not in _names(records.dtype):
        return {}
    inner = records["tensors"]
    return {name: torch.from_numpy(np.array(inner[name])).to(device) for name in _names(inner.dtype)}


def _names(dtype: np.dtype) -> tuple[str, ...]:
    return dtype.names or ()


def as_bytes(records: np.ndarray) -> np.ndarray:
    """The records as one flat uint8 array (no copy)."""
    return records.reshape(-1).view(np.uint8)
