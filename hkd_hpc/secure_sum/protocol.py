"""One masked sum as plain objects that pass bytes: what a party does, and what the server does between.

A party is a client, or all clients of one rank: they share a memory, and only their sum leaves it.

    party                       server                                what a party sends
    advertise()             ->  all public keys to all                two public keys
    share(roster)           ->  sealed shares to whom they are for    shares of its masking key, sealed
    receive(sealed)
    masks()                 ->  sum modulo 2^64                       its numbers under the masks of all its pairs
    reveal(delivering)      ->  rebuilt(), masks_left()               shares of the keys of those who do not deliver

After Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning" (CCS 2017), for a server
that is honest but curious. For each pair of parties one adds a stream of random numbers that the other subtracts, so
that the sum over all is the sum of the plain numbers. A party that has shared its key but does not deliver leaves its
partners' halves in the sum; from the shares of `threshold_of` clients its key is rebuilt, and they are taken off.

The paper's second mask, a party's own, guards those whose numbers arrive late, after they were taken for dropped and
their key was rebuilt. It is not needed here, where a server is honest: it says who delivers BEFORE any numbers travel,
all parties check that they were told the same, and whoever is not named sends nothing. For the same reason a party
reveals once. What the parties compare passes through the server too: one that forges it is not caught.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag

from hkd_hpc.common.errors import RunError
from hkd_hpc.secure_sum.keys import KEY_BYTES, TAG_BYTES, KeyPair, seal, unseal
from hkd_hpc.secure_sum.rules import threshold_of
from hkd_hpc.secure_sum.shares import SHARE_BYTES, joined, split
from hkd_hpc.secure_sum.stream import Mask

PUBLISHED_BYTES = 2 * KEY_BYTES


@dataclass(frozen=True)
class Roster:
    """Who takes part, the same for all.

    Attributes:
        published: what each party advertised, by its number.
        clients: how many clients it stands for: it holds so many shares of each key.
    """

    published: Mapping[int, bytes]
    clients: Mapping[int, int]

    @property
    def needed(self) -> int:
        """How many shares give a key back."""
        return threshold_of(sum(self.clients[number] for number in self.published))

    def places(self, number: int) -> list[int]:
        """Of a party's shares: 1, 2, ... in the order of the parties; at 0 is the secret."""
        start = 1 + sum(self.clients[other] for other in self.published if other < number)
        return list(range(start, start + self.clients[number]))

    def sealed_bytes(self, number: int) -> int:
        """Of the shares of one key that a party holds."""
        return SHARE_BYTES * self.clients[number] + TAG_BYTES


class Party:
    """One party of one cohort; `forget` its keys when its masks are made.

    Args:
        number: its own, unlike all others'.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._sealing, self._masking = KeyPair.new(), KeyPair.new()
        self._roster = Roster({}, {})
        self._shares: dict[int, bytes] = {}  # of the others' masking keys
        self._told: frozenset[int] | None = None

    def advertise(self) -> bytes:
        """The public keys: for sealing, for masks."""
        return self._sealing.public + self._masking.public

    def share(self, roster: Roster) -> dict[int, bytes]:
        """Sealed shares of the masking key, by the party that may open them.

        Args:
            roster: all that advertised, this one among them.

        Raises:
            RunError: a public key is none that two could agree with.
        """
        self._roster = roster
        others = sorted(roster.published.keys() - {self.number})
        shares = split(
            self._masking.secret, roster.needed, (place for other in others for place in roster.places(other))
        )
        return {
            other: seal(self._channel(self.number, other), b"".join(shares[place] for place in roster.places(other)))
            for other in others
        }

    def receive(self, sealed: Mapping[int, bytes]) -> None:
        """Open what the others sealed for this party; only with those who did it has masks.

        Args:
            sealed: by sender.

        Raises:
            RunError: one of them was changed, or is for somebody else.
        """
        for sender, text in sealed.items():
            try:
                self._shares[sender] = unseal(self._channel(sender, self.number), text)
            except InvalidTag:
                raise RunError(
                    f"the shares of party {sender}'s key that party {self.number} got were changed on their way, or "
                    "are for another party"
                ) from None

    def masks(self, sum_number: int) -> list[Mask]:
        """Of all pairs of this party and those who shared: what it adds to its numbers.

        Args:
            sum_number: of several sums of one cohort; each has masks of its own.
        """
        return masks_of(self.number, self._masking, self._shares, self._roster, sum_number)

    def reveal(self, delivering: Collection[int]) -> dict[int, bytes]:
        """The shares that this party has of the masking keys of those who do not deliver, by their number.

        Args:
            delivering: who does, of those who shared.

        Raises:
            RunError: they are too few, this one is not among them, or was told of others before: then keys of parties
                that do deliver could be rebuilt.
        """
        self._told = self._told or frozenset(delivering)
        if self._told != frozenset(delivering) or self.number not in self._told:
            raise RunError(f"party {self.number} was told twice, and differently, who delivers to the masked sum")
        held = sum(self._roster.clients[other] for other in self._told)
        if held < self._roster.needed:
            raise RunError(f"party {self.number} reveals nothing to {held} clients, {self._roster.needed} are needed")
        return {other: shares for other, shares in self._shares.items() if other not in self._told}

    def forget(self) -> None:
        """Drop the secret keys; shares of the others' stay until all is revealed."""
        del self._sealing, self._masking

    def forget_shares(self) -> None:
        """Drop these too: from here on no number of parties can rebuild a key."""
        self._shares.clear()

    def _channel(self, sender: int, receiver: int) -> bytes:
        """The key that seals what one of two parties, of which this is one, sends to the other."""
        other = self._roster.published[receiver if sender == self.number else sender]
        return agreed(self.number, self._sealing, other[:KEY_BYTES], f"shares {sender} {receiver}")


