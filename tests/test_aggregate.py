"""The averages: exact, in any order, weighted by the clients that delivered; knowledge by count."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from hkd_hpc.aggregate import CHUNK, FixedPointSum, combine_by_class, mean_by_count, sharer_weights
from hkd_hpc.common.errors import RunError

pytestmark = pytest.mark.kernels

PIECE = 64


def mean(total: FixedPointSum, length: int) -> tuple[torch.Tensor, int]:
    out = torch.full((length,), float("nan"))
    total.mean_into(out, total.pieces(PIECE))
    return out, int(content(total)[0])


def content(total: FixedPointSum, piece: int = PIECE) -> torch.Tensor:
    """[M, sums ...] as one vector."""
    return torch.cat([part.clone() for part in total.pieces(piece)])


def random_clients(clients: int, length: int, seed: int = 0) -> list[tuple[torch.Tensor, int]]:
    """Vectors whose magnitudes span 1e-6 .. 1e4, and numbers of images."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((clients, length)) * 10.0 ** random.uniform(-6, 4, (clients, length))
    images = random.integers(1, 900, clients).tolist()
    return [(torch.from_numpy(row.astype(np.float32)), n) for row, n in zip(values, images)]


def added(clients, total_weight: int) -> FixedPointSum:
    total = FixedPointSum(len(clients[0][0]), total_weight)
    for values, weight in clients:
        assert total.add(values, weight) is None
    return total


# --- the clients' weights


def test_mean_is_weighted_by_images():
    total = added([(torch.zeros(3), 100), (torch.full((3,), 4.0), 300)], 400)
    out, weight = mean(total, 3)
    assert out.tolist() == [3.0, 3.0, 3.0]
    assert weight == 400


@pytest.mark.parametrize(
    "weights, all_weights",
    [([1] * 10, 10), ([1], 10), ([1], 1), ([375] * 3, 3750), ([1, 700, 33], 50_000), ([5], 2**20)],
)
def test_the_error_of_the_mean_is_that_of_the_docstring(weights, all_weights):
    """m (T / N) 2^-37 at most, before the mean is rounded to float32; and more than a hundredth of it."""
    values_MV = 0.01 * torch.randn(len(weights), 5000, generator=torch.Generator().manual_seed(0))
    total = added(list(zip(values_MV, weights)), all_weights)
    found_V = content(total)[1:] / (sum(weights) * 2.0**total.bits)
    exact_V = (values_MV.double() * torch.tensor(weights, dtype=torch.float64)[:, None]).sum(0) / sum(weights)
    worst, bound = float((found_V - exact_V).abs().max()), len(weights) * all_weights / sum(weights) * 2.0**-37
    assert bound / 100 < worst <= bound


@pytest.mark.parametrize("piece", [2, 3, 64])
def test_only_the_spans_are_summed_and_moved(piece):
    """Numbers 1, 2 and 5, 6, 7 of ten: five in the sum, [M, 4, 8, 20, 24, 28] with weight 4; the others stay what they
    were.
    """
    total = FixedPointSum(10, 4, spans=[(1, 3), (5, 8)])
    assert total.length == 5
    values = torch.arange(10.0)
    total.add(values, 1)
    total.flush()
    total.add(values, 3)
    found = content(total, piece)
    assert found[0] == 4
    assert (found[1:] * 2.0**-total.bits).tolist() == [4.0, 8.0, 20.0, 24.0, 28.0]
    out = torch.full((10,), 7.5)
    total.mean_into(out, total.pieces(piece))
    assert out.tolist() == [7.5, 1.0, 2.0, 7.5, 7.5, 5.0, 6.0, 7.0, 7.5, 7.5]
    assert [part.tolist() for part in total.parts(out)] == [[1.0, 2.0], [5.0, 6.0, 7.0]]


def test_a_bad_number_between_the_spans_is_rejected_too():
    total = FixedPointSum(3, 4, spans=[(0, 1), (2, 3)])
    assert total.add(torch.tensor([1.0, float("inf"), 1.0]), 1) == (1.0, float("inf"))


