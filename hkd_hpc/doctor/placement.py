"""Ranks, hosts, cores, memory and devices: who computes where, and who is in whose way."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from hkd_hpc.comm.cores import cores_text, format_cpulist, numa_nodes, parse_cpulist
from hkd_hpc.comm.devices import rank_list
from hkd_hpc.common.groups import grouped
from hkd_hpc.console.messages import bytes_text
from hkd_hpc.doctor.context import Context
from hkd_hpc.doctor.findings import ERROR, WARNING, Finding, Kind, Section
from hkd_hpc.runtime.machine import cgroup_values, memory_bytes, peak_memory_bytes, quota_cores

NAME = "placement"
MOST_GROUPS = 4  # of ranks with the same cores that a host's line tells one by one
MEMORY_SHARE = 0.5  # of a host's memory, that ranks may hold with torch alone, before images and models

ONE_CORE = Kind(
    "placement.one_core",
    ERROR,
    "they take turns on one core, so that a run takes as many times longer, while others idle",
    "mpirun --bind-to none, or srun --cpu-bind=none (or --cpus-per-task={threads}); see who binds: taskset -p $$",
)
SHARED_CORES = Kind(
    "placement.shared_cores",
    WARNING,
    "they take turns while other cores of the machine idle",
    "mpirun --bind-to none, or srun --cpu-bind=cores --cpus-per-task={threads}",
)
FEW_CORES = Kind(
    "placement.few_cores",
    WARNING,
    "they take turns, so that a round takes longer; the results are the same",
    "at most {ranks} ranks on a host with {cores} core(s), each with several clients; or more nodes",
)
THREADS = Kind(
    "placement.threads",
    WARNING,
    "threads of one rank wait for each other, which is slower than one thread",
    "run.threads={cores}, or --cpus-per-task={threads} (under mpirun: --bind-to none)",
)
QUOTA = Kind(
    "placement.quota",
    WARNING,
    "the kernel stops the ranks in each period, however many cores they see",
    "ask for {threads} cores (--cpus-per-task, or the container's --cpus), or start fewer ranks",
)
MEMORY = Kind(
    "placement.memory",
    WARNING,
    "with images, models and optimizers beside it the out-of-memory killer may end a rank",
    "fewer ranks a host, each with several clients; more --mem; or more nodes",
)
SHARED_DEVICE = Kind(
    "placement.shared_device",
    WARNING,
    "they take turns on it, and weights travel through host memory, not by NCCL or RCCL",
    "one client rank a GPU and one rank for the server: -n {ranks} here, each with several clients",
)


@dataclass(frozen=True)
class RankPlacement:
    """Where a rank computes. cores: that it may use; allowed: that the job may use on this host."""

    rank: int
    host: str
    machine: str
    cores: list[int]
    allowed: list[int]
    numa: str
    threads: int
    device: str | None
    quota_cores: float | None
    memory_bytes: int
    held_bytes: int


def collect(context: Context) -> Section | None:
    """Every rank tells where it is; rank 0 compares."""
    placements = [RankPlacement(**facts) for facts in context.gathered(asdict(own_placement(context)))]
    return section_of(placements) if placements else None


def own_placement(context: Context) -> RankPlacement:
    """Of this rank."""
    me = context.world.topology.members[context.comm.rank]
    cores = sorted(os.sched_getaffinity(0))
    return RankPlacement(
        rank=context.comm.rank,
        host=me.host,
        machine=me.machine,
        cores=cores,
        allowed=sorted(allowed_cores() | set(cores)),
        numa=cores_text(cores, numa_nodes()),
        threads=context.config.run.threads,
        device=context.device,
        quota_cores=quota_cores(),
        memory_bytes=memory_bytes(),
        held_bytes=peak_memory_bytes(),
    )


def allowed_cores() -> set[int]:
    """The cores that the job may use: those of its cgroup, else all of the machine."""
    return parse_cpulist(next(iter(cgroup_values("cpuset.cpus.effective")), "")) or set(range(os.cpu_count() or 1))


def section_of(placements: Sequence[RankPlacement]) -> Section:
    """The section, from the placements of all ranks."""
    hosts = by_host(placements)
    findings = [finding for ranks in hosts for check in CHECKS for finding in check(ranks)]
    return Section(NAME, [line_of(ranks) for ranks in hosts], {"ranks": list(map(asdict, placements))}, findings)


def by_host(placements: Sequence[RankPlacement]) -> list[list[RankPlacement]]:
    """The ranks of each machine."""
    return list(grouped((placement.machine, placement) for placement in placements).values())


def line_of(ranks: Sequence[RankPlacement]) -> str:
    """A host in one line: `n1: ranks 0-3 on cores 0-3 (NUMA 0) of 0-63, 1 thread(s) a rank; 128 GB memory; ...`."""
    first = ranks[0]
    quota = "" if first.quota_cores is None else f", quota {first.quota_cores:g}"
    cores = f"{binding_text(ranks)} of {format_cpulist(allowed_of(ranks))}{quota}"
    parts = [f"{first.host}: {cores}, {first.threads} thread(s) a rank"]
    parts += [f"{bytes_text(first.memory_bytes)} memory"]
    parts += [f"{named(group)} {device or 'cpu'}" for device, group in by_device(ranks).items()]
    return "; ".join(parts)


def binding_text(ranks: Sequence[RankPlacement]) -> str:
    """Which ranks may use which cores; many groups in short."""
    groups = by_cores(ranks)
    if len(groups) > MOST_GROUPS:
        counts = sorted({len(group[0].cores) for group in groups})
        some = "-".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        return f"{named(ranks)} on {some} core(s) each, {format_cpulist(used_by(ranks))}"
    return "; ".join(f"{named(group)} on cores {group[0].numa}" for group in groups)


def by_cores(ranks: Sequence[RankPlacement]) -> list[list[RankPlacement]]:
    """The ranks of a host that may use the same cores."""
    return list(grouped((tuple(placement.cores), placement) for placement in ranks).values())


def by_device(ranks: Sequence[RankPlacement]) -> dict[str | None, list[RankPlacement]]:
    """The ranks on each device of a host; None: the CPU."""
    return grouped((placement.device, placement) for placement in ranks)


def allowed_of(ranks: Sequence[RankPlacement]) -> set[int]:
    return {core for placement in ranks for core in placement.allowed}


def used_by(ranks: Sequence[RankPlacement]) -> set[int]:
    return {core for placement in ranks for core in placement.cores}


def threads_of(ranks: Sequence[RankPlacement]) -> int:
    return sum(placement.threads for placement in ranks)


def named(ranks: Sequence[RankPlacement]) -> str:
    return rank_list([placement.rank for placement in ranks])


def check_binding(ranks: Sequence[RankPlacement]) -> list[Finding]:
    """Several ranks on too few cores, while others idle."""
    used, host, first = used_by(ranks), ranks[0].host, ranks[0]
    idle = allowed_of(ranks) - used
    if not idle:
        return []
    if len(ranks) > 1 and len(used) == 1:
        text = f"all {len(ranks)} ranks of {host} are bound to core {min(used)}; {len(idle)} other core(s) idle"
        return [ONE_CORE.found(text, threads=first.threads)]
    return [
        SHARED_CORES.found(
            f"{named(group)} of {host}, {threads_of(group)} threads together, are bound to core(s) "
            f"{format_cpulist(group[0].cores)}; {format_cpulist(idle)} idle",
            threads=first.threads,
        )
        for group in by_cores(ranks)
        if len(group) > 1 and threads_of(group) > len(group[0].cores)
    ]


def check_load(ranks: Sequence[RankPlacement]) -> list[Finding]:
    """More threads than cores, on a host whose cores are all in use."""
    used, threads, first = used_by(ranks), threads_of(ranks), ranks[0]
    if len(ranks) == 1 or threads <= len(used) or allowed_of(ranks) - used:
        return []
    most = max(1, len(used) // first.threads)
    text = f"{len(ranks)} ranks with {threads} thread(s) together on {len(used)} core(s) of {first.host}"
    return [FEW_CORES.found(text, ranks=most, cores=len(used))]


def check_threads(ranks: Sequence[RankPlacement]) -> list[Finding]:
    """Ranks that have more threads than cores."""
    narrow = [placement for placement in ranks if placement.threads > len(placement.cores)]
    if not narrow:
        return []
    cores, threads = len(narrow[0].cores), narrow[0].threads
    text = f"{named(narrow)} of {ranks[0].host}: {threads} threads (run.threads), but {cores} core(s) to use"
    return [THREADS.found(text, cores=cores, threads=threads)]


def check_quota(ranks: Sequence[RankPlacement]) -> list[Finding]:
    """A limit of CPU time below what the ranks would use."""
    quota, wanted = ranks[0].quota_cores, min(threads_of(ranks), len(used_by(ranks)))
    if quota is None or quota >= wanted:
        return []
    text = f"the cgroup of {ranks[0].host} grants {quota:g} cores' time, its ranks would use {wanted}"
    return [QUOTA.found(text, threads=wanted)]


def check_memory(ranks: Sequence[RankPlacement]) -> list[Finding]:
    """Ranks that nearly fill the memory before there is any data."""
    held, limit = sum(placement.held_bytes for placement in ranks), ranks[0].memory_bytes
    if held <= MEMORY_SHARE * limit:
        return []
    text = f"the ranks of {ranks[0].host} hold {bytes_text(held)} with torch alone, of {bytes_text(limit)}"
    return [MEMORY.found(text)]


def check_devices(ranks: Sequence[RankPlacement]) -> list[Finding]:
    """Client ranks that share a device; the server, rank 0, computes little."""
    sharers = by_device([placement for placement in ranks if placement.rank and placement.device])
    return [
        SHARED_DEVICE.found(f"{named(group)} of {group[0].host} compute on {device}", ranks=len(sharers) + 1)
        for device, group in sharers.items()
        if len(group) > 1
    ]


CHECKS = (check_binding, check_load, check_threads, check_quota, check_memory, check_devices)