def masks_of(number: int, masking: KeyPair, partners: Collection[int], roster: Roster, sum_number: int) -> list[Mask]:
    """The masks of a party, or of one whose key was rebuilt, with its partners: the lower number of a pair adds."""
    return [
        Mask(
            agreed(number, masking, roster.published[other][KEY_BYTES:], f"mask {sum_number}"),
            1 if number < other else -1,
        )
        for other in sorted(partners)
    ]


def agreed(number: int, pair: KeyPair, public: bytes, purpose: str) -> bytes:
    """The secret of a party's pair and another's public key. RunError where no two could agree with that key."""
    try:
        return pair.shared(public, purpose)
    except ValueError as error:
        raise RunError(f"party {number} cannot agree on a key with another: {error}") from None


def rebuilt(revealed: Mapping[int, Mapping[int, bytes]], roster: Roster) -> dict[int, KeyPair]:
    """The masking keys of those who do not deliver.

    Args:
        revealed: what each party that answered revealed: shares by the number of whose key they are of.
        roster: all that advertised.

    Returns:
        By number.

    Raises:
        RunError: too few answered, or the shares do not give the key that was advertised.
    """
    dropped = sorted({other for shares in revealed.values() for other in shares})
    held = sum(roster.clients[number] for number in revealed)
    if dropped and held < roster.needed:
        raise RunError(
            f"parties with {held} clients revealed their shares, and {roster.needed} are needed to take the masks of "
            f"parties {dropped} off the sum"
        )
    return {number: _rebuilt(number, revealed, roster) for number in dropped}


def _rebuilt(number: int, revealed: Mapping[int, Mapping[int, bytes]], roster: Roster) -> KeyPair:
    try:
        pair = KeyPair.of(
            joined(
                {
                    place: share
                    for holder, shares in revealed.items()
                    for place, share in zip(roster.places(holder), cut(shares[number], SHARE_BYTES))
                }
            )
        )
    except (ValueError, KeyError):
        pair = None
    if pair is None or pair.public != roster.published[number][KEY_BYTES:]:
        raise RunError(f"the shares of party {number}'s key do not give that key: one of them is wrong")
    return pair


def masks_left(
    dropped: Mapping[int, KeyPair], delivering: Collection[int], roster: Roster, sum_number: int
) -> list[Mask]:
    """What takes off what these parties added for the dropped ones: the masks that those would have added."""
    return [
        mask
        for number, pair in dropped.items()
        for mask in masks_of(number, pair, set(delivering) - {number}, roster, sum_number)
    ]


def fingerprint(roster: Roster, delivering: Collection[int]) -> int:
    """48 bits of a hash of who takes part, with which keys, and which clients deliver: the same wherever all were told
    the same."""
    told = repr((sorted(roster.published.items()), sorted(delivering))).encode()
    return int.from_bytes(hashlib.sha256(told).digest()[:6], "big")


def cut(row: bytes, size: int) -> list[bytes]:
    """Its parts of so many bytes."""
    return [row[start : start + size] for start in range(0, len(row), size)]
