"""What every communicator must do, written once; run on the local one, on gloo and on MPI (without pytest)."""
from __future__ import annotations

import numpy as np

LENGTH = 1013


def numbers_of(rank: int) -> np.ndarray:
    """Large int64 numbers, other ones in each rank."""
    return np.random.default_rng(rank).integers(-2**56, 2**56, LENGTH)


def check_all(comm) -> None:
    """Every check, in the same order in every rank."""
    for check in (check_sum, check_gather, check_broadcast, check_agree, check_texts, check_empty_blocks):
        comm.at(1, check.__name__)
        check(comm)
    comm.at(2, "counting")
    check_wire_bytes(comm)


def check_sum(comm) -> None:
    """Exact to the last bit, in place, the same in every rank; twice, since buffers are reused."""
    import torch

    for _ in range(2):
        mine = numbers_of(comm.rank) if comm.rank or comm.size == 1 else np.zeros(LENGTH, np.int64)
        buffer = torch.from_numpy(mine.copy()).to(comm.device)
        comm.sum_(buffer)
        hosts = range(1, comm.size) if comm.size > 1 else [0]
        assert buffer.tolist() == sum(numbers_of(rank) for rank in hosts).tolist()


def check_gather(comm) -> None:
    """Rows by rank on rank 0, None elsewhere; a read-only block is fine."""
    block = np.frombuffer(bytes([comm.rank, 7, 255]), np.uint8)
    gathered = comm.gather(block, "knowledge")
    assert (gathered is None) == (comm.rank != 0)
    if comm.rank == 0:
        assert gathered.tolist() == [[rank, 7, 255] for rank in range(comm.size)]


def check_broadcast(comm) -> None:
    """Rank 0's bytes in every rank, for several dtypes."""
    for dtype in (np.uint8, np.int64, np.float32, np.float64, np.bool_):
        block = np.array([1, 0, 1], dtype) if comm.rank == 0 else np.zeros(3, dtype)
        comm.broadcast(block, "knowledge")
        assert block.tolist() == np.array([1, 0, 1], dtype).tolist()


def check_agree(comm) -> None:
    """The largest status, everywhere."""
    assert comm.agree() == 0
    assert comm.agree(comm.rank * 3) == (comm.size - 1) * 3


def check_texts(comm) -> None:
    """Texts of any length, not only ASCII."""
    assert comm.share_text("größer\n" * 1000 if comm.rank == 0 else None) == "größer\n" * 1000
    texts = comm.gather_text("ä" * comm.rank)
    assert texts == (["ä" * rank for rank in range(comm.size)] if comm.rank == 0 else [])


def check_empty_blocks(comm) -> None:
    """Nothing at all is a block too: a scheme without knowledge."""
    gathered = comm.gather(np.empty(0, np.uint8), "knowledge")
    assert comm.rank != 0 or gathered.shape == (comm.size, 0)
    comm.broadcast(np.empty(0, np.float32), "knowledge")


def check_wire_bytes(comm) -> None:
    """Counts, worked out by hand: 80 bytes from each of n ranks, 5 and 24 to or from n - 1."""
    import torch

    comm.wire_bytes.clear()
    comm.sum_(torch.zeros(10, dtype=torch.int64, device=comm.device), "weights")
    comm.gather(np.zeros(5, np.uint8), "reports")
    comm.broadcast(np.zeros(3), "message")
    n = comm.size
    expected = {1: {},
                2: {"weights": 160, "reports": 5, "message": 24},
                3: {"weights": 240, "reports": 10, "message": 48},
                4: {"weights": 320, "reports": 15, "message": 72}}[n]
    counted = {kind: count for kind, count in comm.wire_bytes.items() if count and kind != "control"}
    assert counted == expected
    assert (comm.wire_bytes["control"] > 0) == (n > 1)


def refuses(action, part: str) -> str:
    """The text of the RunError that `action` must raise."""
    from hkd_hpc.errors import RunError

    try:
        action()
    except RunError as error:
        assert part in str(error), str(error)
        return str(error)
    raise AssertionError(f"no RunError that says {part!r}")
