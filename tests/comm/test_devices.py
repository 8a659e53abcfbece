"""Which device and cores each rank has and what carries the weights: tables of the pure functions."""

from __future__ import annotations

import os

import pytest

from hkd_hpc.comm.cores import (
    cores_text,
    describe_cores,
    describe_ranks,
    format_cpulist,
    numa_nodes,
    own_cores,
    parse_cpulist,
)
from hkd_hpc.comm.devices import choose_backend, describe, pick_device, require_devices, sharers
from hkd_hpc.common.errors import UsageError

A, B, C = ("n0", "GPU-a"), ("n0", "GPU-b"), ("n1", "GPU-c")
CPU = ("n0", None)


@pytest.mark.parametrize(
    "local_rank, visible, index", [(3, 1, 0), (3, 4, 3), (6, 4, 2), (0, 0, None), (1, 2, 1), (0, 8, 0)]
)
def test_device_is_the_local_rank_among_the_visible_ones(local_rank, visible, index):
    assert pick_device(local_rank, visible) == index


@pytest.mark.parametrize(
    "places, has_mpi, backend, nccl_ranks",
    [
        ([CPU], False, "local", ()),
        ([A], True, "local", ()),
        ([CPU, CPU], False, "gloo", ()),
        ([CPU, CPU], True, "mpi", ()),
        ([A, A], False, "gloo", ()),
        ([A, A], True, "mpi", ()),
        ([A, B], False, "gloo", ()),
        ([A, B, C], True, "nccl", (1, 2)),
        ([CPU, A, B], True, "nccl", (1, 2)),
        ([A, A, B], False, "nccl", (1, 2)),
        ([A, B, B], False, "gloo", ()),
        ([A, B, CPU], False, "gloo", ()),
        ([CPU, A], False, "gloo", ()),
        ([A, A, A, A], True, "mpi", ()),
        ([CPU, ("n0", "GPU-a"), ("n1", "GPU-a")], False, "nccl", (1, 2)),
    ],
)
def test_rule_for_the_transport(places, has_mpi, backend, nccl_ranks):
    plan = choose_backend("auto", places, has_mpi)
    assert (plan.backend, plan.nccl_ranks) == (backend, nccl_ranks)


@pytest.mark.parametrize("places, without", [([CPU], "rank 0"), ([A, CPU, B, CPU], "ranks 1, 3")])
def test_a_gpu_that_was_asked_for_and_is_not_there_is_wrong_input(places, without):
    plan = choose_backend("gloo", places, False)
    with pytest.raises(UsageError) as error:
        require_devices(plan, {"CUDA_VISIBLE_DEVICES": "3"})
    assert str(error.value) == (
        f"run.device=cuda, but torch sees no CUDA or ROCm device for {without} (CUDA_VISIBLE_DEVICES=3); "
        "run.device=auto takes the CPU there"
    )
    require_devices(choose_backend("gloo", [A, B], False), {})


def test_ranks_that_share_a_device_are_counted():
    """A device of the same name on another host is another one; CPUs are not shared so."""
    places = [("a", "GPU-0"), ("a", "GPU-1"), ("a", "GPU-0"), ("b", "GPU-0"), ("a", None), ("a", None)]
    assert [sharers(places, rank) for rank in range(6)] == [2, 1, 2, 1, 1, 1]


def test_what_is_asked_for_is_taken():
    assert choose_backend("gloo", [A, B], has_mpi=True).backend == "gloo"
    assert choose_backend("mpi", [A, B], has_mpi=True).backend == "mpi"
    assert choose_backend("nccl", [A, A, B], has_mpi=True).nccl_ranks == (1, 2)
    assert choose_backend("auto", [A, B], has_mpi=False, nccl_available=False).backend == "gloo"
    assert choose_backend("mpi", [CPU], has_mpi=False).backend == "local"


