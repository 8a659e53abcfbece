"""Names of files as people write them: with ~ and $VARIABLES. A shell leaves both as they are in `--out='~/x'`, and so
does a TOML file; to take them literally would make a folder named `~`."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from hkd_hpc.common.errors import LocalUsageError, UsageError

VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)


def expanded(path: str | os.PathLike, what: str) -> str:
    """The path with ~, ~user, $NAME and ${NAME} replaced. LocalUsageError, which begins with `what`, for one that means
    nothing.

    A `$` in the name of a file that is there, and that names no variable, stays: absolute paths come here again.
    """
    path = path_text(path, what)
    unset = [name for name in VARIABLE.findall(path) if not os.environ.get(name.strip("{}"))]
    if unset and not _is_there(path):
        raise LocalUsageError(
            f"{what}{path}: the variable {unset[0].strip('{}')} is not set; set it, or write the complete path"
        )
    found = os.path.expandvars(os.path.expanduser(path))
    if path.startswith("~") and found.startswith("~"):
        raise LocalUsageError(
            f"{what}{path}: no home folder of {path.partition('/')[0]} is known; write the complete path, "
            "or ./~ for a file of that name"
        )
    return found


def path_text(path: str | os.PathLike, what: str) -> str:
    """As text. UsageError, which begins with `what`, for what is no path, or one of bytes."""
    found = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(found, str):
        raise UsageError(f"{what}{path!r}: is no path; write it as text or as a pathlib.Path")
    return found


def named_path(path: str | os.PathLike, what: str) -> Path:
    """Expanded, of a file or a folder that has to be named: an empty one, of a variable that is not set, would be the
    current folder. UsageError.
    """
    if not path_text(path, what):
        raise UsageError(f"{what.strip() or 'a path'}: is empty; name a file or a folder")
    return Path(expanded(path, what))


def nearest_existing(path: Path) -> Path:
    """What is there of a path: itself, or the folder below which it would be made. Raises OSError."""
    return next(place for place in (path, *path.parents) if place.exists())


def path_argument(text: str) -> Path:
    """The same for `type=` of argparse, which names the option itself. Raises ArgumentTypeError."""
    try:
        return named_path(text, "")
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("a path: ")) from None


def _is_there(path: str) -> bool:
    """Whether all of its parts with a `$` name files."""
    return os.path.lexists(path[: path.rindex("$")] + path[path.rindex("$") :].partition("/")[0])
