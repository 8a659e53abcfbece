"""What is installed, and whether it fits. Read from package metadata: nothing is imported."""

from __future__ import annotations

import platform
import re
from importlib import metadata

from hkd_hpc.common.errors import UsageError, obtainable
from hkd_hpc.runtime.revision import revision
from hkd_hpc.version import __version__

OLDEST_TORCH = (2, 4)  # the first with the fused Adam on CPUs
TORCHVISION_MINOR = 15  # torchvision 0.(n + 15) belongs to torch 2.n
TORCH_FROM = re.compile(
    r"torch *\(?>= *([\d.]+)\)?$"
)  # as torchvision requires it since 0.29: of newer ones each will do
REVISION = "revision"  # of this package's code, beside its version
PACKAGES = ("torch", "torchvision", "mpi4py", "numpy", "h5py")


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirements(package: str) -> list[str]:
    """What it says that it needs: "numpy", "torch (>=2.14.0)"."""
    try:
        return metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []


def numbers(version: str) -> tuple[int, ...]:
    """'2.14.1+cu130' -> (2, 14, 1)"""
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])


def check(model_name: str, needs_torchvision: bool) -> None:
    """Raise UsageError, one line, when torch is missing or too old, or torchvision does not belong to this torch.

    Args:
        model_name: for the message.
        needs_torchvision: whether that model is made of torchvision's parts.
    """
    torch = installed("torch")
    if torch is None:
        raise UsageError(
            "torch is not installed; pip install 'hkd_hpc[torch]', or use your site's: "
            + obtainable("docs/getting_started.md, Installing")
        )
    if numbers(torch)[:2] < OLDEST_TORCH:
        raise UsageError(f"torch {torch} is too old; the oldest that fits is {'.'.join(map(str, OLDEST_TORCH))}")
    if needs_torchvision:
        check_torchvision(torch, installed("torchvision"), model_name)


def check_torchvision(torch: str, torchvision: str | None, model_name: str) -> None:
    wanted = f"0.{numbers(torch)[1] + TORCHVISION_MINOR}"
    if torchvision is None:
        raise UsageError(
            f"model.name={model_name} needs torchvision {wanted} beside torch {torch}; it is not installed"
        )
    if numbers(torch)[0] == 2 and not belongs(torch, torchvision):
        raise UsageError(f"torchvision {torchvision} does not belong to torch {torch}; install torchvision {wanted}.*")


def belongs(torch: str, torchvision: str) -> bool:
    """Whether they are of the same minor version, or this torch is one that torchvision's own requirement allows."""
    oldest = [match[1] for match in map(TORCH_FROM.match, requirements("torchvision")) if match]
    is_same = numbers(torchvision)[1] == numbers(torch)[1] + TORCHVISION_MINOR
    return is_same or any(numbers(torch) >= numbers(version) for version in oldest)


def found() -> dict[str, str]:
    """For the record of a run: {"hkd_hpc": its version, "revision": of its code, "python": ..., package: version}.

    Starts git: on one rank alone.
    """
    return {
        "hkd_hpc": __version__,
        REVISION: revision(),
        "python": platform.python_version(),
        **{package: installed(package) or "not installed" for package in PACKAGES},
    }


def text() -> str:
    """For --version: hkd_hpc 0.1.0 (revision 2f781651a4b2; python 3.11.7, torch 2.14.1, ...)."""
    packages = found()
    own, revised = packages.pop("hkd_hpc"), packages.pop(REVISION)
    return f"hkd_hpc {own} ({REVISION} {revised}; {', '.join(map(' '.join, packages.items()))})"