@pytest.mark.parametrize(
    "requested, places, has_mpi, parts",
    [
        ("nccl", [A, A, A], True, ["ranks 1, 2 share GPU-a on n0", "comm.backend=auto"]),
        ("nccl", [A, A], True, ["there is one client rank only"]),
        ("nccl", [CPU, A, CPU, A], False, ["ranks 1, 3 share GPU-a", "rank 2 has no GPU"]),
        ("nccl", [CPU, A, CPU, CPU], False, ["ranks 2-3 have no GPU"]),
        ("mpi", [CPU, CPU], False, ["comm.backend=mpi", "started by MPI", "gloo"]),
        ("ucc", [CPU, CPU], False, ["comm.backend=ucc", "auto, nccl, gloo, mpi"]),
    ],
)
def test_what_cannot_be_had_is_rejected_in_one_line(requested, places, has_mpi, parts):
    with pytest.raises(UsageError) as caught:
        choose_backend(requested, places, has_mpi)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


def test_plan_is_described_in_one_line():
    assert describe(choose_backend("auto", [CPU] * 11, has_mpi=True)) == (
        "11 ranks on 1 host, weights by mpi (started by MPI); devices: ranks 0-10 cpu"
    )
    assert describe(choose_backend("auto", [CPU, A, B, C], has_mpi=True)) == (
        "4 ranks on 2 hosts, weights by nccl among ranks 1-3 (each has a GPU of its own); "
        "devices: rank 0 cpu on n0; rank 1 GPU-a on n0; rank 2 GPU-b on n0; rank 3 GPU-c on n1"
    )
    assert describe(choose_backend("auto", [A, B, A, B], has_mpi=False)) == (
        "4 ranks on 1 host, weights by gloo (several ranks share a GPU, started without MPI); "
        "devices: ranks 0, 2 GPU-a; ranks 1, 3 GPU-b"
    )
    assert describe(choose_backend("auto", [CPU], has_mpi=False)) == (
        "1 rank on 1 host, weights by local (one process); devices: rank 0 cpu"
    )


@pytest.mark.parametrize(
    "text, cores",
    [
        ("0-2,8\n", {0, 1, 2, 8}),
        ("5", {5}),
        ("", set()),
        ("\n", set()),
        ("0-1,64-65", {0, 1, 64, 65}),
        ("3,1-2", {1, 2, 3}),
    ],
)
def test_lists_of_cores_are_read(text, cores):
    assert parse_cpulist(text) == cores


@pytest.mark.parametrize(
    "cores, text",
    [({8, 1, 0, 2}, "0-2,8"), ([5], "5"), ([], ""), (range(56), "0-55"), ([0, 2, 4], "0,2,4"), ([6, 7], "6-7")],
)
def test_lists_of_cores_are_written(cores, text):
    assert format_cpulist(cores) == text


def test_cores_and_the_numa_nodes_near_them(tmp_path):
    for node, text in ((0, "0-3,8-11\n"), (1, "4-7,12-15\n"), (2, "\n")):  # a node of memory alone has no cores
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}/cpulist").write_text(text)
    nodes = numa_nodes(f"{tmp_path}/node*/cpulist")
    assert nodes == {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}, 2: set()}
    assert cores_text({5, 6, 13}, nodes) == "5-6,13 (NUMA 1)"
    assert cores_text(range(16), nodes) == "0-15 (NUMA 0-1)"
    assert cores_text({3}, numa_nodes(f"{tmp_path}/none")) == "3"


def test_own_cores_are_those_that_the_kernel_grants():
    assert parse_cpulist(own_cores().partition(" ")[0]) == os.sched_getaffinity(0)


def test_cores_are_described_in_one_line_and_by_rank():
    assert describe_cores(["0-1 (NUMA 0)"] * 11) == "cores: ranks 0-10 0-1 (NUMA 0)"
    texts = ["0-6", "7-13 (NUMA 0)", "0-6", "14-20 (NUMA 1)"]
    assert describe_cores(texts) == "cores: ranks 0, 2 0-6; rank 1 7-13 (NUMA 0); rank 3 14-20 (NUMA 1)"
    assert describe_ranks(choose_backend("auto", [CPU, A, B, C], has_mpi=True), texts) == [
        "rank 0 on n0: cores 0-6, cpu",
        "rank 1 on n0: cores 7-13 (NUMA 0), GPU-a",
        "rank 2 on n0: cores 0-6, GPU-b",
        "rank 3 on n1: cores 14-20 (NUMA 1), GPU-c",
    ]
