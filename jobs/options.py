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
    pack: bool = False  # jobs that take cell after cell, each in one process, until their time is up
    slots: int = 0  # of a packed job: cells at a time on each GPU (without GPUs: node); 0: one a GPU, or as cores fit
    allocations: int = 1  # jobs of a packed launch
    max_queued: int = 0  # jobs of mine that may wait or run in SLURM at once; 0: any number
    cores_per_node: int = 0  # 0: not known
    cores_free: int = 0  # of these, left to the system
    setup: list[str] = field(default_factory=list)
    slurm: dict[str, Any] = field(default_factory=dict)

    def workers_per_node(self) -> int:
        """Cells at a time on a node of a packed job."""
        if self.gpus_per_node or self.slots:
            return max(1, self.slots) * max(1, self.gpus_per_node)
        return (self.cores_per_node - self.cores_free) // self.cpus_per_task

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
    for name in ("nodes", "cpus_per_task", "time_min", "array_parallelism", "signal_delay_s", "allocations"):
        if not isinstance(getattr(options, name), int) or getattr(options, name) < 1:
            raise UsageError(f"{name}={getattr(options, name)}: must be a whole number >= 1")
    for name in ("parallel", "slots", "max_queued", "cores_per_node", "cores_free"):
        if not isinstance(getattr(options, name), int) or getattr(options, name) < 0:
            raise UsageError(f"{name}={getattr(options, name)}: must be a whole number >= 0")
    check_pack(options, executor)
    if executor == "slurm" and options.signal_delay_s >= options.time_min * 60:
        raise UsageError(f"signal_delay_s={options.signal_delay_s}: must be below time_min={options.time_min} minutes")


def check_pack(options: Options, executor: str) -> None:
    """UsageError for a packed launch that cannot be meant."""
    if not options.pack:
        return
    if executor != "slurm":
        raise UsageError(f"pack: is for SLURM; with --executor {executor} --parallel says how many cells run at a time")
    if options.ranks not in (None, 1):
        raise UsageError(f"pack: each cell is one process; leave ranks={options.ranks} away")
    if options.workers_per_node() < 1:
        raise UsageError("pack: on nodes without GPU say how many cells at a time by slots=N, or what a node has by "
                         "cores_per_node=N")
