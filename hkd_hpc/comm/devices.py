"""Which device each rank computes on, and what carries the sum of the weights. Pure functions, but for two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.groups import grouped
from hkd_hpc.common.words import counted

BACKENDS = ("auto", "nccl", "gloo", "mpi")
DEVICE_OFFSET = (
    "HKD_DEVICE_OFFSET"  # variable: processes that are worlds of their own, but share a machine's GPUs, count on
)
HostDevice = tuple[str, "str | None"]  # (host, identity of the device; None for the CPU)


@dataclass(frozen=True)
class Plan:
    """What carries the weights: "local", "mpi", "gloo" or "nccl" (`nccl_ranks` are the members of the device group)."""

    backend: str
    device_by_rank: tuple[HostDevice, ...]
    nccl_ranks: tuple[int, ...] = ()
    reason: str = ""


def pick_device(local_rank: int, visible: int) -> int | None:
    """Index of this rank's device among the `visible` ones, None for the CPU. The launcher may have renumbered them."""
    return local_rank % visible if visible else None


def sharers(device_by_rank: Sequence[HostDevice], rank: int) -> int:
    """How many ranks compute on this rank's device; 1 for a CPU."""
    own = device_by_rank[rank]
    return 1 if own[1] is None else list(device_by_rank).count(own)


def device_offset(env: Mapping[str, str]) -> int:
    """Where this process begins to count a machine's GPUs. UsageError for garbage."""
    text = env.get(DEVICE_OFFSET, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise UsageError(f"{DEVICE_OFFSET}={text!r} is not a whole number >= 0")
    return int(text)


def choose_backend(
    requested: str, device_by_rank: Sequence[HostDevice], has_mpi: bool, nccl_available: bool = True
) -> Plan:
    """Choose what carries the weights, from (host, device) of every rank. The rule, in this order:

    - one rank: "local".
    - "nccl" (also for RCCL) when each of two or more client ranks has a device of its own. Rank 0 is outside its group.
    - otherwise "mpi" if the job was started by MPI, else "gloo".

    Raises UsageError when `requested` is unknown or cannot be had.
    """
    if requested not in BACKENDS:
        raise UsageError(f"comm.backend={requested} is unknown; allowed: {', '.join(BACKENDS)}")
    host_devices = tuple((host, device) for host, device in device_by_rank)
    if len(host_devices) == 1:
        return Plan("local", host_devices, reason="one process")
    if requested == "mpi" and not has_mpi:
        raise UsageError(
            "comm.backend=mpi needs a job that was started by MPI (mpirun, or srun with --mpi=pmix); "
            "use comm.backend=auto or gloo here"
        )
    ranks = nccl_members(host_devices) if nccl_available else ()
    if requested == "nccl" and not ranks:
        raise UsageError(_why_no_nccl(host_devices, nccl_available))
    if requested == "nccl" or (requested == "auto" and ranks):
        return Plan("nccl", host_devices, ranks, "each has a GPU of its own")
    backend = ("mpi" if has_mpi else "gloo") if requested == "auto" else requested
    return Plan(backend, host_devices, reason=_why(requested, host_devices, has_mpi))


def nccl_members(host_devices: Sequence[HostDevice]) -> tuple[int, ...]:
    """The client ranks, or () where there is one only, or one has no device, or two of them would share one."""
    members = host_devices[1:]
    own = len(members) > 1 and all(device for _, device in members) and len(set(members)) == len(members)
    return tuple(range(1, len(host_devices))) if own else ()


def require_devices(plan: Plan, env: Mapping[str, str]) -> None:
    """UsageError unless each rank has a device; `env`: says what hides them."""
    without = [rank for rank, (_, device) in enumerate(plan.device_by_rank) if device is None]
    if without:
        masked = env.get("CUDA_VISIBLE_DEVICES", "not set")
        raise UsageError(
            f"run.device=cuda, but torch sees no CUDA or ROCm device for {rank_list(without)} "
            f"(CUDA_VISIBLE_DEVICES={masked}); run.device=auto takes the CPU there"
        )


def describe(plan: Plan) -> str:
    """One line for people: ranks, hosts, what carries the weights and why, and the device of each rank, compacted."""
    hosts = len({host for host, _ in plan.device_by_rank})
    groups = "; ".join(
        f"{rank_list(ranks)} {device or 'cpu'}{f' on {host}' if hosts > 1 else ''}"
        for (host, device), ranks in _by_device(plan.device_by_rank).items()
    )
    carrier = plan.backend + (f" among {rank_list(plan.nccl_ranks)}" if plan.nccl_ranks else "")
    return (
        f"{counted(len(plan.device_by_rank), 'rank')} on {counted(hosts, 'host')}, weights by {carrier} "
        f"({plan.reason}); devices: {groups}"
    )


def cuda_identity(index: int) -> str:
    """A name of CUDA or ROCm device `index` that is the same in every process of a host: UUID, else bus, else index."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return f"GPU-{uuid}"
    bus = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return f"cuda:{index}" if None in bus else "PCI-" + ":".join(f"{number:02x}" for number in bus)


def visible_devices(requested: str) -> int:
    """How many CUDA or ROCm devices torch sees; 0 when the CPU is asked for."""
    if requested == "cpu":
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _by_device(host_devices: Sequence[HostDevice]) -> dict[HostDevice, list[int]]:
    return grouped((host_device, rank) for rank, host_device in enumerate(host_devices))


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 0`, `ranks 1-10`, `ranks 0, 3, 5-7`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(runs_of(ranks))}"


def runs_of(numbers: Iterable[int]) -> list[str]:
    """Ascending numbers, those that follow each other together: `0`, `3`, `5-7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def _why(requested: str, host_devices: Sequence[HostDevice], has_mpi: bool) -> str:
    """The reason for a CPU transport, short."""
    if requested != "auto":
        return "asked for"
    started = "started by MPI" if has_mpi else "started without MPI"
    if not any(device for _, device in host_devices):
        return started
    shared = any(device and len(ranks) > 1 for (_, device), ranks in _by_device(host_devices).items())
    return f"{'several ranks share a GPU' if shared else 'not every client rank has a GPU'}, {started}"


def _why_no_nccl(host_devices: Sequence[HostDevice], nccl_available: bool) -> str:
    """The line for a forced NCCL that cannot be had: which ranks share which device, and what to change."""
    advice = "give each client rank a GPU of its own (fewer ranks, several clients each), or use comm.backend=auto"
    if not nccl_available:
        return f"comm.backend=nccl: this torch has no NCCL; {advice}"
    clients = {host_device: [rank for rank in ranks if rank] for host_device, ranks in _by_device(host_devices).items()}
    reasons = [
        f"ranks {', '.join(map(str, ranks))} share {device} on {host}"
        for (host, device), ranks in clients.items()
        if device and len(ranks) > 1
    ]
    absent = [rank for (_, device), ranks in clients.items() if device is None for rank in ranks]
    if absent:
        reasons.append(f"{rank_list(absent)} ha{'ve' if len(absent) > 1 else 's'} no GPU")
    reason = "; ".join(reasons) or "there is one client rank only"
    return f"comm.backend=nccl needs a GPU per client rank, but {reason}: {advice}"
