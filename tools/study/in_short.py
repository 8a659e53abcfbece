"""What the page begins with: the answers of tables that have come to their end, and which have not."""

from __future__ import annotations

from collections.abc import Sequence

from hkd_hpc.common.groups import grouped

from .answers import EXCLUDED, FAILS, HOLDS, OPEN, Answer


def in_short(told: Sequence[Answer]) -> str:
    """A list of claims for each kind of answer, with what was measured in each table; then the tables without one."""
    kinds = {FAILS: "Does not hold", OPEN: "Cannot be told", HOLDS: "Holds"}
    final = [one for one in told if one.is_final]
    lists = [
        claims_list(title, [one for one in final if one.verdict.startswith(kind)]) for kind, title in kinds.items()
    ]
    unfinished = dict.fromkeys(one.table for one in told if not one.is_final)
    # a claim on schemes that have not run yet names the table without its seeds, beside others that name it with them
    waiting = [table for table in unfinished if not any(other.startswith(f"{table} (") for other in unfinished)]
    parts = [*filter(None, lists), f"**Not run to the end yet:** {'; '.join(waiting)}." if waiting else ""]
    return "\n\n".join(filter(None, parts))


def claims_list(title: str, told: Sequence[Answer]) -> str:
    """The claims that have this answer, each with its tables; empty without any."""
    by_claim = grouped((one.claim, one) for one in told)
    lines = [f"- {claim}.\n" + "\n".join(map(evidence, own)) for claim, own in by_claim.items()]
    return "\n".join([f"**{title}:**", "", *lines]) if lines else ""


def evidence(one: Answer) -> str:
    """Of one table: what was measured, why it fails, and whether that leaves room for what the paper has."""
    _, _, why = one.verdict.partition(": ")
    size = "a difference of the paper's size is excluded" if one.as_large == EXCLUDED else ""
    return f"    - {one.table}: " + "; ".join(filter(None, [one.measured, why, size]))
