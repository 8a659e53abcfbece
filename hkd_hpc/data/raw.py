"""What every reader gives, before it is checked."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from hkd_hpc.common.errors import UsageError

Arrays = dict[str, np.ndarray]


class RawData(NamedTuple):
    """What a reader found: raw arrays, names of the classes where it knows them, and what it left out or changed."""

    arrays: Arrays
    class_names: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def broken(path: Path, error: object) -> UsageError:
    """The error for a file that is there but cannot be read."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return UsageError(f"{path}: truncated or not what its name says ({reason[:160]}); replace it by a good copy")
