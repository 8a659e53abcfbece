"""Which world was this process started in? Read from the launcher's variables, before MPI or torch is loaded.

Documented order, the first that is set wins:

1. torchrun or `env://`: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (or TORCHELASTIC_RUN_ID). When they only repeat what
   the outer launcher says (a script that exports RANK=$SLURM_PROCID), the outer launcher counts.
2. Open MPI's mpirun: OMPI_COMM_WORLD_*. It beats SLURM_* variables, which are left over when mpirun runs inside sbatch.
3. MPICH, Hydra, Intel MPI: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS.
4. a step of srun: SLURM_PROCID, SLURM_STEP_ID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS. With a PMI server beside it
   (PMIX_RANK, PMI_RANK, PMI_FD) and mpi4py installed it is an MPI world, otherwise a plain SLURM one.
5. nothing: one process. The shell of a batch script is such a process, whatever SLURM_NTASKS says.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.rank import is_number

FIRST_SPECIAL_STEP = 4294967280  # step ids from here on are the batch script, the interactive shell and the like
LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_", "SBATCH_", "SRUN_", "TORCHELASTIC_")  # prefixes of variables
RANKS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
)
ADDRESSES = ("SLURM_CONF", "SLURM_CLUSTERS")  # say where SLURM is, not in which job
MOST_RANKS = 8192  # all of them send messages to one process, rank 0
BATCH_JOBS = {  # by scheduler: the variable that says which job this is
    "slurm": "SLURM_JOB_ID",
    "pbs": "PBS_JOBID",
    "lsf": "LSB_JOBID",
    "flux": "FLUX_JOB_ID",
}


@dataclass(frozen=True)
class Hint:
    """What the launcher says about this process; local_* are None where it does not say."""

    launcher: str  # "none", "mpi", "slurm" or "torchrun"
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    rank_name: str = field(default="", compare=False)  # the variable that gave the rank


class SplitWorld(UsageError):
    """The launcher started one world, and MPI sees several, of one rank each as a rule."""


def read_hint(env: Mapping[str, str], has_mpi4py: bool | None = None) -> Hint:
    """The world that `env` describes. Raises UsageError for half-set, contradictory, unreadable or nested worlds."""
    if has_mpi4py is None:
        has_mpi4py = importlib.util.find_spec("mpi4py") is not None
    outer = _outer(env, has_mpi4py)
    inner = _torch(env, outer)
    return inner or outer or Hint("none", 0, 1)


def check_world(mpi_size: int, hint: Hint) -> None:
    """Raise SplitWorld when MPI and the launcher disagree on the number of ranks (N worlds of one rank each)."""
    if mpi_size == hint.size:
        return
    raise SplitWorld(
        f"the launcher started {hint.size} ranks ({hint.rank_name or 'its variables'} says rank {hint.rank}), but MPI "
        f"sees a world of {mpi_size}: this MPI library and this launcher do not use the same PMI. Use the mpirun "
        f"that belongs to this MPI; under srun choose a flavour that both know (see `srun --mpi=list`, often "
        f"--mpi=pmix), or set comm.backend=gloo to go without MPI."
    )


def batch_job(env: Mapping[str, str]) -> dict[str, str]:
    """{"scheduler": "slurm", "job_id": "17"} of the batch job that this process belongs to; {} outside of one."""
    found = [{"scheduler": name, "job_id": env[variable]} for name, variable in BATCH_JOBS.items() if env.get(variable)]
    return found[0] if found else {}


def outside_of_jobs(env: Mapping[str, str]) -> dict[str, str]:
    """The variables without those of launchers: for what is started from within a job and is a job of its own."""
    return {
        name: value
        for name, value in env.items()
        if name in ADDRESSES or not (name.startswith(LAUNCHERS) or name in RANKS)
    }


def without_mpi(hint: Hint, env: Mapping[str, str]) -> Hint:
    """The same world as a plain SLURM one where srun started it, so that no MPI is needed."""
    step = slurm_step(env, has_mpi4py=False)
    return step if step and (step.rank, step.size) == (hint.rank, hint.size) else hint


def slurm_step(env: Mapping[str, str], has_mpi4py: bool) -> Hint | None:
    """The step of srun that this process belongs to, None outside a real step."""
    step = _number(env, "SLURM_STEP_ID")
    if step is None or step >= FIRST_SPECIAL_STEP or "SLURM_PROCID" not in env:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    rank, size = _pair(env, "SLURM_PROCID", size_name)
    has_pmi = any(name in env for name in ("PMIX_RANK", "PMI_RANK", "PMI_FD"))
    return Hint(
        "mpi" if has_pmi and has_mpi4py else "slurm",
        rank,
        size,
        _number(env, "SLURM_LOCALID"),
        _slurm_local_size(env, size),
        "SLURM_PROCID",
    )


def _outer(env: Mapping[str, str], has_mpi4py: bool) -> Hint | None:
    """The world of mpirun or srun, without a torchrun inside it."""
    open_mpi = _mpi(
        env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    )
    step = slurm_step(env, has_mpi4py)
    if step and "PMI_SIZE" not in env:
        return open_mpi or step
    hydra = _mpi(env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if open_mpi and hydra and hydra.size > 1 and _rank_and_size(hydra) != _rank_and_size(open_mpi):
        raise UsageError(_contradiction(open_mpi, hydra))
    if step and hydra and _rank_and_size(step) == _rank_and_size(hydra):
        return open_mpi or step
    return open_mpi or hydra or step


def _torch(env: Mapping[str, str], outer: Hint | None) -> Hint | None:
    """The world of torchrun or env://, None where there is none or where it only repeats the outer one."""
    if not any(name in env for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")) or _repeats(env, outer):
        return None
    rank, size = _pair(env, "RANK", "WORLD_SIZE")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise UsageError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but {' and '.join(missing)} not: set all four, or none of them"
        )
    inner = Hint("torchrun", rank, size, _number(env, "LOCAL_RANK"), _number(env, "LOCAL_WORLD_SIZE"), "RANK")
    _reject_nested(env, outer, inner)
    return inner


