"""Partitions: sizes, disjointness, determinism, no favoured client, public set, stratified local test sets."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest

from hkd_hpc import config
from hkd_hpc.assembly import federation
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.rng import stream
from hkd_hpc.data import public, sources
from hkd_hpc.data.partition import (
    Labels,
    Partition,
    Rule,
    capped_counts,
    count_MC,
    heuristic_counts,
    make_partition,
    stratified_sizes,
)


def balanced(images: int, classes: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.arange(images) % classes)


def split(labels, *, client_train=None, client_test=None, test_labels=None, **changes) -> Partition:
    rule = Rule(**dict(clients=10, kind="dirichlet", beta=0.5, fraction=1.0, seed=1) | changes)
    test = labels if test_labels is None else test_labels
    return make_partition(Labels(labels, test, int(labels.max()) + 1, client_train, client_test), rule)


def shares(partition: Partition) -> list[np.ndarray]:
    """All images of each client, in train and local test together."""
    return [np.concatenate(pair) for pair in zip(partition.train, partition.test)]


def rejection(labels, **changes) -> str:
    with pytest.raises(UsageError) as caught:
        split(labels, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- sizes and disjointness


@pytest.mark.parametrize(
    "kind, clients, beta",
    [
        ("dirichlet", 100, 0.1),
        ("dirichlet", 50, 0.01),
        ("dirichlet", 10, 1e-3),
        ("dirichlet", 10, 1e6),
        ("dirichlet", 100, 1e-3),
        ("dirichlet", 7, 0.5),
        ("dirichlet", 1, 0.5),
        ("dirichlet", 10, 1e-300),
        ("dirichlet", 10, 1e300),
        ("dirichlet", 600, 0.1),
        ("iid", 100, None),
        ("iid", 7, None),
    ],
)
@pytest.mark.parametrize("fraction, public_fraction", [(1.0, 0.0), (0.9, 0.1), (0.3, 0.05)])
def test_sizes_are_exact_and_nothing_is_assigned_twice(kind, clients, beta, fraction, public_fraction):
    labels = balanced(6000, 10)
    size = int(fraction * 6000 / clients + 1e-9)
    for seed in range(4):
        partition = split(
            labels, kind=kind, clients=clients, beta=beta, fraction=fraction, public_fraction=public_fraction, seed=seed
        )
        assert [len(own) for own in shares(partition)] == [size] * clients
        assert [len(own) for own in partition.test] == [size // 4] * clients
        assert len(partition.public) == round(6000 * public_fraction)
        everything = np.concatenate([*partition.train, *partition.test, partition.public])
        assert len(np.unique(everything)) == len(everything)
        assert everything.min() >= 0
        assert everything.max() < 6000
        for index in (*partition.train, *partition.test, partition.public):
            assert index.dtype == np.int64
            assert np.array_equal(index, np.sort(index))


def test_a_whole_imbalanced_split_is_assigned_to_the_last_image():
    labels = np.repeat(np.arange(4), [1, 10, 100, 889])
    partition = split(labels, beta=0.05)
    counts = partition.train_count_MC(labels) + partition.test_count_MC(labels)
    assert counts.sum(0).tolist() == [1, 10, 100, 889]
    assert counts.sum(1).tolist() == [100] * 10


def test_one_client_gets_everything():
    labels = balanced(40, 2)
    partition = split(labels, clients=1)
    assert sorted(np.concatenate(shares(partition))) == list(range(40))
    assert partition.test_count_MC(labels).tolist() == [[5, 5]]
    assert partition.train_count_MC(labels).tolist() == [[15, 15]]


def test_sizes_round_down_but_not_through_float_error():
    assert len(split(balanced(100, 2), kind="iid", clients=1, fraction=0.29).train[0]) == 29 - 29 // 4
    assert [len(own) for own in shares(split(balanced(103, 2), clients=10))] == [10] * 10


# ---- the class mix


def test_beta_sets_how_uneven_the_clients_are():
    labels = balanced(60_000, 10)

    def largest_share(beta: float) -> float:
        counts = count_MC(shares(split(labels, beta=beta, fraction=0.1)), labels, 10)
        return float((counts.max(1) / counts.sum(1)).mean())

    assert largest_share(1e-3) > 0.95 > largest_share(0.5) > largest_share(5) > 0.105 > largest_share(1e6)


def test_a_large_beta_gives_the_class_frequencies_within_one_image():
    labels = np.repeat(np.arange(3), [5000, 3000, 2000])
    counts = count_MC(shares(split(labels, beta=1e12, fraction=0.5)), labels, 3)
    assert (abs(counts - [250, 150, 100]) <= 1).all()


def test_a_tiny_beta_gives_one_class_as_long_as_there_are_images():
    labels = balanced(10_000, 10)
    counts = count_MC(shares(split(labels, clients=5, beta=1e-6, fraction=0.01)), labels, 10)
    assert (counts.max(1) == 20).all()


def test_dirichlet_moments():
    """q ~ Dir(beta * C * prior): mean prior, variance prior (1 - prior) / (beta C + 1), here 1/4 and (3/16) / 3."""
    labels = balanced(80_000, 4)
    splits = [split(labels, clients=40, beta=0.5, fraction=0.2, seed=seed) for seed in range(25)]
    mixes = np.concatenate([count_MC(shares(partition), labels, 4) / 400 for partition in splits])
    assert mixes.shape == (1000, 4)
    assert np.allclose(mixes.mean(0), 0.25, atol=0.03)
    assert np.allclose(mixes.var(0), 0.0625, atol=0.008)


@pytest.mark.parametrize("kind, beta", [("dirichlet", 0.1), ("dirichlet", 1e-3), ("iid", None)])
def test_no_client_is_favoured_by_its_number(kind, beta):
    """All is assigned, so classes run out. Over many seeds mean and spread of each client's counts must agree."""
    labels = np.repeat(np.arange(3), [20, 40, 60])
    counts_SMC = np.array(
        [count_MC(shares(split(labels, kind=kind, clients=6, beta=beta, seed=seed)), labels, 3) for seed in range(800)]
    )
    for statistic in (counts_SMC, (counts_SMC == 0).astype(float), counts_SMC.astype(float) ** 2):
        error_MC = statistic.std(0) / np.sqrt(len(statistic)) + 1e-9
        assert (abs(statistic.mean(0) - statistic.mean((0, 1))) / error_MC).max() < 4


