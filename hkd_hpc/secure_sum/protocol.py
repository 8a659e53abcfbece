"""One masked sum as plain objects that pass bytes: what a client does, and what the server does between.

    client                      server                                what a client sends
    advertise()             ->  all public keys to all                two public keys
    share(published)        ->  each sealed share to whom it is for   shares of its masking key, sealed
    receive(sealed)
    masks()                 ->  sum modulo 2^64                       its numbers under the masks of all its pairs
    reveal(delivering)      ->  rebuilt(), masks_left()               shares of the keys of those who do not deliver

After Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning" (CCS 2017), for a server
that is honest but curious. For each pair of clients one adds a stream of random numbers that the other subtracts, so
that the sum over all is the sum of the plain numbers. A client that has shared its key but does not deliver leaves its
partners' halves in the sum; from the shares of `threshold_of` clients its key is rebuilt, and they are taken off.

The paper's second mask, a client's own, guards those whose numbers arrive late, after they were taken for dropped and
their key was rebuilt. It is not needed here: the server says who delivers BEFORE any numbers travel, all clients check
that they were told the same, and whoever is not named sends nothing. For the same reason a client reveals once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from cryptography.exceptions import InvalidTag

from hkd_hpc.errors import RunError
from hkd_hpc.secure_sum.keys import KEY_BYTES, TAG_BYTES, KeyPair, seal, unseal
from hkd_hpc.secure_sum.rules import threshold_of
from hkd_hpc.secure_sum.shares import SHARE_BYTES, joined, split
from hkd_hpc.secure_sum.stream import Mask

PUBLISHED_BYTES = 2 * KEY_BYTES
SEALED_BYTES = SHARE_BYTES + TAG_BYTES


class Client:
    """One client of one cohort; `forget` it with its keys when its masks are made.

    Args:
        number: its own, unlike all others'.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._sealing, self._masking = KeyPair.new(), KeyPair.new()
        self._published: dict[int, bytes] = {}
        self._shares: dict[int, bytes] = {}  # of the others' masking keys
        self._told: frozenset[int] | None = None

    def advertise(self) -> bytes:
        """The public keys: for sealing, for masks."""
        return self._sealing.public + self._masking.public

    def share(self, published: Mapping[int, bytes]) -> dict[int, bytes]:
        """Sealed shares of the masking key, by the client that may open them.

        Args:
            published: what each client advertised, this one among them.
        """
        self._published = dict(published)
        others = sorted(published.keys() - {self.number})
        shares = split(self._masking.secret, threshold_of(len(published)), (place_of(other) for other in others))
        return {other: seal(self._channel(self.number, other), shares[place_of(other)]) for other in others}

    def receive(self, sealed: Mapping[int, bytes]) -> None:
        """Open what the others sealed for this client; only with those who did it has masks.

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
                    f"the share of client {sender}'s key that client {self.number} got was changed on its way, or is "
                    "for another client"
                ) from None

    def masks(self, sum_number: int, apart: Collection[int] | None = None) -> list[Mask]:
        """Of all pairs of this client and those who shared: what it adds to its numbers.

        Args:
            sum_number: of several sums of one cohort; each has masks of its own.
            apart: the others that count; without it all. Two that leave one another out have no mask.
        """
        partners = self._shares.keys() & (self._shares.keys() if apart is None else set(apart))
        return masks_of(self.number, self._masking, partners, self._published, sum_number)

    def reveal(self, delivering: Collection[int]) -> dict[int, bytes]:
        """The shares that this client has of the masking keys of those who do not deliver, by their number.

        Args:
            delivering: who does, of those who shared.

        Raises:
            RunError: they are too few, this one is not among them, or was told of others before: then keys of clients
                that do deliver could be rebuilt.
        """
        self._told = self._told or frozenset(delivering)
        if self._told != frozenset(delivering) or self.number not in self._told:
            raise RunError(f"client {self.number} was told twice, and differently, who delivers to the masked sum")
        if len(self._told) < threshold_of(len(self._published)):
            raise RunError(
                f"client {self.number} reveals nothing: {len(self._told)} of {len(self._published)} clients deliver"
            )
        return {other: share for other, share in self._shares.items() if other not in self._told}

    def forget(self) -> None:
        """Drop the secret keys: whoever breaks in later finds none."""
        del self._sealing, self._masking

    def _channel(self, sender: int, receiver: int) -> bytes:
        """The key that seals what one of two clients, of which this is one, sends to the other."""
        other = self._published[receiver if sender == self.number else sender]
        try:
            return self._sealing.shared(other[:KEY_BYTES], f"share {sender} {receiver}")
        except ValueError as error:
            raise RunError(f"client {self.number} cannot agree on a key with another: {error}") from None


def masks_of(
    number: int, masking: KeyPair, partners: Collection[int], published: Mapping[int, bytes], sum_number: int
) -> list[Mask]:
    """The masks of a client, or of one whose key was rebuilt, with its partners: the lower number of a pair adds."""
    return [
        Mask(masking.shared(published[other][KEY_BYTES:], f"mask {sum_number}"), 1 if number < other else -1)
        for other in sorted(partners)
    ]


def rebuilt(revealed: Mapping[int, Mapping[int, bytes]], published: Mapping[int, bytes]) -> dict[int, KeyPair]:
    """The masking keys of those who do not deliver.

    Args:
        revealed: what each client that answered revealed: shares by the number of whose key they are of.
        published: what all advertised.

    Returns:
        By number.

    Raises:
        RunError: fewer than `threshold_of` answered, or the shares do not give the key that was advertised.
    """
    dropped = sorted({other for shares in revealed.values() for other in shares})
    needed = threshold_of(len(published))
    if dropped and len(revealed) < needed:
        raise RunError(
            f"{len(revealed)} of {len(published)} clients revealed their shares, and {needed} are needed to take the "
            f"masks of clients {dropped} off the sum"
        )
    return {number: _rebuilt(number, revealed, published[number][KEY_BYTES:]) for number in dropped}


def _rebuilt(number: int, revealed: Mapping[int, Mapping[int, bytes]], public: bytes) -> KeyPair:
    try:
        pair = KeyPair.of(joined({place_of(holder): shares[number] for holder, shares in revealed.items()}))
    except (ValueError, KeyError):
        pair = None
    if pair is None or pair.public != public:
        raise RunError(f"the shares of client {number}'s key do not give that key: one of them is wrong")
    return pair


def masks_left(
    dropped: Mapping[int, KeyPair], delivering: Collection[int], published: Mapping[int, bytes], sum_number: int
) -> list[Mask]:
    """What takes off what the dropped clients' partners added: the masks that they themselves would have added."""
    return [
        mask
        for number, pair in dropped.items()
        for mask in masks_of(number, pair, set(delivering) - {number}, published, sum_number)
    ]


def fingerprint(published: Mapping[int, bytes], delivering: Collection[int]) -> int:
    """48 bits of a hash of who takes part, with which keys, and who delivers: the same wherever all were told the
    same."""
    told = repr((sorted(published.items()), sorted(delivering))).encode()
    return int.from_bytes(hashlib.sha256(told).digest()[:6], "big")


def place_of(number: int) -> int:
    """Of a client's share: 0 is where the secret is."""
    return number + 1
