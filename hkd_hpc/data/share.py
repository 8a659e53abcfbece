"""One read-only copy of the data per node: `publish` writes a plain file, every rank of the node maps it with `attach`.

The file: 8 bytes magic, 8 bytes little-endian header length, JSON header, then the arrays at multiples of 64 bytes.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc.common.errors import RunError
from hkd_hpc.data.sources import DataSet

_MAGIC = b"HKDDATA1"
_ALIGN_BYTES = 64
_SPARE_BYTES = 64 * 2**20
_NAME = "hkd_hpc-data-"
_OLD_S = (
    3600.0  # ranks attach within the time in which a job starts; what is older was left by a job that was killed then
)


def publish(dataset: DataSet) -> str:
    """Write the arrays uncompressed into a new file that only this user can read; returns its path.

    In /dev/shm where that is writable and has space, else in the temporary folder. The caller removes the file, at best
    as soon as all ranks of the node are attached: mappings stay valid. RunError if no folder has space.
    """
    head, arrays = _layout(dataset)
    payload_bytes = sum(array.nbytes for array in arrays)
    problems = []
    for folder in ("/dev/shm", tempfile.gettempdir()):
        _remove_leftovers(folder)
    for folder in _folders_with_space(payload_bytes):
        try:
            return _write(folder, head, arrays)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror}")
    raise RunError(
        f"no space for the {payload_bytes / 1e6:.0f} MB of {dataset.name} that a node's ranks share "
        f"({'; '.join(problems)}); free some or set TMPDIR to a folder with space"
    )


def _remove_leftovers(folder: str) -> None:
    """This user's old copies there: a job killed between `publish` and the removal leaves one, in memory."""
    for path in Path(folder).glob(_NAME + "*"):
        with suppress(OSError):
            found = path.lstat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > _OLD_S:
                path.unlink()


def _folders_with_space(payload_bytes: int) -> list[str]:
    """Where to try: memory first, but never so that it would be filled up."""
    folders = [tempfile.gettempdir()]
    if os.access("/dev/shm", os.W_OK):
        disk = os.statvfs("/dev/shm")
        if disk.f_bavail * disk.f_frsize > payload_bytes + _SPARE_BYTES:
            folders.insert(0, "/dev/shm")
    return folders


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN_BYTES) * _ALIGN_BYTES


def _layout(dataset: DataSet) -> tuple[bytes, list[np.ndarray]]:
    """The head of the file (padded to a multiple of 64 bytes) and the arrays that follow it."""
    arrays = {key: np.ascontiguousarray(value) for key, value in dataset.arrays().items()}
    header: dict = {"plain": {key: value for key, value in vars(dataset).items() if key not in arrays}, "arrays": {}}
    offset = 0
    for key, array in arrays.items():
        header["arrays"][key] = {"dtype": array.dtype.str, "shape": array.shape, "offset": offset}
        offset = _aligned(offset + array.nbytes)
    text = json.dumps(header).encode()
    head = _MAGIC + len(text).to_bytes(8, "little") + text
    return head.ljust(_aligned(len(head)), b"\0"), list(arrays.values())


def _write(folder: str, head: bytes, arrays: list[np.ndarray]) -> str:
    descriptor, path = tempfile.mkstemp(prefix=_NAME, dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(head)
            for array in arrays:
                file.write(array.data)
                file.write(bytes(_aligned(array.nbytes) - array.nbytes))
    except BaseException:
        os.unlink(path)
        raise
    return path


def attach(path: str | os.PathLike) -> DataSet:
    """The published data set as read-only arrays on a memory map; the file may be removed afterwards.

    RunError if the file cannot be mapped or is no complete file of `publish`.
    """
    try:
        buffer = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        if buffer[:8].tobytes() != _MAGIC:
            raise ValueError("wrong first bytes")
        end = 16 + int.from_bytes(buffer[8:16].tobytes(), "little")
        header = json.loads(buffer[16:end].tobytes())
        data = buffer[_aligned(end) :]
        values: dict[str, Any] = {key: _view(data, **entry) for key, entry in header["arrays"].items()}
        for key, value in header["plain"].items():
            values[key] = tuple(value) if isinstance(value, list) else value
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{os.fspath(path)}: the node's shared copy of the data cannot be used ({error})") from error
    return DataSet(**values)


def _view(data: np.ndarray, dtype: str, shape: list[int], offset: int) -> np.ndarray:
    length_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return data[offset : offset + length_bytes].view(dtype).reshape(shape)