def test_every_image_is_equally_likely_to_go_to_a_client():
    labels = np.repeat(np.arange(2), [10, 30])
    owner_count = np.zeros((4, 40))
    for seed in range(1000):
        for client, own in enumerate(shares(split(labels, clients=4, beta=0.3, seed=seed))):
            owner_count[client, own] += 1
    assert (abs(owner_count - 250) / np.sqrt(1000 * 0.25 * 0.75)).max() < 4.5


# ---- determinism


def test_a_partition_is_a_function_of_its_inputs():
    labels = balanced(5000, 10)
    first = split(labels)
    assert first.sha256 == split(labels.copy()).sha256
    assert all(np.array_equal(a, b) for a, b in zip(first.train, split(labels).train))
    others = {
        split(labels, **change).sha256
        for change in (
            dict(seed=2),
            dict(beta=0.4),
            dict(clients=9),
            dict(fraction=0.9),
            dict(kind="iid"),
            dict(test_share=0.3),
        )
    }
    assert len(others) == 6
    assert first.sha256 not in others


def test_the_hash_of_known_settings_never_changes():
    assert split(balanced(5000, 10), fraction=0.9).sha256[:16] == "8c9e592f269a161c"
    assert split(balanced(5000, 10), kind="iid").sha256[:16] == "c78d031abdc2ca55"


def test_the_global_generator_is_neither_used_nor_moved():
    np.random.seed(7)
    split(balanced(500, 10))
    assert np.random.random() == 0.07630828937395717


# ---- public set


def test_the_public_set_depends_on_the_seed_and_its_size_alone():
    labels = balanced(5000, 10)
    public = split(labels, fraction=0.5, public_fraction=0.2).public
    assert len(public) == 1000
    for change in (dict(clients=3), dict(beta=9.0), dict(kind="iid"), dict(fraction=0.8), dict(test_share=0.5)):
        assert np.array_equal(split(labels, **(dict(fraction=0.5, public_fraction=0.2) | change)).public, public)
    assert not np.array_equal(split(labels, fraction=0.5, public_fraction=0.2, seed=2).public, public)
    smaller = split(labels, fraction=0.5, public_fraction=0.1).public
    assert np.isin(smaller, public).all()
    assert len(smaller) == 500


def test_no_public_set_by_default():
    assert split(balanced(100, 2)).public.tolist() == []


def test_the_largest_public_fraction_is_named():
    labels = balanced(1000, 10)
    assert "the largest that fits is 0.1" in rejection(labels, fraction=0.9, public_fraction=0.2)
    assert "the largest that fits is 0" in rejection(labels, public_fraction=0.01)
    assert len(split(labels, fraction=0.9, public_fraction=0.1).public) == 100


