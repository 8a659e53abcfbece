"""How the jobs of a launch run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from hkd_hpc.common.errors import UsageError
from hkd_hpc.jobs.sweep import Trial


@dataclass(frozen=True)
class Options:
    """How the jobs of a launch run. On this machine only `parallel`, `strict_code` and `keep_state` count.

    Attributes:
        ranks: Processes of a trial; "clients": one for each client, and the server; None: where a job has several GPUs,
            one client rank on each and the server, never more than clients + 1; else one process that does all, which
            is fastest there.
        nodes: Of a job.
        cpus_per_task: Cores of a rank; None: where a job has GPUs or whole nodes and cores_per_node is known, the cores
            of a node, less cores_free, divided among its ranks; else 1.
        gpus_per_node: Of a job.
        gres: The same as SLURM's text (gpu:a100:4), where gpus_per_node is not understood.
        time_min: Time limit of a job, minutes.
        mem_gb: Host memory of a node, GiB; None: SLURM's default.
        partition: SLURM's, as the next three.
        account: Whom the time is billed to.
        qos: Quality of service.
        constraint: Features of nodes.
        exclusive: Whole nodes.
        array_parallelism: Jobs at a time.
        signal_delay_s: Notice before the time limit, seconds: for the running round and its save.
        mpi: Of srun --mpi.
        parallel: Trials at a time on this machine; 0: as many as fit.
        pack: Jobs that take trial after trial, each in one process, until their time is up.
        slots: Of a packed job: trials at a time on each GPU (without GPUs: node); 0: one a GPU, or as cores fit.
        allocations: Jobs of a packed launch.
        max_queued: Jobs of mine that may wait or run in SLURM at once; 0: any number.
        cores_per_node: Cores that a node has; 0: not known.
        cores_free: Of these, left to the system.
        strict_code: Reject trials that began, or were submitted, with other code.
        keep_state: Keep of finished trials too the clients' state and models, and the checkpoint before the last.
        python: The command that starts Python, quoted as for the shell; None: this one.
        setup: Shell lines before srun.
        environment: Variables exported after them.
        srun_args: Further arguments of srun.
        sbatch: Further options of sbatch, without dashes.
        slurm: Further parameters of submitit's SLURM executor, without its prefix.
    """

    ranks: int | str | None = None
    nodes: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int = 0
    gres: str | None = None
    time_min: int = 60
    mem_gb: float | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclusive: bool = False
    array_parallelism: int = 256
    signal_delay_s: int = 120
    mpi: str = "none"
    parallel: int = 0
    pack: bool = False
    slots: int = 0
    allocations: int = 1
    max_queued: int = 0
    cores_per_node: int = 0
    cores_free: int = 0
    strict_code: bool = False
    keep_state: bool = False
    python: str | None = None
    setup: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    srun_args: list[str] = field(default_factory=list)
    sbatch: dict[str, Any] = field(default_factory=dict)
    slurm: dict[str, Any] = field(default_factory=dict)

    def gpus_of_node(self) -> int:
        """How many GPUs a job has on a node, as gpus_per_node or gres (gpu, gpu:2, gpu:a100:4) asks for them."""
        kinds = [re.fullmatch(r"gpu(?::[^:]*?)??(?::(\d+))?", part) for part in (self.gres or "").split(",")]
        return self.gpus_per_node or sum(int(kind[1] or 1) for kind in kinds if kind)

    def workers_per_node(self) -> int:
        """Trials at a time on a node of a packed job."""
        if self.gpus_of_node() or self.slots:
            return max(1, self.slots) * max(1, self.gpus_of_node())
        return (self.cores_per_node - self.cores_free) // (self.cpus_per_task or 1)

    @property
    def workers(self) -> int:
        """Trials at a time in a packed job."""
        return self.nodes * self.workers_per_node()

    def ranks_of(self, trial: Trial) -> int:
        """Processes of the job of a trial."""
        clients = trial.config().fed.clients
        if self.ranks is None:
            return default_ranks(self, clients)
        return clients + 1 if self.ranks == "clients" else int(self.ranks)


def default_ranks(options: Options, clients: int | None) -> int:
    """One client rank per GPU and the server, never more than clients + 1; one process for one GPU or none."""
    gpus = options.nodes * options.gpus_of_node()
    return 1 if gpus < 2 else 1 + (gpus if clients is None else min(gpus, clients))


def cores_of(options: Options, ranks: int) -> int:
    """Cores of each rank of a job with so many."""
    if options.cpus_per_task is not None:
        return options.cpus_per_task
    if not options.cores_per_node or not (options.exclusive or options.gpus_of_node()):
        return 1
    return max(1, (options.cores_per_node - options.cores_free) // -(-ranks // options.nodes))


def setup_lines(setup: list[str], environment: dict[str, str]) -> list[str]:
    """Shell lines: those of the setup, then the exports."""
    return [*setup, *(f"export {name}={shlex.quote(value)}" for name, value in environment.items())]


def as_options(given: dict[str, Any], site: dict[str, Any] | None = None) -> Options:
    """Fields of Options by name, over those of the site; lists and tables are joined with the site's, which come first.

    What is no field goes to submitit's SLURM executor.
    """
    known = {name: value for name, value in given.items() if name in Options.__dataclass_fields__}
    more = {name: value for name, value in given.items() if name not in known}
    known["slurm"] = {**known.get("slurm", {}), **more}
    asks_for_gpus = not {"gres", "gpus_per_node"}.isdisjoint(known)
    for name, value in (site or {}).items():
        if name not in known and not (asks_for_gpus and name in ("gres", "gpus_per_node")):
            known[name] = value
        elif isinstance(value, list):
            known[name] = [*value, *known[name]]
        elif isinstance(value, dict):
            known[name] = {**value, **known[name]}
    return Options(**known)


def check_options(options: Options, executor: str) -> None:
    """UsageError for what cannot be meant."""
    _check_kinds(options)
    if options.gres and options.gpus_per_node:
        raise UsageError(
            f"gres={options.gres}: asks for GPUs as gpus_per_node={options.gpus_per_node} does; leave one away"
        )
    if options.cores_per_node and options.cores_free >= options.cores_per_node:
        raise UsageError(f"cores_free={options.cores_free}: must be below cores_per_node={options.cores_per_node}")
    check_pack(options, executor)
    if executor == "slurm" and options.signal_delay_s >= options.time_min * 60:
        raise UsageError(
            f"signal_delay_s={options.signal_delay_s}: must be below time_min={options.time_min} minutes; "
            f"signal_delay_s={options.time_min * 20} leaves enough"
        )


def _check_kinds(options: Options) -> None:
    if options.ranks not in (None, "clients") and not (isinstance(options.ranks, int) and options.ranks >= 1):
        raise UsageError(f"ranks={options.ranks}: must be a whole number >= 1, or clients: one for each and the server")
    given = [] if options.cpus_per_task is None else ["cpus_per_task"]
    for name in ("nodes", *given, "time_min", "array_parallelism", "signal_delay_s", "allocations"):
        if not isinstance(getattr(options, name), int) or getattr(options, name) < 1:
            raise UsageError(f"{name}={getattr(options, name)}: must be a whole number >= 1")
    for name in ("gpus_per_node", "parallel", "slots", "max_queued", "cores_per_node", "cores_free"):
        if not isinstance(getattr(options, name), int) or getattr(options, name) < 0:
            raise UsageError(f"{name}={getattr(options, name)}: must be a whole number >= 0")
    for name in ("setup", "srun_args"):
        if not isinstance(getattr(options, name), (list, tuple)):
            raise UsageError(f"{name}={getattr(options, name)}: must be a list of texts")
    try:
        shlex.split(options.python or "")
    except ValueError as error:
        raise UsageError(f"python={options.python}: no command as a shell takes it ({error})") from None


def check_pack(options: Options, executor: str) -> None:
    """UsageError for a packed launch that cannot be meant."""
    if not options.pack:
        if options.slots or options.allocations != 1:
            raise UsageError("slots and allocations: are for a packed launch, --pack or pack=True")
        return
    if executor != "slurm":
        raise UsageError(
            f"--pack: is for SLURM; with --executor {executor} --parallel says how many trials run at a time"
        )
    if options.ranks not in (None, 1):
        raise UsageError(f"pack: each trial is one process; leave ranks={options.ranks} away")
    if options.workers_per_node() < 1:
        raise UsageError(
            "pack: on nodes without GPU, slots=N says how many trials at a time, or cores_per_node=N what a node has"
        )
