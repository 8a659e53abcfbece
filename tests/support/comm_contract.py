"""What every communicator must do, written once; run on the local one, on gloo and on MPI (without pytest)."""

from __future__ import annotations

import numpy as np

LENGTH = 1013
LIMIT_BYTES = 2400  # of one call, where it is lowered: 300 float64, and of a gather among 4 ranks 600 bytes each


def numbers_of(rank: int, length: int = LENGTH) -> np.ndarray:
    """Large whole numbers, other ones in each rank; float64 holds their sum exactly."""
    return np.random.default_rng(rank).integers(-(2**50), 2**50, length)


def bytes_of(rank: int, length: int) -> np.ndarray:
    """Other ones in each rank."""
    return np.random.default_rng([length, rank]).integers(0, 256, length, np.uint8)


def sum_(comm, buffer, pieces: int = 1) -> None:
    """The all-reduce of a buffer of float64 or int64 in so many pieces, in place in every rank; rank 0's own numbers
    do not count.
    """
    for _ in comm.summed(buffer.tensor_split(pieces), len(buffer)):
        pass
    comm.relay([buffer])


def check_all(comm) -> None:
    """Every check, in the same order in every rank; then once more in short calls, which must change nothing."""
    for most_bytes in (comm.most_bytes, LIMIT_BYTES):
        comm.most_bytes = most_bytes
        for check in (
            check_sum,
            check_sum_modulo_2_to_the_64,
            check_sum_asks_for_a_piece_when_the_one_before_is_used,
            check_relay,
            check_gather,
            check_broadcast,
            check_agree,
            check_texts,
            check_empty_blocks,
            check_lengths_around_the_limit,
            check_wire_bytes,
        ):
            comm.at(1, check.__name__)
            check(comm)
    check_no_call_is_above_the_limit(comm)


def check_sum(comm, length: int = LENGTH, pieces: tuple[int, ...] = (1, 3)) -> None:
    """Exact to the last bit, in place, the same in every rank; in one piece and in several."""
    import torch

    for count in pieces:
        buffer = torch.from_numpy(numbers_of(comm.rank, length)).double().to(comm.device)
        sum_(comm, buffer, count)
        hosts = range(1, comm.size) if comm.size > 1 else [0]
        assert buffer.tolist() == sum(numbers_of(rank, length) for rank in hosts).tolist()


def check_sum_modulo_2_to_the_64(comm) -> None:
    """int64 wraps around: the ends of its range, and numbers from all of it; exact to the last bit in every rank."""
    import torch

    low, high = -(2**63), 2**63 - 1
    random = [np.random.default_rng([1, rank]).integers(low, high, LENGTH).tolist() for rank in range(comm.size)]
    rows = [[low, high, -1, low + rank, high - rank, *values] for rank, values in enumerate(random)]
    hosts = rows[1:] if comm.size > 1 else rows
    for count in (1, 3):
        buffer = torch.tensor(rows[comm.rank], dtype=torch.int64, device=comm.device)
        sum_(comm, buffer, count)
        assert buffer.tolist() == [(sum(column) - low) % 2**64 + low for column in zip(*hosts)]


def check_sum_asks_for_a_piece_when_the_one_before_is_used(comm) -> None:
    """So one reused tensor can carry all pieces; rank 0 of several is never asked."""
    import torch

    buffer, asked, used = torch.zeros(2, dtype=torch.float64, device=comm.device), [], []

    def pieces():
        for number in range(3):
            asked.append((number, len(used)))
            yield buffer.fill_(number * comm.rank)

    for piece in comm.summed(pieces(), 6):
        used.append(piece.tolist())
    takes_part = comm.rank > 0 or comm.size == 1
    assert asked == ([(0, 0), (1, 1), (2, 2)] if takes_part else [])
    total = sum(range(comm.size))
    assert used == ([[0.0, 0.0], [total, total], [2 * total, 2 * total]] if takes_part else [])


