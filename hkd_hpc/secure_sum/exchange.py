"""The masked sums of a run: the steps of the protocol between the ranks, and the all-reduce of masked int64.

What a rank hands to the transport is, but for who holds all other ranks, uniform modulo 2^64. The numbers are whole
(aggregate.FixedPointSum), so that int64 holds them exactly and the sum, once the masks have cancelled, is to the bit
the one without masks. The clients of one rank are one party: they have no masks between them, since their numbers are
added before anything leaves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.common.errors import RunError
from hkd_hpc.common.lazy import torch
from hkd_hpc.secure_sum import stream
from hkd_hpc.secure_sum.protocol import PUBLISHED_BYTES, Party, Roster, cut, fingerprint, masks_left, rebuilt
from hkd_hpc.secure_sum.rules import SMALLEST, problem_of
from hkd_hpc.secure_sum.shares import SHARE_BYTES

KIND = "control"  # under which bytes of keys and shares are counted


class SecureSum:
    """One rank's part. For each cohort `agree_on_keys`, `make_masks`, `add_masked` for each sum, `unmask`,
    and `summed` for each.

    Args:
        comm: the collectives.
        rank_of: the rank of each client.
        member_of: the architecture of each client.
    """

    def __init__(self, comm: Comm, rank_of: Sequence[int], member_of: Sequence[str]) -> None:
        self.comm, self.rank_of, self.member_of = comm, rank_of, member_of
        self._cohort: list[int] = []
        self._party = Party(comm.rank)
        self._roster = Roster({}, {})
        self._delivered: list[int] = []  # clients here
        self._sent: list[np.ndarray] = []  # uint64: masks, then numbers under them; kept from cohort to cohort
        self._taken = self._summed = 0
        self._real_N = torch.empty(0, dtype=torch.float64, device=comm.device)

    @property
    def text(self) -> str:
        """What it protects, in one line."""
        if len(set(self.rank_of)) == 1:
            return "privacy.secure_sum protects nothing here: all clients are in one process"
        one_host = "; all ranks are on one host, whose owner can read them all" * (len(set(self.comm.hosts)) == 1)
        two = "; two ranks alone have clients, and each can tell the other's sum" * (len(set(self.rank_of)) == 2)
        return (
            "privacy.secure_sum: weights are summed under masks, rank 0 sees their sum alone; it sees reports "
            f"(knowledge, counts, losses, integer buffers) as they are{two}{one_host}; every rank reads the data of "
            "all clients, so that who runs one needs no weights"
        )

    @property
    def is_masked(self) -> bool:
        """Whether there are masks: not where all clients of the cohort live on one rank, nor where they are too few."""
        return len(self._cohort) >= SMALLEST and len(self._parties(self._cohort)) > 1

    def agree_on_keys(self, round: int | None, cohort: Sequence[int]) -> None:
        """All ranks: new keys for the ranks with these clients, and shares of them.

        Args:
            round: for messages about failures.
            cohort: clients that may deliver, ascending.

        Raises:
            RunError: a share was changed on its way.
        """
        self.comm.at(round, "keys")
        self._cohort, self._party, self._roster = list(cohort), Party(self.comm.rank), Roster({}, {})
        if not self.is_masked:
            return
        clients = self._parties(cohort)
        published = self._spread(self._party.advertise(), PUBLISHED_BYTES, clients)
        self._roster = Roster(published, clients)
        sizes = [self._roster.sealed_bytes(rank) for rank in clients]
        is_in = self.comm.rank in clients
        shared = self._party.share(self._roster) if is_in else {}
        mine = b"".join(shared.get(rank, bytes(size)) for rank, size in zip(clients, sizes))
        rows = self._spread(mine, sum(sizes), clients)
        if is_in:
            place = list(clients).index(self.comm.rank)
            cell = slice(sum(sizes[:place]), sum(sizes[: place + 1]))
            self._party.receive({rank: row[cell] for rank, row in rows.items() if rank != self.comm.rank})

    def make_masks(self, lengths: Sequence[int], delivered: Sequence[int]) -> None:
        """The masks of this rank, before anybody knows which clients of others deliver; needs no other rank. The
        secret keys are forgotten.

        Args:
            lengths: of the sums that follow, in numbers.
            delivered: clients here whose weights are in these sums; without any there are no masks.
        """
        self._delivered, self._taken, self._summed = sorted(delivered), 0, 0
        if [len(sent_N) for sent_N in self._sent] != [*lengths]:
            self._sent = [np.empty(length, np.uint64) for length in lengths if self.comm.rank in self.rank_of]
        for number, sent_N in enumerate(self._sent):
            masks = self._party.masks(number) if self.is_masked and self._delivered else []
            stream.add(sent_N, masks, fresh=True)
        self._party.forget()

    def add_masked(self, pieces: Iterable[torch.Tensor]) -> None:
        """Add this rank's numbers to its masks, of the next of the sums of `make_masks`; needs no other rank.

        Args:
            pieces: whole numbers in float64, of which no sum over all clients is beyond 2^53.
        """
        if not self._sent:  # rank 0 of several
            return
        sent_N, start, whole_N = self._sent[self._taken].view(np.int64), 0, np.empty(0, np.int64)
        self._taken += 1
        for piece in pieces:
            whole_N = whole_N if len(whole_N) >= len(piece) else np.empty(len(piece), np.int64)
            part, stop = whole_N[: len(piece)], start + len(piece)
            np.copyto(part, piece.cpu().numpy(), casting="unsafe")
            sent_N[start:stop] += part
            start = stop

    def unmask(self, round: int | None, delivering: Collection[int]) -> None:
        """All ranks: who delivers, told by rank 0 and the same for all; the masks of the others are taken off (the
        consistency check and the unmasking of the paper).

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
        delivering_ranks = self._parties(told)
        if self.is_masked and len(delivering_ranks) < len(self._roster.clients):
            self._take_off(list(delivering_ranks))
        self._party.forget_shares()

    def require_enough(self, added: Sequence[int], what: str) -> None:
        """All ranks, before a sum in which not all that deliver need be.

        Args:
            added: clients here that are in it.
            what: is summed, for the message.

        Raises:
            RunError: it would be of too few clients; nobody has sent anything of it.
        """
        flags = np.zeros(len(self.rank_of), np.uint8)
        flags[list(added)] = 1
        rows = self._spread(flags.tobytes(), len(flags), range(self.comm.size))
        told = np.flatnonzero(np.any([np.frombuffer(row, np.uint8) for row in rows.values()], axis=0)).tolist()
        problem = problem_of(len(self._cohort), told, self.member_of)
        if problem:
            raise RunError(f"{what}: {problem}; the warnings say which do not. Nothing of them was sent")

    def summed(self, numbers: int, kind: str = "weights") -> Iterator[torch.Tensor]:
        """The all-reduce of the next of the sums of `make_masks`, as Comm.summed.

        Args:
            numbers: its length.
            kind: under which the bytes are counted.

        Yields:
            Pieces of the exact sum over all clients that deliver, float64; nothing on rank 0 of several.
        """
        sent_N = self._sent[self._summed].view(np.int64) if self._sent else np.empty(0, np.int64)
        self._summed += 1
        pieces = (torch.from_numpy(part).to(self.comm.device) for part in in_pieces(sent_N, self.comm.piece))
        for whole in self.comm.summed(pieces, numbers, kind):
            if len(self._real_N) < len(whole):
                self._real_N = self._real_N.new_empty(len(whole))
            yield converted(whole, self._real_N[: len(whole)])

    def _parties(self, clients: Iterable[int]) -> dict[int, int]:
        """The ranks on which these clients live, ascending, and how many there."""
        return dict(sorted(Counter(self.rank_of[client] for client in clients).items()))

    def _check(self, round: int | None, told: list[int]) -> None:
        """RunError unless enough deliver, those here as they did, and all ranks know the same."""
        problem = problem_of(len(self._cohort), told, self.member_of)
        if problem:
            raise RunError(
                f"round {round}: {problem}; more clients a round (fed.participation) or a lower fed.drop_rate help. "
                "The checkpoint of the last saved round is good"
            )
        if self._delivered != [client for client in told if self.rank_of[client] == self.comm.rank]:
            raise RunError(f"round {round}: rank 0 names other clients of rank {self.comm.rank} than delivered")
        mine = fingerprint(self._roster, told)
        if (self.comm.agree(mine), -self.comm.agree(-mine)) != (mine, mine):
            raise RunError(f"round {round}: the ranks were told different things of who delivers to the masked sum")

    def _take_off(self, delivering: list[int]) -> None:
        """Rebuild the keys of the ranks without a client that delivers, and take off what this rank added for them."""
        dropped = [rank for rank in self._roster.clients if rank not in delivering]
        cell = SHARE_BYTES * max(self._roster.clients.values())
        revealed = self._party.reveal(delivering) if self._delivered else {}
        mine = b"".join(revealed.get(rank, b"").ljust(cell, b"\0") for rank in dropped)
        rows = self._spread(mine, len(mine), delivering)
        pairs = rebuilt({rank: dict(zip(dropped, cut(row, cell))) for rank, row in rows.items()}, self._roster)
        for number, sent_N in enumerate(self._sent if self._delivered else ()):
            stream.add(sent_N, masks_left(pairs, [self.comm.rank], self._roster, number))

    def _spread(self, mine: bytes, size: int, ranks: Iterable[int]) -> dict[int, bytes]:
        """What each of these ranks sends, `size` bytes, in every rank."""
        blocks = self.comm.gather(np.frombuffer(mine, np.uint8), KIND)
        rows = np.zeros((self.comm.size, size), np.uint8) if blocks is None else np.ascontiguousarray(blocks)
        self.comm.broadcast(rows.reshape(-1), KIND)
        return {rank: rows[rank].tobytes() for rank in ranks}


def in_pieces(numbers_N: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Views of so many numbers each, but the last."""
    return (numbers_N[start : start + size] for start in range(0, len(numbers_N), size))


def converted(numbers_N: torch.Tensor, out_N: torch.Tensor) -> torch.Tensor:
    """The same whole numbers in the dtype of `out_N`; on a CPU by NumPy, which takes half of torch's time."""
    if numbers_N.is_cuda:
        return out_N.copy_(numbers_N)
    np.copyto(out_N.numpy(), numbers_N.numpy(), casting="unsafe")
    return out_N
