"""Which code this is: what git says of a clone, a hash over the sources of an installed package."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Collection
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
BESIDE = ("tools", "examples", "docs")  # the package in a clone, within it once installed; no run depends on them
GIT_LIMIT_S = 5.0


def revision() -> str:
    """In a clone 2f781651a4b2-dirty, or v0.2.0-3-g2f781651a4b2 after a tag; elsewhere sources-1a2b3c4d5e6f.

    Starts git: on one rank alone.
    """
    return described(PACKAGE.parent) or f"sources-{package_sha256()[:12]}"


def described(root: Path) -> str:
    """`git describe` of a repository's root; empty where it is none, or git is missing or fails."""
    if not (root / ".git").exists():  # an environment within somebody else's repository is not that repository's code
        return ""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=12"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(command, cwd=root, env=outside, capture_output=True, text=True, timeout=GIT_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def package_sha256() -> str:
    """Of the sources of hkd_hpc, the same in a clone and installed from it."""
    return sources_sha256(PACKAGE, without=BESIDE)


def module_sha256(module: str) -> str:
    """Of the file of a module, of all sources of a package; empty where there is none."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return ""
    file = Path(found.origin) if found and found.has_location and found.origin else None
    return sources_sha256(file.parent if file.name == "__init__.py" else file) if file else ""


def sources_sha256(place: Path, without: Collection[str] = ()) -> str:
    """64 hex digits over names and bytes of a file, or of all *.py below a folder, in the order of their names.

    Args:
        place: the file or folder.
        without: folders in `place` that do not count.
    """
    files = sorted(file for file in place.rglob("*.py") if file.is_file()) if place.is_dir() else [place]
    digest = hashlib.sha256()
    for file in files:
        name = file.relative_to(place)
        if name.parts and name.parts[0] in without:
            continue
        content = file.read_bytes()
        digest.update(f"{name.as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