def test_only_clients_that_delivered_count():
    """2 of 10 clients (50 and 150 of 2,000 images) took part: .25 and .75, not 50 / 2000 and 150 / 2000."""
    total = added([(torch.tensor([1.0, 0.0]), 50), (torch.tensor([0.0, 1.0]), 150)], 2000)
    out, weight = mean(total, 2)
    assert out.tolist() == [0.25, 0.75]
    assert weight == 200


def test_one_client_gets_its_own_values_back():
    """Bit for bit down to 2^-4; below that to half a step of the sum (2^-29 / 375 with 375 images)."""
    values = torch.from_numpy(np.random.default_rng(1).standard_normal(5000).astype(np.float32))
    out, _ = mean(added([(values, 375)], 375), 5000)
    large = values.abs() >= 2.0**-4
    assert large.sum() > 4500
    assert torch.equal(out[large], values[large])
    assert float((out.double() - values.double()).abs().max()) <= 2.0**-29 / 375 + 2.0**-29


def test_sum_equals_python_integers():
    clients = random_clients(clients=7, length=200)
    weight = sum(n for _, n in clients)
    total = added(clients, weight)
    scale = 2**total.bits
    sums = [sum(round(Fraction(float(values[j])) * n * scale) for values, n in clients) for j in range(200)]
    assert content(total).tolist() == [weight, *sums]
    out, _ = mean(total, 200)
    assert out.tolist() == [float(np.float32(float(Fraction(s, weight * scale)))) for s in sums]


def test_mean_is_the_true_mean_to_float32():
    clients = random_clients(clients=7, length=200, seed=3)
    weight = sum(n for _, n in clients)
    out, _ = mean(added(clients, weight), 200)
    true = sum(Fraction(n) * np.array([Fraction(float(x)) for x in values]) for values, n in clients) / weight
    np.testing.assert_allclose(out.numpy(), true.astype(float), rtol=2.0**-23, atol=7e-11)


def test_every_order_and_every_split_over_ranks_gives_the_same_bits():
    length = 2 * CHUNK + 17  # three passes, the last one short
    clients = random_clients(clients=5, length=length)
    weight = sum(n for _, n in clients)
    reference = content(added(clients, weight))
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        assert torch.equal(content(added([clients[i] for i in order], weight), 10**6), reference)
    for split in (1, 3):
        ranks = content(added(clients[:split], weight)) + content(added(clients[split:], weight))
        assert torch.equal(ranks, reference)


def test_zeros_have_no_sign():
    """The only client's -0, and what is too small to count, are 0: as where a rank without clients adds its zeros."""
    out, _ = mean(added([(torch.tensor([-0.0, -1e-30, 0.0, -1.0]), 3)], 3), 4)
    assert out.tolist() == [0, 0, 0, -1]
    assert not torch.signbit(out[:3]).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 65537.0, -65537.0])
def test_bad_values_are_rejected_and_nothing_of_them_is_added(bad):
    length = CHUNK + 5
    total = added([(torch.ones(length), 3)], 10)
    before = content(total)
    poisoned = torch.ones(length)
    poisoned[-1] = bad  # in the last pass, when the first one could have been added already
    low, high = total.add(poisoned, 7)
    assert np.isnan([low, high]).all() if np.isnan(bad) else (low, high) == (min(bad, 1.0), max(bad, 1.0))
    assert torch.equal(content(total), before)
    out, weight = mean(total, length)
    assert weight == 3
    assert torch.equal(out, torch.ones(length))


def test_rejected_first_client_leaves_zeros():
    total = FixedPointSum(2, 10)
    assert total.add(torch.tensor([float("nan"), 1.0]), 5)
    assert content(total).tolist() == [0, 0, 0]


@pytest.mark.parametrize("images", [[1], [2], [3], [1000, 20000, 12345], [2**20], [2**20 + 1], [1] * 50])
def test_largest_allowed_values_do_not_overflow(images):
    largest = torch.tensor([65536.0, -65536.0])
    out, weight = mean(added([(largest, n) for n in images], sum(images)), 2)
    assert out.tolist() == [65536.0, -65536.0]
    assert weight == sum(images)


