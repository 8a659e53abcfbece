"""Which launcher, PMI and MPI there are, and whether all ranks that were started are in one world."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hkd_hpc.comm.control.watch import children_of, descendants, launcher_chain, parent_of
from hkd_hpc.comm.launchers import SplitWorld
from hkd_hpc.comm.world import World
from hkd_hpc.common.errors import RunError, UsageError, obtainable
from hkd_hpc.doctor.context import Context
from hkd_hpc.doctor.findings import ERROR, WARNING, Kind, Section
from hkd_hpc.runtime.versions import installed

NAME = "launch"
PMI = {"PMIX_RANK": "PMIx", "PMI_FD": "PMI-1", "PMI_RANK": "PMI"}  # the first that is set
WAIT_S = 30.0  # in which all of several unconnected processes begin, and the first of them tells it
WAITING = "hkd waits"  # the name of a process that does
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
    "the processes have none of the variables that are known here (Open MPI's, Hydra's, SLURM's, torchrun's), so each "
    "is a job of its own",
    "let the launcher's variables through (a container: without --cleanenv; a wrapper: no env -i), or take another "
    "one: torchrun --nproc_per_node={processes} -m hkd_hpc.doctor",
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


def collect(context: Context) -> Section | None:
    """Rank 0: who started us."""
    return section_of(facts_of(context.world, os.environ)) if context.comm.rank == 0 else None


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


def unconnected_processes(tasks: int) -> Section:
    """The section of tasks that a launcher started together, and that know nothing of each other."""
    program = program_of(parent_of(task_of(os.getpid())))
    found = STRANGE_LAUNCHER.found(
        f"{program} started {tasks} processes of this command, and each takes itself for the only one",
        processes=tasks,
    )
    return Section(NAME, [f"{tasks} processes, started by {program}"], {"processes": tasks}, [found])


def task_of(pid: int) -> int:
    """The child of a launcher that a process is, or that started it (a wrapper); 0 without a launcher."""
    task = pid
    while task > 1 and not program_of(parent_of(task)).startswith(PROGRAMS):
        task = parent_of(task)
    return task if task > 1 else 0


def alike(task: int) -> list[int]:
    """The tasks, `task` among them, that its launcher started with the same command line; [] for 0."""
    own = _of_process(task, "cmdline")
    found = children_of(parent_of(task)) or []
    return sorted(child for child in found if own and _of_process(child, "cmdline") == own)


def await_first() -> bool:
    """Wait for the end of the launcher's first task on this host, WAIT_S at most, and let it see that; False in it."""
    task = task_of(os.getpid())
    first = next(iter(alike(task)), task)
    if task == first:
        return False
    Path("/proc/self/comm").write_text(WAITING)
    wait_while(Path(f"/proc/{first}").exists)
    return True


def await_others(others: int) -> None:
    """Wait until so many others wait for this first task, WAIT_S at most: who comes later would look in vain for it."""
    launcher = parent_of(task_of(os.getpid()))
    wait_while(lambda: sum(program_of(pid) == WAITING for pid in descendants(launcher)) < others)


def wait_while(is_so: Callable[[], bool]) -> None:
    """WAIT_S at most."""
    give_up_s = time.monotonic() + WAIT_S
    while is_so() and time.monotonic() < give_up_s:
        time.sleep(0.05)


def program_of(pid: int) -> str:
    """The name of a process, "?" where it cannot be seen."""
    return _of_process(pid, "comm").strip() or "?"


def _of_process(pid: int, what: str) -> str:
    try:
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace")
    except OSError:
        return ""
