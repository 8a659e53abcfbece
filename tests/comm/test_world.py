"""The launchers' variables: five families, their leftovers, and every way to be half-set, contradictory or nested."""

from __future__ import annotations

import pytest

from hkd_hpc.comm.launchers import Hint, check_world, outside_of_jobs, read_hint, without_mpi
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.rank import guess_rank

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "11",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),7",
}
BATCH_SHELL = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "11", "SLURM_LOCALID": "0"}
MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    **MASTER,
    "TORCHELASTIC_RUN_ID": "none",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
}

READABLE = {
    "nothing": ({}, Hint("none", 0, 1)),
    "open mpi": (OPEN_MPI, Hint("mpi", 5, 11, 1, 4)),
    "mpich and intel": (HYDRA, Hint("mpi", 3, 4, 3, 4)),
    "srun": (STEP, Hint("slurm", 4, 11, 0, 7)),
    "srun on one node": ({**STEP, "SLURM_NNODES": "1"}, Hint("slurm", 4, 11, 0, 11)),
    "srun, fewer tasks than the job": ({**STEP, "SLURM_STEP_NUM_TASKS": "6"}, Hint("slurm", 4, 6, 0, 7)),
    "srun with pmix": ({**STEP, "PMIX_RANK": "4"}, Hint("mpi", 4, 11, 0, 7)),
    "srun with pmi2": ({**STEP, "PMI_RANK": "4", "PMI_SIZE": "11", "PMI_FD": "7"}, Hint("mpi", 4, 11, 0, 7)),
    "shell of a batch job": (BATCH_SHELL, Hint("none", 0, 1)),
    "interactive step": ({**STEP, "SLURM_STEP_ID": "4294967290"}, Hint("none", 0, 1)),
    "batch step": ({**STEP, "SLURM_STEP_ID": "4294967291"}, Hint("none", 0, 1)),
    "mpirun in sbatch": ({**BATCH_SHELL, **OPEN_MPI}, Hint("mpi", 5, 11, 1, 4)),
    "mpirun in sbatch, second node": (
        {**OPEN_MPI, **STEP, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
        Hint("mpi", 5, 11, 1, 4),
    ),
    "mpiexec in sbatch, second node": (
        {**HYDRA, **STEP, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
        Hint("mpi", 3, 4, 3, 4),
    ),
    "torchrun": (TORCHRUN, Hint("torchrun", 1, 2, 1, 2)),
    "as many as can be": ({"RANK": "8191", "WORLD_SIZE": "8192", **MASTER}, Hint("torchrun", 8191, 8192)),
    "env://": ({"RANK": "0", "WORLD_SIZE": "2", **MASTER}, Hint("torchrun", 0, 2)),
    "torchrun in sbatch": ({**BATCH_SHELL, **TORCHRUN}, Hint("torchrun", 1, 2, 1, 2)),
    "one torchrun per node": (
        {**TORCHRUN, **STEP, "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "4"},
        Hint("torchrun", 1, 4, 1, 2),
    ),
    "torchrun in one task": (
        {**TORCHRUN, **STEP, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        Hint("torchrun", 1, 2, 1, 2),
    ),
    "srun, exported copies": ({**STEP, "RANK": "4", "WORLD_SIZE": "11", **MASTER}, Hint("slurm", 4, 11, 0, 7)),
    "srun, exported size only": ({**STEP, "WORLD_SIZE": "11"}, Hint("slurm", 4, 11, 0, 7)),
    "mpirun, exported copies": ({**OPEN_MPI, "RANK": "5", "WORLD_SIZE": "11", **MASTER}, Hint("mpi", 5, 11, 1, 4)),
    "mpirun and a user's port": ({**OPEN_MPI, **MASTER}, Hint("mpi", 5, 11, 1, 4)),
}

REJECTED = {
    "half-set open mpi": ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"]),
    "half-set pmi": ({"PMI_SIZE": "4"}, ["PMI_RANK", "PMI_SIZE"]),
    "half-set torch": ({"RANK": "0", **MASTER}, ["RANK", "WORLD_SIZE"]),
    "no master": ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR", "MASTER_PORT"]),
    "garbage": ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_RANK='x'"]),
    "negative": ({"RANK": "-1", "WORLD_SIZE": "2", **MASTER}, ["RANK='-1'"]),
    "rank beyond size": ({"PMI_RANK": "4", "PMI_SIZE": "4"}, ["PMI_RANK=4", "PMI_SIZE=4"]),
    "world too large": ({"RANK": "0", "WORLD_SIZE": "8193", **MASTER}, ["WORLD_SIZE=8193", "allowed: up to 8192"]),
    "garbage size": ({"RANK": "0", "WORLD_SIZE": "99999999999", **MASTER}, ["WORLD_SIZE=99999999999", "8192"]),
    "world of none": ({"RANK": "0", "WORLD_SIZE": "0", **MASTER}, ["WORLD_SIZE=0"]),
    "two mpis": ({**OPEN_MPI, **HYDRA}, ["OMPI_COMM_WORLD_RANK says rank 5 of 11", "PMI_RANK says rank 3 of 4"]),
    "env:// against mpirun": ({**OPEN_MPI, "RANK": "1", "WORLD_SIZE": "2", **MASTER}, ["rank 5 of 11", "rank 1 of 2"]),
    "mpirun of torchrun": ({**TORCHRUN, **OPEN_MPI}, ["nested launchers", "11", "GROUP_WORLD_SIZE"]),
    "srun of torchrun": ({**TORCHRUN, **STEP}, ["nested launchers", "11", "--nnodes=11"]),
}


@pytest.mark.parametrize("name", READABLE)
def test_world_is_read(name):
    env, expected = READABLE[name]
    assert read_hint(env, has_mpi4py=expected.launcher == "mpi") == expected


@pytest.mark.parametrize("name", REJECTED)
def test_impossible_world_is_rejected_and_the_variables_are_named(name):
    env, parts = REJECTED[name]
    with pytest.raises(UsageError) as caught:
        read_hint(env, has_mpi4py=True)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


def test_srun_with_pmix_but_without_mpi4py_needs_no_mpi():
    assert read_hint({**STEP, "PMIX_RANK": "4"}, has_mpi4py=False) == Hint("slurm", 4, 11, 0, 7)


def test_gloo_goes_without_mpi_under_srun_only():
    pmix = {**STEP, "PMIX_RANK": "4"}
    assert without_mpi(read_hint(pmix, has_mpi4py=True), pmix) == Hint("slurm", 4, 11, 0, 7)
    assert without_mpi(read_hint(OPEN_MPI, has_mpi4py=True), OPEN_MPI) == Hint("mpi", 5, 11, 1, 4)


def test_worlds_of_one_rank_each_are_rejected_with_both_numbers():
    hint = read_hint({**STEP, "PMIX_RANK": "4"}, has_mpi4py=True)
    with pytest.raises(UsageError, match=r"started 11 ranks .*SLURM_PROCID.*world of 1.*--mpi=list.*comm.backend=gloo"):
        check_world(1, hint)
    check_world(11, hint)
    check_world(1, Hint("none", 0, 1))


def test_rank_for_messages_is_zero_only_if_nobody_says_otherwise():
    assert guess_rank({}) == 0
    assert guess_rank({"OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "0"}) == 3
    assert guess_rank({"RANK": "0", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "x"}) == 1


@pytest.mark.parametrize("inside", [STEP, OPEN_MPI, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}])
def test_outside_of_jobs_nothing_says_that_we_are_in_one(inside):
    own = {"SLURM_CONF": "/etc/slurm.conf", "LOCAL_SCRATCH": "/scratch", "PATH": "/bin"}
    assert outside_of_jobs({**inside, **own, "SBATCH_EXPORT": "NONE"}) == own
