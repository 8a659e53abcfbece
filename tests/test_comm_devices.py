"""Which device each rank takes and what carries the weights: tables of the pure functions."""
from __future__ import annotations

import pytest

from hkd_hpc.comm.devices import choose_backend, describe, pick_device
from hkd_hpc.errors import UsageError

A, B, C = ("n0", "GPU-a"), ("n0", "GPU-b"), ("n1", "GPU-c")
CPU = ("n0", None)


@pytest.mark.parametrize("local_rank, visible, index",
                         [(3, 1, 0), (3, 4, 3), (6, 4, 2), (0, 0, None), (1, 2, 1), (0, 8, 0)])
def test_device_is_the_local_rank_among_the_visible_ones(local_rank, visible, index):
    assert pick_device(local_rank, visible) == index


@pytest.mark.parametrize("places, has_mpi, backend, nccl_ranks", [
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
])
def test_rule_for_the_transport(places, has_mpi, backend, nccl_ranks):
    plan = choose_backend("auto", places, has_mpi)
    assert (plan.backend, plan.nccl_ranks) == (backend, nccl_ranks)


def test_what_is_asked_for_is_taken():
    assert choose_backend("gloo", [A, B], has_mpi=True).backend == "gloo"
    assert choose_backend("mpi", [A, B], has_mpi=True).backend == "mpi"
    assert choose_backend("nccl", [A, A, B], has_mpi=True).nccl_ranks == (1, 2)
    assert choose_backend("auto", [A, B], has_mpi=False, nccl_available=False).backend == "gloo"
    assert choose_backend("mpi", [CPU], has_mpi=False).backend == "local"


@pytest.mark.parametrize("requested, places, has_mpi, parts", [
    ("nccl", [A, A, A], True, ["ranks 1, 2 share GPU-a on n0", "comm.backend=auto"]),
    ("nccl", [A, A], True, ["there is one client rank only"]),
    ("nccl", [CPU, A, CPU, A], False, ["ranks 1, 3 share GPU-a", "rank 2 has no GPU"]),
    ("nccl", [CPU, A, CPU, CPU], False, ["ranks 2-3 have no GPU"]),
    ("mpi", [CPU, CPU], False, ["comm.backend=mpi", "started by MPI", "gloo"]),
    ("ucc", [CPU, CPU], False, ["comm.backend=ucc", "auto, nccl, gloo, mpi"]),
])
def test_what_cannot_be_had_is_refused_in_one_line(requested, places, has_mpi, parts):
    with pytest.raises(UsageError) as caught:
        choose_backend(requested, places, has_mpi)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "\n" not in str(caught.value)


def test_plan_is_described_in_one_line():
    assert describe(choose_backend("auto", [CPU] * 11, has_mpi=True)) == (
        "11 ranks on 1 host, weights by mpi (started by MPI); devices: ranks 0-10 cpu")
    assert describe(choose_backend("auto", [CPU, A, B, C], has_mpi=True)) == (
        "4 ranks on 2 hosts, weights by nccl among ranks 1-3 (each has a GPU of its own); "
        "devices: rank 0 cpu on n0; rank 1 GPU-a on n0; rank 2 GPU-b on n0; rank 3 GPU-c on n1")
    assert describe(choose_backend("auto", [A, B, A, B], has_mpi=False)) == (
        "4 ranks on 1 host, weights by gloo (several ranks share a GPU, started without MPI); "
        "devices: ranks 0, 2 GPU-a; ranks 1, 3 GPU-b")
    assert describe(choose_backend("auto", [CPU], has_mpi=False)) == (
        "1 rank on 1 host, weights by local (one process); devices: rank 0 cpu")
