"""What SLURM has planned for this job (time, requeue, nodes, memory); signals that reach its ranks, their limits."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hkd_hpc.comm.devices import rank_list
from hkd_hpc.common.errors import obtainable
from hkd_hpc.common.stop import SIGNALS, name_of
from hkd_hpc.console.messages import bytes_text, seconds_text
from hkd_hpc.doctor.context import Context
from hkd_hpc.doctor.findings import NOTE, WARNING, Finding, Kind, Section
from hkd_hpc.jobs import slurm

NAME = "batch"
SHORT_S = 600.0  # time left from which on a run should better not begin
ADVISED_TIME = "04:00:00"
RDMA_DEVICES = Path("/sys/class/infiniband")  # RoCE's too
LOCKED_BYTES = 1 << 30  # what MPI or NCCL and the weights may want of an adapter at the same time
FILES, FILES_A_RANK = 100, 3  # that rank 0 has open at most: modules, data, results; and, over gloo, for each rank
FIELDS = (
    "Requeue",
    "Restarts",
    "BatchFlag",
    "NumNodes",
    "NumTasks",
    "NodeList",
    "TimeLimit",
    "RunTime",
    "Partition",
    "PartitionMaxTime",
    "MinMemoryNode",
    "MinMemoryCPU",
)

MEMORY = {"MinMemoryNode": "node", "MinMemoryCPU": "core"}  # of what SLURM grants it

NO_ANSWER = Kind(
    "batch.no_answer",
    NOTE,
    "limits are not known here; within a container a sweep's job could not requeue itself either",
    "bind SLURM's programs, configuration and munge's socket into the container, as in "
    + obtainable("slurm/sites/lumi.toml"),
)
SHORT = Kind(
    "batch.short",
    WARNING,
    "a run that begins now is stopped after its round and has to be resumed",
    f"sbatch --time={{time}}, or resume with --resume=auto as {obtainable('slurm/train.sh')} does",
)
BEYOND_PARTITION = Kind(
    "batch.beyond_partition",
    WARNING,
    "once requeued, this job waits forever (PartitionTimeLimit)",
    "scontrol update jobid={job} timelimit={time}; from now on sbatch --time={time}, or another --partition",
)
NO_REQUEUE = Kind(
    "batch.no_requeue",
    WARNING,
    "after a preemption or the loss of a node the run waits until somebody resumes it",
    "sbatch --requeue",
)
OTHER_SIZE = Kind(
    "batch.other_size",
    WARNING,
    "what was asked for and is paid for is not used",
    "srun or mpirun -n {tasks} without further options, or ask for as much as is used",
)
BLOCKED = Kind(
    "batch.blocked_signals",
    WARNING,
    "the notice of the time limit does not arrive, and the round that is running is lost",
    "unblock them in what starts Python (a wrapper's sigprocmask, a supervisor); bash itself blocks none",
)

LOCKED_MEMORY = Kind(
    "batch.locked_memory",
    WARNING,
    "an adapter of InfiniBand or RoCE reads only memory that is locked: MPI and NCCL take slow TCP instead, or fail",
    "ulimit -l unlimited where the ranks start; under SLURM, for its administrators: LimitMEMLOCK=infinity of slurmd, "
    "and PropagateResourceLimitsExcept=MEMLOCK",
)
OPEN_FILES = Kind(
    "batch.open_files",
    WARNING,
    "each rank has connections to the others, rank 0 the most: the start may end with `Too many open files`",
    "ulimit -n {files} before sbatch or mpirun (SLURM passes it on), or fewer ranks, each with several clients",
)


def collect(context: Context) -> Section | None:
    """Every rank tells its limits, and which signals cannot reach it; rank 0 asks SLURM."""
    ranks = context.gathered(own_facts())
    if not ranks:
        return None
    number = os.environ.get("SLURM_JOB_ID", "")
    fields = planned(number) if number else {}
    return section_of(number, fields, ranks, is_step="SLURM_STEP_NODELIST" in os.environ)


def own_facts() -> dict[str, Any]:
    """Of this rank."""
    return {
        "blocked": blocked(Path("/proc/self/status").read_text()),
        "locked_bytes": soft_limit(resource.RLIMIT_MEMLOCK),
        "open_files": soft_limit(resource.RLIMIT_NOFILE),
        "rdma": sorted(path.name for path in RDMA_DEVICES.glob("*")),
    }


def soft_limit(kind: int) -> int | None:
    """Of this process, None without one."""
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def planned(number: str) -> dict[str, str] | None:
    """What SLURM says about a job, with the MaxTime of its partition; None where it does not answer."""
    fields = slurm.fields_of("job", number)
    if fields is None:
        return None
    partition = slurm.fields_of("partition", fields.get("Partition", "")) or {}
    return {**fields, "PartitionMaxTime": partition.get("MaxTime", "")}


def blocked(status: str) -> list[int]:
    """Those signals of SLURM's that are blocked, from /proc/<pid>/status."""
    mask = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk:")), 0)
    return [number for number in (*SIGNALS, signal.SIGTERM) if mask >> (number - 1) & 1]


def section_of(
    number: str, fields: Mapping[str, str] | None, ranks: Sequence[Mapping[str, Any]], is_step: bool
) -> Section:
    """The section, from what SLURM says (None: nothing) about the job (empty: none), and the facts of all ranks."""
    findings = [*check_signals(ranks), *check_locked_memory(ranks), *check_open_files(ranks)]
    limits = {"ranks": list(ranks)}
    if not number:
        return Section(NAME, ["no SLURM job", limits_of(ranks)], limits, findings)
    if fields is None:
        text = f"scontrol does not answer about job {number}"
        findings = [NO_ANSWER.found(text), *findings]
        return Section(NAME, [f"job {number}", limits_of(ranks)], {"job": number, **limits}, findings)
    findings += [*check_time(fields), *check_partition(number, fields), *check_requeue(fields)]
    findings += check_size(fields, len(ranks), is_step)
    facts = {"job": number, **{name: fields[name] for name in FIELDS if name in fields}, **limits}
    return Section(NAME, [line_of(number, fields), limits_of(ranks)], facts, findings)


