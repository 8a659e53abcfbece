"""Inputs as networks see them: images, rows or sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hkd_hpc.common.lazy import torch
from hkd_hpc.models.precision import real


class Inputs(NamedTuple):
    """One input of a network as it lies in the data.

    Attributes:
        shape: of an image (channels, height, width), of a row (columns,), of a sequence (length,).
        dtype: uint8 or float32 of images, float32 of rows, int64 of sequences.
        mean: by which it is normalised, for each channel or column; of uint8 images, that of x / 255. Empty: not.
        std: the standard deviation that belongs to it.
    """

    shape: tuple[int, ...]
    dtype: str = "uint8"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """images, rows or sequences"""
        if len(self.shape) == 3:
            return "images"
        return "sequences" if self.dtype == "int64" else "rows"

    def record(self) -> dict[str, Any]:
        """What a run keeps of it."""
        scale = {"mean": np.array(self.mean), "std": np.array(self.std)} if self.mean else {}
        return {"image_shape": np.array(self.shape, np.int64), "input": {"dtype": self.dtype, **scale}}

    @classmethod
    def of_record(cls, tree: Mapping[str, Any]) -> Inputs:
        """The inverse; runs of earlier versions have uint8 images alone."""
        kept = tree.get("input", {})
        scale = (tuple(np.asarray(kept.get(name, ())).tolist()) for name in ("mean", "std"))
        return cls(tuple(tree["image_shape"].tolist()), str(kept.get("dtype", "uint8")), *scale)

    def zeros(self, count: int) -> torch.Tensor:
        """So many inputs, as `normalise` gives them."""
        return torch.zeros(count, *self.shape, dtype=torch.int64 if self.dtype == "int64" else None)


def normalise(x: torch.Tensor) -> torch.Tensor:
    """uint8 images to float32 in [-1, 1]: (x / 255 - .5) / .5, for all data sets (as the FedHKD authors' code does).

    Floats and sequences stay as they are.
    """
    if x.dtype == torch.uint8:
        return real(x).mul_(1 / 127.5).sub_(1.0)
    return real(x) if x.is_floating_point() else x


def standardise(net: torch.nn.Module, inputs: Inputs, device: torch.device | str = "cpu") -> None:
    """Have a network normalise what `normalise` gives by the mean and standard deviation of its inputs, if any."""
    if not inputs.mean:
        return
    mean_C, std_C = (torch.tensor(values, dtype=torch.float64) for values in (inputs.mean, inputs.std))
    if inputs.dtype == "uint8":  # it gets 2 x / 255 - 1
        mean_C, std_C = 2 * mean_C - 1, 2 * std_C
    shape = (-1, 1, 1) if inputs.kind == "images" else (-1,)
    mean, factor = (real(values.reshape(shape)).to(device) for values in (mean_C, 1 / std_C))
    forward = net.forward

    def standardised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return forward((x - mean.to(x.device)) * factor.to(x.device))

    net.forward = standardised
