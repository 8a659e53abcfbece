"""Get an official data set on a machine with internet: download, md5, unpack, rename. Standard library only.

Nothing appears under its final name before it is complete and its md5 is right. Several prepares of one folder at once
are safe: one works, the others wait for it and find everything done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.data.registry import Download

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 60
_TRIES = 2

Say = Callable[[str], None]


class _BadDownload(Exception):
    """One try failed; the text says how."""


def from_mirror(downloads: tuple[Download, ...], base: str | None) -> tuple[Download, ...]:
    """The same files (and the same md5 sums) from below another address: http://, https:// or file://."""
    if base is None:
        return downloads
    if not base.startswith(("http://", "https://", "file://")):
        raise UsageError(f"--url {base}: allowed are http://, https:// and file:// addresses")
    return tuple(dataclasses.replace(one, url=f"{base.rstrip('/')}/{one.file_name}") for one in downloads)


def prepare(name: str, downloads: tuple[Download, ...], directory: str | os.PathLike, say: Say) -> None:
    """Make all files of data set `name` complete below `directory`; what is already right stays.

    `say` gets lines for people. UsageError if the folder cannot be used, RunError if the files cannot be had.
    """
    folder = Path(directory)
    if all(_is_complete(one, folder) for one in downloads):
        return say(f"{name} is already prepared in {folder}")
    _make_folder(folder)
    try:
        with _only_one(folder, name, say):
            for one in downloads:
                if not _is_complete(one, folder):
                    _get(one, folder, name, say)
    except OSError as error:
        reason = error.strerror or error
        raise RunError(f"{name} cannot be written to {folder}: {reason}; nothing incomplete was left") from error
    say(f"{name} is ready in {folder}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--dir {folder}: cannot be made ({error.strerror})") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--dir {folder}: cannot be written to")


def _is_complete(download: Download, folder: Path) -> bool:
    return all((folder / path).is_file() and md5_of(folder / path) == md5 for path, md5 in download.files)


def md5_of(path: Path) -> str:
    """The md5 of a file as 32 hex digits, read piece by piece."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def _only_one(folder: Path, name: str, say: Say) -> Iterator[None]:
    """Hold the folder's lock for `name`; what a killed prepare left behind is removed under it."""
    with open(folder / f".{name}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another prepare of {name} in {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            # some network file systems have no locks: then each prepare works for itself, the renames keep it safe
            yield
            return
        for leftover in folder.glob(f".{name}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _get(download: Download, folder: Path, name: str, say: Say) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as temporary:
        own = folder / download.path
        own.parent.mkdir(parents=True, exist_ok=True)
        is_good = _is_good(own, download.md5, say)
        archive = own if is_good else _fetch(download, Path(temporary), say)
        if not download.members:
            os.replace(archive, own)
            return
        say(f"unpacking {download.file_name}")
        unpacked = Path(temporary, "unpacked")
        _unpack(archive, download, unpacked)
        for path, _ in download.members:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(unpacked / path, folder / path)
        if not is_good:
            own.unlink(missing_ok=True)


def _is_good(archive: Path, md5: str, say: Say) -> bool:
    """Whether somebody put the right archive into the folder; a wrong one goes once it is replaced, not before."""
    if not archive.is_file():
        return False
    found = md5_of(archive)
    if found != md5:
        say(f"{archive} has md5 {found}, expected {md5}: it is broken and will be replaced")
    return found == md5


def _fetch(download: Download, temporary: Path, say: Say) -> Path:
    """Download to the temporary folder, twice if need be; RunError says what was wrong with the last try."""
    target = temporary / download.file_name
    problem = ""
    for _ in range(_TRIES):
        say(f"downloading {download.url}" + (f" again: {problem}" if problem else ""))
        try:
            _stream(download.url, target, say)
            found = md5_of(target)
            if found == download.md5:
                return target
            problem = f"md5 is {found}, expected {download.md5}"
        except _BadDownload as error:
            problem = str(error)
        target.unlink(missing_ok=True)
    raise RunError(
        f"{download.url}: {problem} ({_TRIES} tries); nothing was kept; without internet here, run it on a "
        "login node, or name a mirror with --url BASE"
    )


def _stream(url: str, target: Path, say: Say) -> None:
    try:
        response = urllib.request.urlopen(url, timeout=_TIMEOUT_S)
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no address at all
        raise _BadDownload(f"cannot be opened ({' '.join(str(error).split())})") from error
    with response, open(target, "wb") as file:
        announced = response.headers.get("Content-Length", "")
        size_bytes = int(announced) if announced.isascii() and announced.isdigit() else 0  # else the md5 decides alone
        while piece := _read(response):
            before = file.tell()
            file.write(piece)
            _progress(before, file.tell(), size_bytes, say)
        if size_bytes and file.tell() != size_bytes:
            raise _BadDownload(f"the server closed after {file.tell()} of {size_bytes} bytes")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _BadDownload(f"the connection broke ({error})") from error


def _progress(before_bytes: int, now_bytes: int, size_bytes: int, say: Say) -> None:
    """A line for every tenth of a file of more than 10 MB."""
    if size_bytes > 1e7 and before_bytes * 10 // size_bytes != now_bytes * 10 // size_bytes:
        say(f"  {now_bytes / 1e6:.0f} of {size_bytes / 1e6:.0f} MB")


def _unpack(archive: Path, download: Download, folder: Path) -> None:
    """Write the expected members, and nothing else, below `folder`; names in the archive never choose a path."""
    expected = dict(download.members)
    try:
        with tarfile.open(archive, "r|*") as tar:
            for member in tar:
                content = tar.extractfile(member) if member.name in expected and member.isfile() else None
                if content:
                    (folder / member.name).parent.mkdir(parents=True, exist_ok=True)
                    with open(folder / member.name, "wb") as file:
                        shutil.copyfileobj(content, file, _CHUNK_BYTES)
    except (tarfile.TarError, EOFError) as error:
        raise RunError(f"{archive.name}: cannot be unpacked ({error})") from error
    for path, md5 in expected.items():
        if not (folder / path).is_file() or md5_of(folder / path) != md5:
            raise RunError(f"{download.url}: {path} is not in the archive, or not with md5 {md5}")
