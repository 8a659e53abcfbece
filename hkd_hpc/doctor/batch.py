"""What SLURM has planned for this job: time, requeue, nodes, memory; and whether its signals reach the ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from hkd_hpc.comm.devices import rank_list
from hkd_hpc.console.messages import seconds_text
from hkd_hpc.doctor.findings import NOTE, WARNING, Finding, Kind, Section
from hkd_hpc.doctor.job import Job
from hkd_hpc.errors import obtainable
from hkd_hpc.jobs import slurm
from hkd_hpc.stop import SIGNALS, name_of

NAME = "batch"
SHORT_S = 600.0  # time left from which on a run should better not begin
FIELDS = (
    "Requeue",
    "Restarts",
    "BatchFlag",
    "NumNodes",
    "NumTasks",
    "NodeList",
    "TimeLimit",
    "RunTime",
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
    f"sbatch --time=04:00:00, or resume with --resume=auto as {obtainable('slurm/train.sh')} does",
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


def look(job: Job) -> Section | None:
    """Every rank tells which signals cannot reach it; rank 0 asks SLURM."""
    ranks = job.gathered({"blocked": blocked(Path("/proc/self/status").read_text())})
    if not ranks:
        return None
    number = os.environ.get("SLURM_JOB_ID", "")
    fields = slurm.fields_of(number) if number else {}
    is_step = "SLURM_STEP_NODELIST" in os.environ
    return section_of(number, fields, [facts["blocked"] for facts in ranks], is_step)


def blocked(status: str) -> list[int]:
    """Those signals of SLURM's that are blocked, from /proc/<pid>/status."""
    mask = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk:")), 0)
    return [number for number in (*SIGNALS, signal.SIGTERM) if mask >> (number - 1) & 1]


def section_of(
    number: str, fields: Mapping[str, str] | None, blocked_by_rank: Sequence[Sequence[int]], is_step: bool
) -> Section:
    """The section, from what SLURM says (None: nothing), and the signals that are blocked in each rank."""
    findings = check_signals(blocked_by_rank)
    if not number:
        return Section(NAME, ["no SLURM job"], {}, findings)
    if fields is None:
        text = f"scontrol does not answer about job {number}"
        return Section(NAME, [f"job {number}"], {"job": number}, [NO_ANSWER.found(text), *findings])
    findings += [*check_time(fields), *check_requeue(fields), *check_size(fields, len(blocked_by_rank), is_step)]
    facts = {"job": number, **{name: fields[name] for name in FIELDS if name in fields}}
    return Section(NAME, [line_of(number, fields)], facts, findings)


def line_of(number: str, fields: Mapping[str, str]) -> str:
    """For people."""
    left = left_s(fields)
    time = "no time limit" if left is None else f"{seconds_text(left)} left of {fields['TimeLimit']}"
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


def check_signals(blocked_by_rank: Sequence[Sequence[int]]) -> list[Finding]:
    """Signals that some ranks never get."""
    ranks = [rank for rank, numbers in enumerate(blocked_by_rank) if numbers]
    names = sorted({name_of(number) for numbers in blocked_by_rank for number in numbers})
    return [BLOCKED.found(f"{rank_list(ranks)}: {', '.join(names)} blocked")] if ranks else []


def check_time(fields: Mapping[str, str]) -> list[Finding]:
    """A limit that is near."""
    left = left_s(fields)
    return [SHORT.found(f"{seconds_text(left)} are left")] if left is not None and left < SHORT_S else []


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