def limits_of(ranks: Sequence[Mapping[str, Any]]) -> str:
    """For people: the least of all ranks."""
    files, locked = least(ranks, "open_files"), least(ranks, "locked_bytes")
    parts = ["unlimited" if files is None else f"{files:,}", "unlimited" if locked is None else bytes_text(locked)]
    return f"a rank may open {parts[0]} files and lock {parts[1]} memory"


def least(ranks: Sequence[Mapping[str, Any]], name: str) -> int | None:
    """The least of a limit, None where no rank has one."""
    return min((facts[name] for facts in ranks if facts[name] is not None), default=None)


def line_of(number: str, fields: Mapping[str, str]) -> str:
    """For people."""
    left = left_s(fields)
    time = "no time limit" if left is None else f"{seconds_text(left)} left of {fields['TimeLimit']}"
    most = fields.get("PartitionMaxTime")
    time += f" (partition {fields['Partition']}: {most})" if most else ""
    memory = [f"{fields[name]} memory a {unit}" for name, unit in MEMORY.items() if fields.get(name, "0") != "0"]
    requeue = "on" if fields.get("Requeue") == "1" else "off"
    parts = [f"job {number}: {time}", f"requeue {requeue}, restarts {fields.get('Restarts', '?')}"]
    return ", ".join([*parts, f"{fields.get('NumNodes', '?')} node(s) {fields.get('NodeList', '?')}", *memory])


def left_s(fields: Mapping[str, str]) -> float | None:
    """Seconds until the time limit, None without one."""
    limit, run = duration_s(fields.get("TimeLimit", "")), duration_s(fields.get("RunTime", ""))
    return None if limit is None else max(0.0, limit - (run or 0.0))


def duration_s(text: str) -> float | None:
    """SLURM's 1-02:03:04, 02:03:04 or 03:04 in seconds; None for UNLIMITED and the like."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in [*parts, days or "0"]):
        return None
    return 86400.0 * int(days or 0) + sum(int(part) * 60.0**place for place, part in enumerate(reversed(parts)))


def check_signals(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Signals that some ranks never get."""
    without = [rank for rank, facts in enumerate(ranks) if facts["blocked"]]
    names = sorted({name_of(number) for facts in ranks for number in facts["blocked"]})
    return [BLOCKED.found(f"{rank_list(without)}: {', '.join(names)} blocked")] if without else []


def check_locked_memory(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Little memory for adapters that read it by themselves."""
    limited = [facts for facts in ranks if facts["rdma"]]
    locked = least(limited, "locked_bytes")
    if locked is None or locked >= LOCKED_BYTES:
        return []
    text = f"{bytes_text(locked)} of memory may be locked beside {', '.join(limited[0]['rdma'])}"
    return [LOCKED_MEMORY.found(f"{text}; {bytes_text(LOCKED_BYTES)} are enough")]


def check_open_files(ranks: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Fewer open files than so many ranks have."""
    allowed, needed = least(ranks, "open_files"), FILES + FILES_A_RANK * len(ranks)
    if allowed is None or allowed >= needed:
        return []
    return [OPEN_FILES.found(f"{allowed} open files, rank 0 of {len(ranks)} may need {needed}", files=needed)]


def check_time(fields: Mapping[str, str]) -> list[Finding]:
    """A limit that is near."""
    left = left_s(fields)
    if left is None or left >= SHORT_S:
        return []
    return [SHORT.found(f"{seconds_text(left)} are left", time=advised_time(fields))]


def advised_time(fields: Mapping[str, str]) -> str:
    """Hours, or less where the partition does not allow that."""
    texts = [text for text in (ADVISED_TIME, fields.get("PartitionMaxTime", "")) if duration_s(text) is not None]
    return min(texts, key=lambda text: duration_s(text) or 0.0)


def check_partition(number: str, fields: Mapping[str, str]) -> list[Finding]:
    """A limit beyond that of the partition, which was lowered meanwhile, or an operator raised the job's."""
    limit, most = (duration_s(fields.get(name, "")) for name in ("TimeLimit", "PartitionMaxTime"))
    if limit is None or most is None or limit <= most:
        return []
    time = fields["PartitionMaxTime"]
    text = f"TimeLimit={fields['TimeLimit']}, but partition {fields['Partition']} has MaxTime={time}"
    return [BEYOND_PARTITION.found(text, job=number, time=time)]


def check_requeue(fields: Mapping[str, str]) -> list[Finding]:
    """A batch job that SLURM does not begin again; what runs in a terminal somebody looks after."""
    is_off = fields.get("Requeue") == "0" and fields.get("BatchFlag") == "1"
    return [NO_REQUEUE.found("Requeue=0: SLURM does not begin this job again")] if is_off else []


def check_size(fields: Mapping[str, str], ranks: int, is_step: bool) -> list[Finding]:
    """Tasks of the job that are no ranks. A step of srun may be smaller on purpose; of one process launch speaks."""
    tasks = fields.get("NumTasks", "")
    if not tasks.isdigit() or is_step or ranks in (1, int(tasks)):
        return []
    return [OTHER_SIZE.found(f"{ranks} ranks, in a job of {tasks} tasks", tasks=tasks)]
