"""Commands that have another name now, and still start by the one of before."""

from __future__ import annotations

from hkd_hpc.console import messages


def tell(package: str, old: str, new: str) -> None:
    """Say how a command is called now; `package`: of its module, "tools" in a clone."""
    messages.warn(f"python -m {package}.{old} is called python -m {package}.{new} now; it runs that")
