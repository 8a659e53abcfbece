"""The data set of a run with the hash of its content: whatever files it came from, equal images have equal hashes.

To hash 200 MB takes a quarter of a second. What was found is kept on the node's own disk, and holds while the system
says the same of the files (names, sizes, times) and the code that makes images of them is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from hkd_hpc.common.errors import RunError
from hkd_hpc.data import sources
from hkd_hpc.data.settings import DataSettings
from hkd_hpc.runtime import environment, revision
from hkd_hpc.store.atomic import replace_text
from hkd_hpc.store.digest import arrays_sha256

OF_NO_ARRAY = (
    "dir",
    "path",
    "normalise",
    "mean",
    "std",
    "fraction",
    "public_fraction",
    "val_fraction",
    "partition",
    "beta",
    "classes_per_client",
    "partition_seed",
    "partition_file",
    "min_images",
    "client_rotation",
    "client_noise",
)  # settings of section `data` on which no array depends
WORTH_KEEPING_BYTES = 1 << 24  # less is hashed as fast as a file is looked up


def load(data: DataSettings) -> sources.DataSet:
    """The data set of a run with the hash of its content.

    Args:
        data: section `data`.

    Returns:
        As `sources.load`, with `sha256`.

    Raises:
        UsageError: as `sources.load`.
    """
    source = sources.source_of(data.name)
    stamp = "" if source.is_loader else stamp_of(data)  # what else than its files a loader reads, nobody knows
    dataset = sources.read(data)
    if source.is_loader or sum(array.nbytes for array in dataset.arrays().values()) < WORTH_KEEPING_BYTES:
        return replace(dataset, sha256=sha256_of(dataset))
    kept = Path(environment.scratch_folder(os.environ), f"content-{stamp}")
    sha256 = look_up(kept)
    if not sha256:
        sha256 = sha256_of(dataset)
        if stamp == stamp_of(data):  # nobody wrote to the files while they were read
            keep(kept, sha256)
    return replace(dataset, sha256=sha256)


def sha256_of(dataset: sources.DataSet) -> str:
    """64 hex digits over images, labels and client ids of both splits: names, dtypes, shapes and bytes."""
    return arrays_sha256(dataset.arrays())


def stamp_of(data: DataSettings) -> str:
    """A hash of what the system says of the files, and of the code and the settings that make images of them."""
    found = sorted([str(path), at.st_size, at.st_mtime_ns, at.st_ctime_ns] for path, at in files_of(data))
    made_by = {key: value for key, value in asdict(data).items() if key not in OF_NO_ARRAY}
    text = json.dumps([revision.package_sha256(), made_by, found])
    return hashlib.sha256(text.encode()).hexdigest()


def files_of(data: DataSettings) -> Iterator[tuple[Path, os.stat_result]]:
    """All files of a data set, with their state; those that cannot be looked at are left out."""
    for path in sources.source_of(data.name).files(data.dir, data.path):
        inside = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
        for file in inside or [path]:
            with contextlib.suppress(OSError):
                yield file, file.stat()


def look_up(kept: Path) -> str | None:
    try:
        text = kept.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return text if re.fullmatch("[0-9a-f]{64}", text) else None


def keep(kept: Path, sha256: str) -> None:
    """Where there is space; else it is found again."""
    with contextlib.suppress(RunError):
        replace_text(kept, sha256)
