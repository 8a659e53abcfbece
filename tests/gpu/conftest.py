"""`python -m pytest tests/gpu` on a machine with a GPU (CUDA or ROCm); elsewhere, and among other tests, what needs
one is skipped."""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as a run sets it; cuBLAS reads it when it starts


@pytest.fixture
def gpu():
    """The device; its TF32 switches as at the start of a run in fp32."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch.cuda.is_available() is false")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", torch.cuda.current_device())