def test_nobody_delivered():
    total = FixedPointSum(2, 10)
    with pytest.raises(RunError, match="no client of the cohort delivered"):
        mean(total, 2)


def test_clear_forgets_the_last_round():
    total = added([(torch.tensor([8.0]), 4)], 10)
    total.clear()
    assert total.add(torch.tensor([1.0]), 2) is None
    assert mean(total, 1)[0].tolist() == [1.0]
    assert mean(total, 1)[1] == 2
    total.clear()
    assert content(total).tolist() == [0, 0]


def test_bank_takes_the_vector_before_its_memory_is_used_again():
    memory, total = torch.tensor([1.0, 2.0]), FixedPointSum(2, 10)
    total.add(memory, 1)
    total.flush()
    memory.fill_(5.0)
    total.add(memory, 3)
    assert mean(total, 2)[0].tolist() == [4.0, 4.25]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 100])
def test_pieces_of_any_size_hold_the_weight_and_then_every_number(size):
    total = added([(torch.tensor([1.0, 2.0, 3.0, 4.0]), 2)], 2)
    scale = 2.0**total.bits
    pieces = [part.tolist() for part in total.pieces(size)]
    assert [number for piece in pieces for number in piece] == [2, 2 * scale, 4 * scale, 6 * scale, 8 * scale]
    assert all(len(part) == size for part in pieces[:-1])
    assert 0 < len(pieces[-1]) <= size


# --- per-class knowledge

H_BY_CLIENT = {
    "A": [[0.0, 4.0], [0.0, 0.0], [0.0, 0.0]],
    "B": [[4.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
    "C": [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]],
}
COUNT_BY_CLIENT = {"A": [1.0, 0.0, 0.0], "B": [3.0, 0.0, 0.0], "C": [0.0, 5.0, 0.0]}


@pytest.mark.parametrize("order", list(itertools.permutations("ABC")))
def test_knowledge_of_three_clients_in_every_order(order):
    """H0 = (1 [0,4] + 3 [4,0]) / 4; class 1 is C's alone; nobody has class 2. The last client must not win."""
    value = torch.tensor([H_BY_CLIENT[name] for name in order])
    count = torch.tensor([COUNT_BY_CLIENT[name] for name in order])
    mean_CX, total_C = mean_by_count(value, count)
    assert mean_CX.dtype == torch.float32
    assert mean_CX.tolist() == [[3.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    assert total_C.tolist() == [4.0, 5.0, 0.0]


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30])
def test_rows_that_are_not_shared_are_ignored(junk):
    value = torch.tensor([[[2.0], [junk]], [[junk], [6.0]]])
    mean_CX, total_C = mean_by_count(value, torch.tensor([[3.0, 0.0], [0.0, 2.0]]))
    assert mean_CX.tolist() == [[2.0], [6.0]]
    assert total_C.tolist() == [3.0, 2.0]


def test_knowledge_against_float64_numpy():
    random = np.random.default_rng(5)
    value = random.standard_normal((6, 10, 64)).astype(np.float32)
    count = random.integers(0, 4, (6, 10)).astype(np.float32) * random.integers(1, 100, (6, 10))
    mean_CX, _ = mean_by_count(torch.from_numpy(value), torch.from_numpy(count.astype(np.float32)))
    shared = count.sum(0) > 0
    true = np.einsum("mc,mcx->cx", count.astype(np.float64), value.astype(np.float64)) / count.sum(0)[:, None]
    np.testing.assert_allclose(mean_CX.numpy()[shared], true[shared], rtol=0, atol=1e-6)


def test_soft_predictions_still_sum_to_one():
    random = np.random.default_rng(6)
    soft = torch.from_numpy(random.dirichlet(np.ones(10), (4, 10)).astype(np.float32))
    count = torch.from_numpy(random.integers(1, 300, (4, 10)).astype(np.float32))
    mean_CX, _ = mean_by_count(soft, count)
    np.testing.assert_allclose(mean_CX.sum(1).numpy(), 1.0, atol=1e-6)


COUNT_MC = torch.tensor([[1.0, 2.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0], [0.0, 6.0, 5.0, 0.0]])


@pytest.mark.parametrize(
    "rule, weights",
    [
        ("count", [[1, 2, 0, 0], [3, 0, 0, 0], [0, 6, 5, 0]]),
        ("uniform", [[1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0]]),
        ("last", [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0]]),
    ],
)
def test_weights_of_the_clients_that_share_a_class(rule, weights):
    assert sharer_weights(rule, COUNT_MC).tolist() == weights


