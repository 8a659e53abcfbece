"""Do all ranks hold the same: data, model, scheme, settings, code?"""

from __future__ import annotations

import hashlib
import json

from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.common.errors import RunError


def require_equal(comm: Comm, values: dict[str, str | dict[str, str]]) -> None:
    """RunError on all ranks unless all hold the same values (code or data differ between nodes)."""
    problem = inequality(comm, values)
    if problem:
        raise RunError(f"{problem}; is the same code and data on all nodes?")


def inequality(comm: Comm, values: dict[str, str | dict[str, str]]) -> str:
    """Which ranks hold other values than rank 0, for people; empty where none does. On all ranks.

    Of a value that is a dict (shapes by name) the first entry that differs is told, with what it is on both ranks.
    """
    own = {what: hashlib.sha256(json.dumps(value).encode()).hexdigest() for what, value in values.items()}
    told = [json.loads(text) for text in comm.gather_text(json.dumps(own))]
    others = {what: [rank for rank, other in enumerate(told) if other[what] != digest] for what, digest in own.items()}
    different = json.loads(comm.share_text(json.dumps(others) if comm.rank == 0 else None))
    return ", ".join(
        f"ranks {ranks} have another {what} than rank 0{difference(comm, values[what], ranks[0])}"
        for what, ranks in different.items()
        if ranks
    )


def difference(comm: Comm, value: str | dict[str, str], rank: int) -> str:
    """ " (fc.weight is (8, 128) torch.float32 on rank 3, (16, 128) torch.float32 on rank 0)": the first entry
    that is another on this rank than on rank 0. On all ranks."""
    if isinstance(value, str):
        return ""
    told = [json.loads(text) for text in comm.gather_text(json.dumps(value))]
    if comm.rank:
        return comm.share_text()
    own, other = told[0], told[rank]
    names = [name for name in [*own, *other] if own.get(name) != other.get(name)]
    return comm.share_text(
        f" ({names[0]} is {other.get(names[0], 'absent')} on rank {rank}, {own.get(names[0], 'absent')} on rank 0)"
        if names
        else " (in another order)"
    )
