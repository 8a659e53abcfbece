"""`python -m pytest` on a machine with a GPU: which tests see it."""

from pathlib import Path

import pytest
from gpus import masks_for

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "asked, folder, sees",
    [
        (["tests/gpu"], PROJECT, True),
        (["gpu/test_on_gpu.py::test_x", "gpu"], PROJECT / "tests", True),
        (["."], PROJECT, False),
        (["tests"], PROJECT, False),
        (["tests/gpu", "tests/run"], PROJECT, False),
        (["tests/gpu/../run"], PROJECT, False),
    ],
)
def test_tests_of_the_cpu_do_not_see_a_gpu(asked, folder, sees, tmp_path):
    driver = tmp_path / "nvidiactl"
    driver.touch()
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    assert masks_for(asked, folder, [tmp_path / "kfd", driver]) == ({} if sees else hidden)
    assert masks_for(asked, folder, [tmp_path / "kfd"]) == {}  # no driver