VALUE_MCX = torch.tensor([[[4.0], [8.0], [9.0], [9.0]], [[8.0], [9.0], [9.0], [9.0]], [[9.0], [16.0], [3.0], [9.0]]])


@pytest.mark.parametrize(
    "rule, means",
    [("count", [7.0, 14.0, 3.0, 0.0]), ("uniform", [6.0, 12.0, 3.0, 0.0]), ("last", [8.0, 16.0, 3.0, 0.0])],
)
def test_knowledge_under_each_rule(rule, means):
    """The 9s stand where nobody shares. count: (4 + 3 * 8) / 4, (2 * 8 + 6 * 16) / 8. Counts are images under all
    rules.
    """
    state = {}
    message = combine_by_class(rule, {"count_C": COUNT_MC, "x": VALUE_MCX, "y": -2 * VALUE_MCX}, state)
    assert message["x"][:, 0].tolist() == means
    assert message["y"][:, 0].tolist() == [-2 * mean for mean in means]
    assert message["count_C"].tolist() == [4.0, 8.0, 5.0, 0.0]
    assert set(state) == (set(message) if rule == "last" else set())


@pytest.mark.parametrize("rule", ["count", "uniform", "last"])
def test_knowledge_under_each_rule_against_float64_numpy(rule):
    random = np.random.default_rng(9)
    count = random.integers(0, 3, (7, 20)) * random.integers(1, 100, (7, 20))
    value = random.standard_normal((7, 20, 5))
    message = combine_by_class(
        rule, {"count_C": torch.from_numpy(count).float(), "x": torch.from_numpy(value).float()}, {}
    )
    for j in np.flatnonzero(count.sum(0)):
        sharers = [i for i in range(7) if count[i, j]]
        true = {
            "count": sum(count[i, j] * value[i, j] for i in sharers) / count[:, j].sum(),
            "uniform": sum(value[i, j] for i in sharers) / len(sharers),
            "last": value[max(sharers), j],
        }[rule]
        np.testing.assert_allclose(message["x"][j].numpy(), true, atol=1e-6)


def one_client(count: list[float], value: list[float]) -> dict[str, torch.Tensor]:
    return {"count_C": torch.tensor([count]), "x": torch.tensor([value])[..., None]}


def test_old_entries_stay_under_the_rule_last_alone():
    """Class 0 in rounds 1 and 3, class 1 in rounds 1 and 2, class 2 never."""
    rounds = one_client([4, 5, 0], [1, 2, 0]), one_client([0, 6, 0], [0, 3, 0]), one_client([7, 0, 0], [4, 0, 0])
    state: dict[str, torch.Tensor] = {}
    last = [combine_by_class("last", reports, state) for reports in rounds]
    assert [message["x"][:, 0].tolist() for message in last] == [[1, 2, 0], [1, 3, 0], [4, 3, 0]]
    assert [message["count_C"].tolist() for message in last] == [[4, 5, 0], [4, 6, 0], [7, 6, 0]]
    for rule in ("count", "uniform"):
        state = {}
        found = [combine_by_class(rule, reports, state)["x"][:, 0].tolist() for reports in rounds]
        assert found == [[1, 2, 0], [0, 3, 0], [4, 0, 0]]
        assert not state
