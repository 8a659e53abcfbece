"""How many clients a masked sum needs; without `cryptography`, since settings are checked with them."""

from __future__ import annotations

from collections.abc import Sequence

SMALLEST = 3  # of two numbers each owner can tell the other's from the sum


def threshold_of(clients: int) -> int:
    """How many of those who shared their keys must deliver: more than half, and SMALLEST at least.

    Two sets of so many have a client in common, so that none can be told that everybody delivers while others reveal
    its key.
    """
    return max(SMALLEST, clients // 2 + 1)


def problem_of(clients: int, delivering: Sequence[int], member_of: Sequence[str]) -> str:
    """Why this sum may not be made; empty where it may.

    Args:
        clients: how many shared their keys.
        delivering: the numbers of those who deliver.
        member_of: the architecture of each client, each with a sum of its own.
    """
    needed = threshold_of(clients)
    if len(delivering) < needed:
        return f"{len(delivering)} of {clients} clients deliver, and privacy.secure_sum needs {needed}"
    counts = {name: sum(member_of[client] == name for client in delivering) for name in set(member_of)}
    few = [f"{count} with {name}" for name, count in sorted(counts.items()) if 0 < count < SMALLEST]
    return f"too few clients of an architecture deliver for privacy.secure_sum: {', '.join(few)}" if few else ""