def public_of(images: int, *overrides: str, needs_public: bool = False, **more) -> Partition:
    """The partition of a run's settings, of images whose classes are 0 1 0 1 ..."""
    labels = np.arange(images) % 2
    data = sources.DataSet("file", 2, *(None,) * 4, **more)
    data = replace(data, y_train=labels, y_test=labels)
    return federation.partition_of(config.resolve(overrides=overrides), data, needs_public)


@pytest.mark.parametrize(
    "images, clients, fraction, public",
    [
        (60, 5, 0.9, 8),  # 10 images a client, 8 of them trained on; 10 are left
        (5000, 150, 1, 25),
        (5000, 10, 0.9, 338),
        (5000, 10, 1, 0),
        (60, 5, 1, 0),
        (61, 60, 1, 1),
        (10, 10, 1, 0),
    ],
)
def test_the_default_public_set_has_a_clients_training_images_or_none(images, clients, fraction, public):
    for kind in ("dirichlet", "iid", "shards"):
        partition = public_of(
            images,
            f"fed.clients={clients}",
            f"data.fraction={fraction}",
            f"data.partition={kind}",
            "data.classes_per_client=1",
        )
        assert len(partition.public) == public
        assigned = np.concatenate(partition.train + partition.test)
        assert len(set(assigned) | set(partition.public)) == clients * int(images * fraction / clients + 1e-9) + public


def test_the_default_public_set_never_rejects():
    for images, counts in ((50_000, range(2, 1001)), (5000, (150,))):
        for clients in counts:
            settings = config.resolve(overrides=[f"fed.clients={clients}", "data.fraction=1"])
            size = images // clients
            assert clients * size + public.fitting_public_images(settings.data, settings.fed.clients, images) <= images
    for clients in range(1, 61):
        for fraction in (0.3, 0.5, 0.77, 0.9, 0.99, 1):
            if int(60 * fraction) >= clients:
                public_of(60, f"fed.clients={clients}", f"data.fraction={fraction}", "data.partition=iid")


@pytest.mark.parametrize(
    "images, clients, most", [(60, 5, 0.9166), (5000, 10, 0.9319), (5000, 150, 1.0), (50_000, 2, 0.7272)]
)
def test_a_scheme_that_needs_public_images_names_the_fraction_that_leaves_them(images, clients, most):
    """60 images, 5 clients: 10 each and 8 public ones are 58; 11 each and 9 are 64. 10 each are given below 55 / 60."""
    assert public.most_with_public_images(clients, images) == most
    settings = f"fed.clients={clients}", "data.partition=iid", "scheme.name=fedmd"
    if most < 1:
        with pytest.raises(UsageError, match=f"data.fraction=1 leaves too few .* of at most {most:g} leaves enough"):
            public_of(images, *settings, "data.fraction=1", needs_public=True)
    assert len(public_of(images, *settings, f"data.fraction={most}", needs_public=True).public) >= 2


def test_natural_clients_without_public_images_are_told_what_fits():
    natural = ("data.name=file", "data.path=x.npz", "data.partition=natural", "fed.clients=2", "scheme.name=fedmd")
    ids = np.arange(100) // 50
    for fraction, words in ((0.9, "at most 0.1 fits"), (1, "both fit as data.fraction=0.9 data.public_fraction=0.1")):
        with pytest.raises(UsageError, match=words):
            public_of(100, *natural, f"data.fraction={fraction}", needs_public=True, client_train=ids)
    told = public_of(
        100, *natural, "data.fraction=0.9", "data.public_fraction=0.1", needs_public=True, client_train=ids
    )
    assert len(told.public) == 10


# ---- local test sets


def rng():
    return stream(0, "test")


def test_stratified_sizes_by_hand():
    assert stratified_sizes(np.array([40, 40, 20]), 0.25, rng()).tolist() == [10, 10, 5]
    # 21 images: 5 for the test, quotas 2.86, 1.67, .48
    assert stratified_sizes(np.array([12, 7, 2]), 0.25, rng()).tolist() == [3, 2, 0]
    # 8 images: 2 for the test, quotas 1.5, .25, .25
    assert stratified_sizes(np.array([6, 1, 1]), 0.25, rng())[0] in (1, 2)
    assert stratified_sizes(np.array([1]), 0.25, rng()).tolist() == [0]
    assert stratified_sizes(np.array([3]), 0.25, rng()).tolist() == [0]
    assert stratified_sizes(np.array([], int), 0.25, rng()).tolist() == []
    assert stratified_sizes(np.array([2, 2]), 0.25, rng()).sum() == 1
    # half of 2 + 2 + 8: quotas 1, 1, 4
    assert stratified_sizes(np.array([2, 2, 8]), 0.5, rng()).tolist() == [1, 1, 4]
    # nine tenths would be 10 images, but each class keeps one
    assert stratified_sizes(np.array([2, 2, 8]), 0.9, rng()).tolist() == [1, 1, 7]


