"""The protocol as plain objects: whoever drops out at whichever step, the sum is exact or rejected."""

from __future__ import annotations

import copy
import functools
import hmac
import itertools

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag

from hkd_hpc.common.errors import RunError
from hkd_hpc.secure_sum import stream
from hkd_hpc.secure_sum.keys import KEY_BYTES, KeyPair, seal, unseal
from hkd_hpc.secure_sum.protocol import Party, Roster, fingerprint, masks_left, masks_of, rebuilt
from hkd_hpc.secure_sum.rules import problem_of, threshold_of
from hkd_hpc.secure_sum.stream import CHUNK, Mask

LENGTH = 3
EXTREMES = [-(2**63), 2**63 - 1, -1]
ARCHITECTURES = ("small",) * 10


def numbers_of(client: int) -> list[int]:
    """Whole numbers from one end of int64 to the other, others for each client."""
    return [value - client if value > 0 else value + client for value in EXTREMES]


def sum_of(clients) -> list[int]:
    """By Python's integers, modulo 2^64 as signed numbers."""
    totals = (sum(column) for column in zip(*map(numbers_of, clients)))
    return [(total + 2**63) % 2**64 - 2**63 for total in totals]


class Cohort:
    """Clients that have advertised and sealed their shares; each play goes on with copies of them."""

    def __init__(self, clients: list[Party]) -> None:
        self.clients = {client.number: copy.copy(client) for client in clients}
        published = {number: client.advertise() for number, client in self.clients.items()}
        self.roster = Roster(published, dict.fromkeys(published, 1))
        self.sealed = {number: client.share(self.roster) for number, client in self.clients.items()}

    def client(self, number: int) -> Party:
        """One that has got nothing from the others so far."""
        found = copy.copy(self.clients[number])
        found._shares = {}
        return found

    def shared(self, sharing) -> dict[int, Party]:
        """Those who shared, once each has got what the others sealed for it."""
        clients = {number: self.client(number) for number in sharing}
        for number, client in clients.items():
            client.receive({other: self.sealed[other][number] for other in sharing if other != number})
        return clients

    def summed(self, clients: dict[int, Party], delivering: list[int], revealing: list[int]) -> list[int]:
        """What the server gets out; RunError where it may not."""
        problem = problem_of(len(self.clients), delivering, ARCHITECTURES)
        if problem:
            raise RunError(problem)
        total_N = np.zeros(LENGTH, np.uint64)
        for number in delivering:
            masked_N = np.array(numbers_of(number), np.int64).view(np.uint64)
            stream.add(masked_N, clients[number].masks(0))
            total_N += masked_N
        if len(clients) > len(delivering):
            revealed = {number: copy.copy(clients[number]).reveal(delivering) for number in revealing}
            left = masks_left(rebuilt(revealed, self.roster), delivering, self.roster, 0)
            stream.add(total_N, left)
        return total_N.view(np.int64).tolist()