def _repeats(env: Mapping[str, str], outer: Hint | None) -> bool:
    """True when RANK and WORLD_SIZE, as far as set, are copies of the outer launcher's numbers."""
    if outer is None or "TORCHELASTIC_RUN_ID" in env:
        return False
    rank, size = str(outer.rank), str(outer.size)
    return env.get("RANK", rank) == rank and env.get("WORLD_SIZE", size) == size


def _reject_nested(env: Mapping[str, str], outer: Hint | None, inner: Hint) -> None:
    """One torchrun per outer task is fine; anything else would run the job several times over."""
    if outer is None or outer.size == 1 or _number(env, "GROUP_WORLD_SIZE") == outer.size:
        return
    if "GROUP_WORLD_SIZE" not in env:
        raise UsageError(_contradiction(outer, inner))
    raise UsageError(
        f"nested launchers: {outer.size} tasks of the outer launcher ({outer.rank_name}) each start a torchrun of "
        f"{env['GROUP_WORLD_SIZE']} node(s) (GROUP_WORLD_SIZE). Start torchrun without mpirun or srun, or start one "
        f"torchrun per node with --nnodes={outer.size}, or leave torchrun out."
    )


def _mpi(env: Mapping[str, str], rank_name: str, size_name: str, local_rank: str, local_size: str) -> Hint | None:
    """The world of one family of mpirun, None if neither its rank nor its size is set."""
    if rank_name not in env and size_name not in env:
        return None
    rank, size = _pair(env, rank_name, size_name)
    return Hint("mpi", rank, size, _number(env, local_rank), _number(env, local_size), rank_name)


def _pair(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    """Rank and size, both there and fitting together."""
    rank, size = _number(env, rank_name), _number(env, size_name)
    if rank is None or size is None:
        there, absent = (size_name, rank_name) if rank is None else (rank_name, size_name)
        raise UsageError(
            f"{there} is set, but {absent} not: the launcher's variables are incomplete; set both, or neither"
        )
    if size > MOST_RANKS:
        raise UsageError(f"{size_name}={size} is more ranks than can be; allowed: up to {MOST_RANKS}")
    if rank >= size:
        raise UsageError(f"{rank_name}={rank} does not fit {size_name}={size}: ranks go from 0 to {size - 1}")
    return rank, size


def _number(env: Mapping[str, str], name: str) -> int | None:
    """The variable as a number >= 0, None if it is not set."""
    text = env.get(name)
    if text is None:
        return None
    if not is_number(text):
        raise UsageError(f"{name}={text!r} is not a whole number >= 0")
    return int(text)


def _slurm_local_size(env: Mapping[str, str], size: int) -> int | None:
    """Tasks of this step on this node, from a list such as `4(x2),3`."""
    if env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES")) == "1":
        return size
    node = _number(env, "SLURM_NODEID")
    if node is None:
        return None
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, times = part.rstrip(")").partition("(x")
        if not (is_number(count) and is_number(times or "1")):
            return None
        node -= int(times or 1)
        if node < 0:
            return int(count)
    return None


def _rank_and_size(hint: Hint) -> tuple[int, int]:
    return hint.rank, hint.size


def _contradiction(one: Hint, other: Hint) -> str:
    """The line for two launchers that do not agree."""
    return (
        f"contradictory launchers: {one.rank_name} says rank {one.rank} of {one.size}, {other.rank_name} says rank "
        f"{other.rank} of {other.size}. Start the job with one launcher, or unset the left-over variables."
    )
