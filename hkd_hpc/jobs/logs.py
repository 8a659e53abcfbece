"""The log.txt of a trial: who writes into it, and which of its lines says what went wrong."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hkd_hpc.common.stop import STOPPED
from hkd_hpc.console.output import STAMP
from hkd_hpc.jobs.files import disk_full

START = "--- "  # how a start begins in a log
TAIL_BYTES = 65536  # as much of a log's end is looked at
LINE_CHARACTERS = 500  # as much of a line is told
OURS, WARNING = "hkd_hpc: ", "hkd_hpc: warning:"
ERROR = re.compile(
    r"(?!.*(warning:|ended by signal))"
    r"(hkd_hpc: |Fatal Python error|[\w.]*(Error|Exception)\b|\w+: error: )"
)


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[int]:
    """Within it all output of this process, also that of libraries, is appended to `path`; gives its size before."""
    kept = [os.dup(1), os.dup(2)]
    with open(path, "a", buffering=1, encoding="utf-8") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                yield os.path.getsize(path)
        finally:
            for descriptor, old in zip((1, 2), kept):
                os.dup2(old, descriptor)
                os.close(old)


def error_in(log: Path, begin: int, code: int) -> str:
    """The line that says what went wrong, from this start's part of the log; empty where nothing did."""
    if code in (0, STOPPED):
        return ""
    line = last_line(log, begin)
    return line if line.startswith(OURS) else disk_full(log.parent) or line or f"exit code {code}"


def repeated_error(log: Path, end: int) -> str:
    """The error that each of the last two starts in the log's first `end` bytes ended with; else empty."""
    with open(log, "rb") as file:
        file.seek(max(0, end - TAIL_BYTES))
        text = file.read(min(end, TAIL_BYTES)).decode(errors="replace")
    starts = [start.splitlines()[1:] for start in ("\n" + text).split("\n" + START)[1:]]
    errors = [next(filter(ERROR.match, reversed(lines)), "") for lines in starts[-2:]]
    kinds = {re.sub(r"0x[0-9a-f]+|\d+", "", error) for error in errors}  # processes and addresses differ
    return errors[-1] if len(errors) == 2 and len(kinds) == 1 else ""


def last_line(log: Path, begin: int = 0, weak: str = WARNING) -> str:
    """The last line of ours that is no warning, else the last that does not begin with `weak`, else the last; of the
    log from `begin` on."""
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, os.path.getsize(log) - TAIL_BYTES))
            lines = [STAMP.sub("", line) for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    ours = [line for line in lines if line.startswith(OURS) and not line.startswith(WARNING)]
    return (ours or [line for line in lines if not line.startswith(weak)] or lines or [""])[-1].strip()[
        :LINE_CHARACTERS
    ]
