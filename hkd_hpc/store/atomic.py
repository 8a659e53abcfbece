"""A file is either the older one or the complete new one, whatever kills the writer in between."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from hkd_hpc.common.errors import RunError
from hkd_hpc.common.stop import interrupts_held


def temporary_path(path: Path) -> Path:
    """A hidden name beside `path` to prepare it under, which no other process of any machine or container has."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def replace_file(
    path: str | Path, write: Callable[[Path], object], verify: Callable[[Path], None] = lambda temporary: None
) -> None:
    """Make `path` anew: write under a temporary name, flush to the disk, verify, rename.

    Args:
        path: the file.
        write: gets the temporary path.
        verify: gets it too, and raises OSError for what it must not become the file.

    Raises:
        RunError: where the system fails to write (no space, quota, read-only); the file that was there before is then
            untouched and no temporary file stays.
    """
    path = Path(path)
    temporary = temporary_path(path)
    try:
        with interrupts_held():
            write(temporary)
            _flush(temporary)
            verify(temporary)
            os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}; {_what_remains(path)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    # Some file systems cannot flush a folder, and the rename has happened: no reason to end a run.
    with contextlib.suppress(OSError):
        _flush(path.parent)


def replace_text(path: str | Path, text: str) -> None:
    """Make `path` anew as UTF-8 text, as `replace_file` does."""
    replace_bytes(path, text.encode())


def replace_bytes(path: str | Path, content: bytes) -> None:
    """Make `path` anew with this content, as `replace_file` does."""
    replace_file(path, lambda temporary: temporary.write_bytes(content))


def append(path: str | Path, content: bytes) -> None:
    """Add to the end of a file: all of it, or OSError and none of it."""
    with open(path, "ab", buffering=0) as file:
        end = file.tell()
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(end)
            raise


def append_durably(path: str | Path, content: bytes) -> None:
    """The same, on the disk before this returns. Raises RunError."""
    try:
        append(path, content)
        _flush(Path(path))
        _flush(Path(path).parent)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _what_remains(path: Path) -> str:
    return "the older file is untouched" if os.path.exists(path) else "no file was left behind"
