"""Which launcher, PMI and MPI there are, and whether all ranks that were started are in one world."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hkd_hpc.comm.control.watch import children_of, launcher_chain
from hkd_hpc.comm.launchers import SplitWorld
from hkd_hpc.comm.world import World
from hkd_hpc.doctor.findings import ERROR, WARNING, Kind, Section
from hkd_hpc.doctor.job import Job
from hkd_hpc.errors import RunError, UsageError, obtainable
from hkd_hpc.runtime.versions import installed

NAME = "launch"
PMI = {"PMIX_RANK": "PMIx", "PMI_FD": "PMI-1", "PMI_RANK": "PMI"}  # the first that is set
FIRST_WAIT_S = 30.0  # for the first of several strangers, to find the others and tell it
PROGRAMS = ("mpirun", "mpiexec", "prte", "orte", "orted", "prted", "hydra", "pmi_proxy", "slurmstepd")  # beginnings

SINGLETONS = Kind(
    "launch.singletons",
    ERROR,
    "the ranks do not see each other: the job would be several jobs of one rank, each in the same folder",
    "start with the mpirun that belongs to this mpi4py's MPI (`which mpirun`), under srun with a flavour of "
    "`srun --mpi=list` that it knows, or go without MPI: comm.backend=gloo",
)
STRANGE_LAUNCHER = Kind(
    "launch.strange_launcher",
    ERROR,
    "the launcher sets none of the variables that are known here (Open MPI's, Hydra's, SLURM's, torchrun's), so each "
    "process is a job of its own",
    "torchrun --nproc_per_node={processes} -m hkd_hpc.doctor, or another mpirun",
)
NO_WORLD = Kind(
    "launch.no_world",
    ERROR,
    "the ranks did not come together, so no run can begin; nothing else could be looked at",
    f"what the line itself says; more in {obtainable('docs/troubleshooting.md, Ranks do not find each other')}",
)
ONE_OF_MANY = Kind(
    "launch.one_process",
    WARNING,
    "nothing but this process was looked at: a batch script itself is no launcher",
    f"sbatch {obtainable('slurm/doctor.sh')}, or within the job: srun --mpi=none python -m hkd_hpc.doctor",
)


def look(job: Job) -> Section | None:
    """Rank 0: who started us."""
    return section_of(facts_of(job.world, os.environ)) if job.comm.rank == 0 else None


def section_of(facts: Mapping[str, Any]) -> Section:
    """The section of the facts."""
    findings = []
    if facts["launcher"] == "none" and facts["tasks"] > 1:
        findings = [ONE_OF_MANY.found(f"one process, in a SLURM job of {facts['tasks']} tasks")]
    return Section(NAME, [line_of(facts)], facts, findings)


def facts_of(world: World, env: Mapping[str, str]) -> dict[str, Any]:
    """What this process knows of its start."""
    hint, libraries = world.hint, world.mpi_libraries()
    tasks = env.get("SLURM_NTASKS", "") if "SLURM_JOB_ID" in env else ""
    return {
        "launcher": hint.launcher,
        "variable": hint.rank_name,
        "program": program_of(launcher_chain(hint.rank_name)[-1][1]),
        "ranks": world.size,
        "started": hint.size,
        "tasks": int(tasks) if tasks.isdigit() else 0,
        "pmi": next((name for variable, name in PMI.items() if variable in env), "none"),
        "mpi": libraries[1] if libraries else "not used",
        "mpi4py": installed("mpi4py") or "not installed",
    }


def line_of(facts: Mapping[str, Any]) -> str:
    """For people."""
    if facts["launcher"] == "none":
        return f"one process, without a launcher; mpi4py {facts['mpi4py']}"
    return (
        f"{facts['ranks']} of {facts['started']} ranks, started by {facts['program']} ({facts['variable']}), "
        f"PMI: {facts['pmi']}, MPI: {facts['mpi']}, mpi4py {facts['mpi4py']}"
    )


def without_world(error: UsageError | RunError) -> Section:
    """The section of a job whose ranks did not come together."""
    kind = SINGLETONS if isinstance(error, SplitWorld) else NO_WORLD
    return Section(NAME, ["no world of ranks"], {}, [kind.found(str(error))])


def strangers(pids: list[int]) -> Section:
    """The section of processes that a launcher started together, and that know nothing of each other."""
    program = program_of(os.getppid())
    found = STRANGE_LAUNCHER.found(
        f"{program} started {len(pids)} processes of this command, and each takes itself for the only one",
        processes=len(pids),
    )
    return Section(NAME, [f"{len(pids)} processes, started by {program}"], {"processes": len(pids)}, [found])


def alike(pid: int) -> list[int]:
    """The processes, `pid` among them, that its launcher started with the same command line; [] without a launcher."""
    parent = os.getppid()
    if not program_of(parent).startswith(PROGRAMS):
        return []
    own = _of_process(pid, "cmdline")
    return sorted(child for child in children_of(parent) or [] if own and _of_process(child, "cmdline") == own)


def await_end(pid: int) -> None:
    """Wait for a process to end, FIRST_WAIT_S at most: while it looks for its like, they must be there."""
    give_up_s = time.monotonic() + FIRST_WAIT_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < give_up_s:
        time.sleep(0.05)


def program_of(pid: int) -> str:
    """The name of a process, "?" where it cannot be seen."""
    return _of_process(pid, "comm").strip() or "?"


def _of_process(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace")
    except OSError:
        return ""
