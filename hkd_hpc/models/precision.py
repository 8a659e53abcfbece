"""What weights, images and knowledge are computed, sent and kept in: torch's default dtype.

It is float32 in every run. The tests set float64 (torch.set_default_dtype) and compare whole rounds with oracles: in
float32 the last bit of a tiny gradient, which each kind of CPU rounds its own way, is a whole step of Adam.
"""

from __future__ import annotations

import numpy as np

from hkd_hpc.common.lazy import torch


def real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in that dtype; itself if it is in it already."""
    return tensor.to(torch.get_default_dtype())


def real_type() -> np.dtype:
    """That dtype for NumPy."""
    return np.dtype(str(torch.get_default_dtype()).removeprefix("torch."))


def allow_tf32(is_allowed: bool) -> None:
    """Whether GPUs may compute products and convolutions in TF32; by itself torch lets convolutions do so."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_allowed
