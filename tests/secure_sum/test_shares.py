"""Shamir's shares against Lagrange's formula in fractions, and what too few or wrong ones give."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest

from hkd_hpc.secure_sum.shares import PRIME, SHARE_BYTES, joined, split, value_at

SECRET = bytes(range(32))


def test_prime_is_one():
    """Fermat's test for many bases, and no factor below 10,000."""
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in range(2, 60))
    assert all(PRIME % factor for factor in range(2, 10_000))


def test_values_of_a_polynomial_by_hand():
    """5 + 3 x + 2 x^2 at 0, 1, 2, 10."""
    assert [value_at(x, [5, 3, 2]) for x in (0, 1, 2, 10)] == [5, 10, 19, 235]


def lagrange_at_0(points: dict[int, int]) -> int:
    """In exact fractions, taken to the field at the end: another way than the product's."""
    total = Fraction(0)
    for x, y in points.items():
        term = Fraction(y)
        for other in points:
            if other != x:
                term *= Fraction(-other, x - other)
        total += term
    return total.numerator * pow(total.denominator, -1, PRIME) % PRIME


def test_any_shares_that_are_enough_give_the_secret():
    shares = split(SECRET, 3, [1, 2, 5, 8, 100_000])
    assert {len(share) for share in shares.values()} == {SHARE_BYTES}
    for chosen in itertools.chain(itertools.combinations(shares, 3), itertools.combinations(shares, 4)):
        part = {place: shares[place] for place in chosen}
        assert joined(part) == SECRET
        assert lagrange_at_0({place: int.from_bytes(share, "big") for place, share in part.items()}) == (
            int.from_bytes(SECRET, "big")
        )


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_extreme_secrets(secret):
    assert joined(split(secret, 2, [1, 2])) == secret


def is_given_by(shares: dict[int, bytes]) -> bool:
    try:
        return joined(shares) == SECRET
    except ValueError:
        return False


def test_too_few_or_wrong_shares_do_not_give_it():
    shares = split(SECRET, 3, [1, 2, 3])
    wrong = {**shares, 2: (int.from_bytes(shares[2], "big") ^ 1).to_bytes(SHARE_BYTES, "big")}
    assert not is_given_by({place: shares[place] for place in (1, 2)})
    assert not is_given_by(wrong)
    assert not is_given_by({1: shares[2], 2: shares[1], 3: shares[3]})


def test_each_split_is_another():
    assert split(SECRET, 2, [1]) != split(SECRET, 2, [1])