@pytest.fixture(scope="module", autouse=True)
def each_agreement_is_computed_once():
    """Thousands of plays of the same keys: a function of its arguments alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyPair, "shared", functools.cache(KeyPair.shared))
        yield


@pytest.fixture(scope="module")
def cohorts() -> dict[int, Cohort]:
    """By size."""
    return {n: Cohort([Party(number) for number in range(n)]) for n in range(3, 10)}


def up_to_a_third(n: int):
    return itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in range(n // 3 + 1))


def outcome(cohort: Cohort, clients, delivering, revealing):
    try:
        return cohort.summed(clients, delivering, revealing)
    except RunError:
        return "rejected"


@pytest.mark.parametrize("n", range(3, 10))
def test_whoever_drops_out_before_it_advertises(cohorts, n):
    for dropped in up_to_a_third(n):
        left = [number for number in range(n) if number not in dropped]
        cohort = Cohort([cohorts[n].clients[number] for number in left])
        got = outcome(cohort, cohort.shared(left), left, left)
        assert got == (sum_of(left) if len(left) >= 3 else "rejected")


@pytest.mark.parametrize("n", range(3, 10))
def test_whoever_drops_out_before_it_shares(cohorts, n):
    for dropped in up_to_a_third(n):
        left = [number for number in range(n) if number not in dropped]
        got = outcome(cohorts[n], cohorts[n].shared(left), left, left)
        assert got == (sum_of(left) if len(left) >= threshold_of(n) else "rejected")


@pytest.mark.parametrize("n", range(3, 10))
def test_whoever_drops_out_before_its_masked_numbers_travel(cohorts, n):
    clients = cohorts[n].shared(range(n))
    for dropped in up_to_a_third(n):
        left = [number for number in range(n) if number not in dropped]
        got = outcome(cohorts[n], clients, left, left)
        assert got == (sum_of(left) if len(left) >= threshold_of(n) else "rejected")


@pytest.mark.parametrize("n", range(3, 10))
def test_whoever_drops_out_before_it_reveals(cohorts, n):
    """Beside one that does not deliver, so that there is something to reveal."""
    clients = cohorts[n].shared(range(n))
    for silent in up_to_a_third(n):
        missing = next(number for number in range(n) if number not in silent)
        delivering = [number for number in range(n) if number != missing]
        revealing = [number for number in delivering if number not in silent]
        got = outcome(cohorts[n], clients, delivering, revealing)
        assert got == (sum_of(delivering) if len(revealing) >= threshold_of(n) else "rejected")


def test_thresholds():
    assert [threshold_of(n) for n in range(1, 11)] == [3, 3, 3, 3, 3, 4, 4, 5, 5, 6]


@pytest.mark.parametrize(
    "clients, delivering, members, problem",
    [
        (10, range(6), ["a"] * 10, ""),
        (10, range(5), ["a"] * 10, "5 of 10 clients deliver, and privacy.secure_sum needs 6"),
        (2, range(2), ["a"] * 2, "2 of 2 clients deliver, and privacy.secure_sum needs 3"),
        (6, range(6), ["a", "a", "a", "b", "b", "b"], ""),
        (
            6,
            range(1, 6),
            ["a", "a", "a", "b", "b", "b"],
            "too few clients of an architecture deliver for privacy.secure_sum: 2 with a",
        ),
        (6, range(1, 6), ["c", "a", "a", "b", "b", "b"], "too few clients of an architecture deliver for "
         "privacy.secure_sum: 2 with a"),
    ],
)  # fmt: skip
def test_which_sums_are_rejected(clients, delivering, members, problem):
    assert problem_of(clients, list(delivering), members) == problem


# ---- what is tampered with


@pytest.fixture
def five(cohorts) -> dict[int, Party]:
    return cohorts[5].shared(range(5))


def test_a_sealed_share_that_was_changed_is_rejected(cohorts):
    text = cohorts[5].sealed[1][2]
    changed = text[:7] + bytes([text[7] ^ 1]) + text[8:]
    with pytest.raises(RunError, match="the shares of party 1's key that party 2 got were changed on their way"):
        cohorts[5].client(2).receive({1: changed})


def test_a_sealed_share_for_another_client_is_rejected(cohorts):
    with pytest.raises(RunError, match="or are for another party"):
        cohorts[5].client(2).receive({1: cohorts[5].sealed[1][3]})


@pytest.mark.parametrize("wrong", [bytes(33), b"\xff" * 33])
def test_a_wrong_share_is_noticed_by_the_public_key(cohorts, five, wrong):
    revealed = {number: five[number].reveal([0, 1, 2, 3]) for number in range(4)}
    revealed[1] = {4: wrong}
    with pytest.raises(RunError, match="the shares of party 4's key do not give that key"):
        rebuilt(revealed, cohorts[5].roster)


def test_a_share_that_is_missing_is_noticed(cohorts, five):
    revealed = {number: five[number].reveal([0, 1, 2]) for number in range(3)}
    del revealed[1][4]
    with pytest.raises(RunError, match="the shares of party 4's key"):
        rebuilt(revealed, cohorts[5].roster)


@pytest.mark.parametrize("second", [[0, 1, 3, 4], [1, 2, 3, 4]])
def test_a_client_reveals_for_one_set_alone(five, second):
    assert set(five[0].reveal([0, 1, 2, 3])) == {4}
    with pytest.raises(RunError, match="party 0 was told twice, and differently"):
        five[0].reveal(second)


def test_a_client_that_does_not_deliver_reveals_nothing(five):
    with pytest.raises(RunError, match="party 0 was told twice, and differently"):
        five[0].reveal([1, 2, 3, 4])


def test_a_client_reveals_nothing_to_a_server_that_says_that_most_have_dropped_out(five):
    with pytest.raises(RunError, match="party 0 reveals nothing to 2 clients, 3 are needed"):
        five[0].reveal([0, 1])


def test_a_public_key_that_nobody_can_agree_with_is_rejected():
    client = Party(0)
    published = {0: client.advertise(), 1: bytes(64), 2: Party(2).advertise()}
    with pytest.raises(RunError, match="party 0 cannot agree on a key with another"):
        client.share(Roster(published, dict.fromkeys(published, 1)))


def test_so_is_one_that_is_for_masks_alone():
    clients, one_each = [Party(number) for number in range(3)], dict.fromkeys(range(3), 1)
    published = {client.number: client.advertise() for client in clients}
    published[1] = published[1][:32] + bytes(32)
    roster = Roster(published, one_each)
    sealed = {client.number: client.share(roster) for client in clients}
    clients[0].receive({1: sealed[1][0], 2: sealed[2][0]})
    with pytest.raises(RunError, match="party 0 cannot agree on a key with another"):
        clients[0].masks(1)


def test_the_fingerprint_tells_sets_and_keys_apart():
    published, clients = {0: b"a", 1: b"b", 2: b"c"}, dict.fromkeys(range(3), 1)
    same = fingerprint(Roster(dict(reversed(published.items())), clients), [2, 0, 1])
    assert fingerprint(Roster(published, clients), [0, 1, 2]) == same
    assert fingerprint(Roster(published, clients), [0, 1]) != same
    assert fingerprint(Roster({**published, 2: b"d"}, clients), [0, 1, 2]) != same


# ---- parties of several clients


def test_a_party_holds_a_share_for_each_of_its_clients():
    """Of 4, 1 and 3 clients 5 are needed; places are numbered through."""
    roster = Roster({7: b"", 2: b"", 5: b""}, {2: 4, 5: 1, 7: 3})
    assert roster.needed == 5
    assert [roster.places(number) for number in (2, 5, 7)] == [[1, 2, 3, 4], [5], [6, 7, 8]]


@pytest.mark.parametrize("missing, enough", [(2, False), (5, True), (7, True)])
def test_shares_count_by_clients(missing, enough):
    """Without the party of 4 the others have 4 shares, too few; without one of the others there are 7 or 5."""
    parties = {number: Party(number) for number in (2, 5, 7)}
    roster = Roster({number: party.advertise() for number, party in parties.items()}, {2: 4, 5: 1, 7: 3})
    sealed = {number: party.share(roster) for number, party in parties.items()}
    for number, party in parties.items():
        party.receive({other: sealed[other][number] for other in parties if other != number})
    left = [number for number in parties if number != missing]
    try:
        pairs = rebuilt({number: parties[number].reveal(left) for number in left}, roster)
        assert pairs[missing].public == roster.published[missing][KEY_BYTES:]
        assert enough
    except RunError:
        assert not enough


# ---- keys and streams


P = 2**255 - 19


def x25519(secret: bytes, public: bytes) -> bytes:
    """RFC 7748, section 5: the Montgomery ladder in Python's integers."""
    k = int.from_bytes(secret, "little") & ~7 & ((1 << 254) - 1) | (1 << 254)
    x1 = int.from_bytes(public, "little") & ((1 << 255) - 1)
    x2, z2, x3, z3, swap = 1, 0, x1, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swap ^ bit:
            x2, x3, z2, z3 = x3, x2, z3, z2
        swap = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        e, da, cb = a * a - b * b, d * a, c * b
        x3, z3 = (da + cb) ** 2 % P, x1 * (da - cb) ** 2 % P
        x2, z2 = a * a * b * b % P, e * (a * a + 121665 * e) % P
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, P - 2, P) % P).to_bytes(32, "little")


