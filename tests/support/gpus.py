"""Which tests see the GPUs of a machine that has some."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd")  # of the drivers, CUDA's and ROCm's
MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def masks_for(asked: Sequence[str], folder: Path, device_files: Sequence[str] = DEVICE_FILES) -> dict[str, str]:
    """Variables that hide the GPUs, unless none is here, or all tests that are asked for are those of tests/gpu.

    All others expect the bits and the plan of a CPU, where run.device=auto would take a GPU. asked: pytest's arguments,
    from `folder` on.
    """
    paths = [(folder / argument.partition("::")[0]).resolve() for argument in asked]
    if all(GPU_TESTS in (path, *path.parents) for path in paths) or not any(
        Path(name).exists() for name in device_files
    ):
        return {}
    return dict.fromkeys(MASKS, "")
