"""What a measurement is worth without: machine, packages, date and commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def header() -> str:
    """Machine, torch, date and commit."""
    return (
        f"machine: {cpu_model()}, {len(os.sched_getaffinity(0))} cores; torch {installed('torch')}, "
        f"Python {platform.python_version()}\n"
        f"date: {datetime.datetime.now().astimezone().isoformat(' ', 'minutes')}; commit: {commit()}"
    )


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def commit() -> str:
    """The short hash, with "+ changes" when the tree differs from it; "unknown" outside a repository."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (" + changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