def hkdf(secret: bytes, info: bytes) -> bytes:
    """RFC 5869 with an empty salt and one block, by the standard library's HMAC."""
    extracted = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def test_keys_are_x25519_and_hkdf():
    """Against a ladder of our own and HMAC; both owners get the same, another for each purpose."""
    alice, bob = KeyPair.new(), KeyPair.new()
    base = (9).to_bytes(32, "little")
    assert (alice.public, bob.public) == (x25519(alice.secret, base), x25519(bob.secret, base))
    expected = hkdf(x25519(alice.secret, bob.public), b"mask 3")
    assert alice.shared(bob.public, "mask 3") == expected
    assert bob.shared(alice.public, "mask 3") == expected
    assert bob.shared(alice.public, "mask 4") != expected


def test_what_is_sealed_opens_with_its_key_alone():
    assert unseal(bytes(KEY_BYTES), seal(bytes(KEY_BYTES), b"text")) == b"text"
    with pytest.raises(InvalidTag):
        unseal(b"k" * KEY_BYTES, seal(bytes(KEY_BYTES), b"text"))


def test_the_stream_is_aes_256_in_counter_mode():
    """AES-256 of a block of zeros with a key of zeros, as NIST's vectors have it."""
    words = np.empty(2, np.uint64)
    Mask(bytes(32), 1).fill(words, 0)
    assert words.tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def test_a_stream_can_be_had_from_any_place():
    whole, part = np.empty(1000, np.uint64), np.empty(300, np.uint64)
    Mask(b"k" * 32, 1).fill(whole, 0)
    Mask(b"k" * 32, 1).fill(part, 700)
    assert part.tolist() == whole[700:].tolist()


@pytest.mark.parametrize("length", [1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_masks_of_a_pair_cancel_at_any_length(length):
    """Added to numbers that wrap around, and in a fresh vector."""
    pairs = {number: KeyPair.new() for number in (0, 1)}
    roster = Roster({number: bytes(KEY_BYTES) + pair.public for number, pair in pairs.items()}, {0: 1, 1: 1})
    total_N = np.full(length, 2**64 - 5, np.uint64)
    for number, pair in pairs.items():
        stream.add(total_N, masks_of(number, pair, [1 - number], roster, 0))
    assert (total_N == 2**64 - 5).all()
    fresh_N = np.full(length, 9, np.uint64)
    stream.add(fresh_N, [], fresh=True)
    assert not fresh_N.any()


def test_each_sum_has_masks_of_its_own():
    keys = {mask.key for number in range(3) for mask in masks_with_two_others(number)}
    assert len(keys) == 6


def masks_with_two_others(sum_number: int) -> list[Mask]:
    return masks_of(0, FIXED, [1, 2], PARTNERS, sum_number)


FIXED = KeyPair.of(b"s" * 32)
PARTNERS = Roster({number: bytes(KEY_BYTES) + KeyPair.of(bytes([number]) * 32).public for number in (1, 2)}, {})
