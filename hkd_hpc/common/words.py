"""Words of messages that depend on how many there are."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """ "1 round", "10 rounds"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def listed(words: Sequence[str], joint: str = "and") -> str:
    """ "weights", "weights and counts", "weights, predictions and counts"."""
    return f" {joint} ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
