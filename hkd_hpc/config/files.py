"""Files of settings as they stand: TOML, of a size that no device or pipe feigns. UsageError for all else."""

from __future__ import annotations

import os
import stat
import sys
from typing import Any

from hkd_hpc.common.errors import LocalUsageError, UsageError
from hkd_hpc.runtime.paths import expanded

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_BYTES = 1 << 20  # the largest file of settings


def read_toml(path: str, option: str, else_what: str = "") -> dict[str, Any]:
    """{"section.key": value} of a TOML file with one table per section; `option`, `else_what` as in `load_toml`."""
    tables = load_toml(path, option, else_what)
    for section, keys in tables.items():
        if not isinstance(keys, dict):
            raise UsageError(f"{option} {path}: {section} must stand in a table, for example [fed] rounds = 5")
    return {f"{section}.{key}": value for section, keys in tables.items() for key, value in keys.items()}


def load_toml(path: str, option: str, else_what: str = "") -> dict[str, Any]:
    """A TOML file as it stands; UsageError names the option that gave it, and what else it takes."""
    try:
        return tomllib.loads(file_text(path, option, else_what))
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a number of thousands of digits
        raise UsageError(f"{option} {path}: not valid TOML{else_what} ({error})") from None


def file_text(path: str, option: str, else_what: str = "") -> str:
    """The text of a file of settings; UsageError names the option that gave it, and what else it takes."""
    try:
        return small_file(path, option, else_what).decode()
    except OSError as error:
        raise LocalUsageError(f"{option} {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {path}: not valid TOML{else_what} ({error})") from None


def small_file(path: str, option: str, else_what: str = "") -> bytes:
    """The content of a file of settings. A device or a pipe might never end: LocalUsageError. Raises OSError."""
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise UsageError(f"{option} {path}: is not a name of a file")
    found = os.stat(name := expanded(path, f"{option} "))
    if found.st_size > CONFIG_BYTES or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise LocalUsageError(f"{option} {path}: is no TOML file of at most {CONFIG_BYTES} bytes{else_what}")
    with open(name, "rb") as file:
        return file.read(CONFIG_BYTES)
