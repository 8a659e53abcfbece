"""The masked sums of a run: the steps of the protocol between the ranks, and the all-reduce of masked int64.

What a rank hands to the transport is, but for who holds all other clients, uniform modulo 2^64. The numbers are whole
(aggregate.FixedPointSum), so that int64 holds them exactly and the sum, once the masks have cancelled, is to the bit
the one without masks. Clients of one rank have no mask between them: their numbers are added before anything leaves it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.errors import RunError
from hkd_hpc.lazy import torch
from hkd_hpc.secure_sum import stream
from hkd_hpc.secure_sum.protocol import (
    PUBLISHED_BYTES,
    SEALED_BYTES,
    Client,
    fingerprint,
    masks_left,
    rebuilt,
)
from hkd_hpc.secure_sum.rules import SMALLEST, problem_of
from hkd_hpc.secure_sum.shares import SHARE_BYTES

KIND = "control"  # under which bytes of keys and shares are counted


class SecureSum:
    """One rank's part. For each cohort `begin`, `make`, `settle`, and the sums, in the same order on all ranks.

    Args:
        comm: the collectives.
        rank_of: the rank of each client.
        member_of: the architecture of each client.
    """

    def __init__(self, comm: Comm, rank_of: Sequence[int], member_of: Sequence[str]) -> None:
        self.comm, self.rank_of, self.member_of = comm, rank_of, member_of
        self._cohort: list[int] = []
        self._clients: dict[int, Client] = {}  # those here
        self._published: dict[int, bytes] = {}
        self._delivered: list[int] = []  # those here
        self._masks: list[np.ndarray] = []  # of the sums to come, uint64; kept from cohort to cohort
        self._summed = 0
        self._whole_N = torch.empty(0, dtype=torch.int64, device=comm.device)
        self._real_N = torch.empty(0, dtype=torch.float64, device=comm.device)

    @property
    def text(self) -> str:
        """What it protects, in one line."""
        if len(set(self.rank_of)) == 1:
            return "privacy.secure_sum protects nothing here: all clients are in one process"
        one_host = "; all ranks are on one host, whose owner can read them all" * (len(set(self.comm.hosts)) == 1)
        return (
            "privacy.secure_sum: weights are summed under masks, rank 0 sees their sum alone; it sees reports "
            f"(knowledge, counts, losses, integer buffers) as they are{one_host}"
        )

    @property
    def is_masked(self) -> bool:
        """Whether there are masks: not where all clients of the cohort live on one rank, nor where they are too few."""
        return len(self._cohort) >= SMALLEST and len({self.rank_of[client] for client in self._cohort}) > 1

    def begin(self, round: int | None, cohort: Sequence[int]) -> None:
        """All ranks: new keys for these clients, and shares of them.

        Args:
            round: for messages about failures.
            cohort: clients that may deliver, ascending.

        Raises:
            RunError: a share was changed on its way.
        """
        self.comm.at(round, "keys")
        self._cohort = list(cohort)
        self._clients = {client: Client(client) for client in cohort if self.rank_of[client] == self.comm.rank}
        if not self.is_masked:
            return
        advertised = {number: client.advertise() for number, client in self._clients.items()}
        self._published = self._spread(advertised, PUBLISHED_BYTES)
        shared = {number: self._row(client.share(self._published)) for number, client in self._clients.items()}
        rows = self._spread(shared, SEALED_BYTES * len(self._cohort))
        for place, number in enumerate(self._cohort):
            if number in self._clients:
                cell = slice(SEALED_BYTES * place, SEALED_BYTES * (place + 1))
                self._clients[number].receive({other: row[cell] for other, row in rows.items() if other != number})

    def make(self, lengths: Sequence[int], delivered: Sequence[int]) -> None:
        """The masks of the clients of this rank that deliver, before anybody knows which others do; needs no other
        rank. The secret keys are forgotten.

        Args:
            lengths: of the sums that follow, in numbers.
            delivered: clients here whose weights are in these sums.
        """
        self._delivered, self._summed = sorted(delivered), 0
        kept, self._masks = self._masks, []
        for number, length in enumerate(lengths if self.is_masked and delivered else ()):
            fits = number < len(kept) and len(kept[number]) == length
            self._masks.append(kept[number] if fits else np.empty(length, np.uint64))
            own = [mask for c in self._delivered for mask in self._clients[c].masks(number, self._apart(c))]
            stream.add(self._masks[number], own, fresh=True)
        for client in self._clients.values():
            client.forget()

    def settle(self, round: int | None, delivering: Collection[int]) -> None:
        """All ranks: who delivers, told by rank 0 and the same for all; the masks of the others are taken off.

        Args:
            round: for messages.
            delivering: clients of the cohort, on rank 0; elsewhere it does not count.

        Raises:
            RunError: too few deliver, the ranks were told different things, or a share is wrong.
        """
        self.comm.at(round, "masks")
        flags = np.array([client in delivering for client in self._cohort], np.uint8)
        self.comm.broadcast(flags, KIND)
        told = [client for client, flag in zip(self._cohort, flags) if flag]
        self._check(round, told)
        dropped = sorted({*self._cohort} - {*told})
        if self.is_masked and dropped:
            self._take_off(told, dropped)

    def summed(self, pieces: Iterable[torch.Tensor], numbers: int, kind: str = "weights") -> Iterator[torch.Tensor]:
        """As Comm.summed, of whole numbers in float64 whose sums are below 2^53; the next of the sums of `make`."""
        mask_N = self._masks[self._summed] if self._masks else None
        self._summed += 1
        for whole in self.comm.summed(self._masked(pieces, mask_N), numbers, kind):
            yield self._real_N[: len(whole)].copy_(whole)

    def _masked(self, pieces: Iterable[torch.Tensor], mask_N: np.ndarray | None) -> Iterator[torch.Tensor]:
        """Each piece as int64 under its part of the masks, in one reused tensor."""
        mask, start = None if mask_N is None else torch.from_numpy(mask_N.view(np.int64)), 0
        for piece in pieces:
            whole, stop = self._room(len(piece)).copy_(piece), start + len(piece)
            if mask is not None:
                whole.add_(mask[start:stop].to(whole.device))
            yield whole
            start = stop

    def _room(self, size: int) -> torch.Tensor:
        if len(self._whole_N) < size:
            self._whole_N, self._real_N = self._whole_N.new_empty(size), self._real_N.new_empty(size)
        return self._whole_N[:size]

    def _apart(self, client: int) -> list[int]:
        """Those of the cohort that live on another rank than this client."""
        return [other for other in self._cohort if self.rank_of[other] != self.rank_of[client]]

    def _check(self, round: int | None, told: list[int]) -> None:
        """RunError unless enough deliver, those here as they did, and all ranks know the same."""
        problem = problem_of(len(self._cohort), told, self.member_of)
        if problem:
            raise RunError(
                f"round {round}: {problem}; more clients a round (fed.participation) or a lower fed.drop_rate help. "
                "The checkpoint of the last saved round is good"
            )
        if self._delivered != [client for client in told if client in self._clients]:
            raise RunError(f"round {round}: rank 0 names other clients of rank {self.comm.rank} than delivered")
        mine = fingerprint(self._published, told)
        if (self.comm.agree(mine), -self.comm.agree(-mine)) != (mine, mine):
            raise RunError(f"round {round}: the ranks were told different things of who delivers to the masked sum")

    def _take_off(self, told: list[int], dropped: list[int]) -> None:
        """Rebuild the keys of the dropped clients, and take off what the clients of this rank added for them."""
        revealed = {client: self._clients[client].reveal(told) for client in self._delivered}
        rows = self._spread(
            {client: b"".join(shares[other] for other in dropped) for client, shares in revealed.items()},
            SHARE_BYTES * len(dropped),
        )
        shares = {client: dict(zip(dropped, cells(rows[client], SHARE_BYTES))) for client in told}
        for number, pair in rebuilt(shares, self._published).items():
            partners = [client for client in self._delivered if client in self._apart(number)]
            for sum_number, mask_N in enumerate(self._masks):
                stream.add(mask_N, masks_left({number: pair}, partners, self._published, sum_number))

    def _row(self, by_client: Mapping[int, bytes]) -> bytes:
        """What one client sends to each of the cohort, zeros to itself."""
        return b"".join(by_client.get(client, bytes(SEALED_BYTES)) for client in self._cohort)

    def _spread(self, by_client: Mapping[int, bytes], size: int) -> dict[int, bytes]:
        """What the clients of all ranks send, in every rank: `size` bytes each, zeros of those that send nothing."""
        hosted = [[client for client in self._cohort if self.rank_of[client] == r] for r in range(self.comm.size)]
        slots = max(map(len, hosted))
        mine = b"".join(by_client.get(client, bytes(size)) for client in hosted[self.comm.rank])
        blocks = self.comm.gather(np.frombuffer(mine.ljust(slots * size, b"\0"), np.uint8), KIND)
        rows = np.zeros((len(self._cohort), size), np.uint8)  # by rank, and there by number
        if blocks is not None:
            sent = [block.reshape(slots, size)[: len(here)] for block, here in zip(blocks, hosted)]
            np.concatenate(sent, out=rows)
        self.comm.broadcast(rows.reshape(-1), KIND)
        return {client: row.tobytes() for client, row in zip([c for here in hosted for c in here], rows)}


def cells(row: bytes, size: int) -> Iterator[bytes]:
    """Its parts of so many bytes."""
    return (row[start : start + size] for start in range(0, len(row), size))
