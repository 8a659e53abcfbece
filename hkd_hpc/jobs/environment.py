"""The environment variables of the processes that a sweep starts."""

from __future__ import annotations

import contextlib
import os
import site
from collections.abc import Iterator
from pathlib import Path

from hkd_hpc.comm.devices import DEVICE_OFFSET
from hkd_hpc.comm.launchers import outside_of_jobs

PACKAGE_PARENT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def variables(new: dict[str, str]) -> Iterator[None]:
    """Within it the process has these environment variables and no others."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(new)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def outside_of_any_job() -> Iterator[None]:
    """Within it no variable tells of a job, and what is started can import this package."""
    with variables(outside_of_jobs(os.environ) | import_path()):
        yield


@contextlib.contextmanager
def world_of_its_own(place: int, devices: str | None, set_devices: bool) -> Iterator[None]:
    """Within it this process is no rank of its job; of the GPUs it sees, it takes number `place`, modulo their number.

    devices: CUDA_VISIBLE_DEVICES, None for all; heeded with set_devices.
    """
    alone = outside_of_jobs(os.environ) | {DEVICE_OFFSET: str(place)}
    if set_devices:
        alone.pop("CUDA_VISIBLE_DEVICES", None)
        alone |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    with variables(alone):
        yield


def import_path() -> dict[str, str]:
    """{"PYTHONPATH": ...} with which another process imports this package; {} where it is installed: any Python of the
    environment finds it there, and one of a container has its own."""
    if is_installed():
        return {}
    paths = [str(PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def is_installed() -> bool:
    """Whether the package is in a folder that Python looks into by itself."""
    return any(Path(path).resolve() == PACKAGE_PARENT for path in (*site.getsitepackages(), site.getusersitepackages()))
