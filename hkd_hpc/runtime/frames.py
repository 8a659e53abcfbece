"""Whose line failed: a user's own scheme or model in the traceback of an exception."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

INSTALLED = ("site-packages", "dist-packages")  # folders of what pip or the system installs


def is_own(path: str) -> bool:
    """Whether a source file is neither of this package, nor of Python, nor of an installed package such as torch."""
    folders = (
        str(Path(__file__).resolve().parents[1]),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
    )
    return not (
        path.startswith(("<", *(folder + os.sep for folder in folders)))
        or any(part in INSTALLED for part in path.split(os.sep))
    )


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of a user's own code on the way to the exception."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    return frames[-1] if frames else None


def place_of(error: BaseException) -> str:
    """What a message begins with: "/home/me/my_scheme.py:12, in loss: return client.nett(batch.x_BCHW): ".

    Empty where no code of the user's failed.
    """
    frame = own_frame(error)
    return f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}: " if frame else ""


def trace_of(error: BaseException) -> str:
    """The traceback as Python prints it, from the first frame of a user's own code on if there is one."""
    start = first_own(error.__traceback__) or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, start))


def first_own(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins with a user's own code."""
    while trace and not is_own(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
