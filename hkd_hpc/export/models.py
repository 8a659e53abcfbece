"""Trained models as plain state dicts."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.lazy import torch
from hkd_hpc.results.models import read_inputs, read_model
from hkd_hpc.store.atomic import replace_bytes


def export_model(run: Path, out: Path, client: int | None, architecture: str = "") -> str:
    """Write one model; what was written, for people."""
    arrays = read_model(run, client, architecture)
    write_model(out, arrays)
    told = f"{out}: {len(arrays)} tensors, {sum(a.size for a in arrays.values()):,} numbers"
    return f"{told}{normalised_text(run)}"


def normalised_text(run: Path) -> str:
    """By which mean and standard deviation the run normalised its inputs, which no state dict says; else empty."""
    inputs = read_inputs(run)
    if not inputs.mean:
        return ""
    mean, std = (",".join(f"{value:g}" for value in values) for values in (inputs.mean, inputs.std))
    return f"; its inputs{' / 255' * (inputs.dtype == 'uint8')} are normalised by mean {mean} and deviation {std}"


def write_model(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a state dict: the whole file or none.

    Args:
        path: ends in .pt or .safetensors.
        arrays: by name.

    Raises:
        UsageError: another suffix, or safetensors is not installed.
        RunError: the file cannot be written.
    """
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    if path.suffix == ".pt":
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        content = buffer.getvalue()
    elif path.suffix == ".safetensors":
        content = safetensors_of(tensors)
    else:
        raise UsageError(f"--out {path}: the name must end in .pt or .safetensors")
    replace_bytes(path, content)


def safetensors_of(tensors: dict) -> bytes:
    """The content of a .safetensors file.

    Args:
        tensors: by name.

    Returns:
        Its bytes.

    Raises:
        UsageError: safetensors is not installed.
    """
    try:
        from safetensors.torch import save
    except ImportError:
        raise UsageError(
            "safetensors is not installed; pip install safetensors, or choose a name ending in .pt"
        ) from None
    return save(tensors)