def check_relay(comm) -> None:
    """Rank 0 gets the parts that rank 1 has; nobody else's values change, nor what lies between. Any dtype."""
    import torch

    for dtype in (torch.float32, torch.float64):
        values = torch.full((5,), float(comm.rank), dtype=dtype, device=comm.device)
        comm.relay([values[:2], values[3:]])
        relayed, own = float(comm.rank or min(1, comm.size - 1)), float(comm.rank)
        assert values.tolist() == [relayed, relayed, own, relayed, relayed]


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


def check_lengths_around_the_limit(comm) -> None:
    """Every collective, of lengths just below, at and above what one call takes, and of several calls."""
    import torch

    for length in around(LIMIT_BYTES // comm.size):
        rows = comm.gather(bytes_of(comm.rank, length), "knowledge")
        assert comm.rank or rows.tolist() == [bytes_of(rank, length).tolist() for rank in range(comm.size)]
    for dtype in (np.uint8, np.float64):
        for length in around(LIMIT_BYTES // np.dtype(dtype).itemsize):
            block = bytes_of(comm.rank, length).astype(dtype)
            comm.broadcast(block, "knowledge")
            assert block.tolist() == bytes_of(0, length).tolist()
    for length in around(LIMIT_BYTES // 4):
        values = torch.from_numpy(bytes_of(comm.rank, length).astype(np.float32)).to(comm.device)
        comm.relay([values[:0], values])
        assert values.tolist() == bytes_of(comm.rank or min(1, comm.size - 1), length).tolist()
    for length in around(LIMIT_BYTES // 8):
        check_sum(comm, length, (1,))


def around(most: int) -> tuple[int, ...]:
    return 0, most - 1, most, most + 1, 3 * most + 1


def check_no_call_is_above_the_limit(comm) -> None:
    """What the transport itself is handed, while all travels as it should: no call of nothing, none above the limit."""
    import torch

    handed: list[int] = []
    for name in ("_sum", "_relay", "_gather", "_broadcast"):
        note(comm, name, handed)
    sum_(comm, torch.zeros(LENGTH, dtype=torch.float64, device=comm.device))
    comm.gather(np.zeros(LENGTH, np.uint8), "knowledge")
    comm.broadcast(np.zeros(LENGTH), "knowledge")
    comm.broadcast(np.zeros(0), "knowledge")
    assert handed
    assert min(handed) > 0
    assert max(handed) <= LIMIT_BYTES


def note(comm, name: str, handed: list[int]) -> None:
    """Have the bytes that each call of this transport's method is handed written down: all ranks' for a gather."""
    original = getattr(comm, name)

    def noting(*arguments) -> None:
        handed.append(arguments[0].nbytes * (comm.size if name == "_gather" else 1))
        original(*arguments)

    setattr(comm, name, noting)


def check_wire_bytes(comm) -> None:
    """Counts, worked out by hand: 80 bytes from each of n - 1 ranks and relayed once, 5 and 24 to or from n - 1."""
    import torch

    comm.wire_bytes.clear()
    sum_(comm, torch.zeros(10, dtype=torch.float64, device=comm.device))
    comm.gather(np.zeros(5, np.uint8), "reports")
    comm.broadcast(np.zeros(3), "message")
    n = comm.size
    expected = {
        1: {},
        2: {"weights": 160, "reports": 5, "message": 24},
        3: {"weights": 240, "reports": 10, "message": 48},
        4: {"weights": 320, "reports": 15, "message": 72},
    }[n]
    counted = {kind: count for kind, count in comm.wire_bytes.items() if count and kind != "control"}
    assert counted == expected
    assert (comm.wire_bytes["control"] > 0) == (n > 1)


def rejects(action, part: str) -> str:
    """The text of the RunError that `action` must raise."""
    from hkd_hpc.common.errors import RunError

    try:
        action()
    except RunError as error:
        assert part in str(error), str(error)
        return str(error)
    raise AssertionError(f"no RunError that says {part!r}")
