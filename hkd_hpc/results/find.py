"""Where runs are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hkd_hpc.common.errors import UsageError
from hkd_hpc.results.run import Run
from hkd_hpc.runtime.paths import named_path
from hkd_hpc.store.folder import RunFolder


def load(path: str | os.PathLike) -> Run:
    """A run to look at, while it trains or later.

    Args:
        path: Its folder, or a metrics file by itself.

    Returns:
        The run; a broken one too, with its `problem`.

    Raises:
        UsageError: There is no run.
    """
    place = existing(path)
    if place.is_file() or RunFolder(place).holds_run():
        return Run(place)
    below = find_runs(place)
    raise UsageError(
        f"{place}: holds {len(below)} runs in its folders, the first is {below[0].path}; name one, or load all with "
        "hkd_hpc.load_study"
        if below
        else f"{place}: holds no run (neither config.json nor metrics.h5 nor a checkpoint)"
    )


def find_runs(path: str | os.PathLike) -> list[Run]:
    """All runs at and below a place.

    Args:
        path: A run, a metrics file, the root of a sweep or a comparison, or a folder with any of them below it.

    Returns:
        The runs, in the order of their paths; broken ones too.

    Raises:
        UsageError: There is no such file or folder.
    """
    place = existing(path)
    return [Run(place)] if place.is_file() else [Run(folder) for folder in folders_with_runs(place)]


def existing(path: str | os.PathLike) -> Path:
    """With ~ and $VARIABLES replaced. UsageError where nothing is there."""
    place = named_path(path, "")
    try:
        place.stat()
    except (OSError, ValueError) as error:
        raise UsageError(f"{place}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return place


def folders_with_runs(root: Path) -> Iterator[Path]:
    """In the order of their paths; what lies within a run is not looked at, and what links lead to counts once."""
    seen: set[str] = set()
    for path, folders, _ in os.walk(root, followlinks=True):
        real, is_run = os.path.realpath(path), RunFolder(Path(path)).holds_run()
        if is_run and real not in seen:
            yield Path(path)
        ends = is_run or real in seen
        folders[:] = [] if ends else sorted(name for name in folders if not name.startswith("."))
        seen.add(real)
