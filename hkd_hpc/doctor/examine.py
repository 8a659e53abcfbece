"""The sections, in their order: what tells most about a job that then hangs comes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

from hkd_hpc.doctor import batch, clocks, collectives, files, launch, packages, placement, transport
from hkd_hpc.doctor.context import Context
from hkd_hpc.doctor.findings import Kind, Section

SECTIONS: tuple[ModuleType, ...] = (launch, transport, placement, packages, clocks, batch, files, collectives)


def sections(context: Context) -> Iterator[Section]:
    """Make all examinations; every rank calls this.

    Args:
        context: this job, as this rank sees it.

    Yields:
        On rank 0 each section when it is done; nothing on the others.
    """
    for module in SECTIONS:
        context.comm.at(None, f"doctor, {module.NAME}")
        collect: Callable[[Context], Section | None] = module.collect
        section = collect(context)
        if section:
            yield section


def kinds() -> list[Kind]:
    """Every kind of finding, by section."""
    return [kind for module in SECTIONS for kind in vars(module).values() if isinstance(kind, Kind)]
