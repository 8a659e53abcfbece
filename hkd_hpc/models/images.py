"""Images as networks see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkd_hpc.models.precision import real

if TYPE_CHECKING:
    import torch


def normalise(x_uint8: torch.Tensor) -> torch.Tensor:
    """uint8 images to float32 in [-1, 1]: (x / 255 - .5) / .5, for all data sets (as the FedHKD authors' code does)."""
    return real(x_uint8).mul_(1 / 127.5).sub_(1.0)
