"""How the jobs of a launch run."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hkd_hpc.errors import UsageError
from jobs.sweep import Cell


@dataclass(frozen=True)
class Options:
    """How the jobs of a launch run. `slurm`: further parameters of submitit's SLURM executor, without its prefix."""

    ranks: int | str = 1  # of a cell, or "clients": one for each client, and the server. Only under SLURM
    nodes: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    time_min: int = 60
    mem_gb: float | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    array_parallelism: int = 256
    signal_delay_s: int = 120  # time for the running round and its save, before the limit
    mpi: str = "none"
    parallel: int = 0  # cells at a time on this machine; 0: as many as fit
    setup: list[str] = field(default_factory=list)
    slurm: dict[str, Any] = field(default_factory=dict)

    def ranks_of(self, cell: Cell) -> int:
        return cell.config().fed.clients + 1 if self.ranks == "clients" else int(self.ranks)


def as_options(given: dict[str, Any]) -> Options:
    """Fields of Options by name; what is none of them goes to submitit's SLURM executor."""
    known = {name: value for name, value in given.items() if name in Options.__dataclass_fields__}
    more = {name: value for name, value in given.items() if name not in known}
    return Options(**{**known, "slurm": {**known.get("slurm", {}), **more}})


def check_options(options: Options, executor: str) -> None:
    if options.ranks != "clients" and not (isinstance(options.ranks, int) and options.ranks >= 1):
        raise UsageError(f"ranks={options.ranks}: must be a whole number >= 1, or clients: one for each and the server")
    for name in ("nodes", "cpus_per_task", "time_min", "array_parallelism", "signal_delay_s"):
        if not isinstance(getattr(options, name), int) or getattr(options, name) < 1:
            raise UsageError(f"{name}={getattr(options, name)}: must be a whole number >= 1")
    if executor == "slurm" and options.signal_delay_s >= options.time_min * 60:
        raise UsageError(f"signal_delay_s={options.signal_delay_s}: must be below time_min={options.time_min} minutes")