def test_stratified_sizes_of_many_random_clients():
    generator = np.random.default_rng(5)
    for _ in range(500):
        counts = generator.integers(1, 30, generator.integers(1, 12))
        test = stratified_sizes(counts, 0.25, generator)
        assert test.sum() == counts.sum() // 4
        assert (abs(test - counts.sum() // 4 * counts / counts.sum()) < 1).all()
        assert ((counts - test)[counts >= 2] >= 1).all()


def test_ties_do_not_favour_a_class():
    chosen = sum(stratified_sizes(np.array([2, 2]), 0.25, stream(seed, "tie"))[0] for seed in range(400))
    assert abs(chosen - 200) < 50


@pytest.mark.parametrize("size, test_size", [(1, 0), (2, 0), (3, 0), (4, 1), (7, 1), (8, 2), (375, 93)])
def test_test_share_of_small_clients(size, test_size):
    partition = split(balanced(size * 3, 2), clients=3, kind="iid")
    assert [len(own) for own in partition.test] == [test_size] * 3
    assert [len(own) for own in partition.train] == [size - test_size] * 3


def test_local_classes_are_tested_and_trained_alike():
    labels = balanced(5000, 10)
    partition = split(labels, beta=0.2)
    train, test = partition.train_count_MC(labels), partition.test_count_MC(labels)
    assert (abs(test - (train + test) * 0.25) < 1.01).all()
    assert (train[(train + test) > 0] > 0).mean() > 0.97
    assert (train[(train + test) >= 2] >= 1).all()
    assert partition.test_split == "train"


# ---- validation sets


def test_validation_images_are_held_out_from_training_alone():
    """40 images a client, 20 of each class: 10 tested, 30 left, floor(.2 * 30) = 6 held out, 3 of each class."""
    labels = balanced(400, 2)
    settings = dict(clients=5, kind="dirichlet", beta=1e9, fraction=0.5, public_fraction=0.1)
    before, after = split(labels, **settings), split(labels, **settings, val_fraction=0.2)
    assert [len(own) for own in before.val] == [0] * 5
    assert [len(own) for own in after.val] == [6] * 5
    assert [len(own) for own in after.train] == [24] * 5
    assert [len(own) for own in after.test] == [10] * 5
    assert (abs(count_MC(after.val, labels, 2) - 3) <= 1).all()
    for client in range(5):
        assert np.array_equal(after.test[client], before.test[client])
        assert np.array_equal(np.union1d(after.train[client], after.val[client]), before.train[client])
    assert np.array_equal(after.public, before.public)
    everything = np.concatenate([*after.train, *after.val, *after.test, after.public])
    assert len(np.unique(everything)) == len(everything) == 240
    assert all(index.dtype == np.int64 and np.array_equal(index, np.sort(index)) for index in (*after.val, *before.val))


def test_validation_images_change_the_hash_and_come_from_the_seed():
    labels = balanced(400, 2)
    none, some = split(labels), split(labels, val_fraction=0.2)
    assert split(labels, val_fraction=0.0).sha256 == none.sha256 != some.sha256
    assert split(labels, val_fraction=0.2).sha256 == some.sha256 != split(labels, val_fraction=0.3).sha256
    # as a stranger would compute it: per part its name and sizes, then its indices, little-endian
    digest = hashlib.sha256()
    for name, parts in (("train", some.train), ("test", some.test), ("public", [some.public]), ("val", some.val)):
        digest.update(f"{name} {[len(part) for part in parts]}".encode())
        digest.update(b"".join(struct.pack("<q", i) for part in parts for i in part))
    assert some.sha256 == digest.hexdigest()


def test_validation_images_of_small_clients():
    """6 images, 1 tested, 5 left: floor(.5 * 5) = 2 held out; of 1 image none is, whatever the share."""
    partition = split(balanced(12, 2), clients=2, kind="iid", val_fraction=0.5)
    assert [len(own) for own in partition.val] == [2, 2]
    assert [len(own) for own in partition.train] == [3, 3]
    alone = split(balanced(4, 2), clients=4, kind="iid", val_fraction=0.9)
    assert [len(own) for own in alone.train] == [1] * 4
    assert [len(own) for own in alone.val] == [0] * 4
    assert alone.sha256 == split(balanced(4, 2), clients=4, kind="iid").sha256


# ---- natural clients


LABELS = np.array([0, 1] * 12)
IDS = np.repeat([30, 7, 12], [8, 12, 4])


def natural(**changes) -> Partition:
    return split(LABELS, **(dict(kind="natural", clients=3, beta=None, client_train=IDS) | changes))


def test_natural_clients_come_in_the_order_of_their_ids():
    partition = natural()
    assert [sorted(own) for own in shares(partition)] == [list(range(8, 20)), list(range(20, 24)), list(range(8))]
    assert [len(own) for own in partition.test] == [3, 1, 2]
    assert partition.test_split == "train"
    assert partition.test_count_MC(LABELS)[2].tolist() == [1, 1]


def test_natural_clients_with_test_images_of_their_own():
    partition = natural(client_test=np.array([7, 30, 7, 30, 30]))
    assert partition.test_split == "test"
    assert [own.tolist() for own in partition.test] == [[0, 2], [], [1, 3, 4]]
    assert [own.tolist() for own in partition.train] == [list(range(8, 20)), list(range(20, 24)), list(range(8))]


def test_natural_clients_with_validation_images():
    """12, 4 and 8 images, half of each class: floor(.25 * 12) = 3, 1 and 2 held out; the test images stay."""
    partition = natural(client_test=np.array([7, 30, 7, 30, 30]), val_fraction=0.25)
    assert [own.tolist() for own in partition.test] == [[0, 2], [], [1, 3, 4]]
    assert [len(own) for own in partition.val] == [3, 1, 2]
    assert [len(own) for own in partition.train] == [9, 3, 6]
    joined = [sorted([*train, *val]) for train, val in zip(partition.train, partition.val)]
    assert joined == [list(range(8, 20)), list(range(20, 24)), list(range(8))]


def test_natural_clients_of_one_image_and_a_fraction():
    partition = split(
        np.array([0, 1, 0, 1, 0]), kind="natural", clients=2, client_train=np.array([4, 1, 1, 1, 1]), fraction=0.5
    )
    assert [len(own) for own in shares(partition)] == [2, 1]
    assert partition.train[1].tolist() == [0]


def test_natural_clients_give_up_the_public_images():
    partition = natural(fraction=0.5, public_fraction=0.5)
    everything = np.concatenate([*partition.train, *partition.test, partition.public])
    assert len(np.unique(everything)) == len(everything)
    assert len(partition.public) == 12


def test_the_right_number_of_natural_clients_is_named():
    assert "set fed.clients=3" in rejection(LABELS, kind="natural", clients=10, client_train=IDS)
    assert "client_train" in rejection(LABELS, kind="natural", clients=3)


def test_of_more_natural_clients_some_are_chosen_by_the_seed():
    ids = np.arange(400) // 4  # 100 clients
    labels = np.arange(400) % 2
    chosen = {
        (clients, seed): split(labels, kind="natural", clients=clients, seed=seed, client_train=ids)
        for clients, seed in ((10, 0), (20, 0), (10, 1))
    }
    first = chosen[10, 0]
    assert set(first.names) < set(chosen[20, 0].names)
    assert set(first.names) != set(chosen[10, 1].names)
    assert [sorted(own) for own in shares(first)] == [list(range(4 * int(n), 4 * int(n) + 4)) for n in first.names]
    assert first.remark == "10 of 100 clients chosen (seed 0)"


def test_small_natural_clients_are_left_out():
    partition = natural(clients=2, min_images=8)
    assert partition.names == ("7", "30")
    assert partition.remark == "1 client with fewer than 8 images left out"
    assert [len(own) for own in shares(partition)] == [12, 8]
    told = rejection(LABELS, kind="natural", clients=3, client_train=IDS, min_images=8)
    assert told == "fed.clients=3: client_train names 2 clients with 8 or more images; set fed.clients=2"
    told = rejection(LABELS, kind="natural", clients=3, client_train=IDS, min_images=13)
    assert told == "data.min_images=13: the largest of 3 clients has 12"


def test_names_of_natural_clients_are_those_of_the_chosen():
    labels = Labels(LABELS, LABELS, 2, np.repeat([2, 0, 1], [8, 12, 4]), client_names=("ann", "bob", "zoë"))
    rule = Rule(clients=2, kind="natural", seed=1, fraction=1.0, min_images=8)
    assert make_partition(labels, rule).names == ("ann", "zoë")


# ---- quantity skew


@pytest.mark.parametrize("beta, min_images", [(0.1, None), (0.5, 20), (1e-300, 1), (1e9, 450)])
def test_clients_of_unequal_sizes_have_one_class_mix(beta, min_images):
    labels = np.repeat(np.arange(5), [2500, 1000, 1000, 300, 200])
    partition = split(labels, kind="quantity", fraction=0.9, public_fraction=0.1, beta=beta, min_images=min_images)
    owned = shares(partition)
    sizes = np.array([len(own) for own in owned])
    assert sizes.sum() == 4500
    assert sizes.min() >= (min_images or 1)
    assert len(np.unique(np.concatenate([*owned, partition.public]))) == 5000
    count = count_MC(owned, labels, 5)
    pool_C = np.bincount(np.delete(labels, partition.public), minlength=5)
    assert (abs(count - sizes[:, None] * pool_C / pool_C.sum()) <= 4).all()  # whatever the size


def test_sizes_follow_beta():
    labels = balanced(5000, 10)

    def largest(beta: float, **more) -> int:
        return max(len(own) for own in shares(split(labels, kind="quantity", beta=beta, **more)))

    assert largest(1e9) <= 501
    assert 700 < largest(0.5) < 4900
    assert largest(1e-300, min_images=30) == 5000 - 9 * 30  # one client has all that is beyond the fewest
    assert split(labels, kind="quantity").sha256[:16] == split(labels, kind="quantity").sha256[:16]
    assert split(labels, kind="quantity", seed=2).sha256 != split(labels, kind="quantity").sha256


def test_moments_of_the_sizes():
    """Dir(.5, .5, .5, .5): mean 1/4, variance (1/4)(3/4) / (2 + 1) = .0625."""
    labels = np.zeros(400, np.int64)
    size_SM = np.array(
        [[len(own) for own in shares(split(labels, kind="quantity", clients=4, seed=seed))] for seed in range(300)]
    )
    share_SM = (size_SM - 1) / 396  # each has one image before the rest is shared
    assert np.allclose(share_SM.mean(0), 0.25, atol=0.06)
    assert np.allclose(share_SM.var(0), 0.0625, atol=0.02)


@pytest.mark.parametrize("kind", ["dirichlet", "iid", "shards", "quantity"])
def test_what_all_clients_cannot_have_is_rejected(kind):
    told = rejection(balanced(1000, 10), kind=kind, min_images=101)
    assert told.startswith("data.min_images=101: 10 clients get 100 images each; lower it or fed.clients")
    assert len(split(balanced(1000, 10), kind=kind, min_images=100).train) == 10


def test_the_heuristic_draws_until_clients_have_enough():
    partition = split(balanced(1000, 10), kind="heuristic", min_images=60)
    assert min(len(own) for own in partition.train) >= 60


# ---- shards


def test_shards_by_hand():
    """6 + 6 images, 3 clients of 2 shards: 6 shards of 2 images, 3 of each class; 1 of a client's 4 is tested."""
    labels = np.array([0, 1] * 6)
    for seed in range(20):
        partition = split(labels, kind="shards", clients=3, beta=None, seed=seed)
        counts = count_MC(shares(partition), labels, 2)
        assert counts.sum(1).tolist() == [4, 4, 4]
        assert counts.sum(0).tolist() == [6, 6]
        assert not (counts % 2).any()
        assert [len(own) for own in partition.test] == [1, 1, 1]
        assert partition.test_split == "train"


def test_a_shard_across_the_border_of_two_classes():
    """4 + 8 images in 4 shards of 3: 000 011 111 111."""
    labels = np.repeat([0, 1], [4, 8])
    counts = count_MC(shares(split(labels, kind="shards", clients=4, classes_per_client=1)), labels, 2)
    assert sorted(counts.tolist()) == [[0, 3], [0, 3], [1, 2], [3, 0]]


def test_shards_of_a_part_of_the_data():
    """.4 of 1000 images in 20 shards of 20: 40 of each class, so that no shard has two."""
    labels = balanced(1000, 10)
    partition = split(labels, kind="shards", fraction=0.4)
    counts = count_MC(shares(partition), labels, 10)
    assert counts.sum(1).tolist() == [40] * 10
    assert counts.sum(0).tolist() == [40] * 10
    assert not (counts % 20).any()
    everything = np.concatenate(shares(partition))
    assert len(np.unique(everything)) == 400


def test_shards_beside_a_public_set_and_of_a_size_that_does_not_divide():
    """floor(.5 * 103 / 6) = 8 images in each of 6 shards."""
    labels = balanced(103, 3)
    partition = split(labels, kind="shards", clients=2, classes_per_client=3, fraction=0.5, public_fraction=0.5)
    everything = np.concatenate([*shares(partition), partition.public])
    assert [len(own) for own in shares(partition)] == [24, 24]
    assert len(np.unique(everything)) == len(everything) == 99


def test_shards_are_assigned_at_random():
    """32 of 40 images in 8 shards: each image is equally often each client's, each pair of shards equally likely."""
    labels = np.repeat(np.arange(4), 10)
    owner_count = np.zeros((4, 40))
    one_class = 0
    for seed in range(1000):
        own = shares(split(labels, kind="shards", clients=4, fraction=0.8, seed=seed))
        one_class += (count_MC(own, labels, 4).max(1) == 8).sum()
        for client, index in enumerate(own):
            owner_count[client, index] += 1
    # a client has 8 of 40 images; the second of its 2 shards is the other one of its class in 1 of 7 cases
    assert (abs(owner_count - 200) / np.sqrt(1000 * 0.2 * 0.8)).max() < 4.5
    assert abs(one_class - 4000 / 7) < 100


# ---- the heuristic of released code


def heuristic(labels, test_labels, **changes) -> Partition:
    return split(labels, **(dict(kind="heuristic", clients=5, test_labels=test_labels) | changes))


def test_capped_counts_by_hand():
    """Cap 15: after two classes client 0 has 9 + 6 and gets nothing of the third. Its test images: cap 3.5, 3 < 3.5."""
    share_CM = np.array([[0.9, 0.1], [0.6, 0.4], [0.99, 0.01]])
    assert capped_counts(share_CM, np.array([10, 10, 10])).tolist() == [[9, 6, 0], [1, 4, 10]]
    assert capped_counts(share_CM, np.array([4, 0, 3])).tolist() == [[3, 0, 2], [1, 0, 1]]
    # three clients, cap 4: with 3 + 1 images two are full
    three = np.array([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5], [0.2, 0.2, 0.6]])
    assert capped_counts(three, np.array([6, 4, 2])).tolist() == [[3, 1, 0], [3, 1, 0], [0, 2, 2]]
    assert capped_counts(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([5, 5])) is None
    assert capped_counts(np.array([[1.0], [1.0]]), np.array([5, 0])).tolist() == [[5, 0]]


@pytest.mark.parametrize("clients, smallest, largest", [(10, 0.54, 1.40), (20, 0.43, 1.57), (50, 0.34, 1.87)])
def test_how_unequal_the_clients_of_the_heuristic_are(clients, smallest, largest):
    """Least and most images over the mean, at beta .5 with CIFAR-10's counts, as simulated from the released code."""
    sizes = (
        np.array(
            [
                heuristic_counts(np.full(10, 5000), np.full(10, 1000), clients, 0.5, stream(seed, "x"))[0].sum(1)
                for seed in range(150)
            ]
        )
        * clients
        / 50_000
    )
    assert abs(sizes.min(1).mean() - smallest) < 0.04
    assert abs(sizes.max(1).mean() - largest) < 0.06


def test_the_heuristic_draws_with_replacement():
    """With fraction 1 a client draws n_i of n_i training and 2 t_i of t_i test images: 1 - 1/e and 1 - 1/e^2."""
    labels, test_labels = balanced(20_000, 10), balanced(10_000, 10)
    whole = heuristic(labels, test_labels, public_fraction=0.0)
    trains, tests = [len(own) for own in whole.train], [len(own) // 2 for own in whole.test]
    assert sum(trains) == 20_000
    assert sum(tests) == 10_000
    assert len(set(trains)) > 1
    assert whole.test_split == "test"
    part = heuristic(labels, test_labels, fraction=0.37)
    assert [len(own) for own in part.train] == [int(0.37 * n) for n in trains]
    assert [len(own) for own in part.test] == [int(2 * 0.37 * t) for t in tests]
    distinct, distinct_test = (np.concatenate([np.unique(own) for own in parts]) for parts in (whole.train, whole.test))
    assert abs(len(distinct) / 20_000 - 0.632) < 0.015
    assert abs(len(distinct_test) / 10_000 - 0.865) < 0.015
    # no image is two clients'
    assert len(np.unique(distinct)) == len(distinct)
    assert len(np.unique(distinct_test)) == len(distinct_test)


def test_the_heuristic_cuts_train_and_test_alike_and_the_test_in_its_order():
    labels, test_labels = balanced(20_000, 4), balanced(10_000, 4)
    partition = heuristic(labels, test_labels, clients=3)
    train = partition.train_count_MC(labels) / 5000
    assert (abs(train - partition.test_count_MC(test_labels) / 5000) < 0.05).all()
    for label in range(4):
        own = [index[test_labels[index] == label] for index in partition.test]
        order = np.concatenate([part for part in own if len(part)])
        assert (np.diff(order) >= 0).all()


def test_the_heuristic_leaves_the_public_images_alone():
    labels = balanced(5000, 10)
    partition = heuristic(labels, balanced(1000, 10), fraction=0.5, public_fraction=0.2)
    assert np.array_equal(partition.public, split(labels, fraction=0.5, public_fraction=0.2).public)
    assert not np.isin(np.concatenate(partition.train), partition.public).any()


def test_the_heuristic_keeps_copies_of_an_image_on_one_side():
    labels, test_labels = balanced(2000, 4), balanced(1000, 4)
    before, after = (heuristic(labels, test_labels, val_fraction=share) for share in (0.0, 0.25))
    for client in range(5):
        train, val = after.train[client], after.val[client]
        assert not np.intersect1d(train, val).size
        assert np.array_equal(np.sort([*train, *val]), before.train[client])
        assert len(np.unique(val)) == len(np.unique(before.train[client])) // 4
        assert np.array_equal(after.test[client], before.test[client])


def test_the_heuristic_is_a_function_of_its_inputs_and_ends():
    labels, test_labels = balanced(5000, 10), balanced(1000, 10)
    first = heuristic(labels, test_labels).sha256
    assert first == heuristic(labels, test_labels).sha256
    assert first not in {
        heuristic(labels, test_labels, **change).sha256
        for change in (dict(seed=2), dict(beta=0.4), dict(clients=6), dict(fraction=0.9))
    }
    message = rejection(labels, kind="heuristic", clients=50, beta=0.01, test_labels=test_labels)
    assert "none of 1000 draws with data.beta=0.01" in message
    assert "raise data.beta or lower fed.clients" in message
    assert "fewer than 10 for each" in rejection(labels, kind="heuristic", clients=501, test_labels=test_labels)


# ---- rejections


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(clients=2000), ["fed.clients=2000", "1000 training images is 1000", "fewer than one for each"]),
        (dict(clients=100, fraction=0.05), ["data.fraction=0.05 of 1000", "is 50"]),
        (dict(clients=0), ["fed.clients=0"]),
        (dict(beta=0.0), ["data.beta=0.0"]),
        (dict(beta=-1), ["data.beta=-1"]),
        (dict(beta=float("nan")), ["data.beta=nan"]),
        (dict(beta=float("inf")), ["data.beta=inf"]),
        (dict(beta=None), ["data.beta=None"]),
        (dict(fraction=0.0), ["data.fraction=0.0"]),
        (dict(fraction=1.5), ["data.fraction=1.5"]),
        (dict(fraction=float("nan")), ["data.fraction=nan"]),
        (dict(public_fraction=-0.1), ["data.public_fraction=-0.1"]),
        (dict(public_fraction=float("nan")), ["nan"]),
        (dict(kind="moon"), ["data.partition='moon'", "dirichlet, iid, natural"]),
        (dict(kind="heuristic", beta=0.0), ["data.beta=0.0"]),
        (dict(kind="shards", classes_per_client=11), ["data.classes_per_client=11", "10 classes", "1 to 10"]),
        (dict(kind="shards", clients=60, fraction=0.1), ["data.classes_per_client=2", "is 100", "each of 120 shards"]),
        (dict(test_share=1.0), ["test_share=1.0"]),
        (dict(val_fraction=1.0), ["data.val_fraction=1.0"]),
        (dict(val_fraction=-0.1), ["data.val_fraction=-0.1"]),
        (dict(val_fraction=float("nan")), ["data.val_fraction=nan"]),
    ],
)
def test_settings_that_cannot_be_met(changes, words):
    message = rejection(balanced(1000, 10), **changes)
    assert all(word in message for word in words), message
