"""The one contract of all communicators. A scheme or the round loop sees only this.

Every collective begins with a barrier on the control plane: call number, operation, round, phase and byte count of all
ranks must agree, otherwise all ranks raise RunError instead of pairing the wrong buffers. The same barrier waits for
stragglers without burning a core (MPI's blocking calls may busy-poll), and knows which rank is missing when the
time-out strikes. Only then the bytes travel, at full speed.

`wire_bytes` counts, by kind, what was handed to the collectives, summed over the ranks: an all-reduce of b bytes among
the n - 1 client ranks, a gather or a broadcast (n - 1) b, a relay b, the barriers themselves under "control". One rank
alone moves nothing: all zero.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hkd_hpc.comm.control.base import Place

if TYPE_CHECKING:  # a world opens, and a file is checked, without the seconds that torch takes
    import torch


SUMMED = ("torch.float64", "torch.int64")  # 8 bytes a number


class ControlPlane(Protocol):
    """What a communicator needs of the control plane (comm/control), whose methods say what they do."""

    timeout_s: float

    @property
    def place(self) -> Place:
        """(round, phase, client) of this rank."""

    def set_status(self, round: int | None, phase: str, client: int | None = None) -> None: ...

    def watch_steps(self, count: Callable[[], int]) -> None: ...

    def places(self) -> Mapping[int, Place]: ...

    def barrier(self, key: Sequence[Any], value: Any = None) -> list[Any]: ...

    def transfer(self, what: str, at_least_s: float = 0.0) -> AbstractContextManager[None]: ...

    def uninterrupted(self) -> AbstractContextManager[None]: ...

    def removed_at_failure(self, path: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class RankInfo:
    """A rank among the others: the attributes of its communicator, see Comm."""

    rank: int
    hosts: Sequence[str]
    local_rank: int
    local_size: int
    device: torch.device
    plan_line: str
    sharers: int = 1
    cores_line: str = ""
    rank_lines: Sequence[str] = ()
    devices: Sequence[str] = ()
    backend: str = "local"


class Comm:
    """Rank, size and the collectives. All ranks make the same calls in the same order.

    Attributes:
        piece: how many numbers of a sum are best asked for at a time (of the class).
        most_bytes: what one call of the transport moves at most; all that is longer takes several (of the class).
        rank, size: this rank, and how many there are.
        hosts: names by rank.
        devices: of all ranks: "cpu", or what identifies a GPU on its host.
        local_rank, local_size: among the ranks of this host.
        device: torch.device of this rank.
        sharers: how many ranks compute on that device, 1 for a CPU.
        backend: what carries the weights: "local", "mpi", "gloo" or "nccl".
        plan_line, cores_line, rank_lines: what carries the weights, and which cores and devices, for people.
        wire_bytes: handed to the transport so far, by kind, summed over the ranks.
        wait_s, transfer_s: spent at barriers and in transfers so far.
    """

    piece = 1 << 18
    most_bytes = 1 << 28  # MPI counts in 31 bits, and what lies on a device passes through a host buffer of this size

    def __init__(self, control: ControlPlane, info: RankInfo) -> None:
        self.rank, self.size, self.hosts = info.rank, len(info.hosts), info.hosts
        self.local_rank, self.local_size = info.local_rank, info.local_size
        self.device, self.sharers, self.backend = info.device, info.sharers, info.backend
        self.plan_line, self.cores_line, self.rank_lines = info.plan_line, info.cores_line, info.rank_lines
        self.devices = info.devices
        self.wire_bytes: dict[str, int] = defaultdict(int)
        self.wait_s = self.transfer_s = 0.0
        self._control, self._calls = control, 0

    def at(self, round: int | None, phase: str, client: int | None = None) -> None:
        """Say where this rank is from now on: for messages about failures, and compared in every collective.

        Args:
            round: from 1 on, None outside of rounds.
            phase: for instance "training" or "weights".
            client: whose turn it is, if it is one's.
        """
        self._control.set_status(round, phase, client)

    def turn_of(self, client: int | None) -> None:
        """Say whose turn it is from now on, in the round and phase where this rank is: a sign of life too.

        Args:
            client: its id; None: nobody's any more.
        """
        round, phase, _ = self._control.place
        self._control.set_status(round, phase, client)

    def watch_steps(self, count: Callable[[], int]) -> None:
        """Count steps as signs of life.

        Args:
            count: the number of steps that this rank has taken; while it grows the rank is not late, however long it
                trains.
        """
        self._control.watch_steps(count)

    def places(self) -> Mapping[int, Place]:
        """Where each rank was last seen, as `at` said it there; nothing travels for it.

        Returns:
            (round, phase, client) by rank: on rank 0 of all ranks, elsewhere of this one.
        """
        return self._control.places()

    def summed(self, pieces: Iterable[torch.Tensor], numbers: int, kind: str = "weights") -> Iterator[torch.Tensor]:
        """The one all-reduce, piece by piece.

        Args:
            pieces: float64 or int64 (modulo 2^64), 1-D, contiguous, on the CPU or this rank's device, of the same
                lengths in all client ranks. One is asked for when the one before has been summed and used, so that it
                can stay in cache all the way. Rank 0 of several has no clients: it only waits at the barrier, and its
                pieces are not asked for.
            numbers: the length of all pieces together.
            kind: under which the bytes are counted.

        Yields:
            Each piece again, in place the sum over the client ranks; nothing on rank 0 of several.

        Raises:
            RunError: where ranks make different calls, or one does not arrive in time; LinkError, a kind of it, where
                the transfer breaks.
            ValueError: for other tensors.
        """
        nbytes = numbers * 8
        with self._collective("sum", kind, nbytes, (self.size - 1) * nbytes):
            for piece in pieces if self.rank or self.size == 1 else ():
                _require(
                    str(piece.dtype) in SUMMED and piece.dim() == 1 and piece.is_contiguous(),
                    "a sum takes contiguous 1-D float64 tensors, or int64, not "
                    f"{piece.dtype} of shape {tuple(piece.shape)}",
                )
                for part in self._calls_of(len(piece), piece.element_size()):
                    self._sum(piece[part])
                yield piece

    def relay(self, parts: Sequence[torch.Tensor], kind: str = "weights") -> None:
        """Rank 0's `parts` become those of rank 1, in place; the others only wait at the barrier.

        Args:
            parts: 1-D, contiguous, of the same lengths and dtypes in every rank.
            kind: under which the bytes are counted.

        Raises:
            RunError: as `summed` does.
        """
        nbytes = sum(values.numel() * values.element_size() for values in parts)
        with self._collective("relay", kind, nbytes, nbytes):
            for values in parts if self.size > 1 and self.rank < 2 else ():
                for part in self._calls_of(len(values), values.element_size()):
                    self._relay(values[part])

    def gather(self, block: np.ndarray, kind: str) -> np.ndarray | None:
        """Gather a block of every rank on rank 0.

        Args:
            block: (nbytes,) uint8, of the same length everywhere.
            kind: under which the bytes are counted.

        Returns:
            (size, nbytes) uint8 on rank 0, None on the others.

        Raises:
            RunError: as `summed` does.
            ValueError: for other arrays.
        """
        _require(block.dtype == np.uint8, f"gather takes uint8 blocks, not {block.dtype}")
        block = np.require(_flat(block), requirements="W")
        gathered = np.empty((self.size, block.nbytes), np.uint8) if self.rank == 0 else None
        with self._collective("gather", kind, block.nbytes, (self.size - 1) * block.nbytes):
            for part in self._calls_of(block.nbytes, self.size):
                self._gather(block[part], None if gathered is None else gathered[:, part])
        return gathered

    def broadcast(self, block: np.ndarray, kind: str) -> None:
        """Fill `block` with rank 0's, in place.

        Args:
            block: 1-D, contiguous, of any dtype of fixed size, the same everywhere.
            kind: under which the bytes are counted.

        Raises:
            RunError: as `summed` does.
            ValueError: for other arrays.
        """
        _require(block.flags.writeable, "broadcast writes into its block: it must be writeable")
        data = _flat(block)
        with self._collective("broadcast", kind, data.nbytes, (self.size - 1) * data.nbytes):
            for part in self._calls_of(data.nbytes):
                self._broadcast(data[part])

    def agree(self, status: int = 0) -> int:
        """Agree on the largest status of all ranks; also a barrier.

        Args:
            status: this rank's, of 64 bits.

        Returns:
            The largest status, in every rank.

        Raises:
            RunError: as `summed` does.
        """
        self._calls += 1
        return max(self._barrier("agreement", "status", 0, value=int(status)))

    def share_text(self, text: str | None = None) -> str:
        """Send rank 0's text to every rank.

        Args:
            text: on rank 0; elsewhere it does not count.

        Returns:
            Rank 0's text, in every rank.

        Raises:
            RunError: as `summed` does.
        """
        data = np.frombuffer((text or "").encode(), np.uint8).copy()
        length = np.array([data.size], np.int64)
        self.broadcast(length, "control")
        data = data if self.rank == 0 else np.empty(length[0], np.uint8)
        self.broadcast(data, "control")
        return data.tobytes().decode()

    def gather_text(self, text: str) -> list[str]:
        """Gather a text of every rank on rank 0.

        Args:
            text: this rank's, of any length.

        Returns:
            The texts by rank on rank 0, an empty list on the others.

        Raises:
            RunError: as `summed` does.
        """
        data = text.encode()
        lengths = self.gather(np.array([len(data)], np.int64).view(np.uint8), "control")
        longest = np.array([0 if lengths is None else lengths.view(np.int64).max()])
        self.broadcast(longest, "control")
        blocks = self.gather(np.frombuffer(data.ljust(longest[0], b"\0"), np.uint8), "control")
        if blocks is None or lengths is None:
            return []
        return [block[:length].tobytes().decode() for block, length in zip(blocks, lengths.view(np.int64)[:, 0])]

    def uninterrupted(self) -> AbstractContextManager[None]:
        """For a block that writes files.

        Returns:
            A context: where another rank fails within it, this process ends after it, within seconds.
        """
        return self._control.uninterrupted()

    def removed_at_failure(self, path: str) -> AbstractContextManager[None]:
        """Make sure that nobody's failure leaves a file of this rank behind.

        Args:
            path: of the file.

        Returns:
            A context, within which it is removed where a failure, of whichever rank, ends this process.
        """
        return self._control.removed_at_failure(path)

    def close(self) -> None:
        """Release what the transport holds. The job's end itself is the World's."""

    def _calls_of(self, length: int, entry_bytes: int = 1) -> Iterator[slice]:
        """Where each call of the transport begins and ends, in entries; no call for nothing."""
        step = max(1, self.most_bytes // entry_bytes)
        return (slice(start, min(start + step, length)) for start in range(0, length, step))

    @contextmanager
    def _collective(self, operation: str, kind: str, nbytes: int, wire_bytes: int) -> Iterator[None]:
        """Wait for all ranks, count, then time the transfer in the body; nothing travels in a world of one."""
        self._calls += 1
        self._barrier(operation, kind, nbytes)
        self.wire_bytes[kind] += wire_bytes if self.size > 1 else 0
        with self._transfer(operation, kind):
            yield

    def _barrier(self, operation: str, kind: str, nbytes: int, value: int | None = None) -> list[Any]:
        began_s = time.perf_counter()
        round, phase, _ = self._control.place
        key = [self._calls, operation, kind, round, phase, nbytes]
        values = self._control.barrier(key, value)
        self.wait_s += time.perf_counter() - began_s
        self.wire_bytes["control"] += (self.size - 1) * (
            len(json.dumps(key)) + len(json.dumps([value for value in values if value is not None]))
        )
        return values

    @contextmanager
    def _transfer(self, operation: str, kind: str) -> Iterator[None]:
        began_s = time.perf_counter()
        with self._control.transfer(f"the transfer of {kind} ({operation})"):
            yield
        self.transfer_s += time.perf_counter() - began_s

    # ---- one call of the transport: never of nothing, never of more than most_bytes in any rank

    def _sum(self, piece: torch.Tensor) -> None:
        raise NotImplementedError

    def _relay(self, values: torch.Tensor) -> None:
        raise NotImplementedError

    def _gather(self, block: np.ndarray, gathered: np.ndarray | None) -> None:
        """gathered: on rank 0 the rows (size, len(block)), each of them contiguous, with gaps between them."""
        raise NotImplementedError

    def _broadcast(self, data: np.ndarray) -> None:
        raise NotImplementedError


class HostStaging:
    """One reused host buffer (pinned) a dtype, through which CUDA tensors travel when no device group carries them."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor of the same length and dtype."""
        import torch

        held = self._buffers.get(tensor.dtype)
        if held is None or held.numel() < tensor.numel():
            held = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[tensor.dtype] = held
        return held[: tensor.numel()]

    @contextmanager
    def host(self, tensor: torch.Tensor, back: bool = True) -> Iterator[torch.Tensor]:
        """The tensor on the host: itself, or a copy that is copied back after it if `back`."""
        if not tensor.is_cuda:
            yield tensor
            return
        held = self.like(tensor).copy_(tensor)
        yield held
        if back:
            tensor.copy_(held)


def _flat(block: np.ndarray) -> np.ndarray:
    """The block as bytes, the same memory."""
    _require(
        block.ndim == 1 and block.flags.c_contiguous and not block.dtype.hasobject,
        f"a block must be contiguous, 1-D and of a fixed dtype, not {block.dtype} of shape {block.shape}",
    )
    return block.view(np.uint8)


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)
