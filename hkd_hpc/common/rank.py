"""Which rank this process is, as far as a message needs to know: read from the launcher's variables."""

from __future__ import annotations

from collections.abc import Mapping

LONGEST_NUMBER = 18  # digits
RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def guess_rank(env: Mapping[str, str]) -> int:
    """The rank for messages when the variables cannot be trusted: 0 only where no launcher says otherwise."""
    return max((int(env[name]) for name in RANK_NAMES if is_number(env.get(name, ""))), default=0)


def is_number(text: str) -> bool:
    """Digits, and not so many that nobody can have meant a rank, a size or an id."""
    return text.isascii() and text.isdigit() and len(text) <= LONGEST_NUMBER
