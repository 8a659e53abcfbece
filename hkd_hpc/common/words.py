"""Words of messages that depend on numbers."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """ "1 round", "10 rounds"."""
    return f"{count} {noun}{'s' * (count != 1)}"
