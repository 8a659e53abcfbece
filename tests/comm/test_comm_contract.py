"""One contract, three transports: one process, gloo among forked ranks, and MPI under a real mpirun."""

from __future__ import annotations

import time

import comm_contract
import numpy as np
import pytest
import torch
from comm_contract import rejects, sum_
from comm_launch import mpirun

from hkd_hpc.comm import World
from hkd_hpc.comm.transports.base import HostStaging
from tools.forked_ranks import run_rank_values, run_ranks


def with_comm(rank, action, timeout_s=120.0):
    """What each forked rank does: open the world, connect, act."""
    with World.open(timeout_s=timeout_s) as world:
        action(world.connect(device="cpu"))


def test_contract_in_one_process():
    with World.open(env={}) as world:
        comm = world.connect(device="cpu")
        assert (comm.rank, comm.size, comm.local_rank, comm.local_size) == (0, 1, 0, 1)
        comm_contract.check_all(comm)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_contract_on_gloo(size):
    run_rank_values(size, with_comm, comm_contract.check_all)


@pytest.mark.mpi
@pytest.mark.parametrize(
    "backend, name, cray, note",
    [
        ("auto", "mpi", "1", "; MPI carries host buffers; GPU support of Cray MPICH is switched off"),
        ("gloo", "gloo", "0", ""),
    ],
)
def test_contract_under_mpirun(backend, name, cray, note):
    result = mpirun(3, "contract", backend, MPICH_GPU_SUPPORT_ENABLED=cray)
    assert result.returncode == 0, result.stderr
    plan, cores, variable = result.stdout.splitlines()
    assert plan.startswith(f"3 ranks on 1 host, weights by {name} (")
    assert plan.endswith(f"devices: ranks 0-2 cpu{note}")
    assert cores.startswith("cores: ranks 0")
    assert variable == "0 0 0"


def _knows_its_place(comm):
    assert (comm.local_rank, comm.local_size) == (comm.rank, 3)
    assert len(comm.hosts) == 3
    assert comm.device.type == "cpu"
    before = comm.wait_s
    if comm.rank == 2:
        time.sleep(0.3)
    sum_(comm, torch.zeros(3, dtype=torch.float64))
    print("waited" if comm.wait_s - before > 0.2 else "came last", comm.transfer_s > 0)


def test_ranks_know_their_hosts_and_the_waiting_is_counted_apart():
    assert run_rank_values(3, with_comm, _knows_its_place) == ["waited True\n", "waited True\n", "came last True\n"]


def _out_of_step(comm, variant):
    comm.at(2, "weights")
    if variant == "other phase" and comm.rank == 1:
        comm.at(2, "knowledge")
    if variant == "other round" and comm.rank == 1:
        comm.at(3, "weights")
    ones = torch.ones(5 if variant == "other length" and comm.rank == 1 else 4, dtype=torch.float64)
    if variant == "other call" and comm.rank == 1:
        text = rejects(lambda: comm.gather(np.zeros(32, np.uint8), "weights"), "out of step")
    else:
        text = rejects(lambda: sum_(comm, ones), "out of step")
    assert ones.tolist() == [1] * len(ones)
    rejects(comm.agree, "out of step")
    print(text)
    time.sleep(1)  # leaving the world is out of step too, and ends the others: let them print first


@pytest.mark.parametrize(
    "variant, parts",
    [
        ("other phase", ["phase weights", "phase knowledge"]),
        ("other round", ["round 2", "round 3"]),
        ("other length", ["32 bytes", "40 bytes"]),
        ("other call", ["sum of weights", "gather of weights"]),
    ],
)
def test_ranks_out_of_step_all_raise_and_no_sum_is_wrong(variant, parts):
    results = run_ranks(3, with_comm, lambda comm: _out_of_step(comm, variant))
    for result in results[:2]:
        assert all(part in result.output for part in parts), results
    assert sum(result.output.count("hkd_hpc:") for result in results) == 1


def _skip_one(comm):
    for round in (1, 2):
        if not (comm.rank == 2 and round == 1):
            comm.at(round, "weights")
            sum_(comm, torch.ones(4, dtype=torch.float64))
            print("summed")


def test_rank_that_skips_a_collective_ends_the_job_before_a_wrong_sum():
    results = run_ranks(3, with_comm, _skip_one)
    output = "".join(result.output for result in results)
    assert [result.exit_code for result in results] == [1, 1, 1]
    assert "summed" not in output
    assert output.count("hkd_hpc:") == 1
    assert "round 1, phase weights" in output
    assert "round 2, phase weights" in output


def _sleeper(comm):
    comm.at(4, "weights")
    if comm.rank == 1:
        comm.at(4, "training", 7)
        time.sleep(600)
    rejects(comm.agree, "did not reach agreement of status (round 4, phase weights")
    raise SystemExit(3)


def test_time_out_names_the_missing_rank_and_where_it_was():
    results = run_ranks(3, with_comm, _sleeper, 1.0)
    assert [result.exit_code for result in results] == [3, 3, 3]


def _talkative(comm):
    if comm.rank == 1:
        for client in range(8):
            comm.at(1, "training", client)
            time.sleep(1)
    comm.at(1, "weights")
    assert comm.agree(comm.rank) == 1


def test_rank_that_shows_progress_may_take_longer_than_the_time_out():
    run_rank_values(2, with_comm, _talkative, 4.0)


def test_wrong_buffers_are_rejected_before_anything_travels():
    with World.open(env={}) as world:
        comm = world.connect(device="cpu")
        for wrong in (torch.zeros(3), torch.zeros(3).int(), torch.zeros(2, 2).double(), torch.zeros(8).double()[::2]):
            with pytest.raises(ValueError, match="a sum takes contiguous 1-D float64 tensors"):
                next(comm.summed([wrong], wrong.numel()))
        with pytest.raises(ValueError, match="uint8"):
            comm.gather(np.zeros(3), "knowledge")
        for wrong in (np.zeros((2, 2)), np.zeros(8)[::2], np.array([None])):
            with pytest.raises(ValueError, match="contiguous, 1-D"):
                comm.broadcast(wrong, "knowledge")
        with pytest.raises(ValueError, match="writeable"):
            comm.broadcast(np.frombuffer(b"abc", np.uint8), "knowledge")


def test_host_buffer_is_reused():
    staging = HostStaging()
    first = staging.like(torch.zeros(10, dtype=torch.float64))
    second = staging.like(torch.zeros(4, dtype=torch.float64))
    assert first.data_ptr() == second.data_ptr()
    assert second.numel() == 4
    assert staging.like(torch.zeros(4)).dtype == torch.float32


def test_opening_the_world_imports_neither_torch_nor_mpi():
    import subprocess
    import sys

    code = (
        "import sys\nfrom hkd_hpc.comm import World\nwith World.open(env={}):\n"
        "    print([name for name in sys.modules if name.split('.')[0] in ('torch', 'mpi4py', 'numpy')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
