"""Who gets which training image: equal clients with a Dirichlet class mix, IID or of shards, clients of unequal sizes,
or the data's own clients.

A partition is a pure function of (labels, settings, seed). Index arrays count into the official splits; no training
image is used twice, by two clients or by a client and the public set. "heuristic" alone repeats images within a client,
as the code it is compared with does, never across clients or parts. Axes: M clients, C classes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.rng import stream
from hkd_hpc.common.words import counted

KINDS = ("dirichlet", "iid", "natural", "shards", "quantity", "heuristic")
HEURISTIC_MIN_IMAGES = 10  # training images of the smallest client before its own draw
HEURISTIC_DRAWS = 1000
Indices = Sequence[np.ndarray]  # of each client, into a split
Divided = tuple[Indices, Indices]  # each client's images of the training split, and of the official test split, if any


@dataclass(frozen=True)
class Partition:
    """Sorted int64 indices: `train`, `val` and `public` into the training split, `test` into the split `test_split`.

    `names` are those of natural clients, empty where these are their numbers; `remark` says which of the data's clients
    take part, where not all do.
    """

    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]
    test_split: str
    public: np.ndarray
    classes: int
    sha256: str
    val: tuple[np.ndarray, ...]
    names: tuple[str, ...] = ()
    remark: str = ""

    @property
    def repeats_training_images(self) -> bool:
        """Whether an image is several inputs of a client's training."""
        return repeats(self.train)

    def train_count_MC(self, labels: np.ndarray) -> np.ndarray:
        """Training images per client and class, (M,C) int64, from the training split's labels (N,)."""
        return count_MC(self.train, labels, self.classes)

    def test_count_MC(self, labels: np.ndarray) -> np.ndarray:
        """Local test images per client and class, (M,C) int64, from the labels of the split that `test_split` names."""
        return count_MC(self.test, labels, self.classes)


def repeats(pieces: Iterable[np.ndarray]) -> bool:
    """Whether an image is in one of these pieces twice."""
    return any(len(np.unique(own)) < len(own) for own in pieces)


def count_MC(indices: tuple[np.ndarray, ...] | list[np.ndarray], labels: np.ndarray, classes: int) -> np.ndarray:
    """Images per client and class, (M,C) int64."""
    return np.array([np.bincount(labels[index], minlength=classes) for index in indices], np.int64)


@dataclass(frozen=True)
class Labels:
    """What a partition sees of the data.

    Attributes:
        train: (N,) labels of the training split, in 0..classes-1.
        test: labels of the official test split.
        classes: C.
        client_train: (N,) client ids of the training images, for "natural".
        client_test: ids of the official test split; given, a client's local test set is its share of that.
        client_names: of the client ids 0, 1 ..., where these were names.
    """

    train: np.ndarray
    test: np.ndarray
    classes: int
    client_train: np.ndarray | None = None
    client_test: np.ndarray | None = None
    client_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """How training images are divided among clients.

    "dirichlet" and "iid" give each client floor(fraction * N / clients) images. Client i's class mix is drawn from
    Dir(beta * classes * prior), prior being the class frequencies; a small beta gives clients of few classes. "shards"
    gives each client `classes_per_client` shards of floor(fraction * N / all shards) images (`_shards`). "quantity"
    shares what "iid" gives to all unequally, sizes drawn from a Dirichlet distribution (`_quantity`). "natural"
    follows the client ids; each client keeps floor(fraction * its images), at least one; of more ids than `clients`
    some are chosen (`natural_ids`). "heuristic" partitions as released code does (`_heuristic`), the official test
    split in the same proportions.

    Attributes:
        clients: M.
        kind: one of KINDS.
        seed: of all draws.
        fraction: share of the training split for all clients together.
        public_fraction: share of it for the public set.
        beta: concentration, for "dirichlet", "quantity" and "heuristic".
        classes_per_client: for "shards".
        test_share: floor(test_share * size) of a client's images are its local test set, stratified by class.
        val_fraction: floor(val_fraction * size) of what is left to train on is held out for validation, stratified;
            public and test sets do not depend on it.
        min_images: fewest images of a client, those held out included; None: 1, for "heuristic" 10. "quantity" gives
            each as many before it shares the rest out, "heuristic" draws again, "natural" leaves smaller clients out;
            where all clients have one size, a smaller one is rejected.
    """

    clients: int
    kind: str
    seed: int
    fraction: float
    public_fraction: float = 0.0
    beta: float = 0.5
    classes_per_client: int = 2
    test_share: float = 0.25
    val_fraction: float = 0.0
    min_images: int | None = None


def make_partition(labels: Labels, rule: Rule) -> Partition:
    """Set the public images aside and divide the other training images among the clients.

    Args:
        labels: of the data.
        rule: how they are divided.

    Returns:
        The partition, a pure function of the arguments.

    Raises:
        UsageError: settings that cannot be met.
    """
    _check_rule(rule)
    pool, public = _set_aside(len(labels.train), rule.public_fraction, rule.seed)
    owned, official_test = DIVIDE[rule.kind](labels, pool, rule)
    train, test = owned, official_test
    if not official_test:
        train, test = _hold_out_each(owned, labels.train, rule.test_share, rule.seed, "partition/test")
    train, val = _hold_out_each(train, labels.train, rule.val_fraction, rule.seed, "partition/val")
    made = _partition(train, val, test, "test" if official_test else "train", public, labels.classes)
    return _with_names(made, labels, rule) if rule.kind == "natural" else made


def _partition(
    train: Sequence[np.ndarray],
    val: Sequence[np.ndarray],
    test: Sequence[np.ndarray],
    test_split: str,
    public: np.ndarray,
    classes: int,
) -> Partition:
    train, val, test = (tuple(map(_sorted, parts)) for parts in (train, val, test))
    public = _sorted(public)
    return Partition(train, test, test_split, public, classes, partition_sha256(train, val, test, public), val)


def partition_sha256(
    train: Sequence[np.ndarray], val: Sequence[np.ndarray], test: Sequence[np.ndarray], public: np.ndarray
) -> str:
    """64 hex digits over the sorted indices of all clients and of the public set."""
    named = {"train": train, "test": test, "public": (public,)}
    if any(map(len, val)):  # else the hash is that of the same partition before there were validation sets
        named["val"] = val
    digest = hashlib.sha256()
    for name, arrays in named.items():
        digest.update(f"{name} {[len(array) for array in arrays]}".encode())
        for array in arrays:
            digest.update(array.astype("<i8").tobytes())
    return digest.hexdigest()


def _sorted(index: np.ndarray) -> np.ndarray:
    return np.sort(np.asarray(index, np.int64))


# ---------------------------------------------------------------------------------------------- sizes


def floor(value: float) -> int:
    """floor that takes 28.999999999999996, which is .29 * 100, for 29."""
    return math.floor(value + 1e-9)


def _check_rule(rule: Rule) -> None:
    if rule.kind not in KINDS:
        raise UsageError(f"data.partition={rule.kind!r}: allowed are {', '.join(KINDS)}")
    if rule.clients < 1:
        raise UsageError(f"fed.clients={rule.clients}: allowed are integers >= 1")
    if rule.kind in ("dirichlet", "quantity", "heuristic") and not (rule.beta is not None and 0 < rule.beta < math.inf):
        raise UsageError(f"data.beta={rule.beta}: allowed are finite numbers > 0")
    if not 0 < rule.fraction <= 1:
        raise UsageError(f"data.fraction={rule.fraction}: allowed is 0 < fraction <= 1")
    shares = {"data.public_fraction": rule.public_fraction, "data.val_fraction": rule.val_fraction}
    for key, share in (shares | {"test_share": rule.test_share}).items():
        if not 0 <= share < 1:
            raise UsageError(f"{key}={share}: allowed is 0 <= {key.removeprefix('data.')} < 1")


def _equal_size(images: int, public: int, rule: Rule) -> int:
    """Images of each client, where all have as many."""
    clients, fraction = rule.clients, rule.fraction
    size = floor(fraction * images / clients)
    if clients * size + public > images:
        raise UsageError(
            f"data.public_fraction={public / images:g} does not fit beside data.fraction={fraction}: "
            f"the largest that fits is {round(1 - fraction, 9):g}"
        )
    if size < 1:
        raise UsageError(
            f"fed.clients={clients}: data.fraction={fraction} of {images} training images is "
            f"{floor(fraction * images)}, fewer than one for each client; "
            "lower fed.clients or raise data.fraction"
        )
    _check_min_images(size, rule)
    return size


def _check_min_images(size: int, rule: Rule) -> None:
    """UsageError if clients that all have `size` images, or as many on average, have fewer than they are to have."""
    if rule.min_images and size < rule.min_images:
        raise UsageError(
            f"data.min_images={rule.min_images}: {rule.clients} clients get {size} images each; "
            "lower it or fed.clients, or raise data.fraction"
        )


def _set_aside(images: int, public_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(pool for the clients, public set): depends on nothing but the number of images, the seed and public_fraction."""
    order = stream(seed, "partition/public").permutation(images)
    size = floor(public_fraction * images)
    return np.sort(order[size:]), np.sort(order[:size])


# ---------------------------------------------------------------------------------------------- who owns what


def _iid(labels: Labels, pool: np.ndarray, rule: Rule) -> Divided:
    size = _equal_size(len(labels.train), len(labels.train) - len(pool), rule)
    order = stream(rule.seed, "partition/iid").permutation(pool)
    return list(order[: rule.clients * size].reshape(rule.clients, size)), []


def _shards(labels: Labels, pool: np.ndarray, rule: Rule) -> Divided:
    """Shards of images sorted by class (McMahan et al. 2017, section 3), `classes_per_client` of them to each client.

    S = clients * classes_per_client shards of z = floor(fraction * N / S) images: the pool is sorted by label, at
    random within a class; every (pool / (S z))-th image of it is taken, which keeps the class frequencies within one
    image; these are cut into S shards in a row, assigned at random without replacement. All clients have
    classes_per_client * z images. A shard across the border of two classes has both, and two shards of a client may be
    of one class.
    """
    images, per_client = len(labels.train), rule.classes_per_client
    _equal_size(images, images - len(pool), rule)  # shards too must fit beside the public set
    shards = rule.clients * per_client
    size = _shard_size(images, labels.classes, rule)
    _check_min_images(per_client * size, rule)
    rng = stream(rule.seed, "partition/shards")
    shuffled = rng.permutation(pool)
    ordered = shuffled[np.argsort(labels.train[shuffled], kind="stable")]
    taken = ordered[np.arange(shards * size) * len(pool) // (shards * size)].reshape(shards, size)
    return list(taken[rng.permutation(shards)].reshape(rule.clients, per_client * size)), []


def _shard_size(images: int, classes: int, rule: Rule) -> int:
    """Images of a shard. UsageError where there is none, or more shards for a client than classes."""
    per_client, fraction = rule.classes_per_client, rule.fraction
    if per_client > classes:
        raise UsageError(
            f"data.classes_per_client={per_client}: the data have {classes} classes; allowed is 1 to {classes}"
        )
    shards = rule.clients * per_client
    size = floor(fraction * images / shards)
    if size < 1:
        raise UsageError(
            f"data.classes_per_client={per_client}: data.fraction={fraction} of {images} training "
            f"images is {floor(fraction * images)}, fewer than one for each of {shards} shards; "
            "lower it or fed.clients, or raise data.fraction"
        )
    return size


def _quantity(labels: Labels, pool: np.ndarray, rule: Rule) -> Divided:
    """Clients of one class mix and unequal sizes: `min_images` each, and Dir(beta, ..., beta) shares of what is left.

    All together have as many images as "iid" gives them.
    """
    images = len(labels.train)
    total = rule.clients * _equal_size(images, images - len(pool), rule)
    rng = stream(rule.seed, "partition/quantity")
    size_M = _unequal_sizes(total, rule.min_images or 1, np.full(rule.clients, rule.beta), rng)
    order = _evenly_mixed(labels.train, pool, rng)[:total]
    return np.split(order, np.cumsum(size_M)[:-1]), []


def _unequal_sizes(total: int, min_images: int, alpha_M: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(M,) whole numbers of this sum, none below `min_images`; what is beyond is shared by a draw from Dir(alpha)."""
    share_1M = _softmax(_log_mix(alpha_M, rng)[None])
    return min_images + _round_rows(share_1M, total - min_images * len(alpha_M), rng)[0]


def _evenly_mixed(labels: np.ndarray, pool: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The pool in a random order in which each class is spread evenly: every stretch has nearly the whole's mix."""
    shuffled = rng.permutation(pool)
    place = np.empty(len(pool))
    for label in np.unique(labels[pool]):
        own = np.flatnonzero(labels[shuffled] == label)
        place[own] = (np.arange(len(own)) + rng.random()) / len(own)
    return shuffled[np.argsort(place, kind="stable")]


def _natural(labels: Labels, pool: np.ndarray, rule: Rule) -> Divided:
    """The images of each client id, in the order of the ids; a client that the public set emptied stays, with none."""
    client_train = _given_ids(labels)
    owned, ids = [], natural_ids(client_train, rule)
    sizes = map(len, _places(client_train, ids))
    for client, (place, size) in enumerate(zip(_places(client_train[pool], ids), sizes)):
        order = stream(rule.seed, "partition/natural", client=client).permutation(pool[place])
        owned.append(order[: max(1, floor(rule.fraction * size))])
    return owned, [] if labels.client_test is None else _places(labels.client_test, ids)


def _places(number_N: np.ndarray, wanted: np.ndarray) -> list[np.ndarray]:
    """Where each of the wanted numbers stands, ascending."""
    order = np.argsort(number_N, kind="stable")
    first, after = (np.searchsorted(number_N[order], wanted, side=side) for side in ("left", "right"))
    return [order[a:b] for a, b in zip(first, after)]


def _given_ids(labels: Labels) -> np.ndarray:
    if labels.client_train is None:
        raise UsageError("data.partition=natural needs client ids: data.name=file with the key client_train")
    return labels.client_train


def natural_ids(client_train: np.ndarray, rule: Rule) -> np.ndarray:
    """The ids of the natural clients, sorted: of all with `min_images` or more, as many as there are to be.

    They are chosen at random where there are more; a choice of 10 is a part of that of 20.
    """
    eligible = eligible_ids(client_train, rule.min_images)
    if rule.clients > len(eligible):
        enough = f" with {rule.min_images} or more images" if rule.min_images else ""
        raise UsageError(
            f"fed.clients={rule.clients}: client_train names {len(eligible)} clients{enough}; "
            f"set fed.clients={len(eligible)}"
        )
    order = stream(rule.seed, "partition/natural clients").permutation(eligible)
    return np.sort(order[: rule.clients])


def eligible_ids(client_train: np.ndarray, min_images: int | None) -> np.ndarray:
    """The sorted ids, or names, that as many images have. UsageError where there is none."""
    ids, image_count = np.unique(client_train, return_counts=True)
    eligible = ids[image_count >= (min_images or 1)]
    if not len(eligible):
        raise UsageError(f"data.min_images={min_images}: the largest of {len(ids)} clients has {image_count.max()}")
    return eligible


def _with_names(partition: Partition, labels: Labels, rule: Rule) -> Partition:
    """With the names, or else the numbers, that natural clients have in the data, and which of these they are."""
    client_train = _given_ids(labels)
    ids, everybody = natural_ids(client_train, rule), np.unique(client_train)
    eligible = eligible_ids(client_train, rule.min_images)
    chosen = f"{len(ids)} of {len(eligible)} clients chosen (seed {rule.seed})" * (len(ids) < len(eligible))
    left_out = len(everybody) - len(eligible)
    small = f"{counted(left_out, 'client')} with fewer than {rule.min_images} images left out" * bool(left_out)
    names = [labels.client_names[number] if labels.client_names else str(number) for number in ids]
    if not labels.client_names and np.array_equal(ids, np.arange(len(ids))):
        names = []
    return replace(partition, names=tuple(names), remark="; ".join(filter(None, (chosen, small))))


def _dirichlet(labels: Labels, pool: np.ndarray, rule: Rule) -> Divided:
    size = _equal_size(len(labels.train), len(labels.train) - len(pool), rule)
    prior_C = np.bincount(labels.train, minlength=labels.classes) / len(labels.train)
    available_C = np.bincount(labels.train[pool], minlength=labels.classes)
    alpha_C = rule.beta * labels.classes * prior_C
    log_mix_MC = np.array(
        [_log_mix(alpha_C, stream(rule.seed, "partition/mix", client=client)) for client in range(rule.clients)]
    )
    rng = stream(rule.seed, "partition/round")
    count_MC = _round_rows(_share_out(log_mix_MC, size, available_C), size, rng)
    _return_excess(count_MC, log_mix_MC, available_C, rng)
    return _cut_classes(labels.train, pool, count_MC, rule.seed), []


def _cut_classes(labels: np.ndarray, pool: np.ndarray, count_MC: np.ndarray, seed: int) -> list[np.ndarray]:
    """Each client's images: of each class, shuffled, as many as it is to have."""
    pieces = [
        _cut(pool[labels[pool] == label], count_M, stream(seed, "partition/class", client=label))
        for label, count_M in enumerate(count_MC.T)
    ]
    return [np.concatenate(own) for own in zip(*pieces)]


def _cut(images: np.ndarray, count_M: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle one class and cut it into pieces of the given sizes; what is left over is nobody's."""
    return np.split(rng.permutation(images), np.cumsum(count_M))[:-1]


# ---------------------------------------------------------------------------------------------- Dirichlet


def _log_mix(alpha_C: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Logarithm of a Dirichlet draw, not normalised: finite at any alpha > 0, -inf where alpha is 0.

    Gamma(a) = Gamma(a + 1) * U^(1/a), taken in logarithms: for a tiny alpha the plain draw is zero everywhere.
    """
    alpha = np.clip(alpha_C, 1e-200, 1e200)
    log_gamma = np.log(rng.standard_gamma(alpha + 1)) + np.log(1 - rng.random(len(alpha))) / alpha
    return np.where(alpha_C > 0, log_gamma, -np.inf)


def _share_out(log_mix_MC: np.ndarray, size: int, available_C: np.ndarray) -> np.ndarray:
    """Images per client and class as real numbers: rows sum to `size`, no column exceeds what is available.

    Every client asks by its own mix among the classes with images left. Where all ask for more than there is, all get
    the same part of their wish, the class is used up, and what is missing is asked for again elsewhere. Each pass but
    the last uses up a class, so there are at most C passes.
    """
    share_MC = np.zeros(log_mix_MC.shape)
    need_M, left_C = np.full(len(log_mix_MC), float(size)), available_C.astype(float)
    while (left_C > 0).any():
        wish_MC = need_M[:, None] * _softmax(np.where(left_C > 0, log_mix_MC, -np.inf))
        asked_C = wish_MC.sum(0)
        full_C = (asked_C > left_C) | (left_C == 0)
        part_C = np.where(full_C, left_C / np.maximum(asked_C, 1e-300), 1.0)
        share_MC += wish_MC * part_C
        if not (full_C & (left_C > 0)).any():
            break
        need_M = np.maximum(need_M - (wish_MC * part_C).sum(1), 0)
        left_C = np.where(full_C, 0, left_C - asked_C)
    return share_MC


def _softmax(log_mix_MC: np.ndarray) -> np.ndarray:
    mix_MC = np.exp(log_mix_MC - log_mix_MC.max(1, keepdims=True))
    return mix_MC / mix_MC.sum(1, keepdims=True)


def _round_rows(share_MC: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Integers whose expectation is `share_MC` and whose rows sum to `size` exactly: one random shift for each row."""
    edge_MC = np.cumsum(share_MC, axis=1)
    edge_MC *= size / edge_MC[:, -1:]
    edge_MC = np.minimum(np.floor(edge_MC + rng.random((len(share_MC), 1))), size)
    edge_MC[:, -1] = size
    return np.diff(edge_MC, axis=1, prepend=0).astype(np.int64)


def _return_excess(
    count_MC: np.ndarray, log_mix_MC: np.ndarray, available_C: np.ndarray, rng: np.random.Generator
) -> None:
    """Take back, in place, what rounding gave beyond a class's images; its owners draw again from their own mixes.

    The images taken back are a random draw from all that were given, and their owners choose in random order, so that
    no client is favoured. Every image finds an owner, because all clients together never get more than there is.
    """
    taken_back = []
    for label in np.flatnonzero(count_MC.sum(0) > available_C):
        taken_M = rng.multivariate_hypergeometric(count_MC[:, label], count_MC[:, label].sum() - available_C[label])
        count_MC[:, label] -= taken_M
        taken_back.append(np.repeat(np.arange(len(taken_M)), taken_M))
    left_C = available_C - count_MC.sum(0)
    for client in rng.permutation(np.concatenate(taken_back)) if taken_back else ():
        label = np.argmax(np.where(left_C > 0, log_mix_MC[client] + rng.gumbel(size=len(left_C)), -np.inf))
        count_MC[client, label] += 1
        left_C[label] -= 1


# ---------------------------------------------------------------------------------------------- as released code does


def _heuristic(labels: Labels, pool: np.ndarray, rule: Rule) -> Divided:
    """(train, test) as the code released with FedHKD partitions them, for comparison with it and nothing else.

    The heuristic of FedMA and MOON: for each class the clients' shares are drawn from Dir(beta, ..., beta); a client
    that holds N / M images or more gets none of the class, the others' shares are normalised again and cut the class.
    All is drawn again until each client has 10 images (`min_images`). The same shares cut the official test split, in
    its own order and with its own cap. Client i then draws int(fraction * n_i) of its n_i training images and
    int(2 * fraction * t_i) of its t_i test images WITH replacement: sizes differ, images repeat, and local tests are
    part of the global test. N is the whole training split less the public set. UsageError when 1000 draws do not give
    each client so many.
    """
    min_images = rule.min_images or HEURISTIC_MIN_IMAGES
    if len(pool) < min_images * rule.clients:
        raise UsageError(
            f"fed.clients={rule.clients}: data.partition=heuristic partitions {len(pool)} training images, fewer "
            f"than {min_images} for each client; lower fed.clients"
        )
    available_C, test_available_C = (
        np.bincount(y, minlength=labels.classes) for y in (labels.train[pool], labels.test)
    )
    rng = stream(rule.seed, "partition/heuristic")
    count_MC, test_count_MC = heuristic_counts(available_C, test_available_C, rule.clients, rule.beta, rng, min_images)
    train = _cut_classes(labels.train, pool, count_MC, rule.seed)
    by_class = [
        np.split(np.flatnonzero(labels.test == label), np.cumsum(count_M))[:-1]
        for label, count_M in enumerate(test_count_MC.T)
    ]
    test = [np.concatenate(own) for own in zip(*by_class)]
    return (
        _draw_again(train, rule.fraction, rule.seed, "partition/heuristic train"),
        _draw_again(test, 2 * rule.fraction, rule.seed, "partition/heuristic test"),
    )


def heuristic_counts(
    available_C: np.ndarray,
    test_available_C: np.ndarray,
    clients: int,
    beta: float,
    rng: np.random.Generator,
    min_images: int = HEURISTIC_MIN_IMAGES,
) -> tuple[np.ndarray, np.ndarray]:
    """(M,C) training and test images, of the first draw that gives each client enough."""
    for _ in range(HEURISTIC_DRAWS):
        share_CM = rng.dirichlet(np.full(clients, beta), len(available_C))
        count_MC, test_count_MC = capped_counts(share_CM, available_C), capped_counts(share_CM, test_available_C)
        if count_MC is not None and test_count_MC is not None and count_MC.sum(1).min() >= min_images:
            return count_MC, test_count_MC
    raise UsageError(
        f"data.partition=heuristic: none of {HEURISTIC_DRAWS} draws with data.beta={beta:g} gave each of "
        f"{clients} clients {min_images} training images; raise data.beta or lower fed.clients"
    )


def capped_counts(share_CM: np.ndarray, available_C: np.ndarray) -> np.ndarray | None:
    """Images per client and class, (M,C) int64: each class cut by its shares among the clients below 1/M of all images.

    Classes are cut in their order. None if a class has images and all clients below the cap have a share of 0.
    """
    clients = share_CM.shape[1]
    count_MC = np.zeros((clients, len(available_C)), np.int64)
    for label in np.flatnonzero(available_C):
        share_M = np.where(count_MC.sum(1) < available_C.sum() / clients, share_CM[label], 0)
        if not share_M.sum() > 0:
            return None
        edge_M = np.floor(np.cumsum(share_M / share_M.sum()) * available_C[label] + 1e-9)
        edge_M[-1] = available_C[label]
        count_MC[:, label] = np.diff(edge_M, prepend=0)
    return count_MC


def _draw_again(owned: list[np.ndarray], share: float, seed: int, purpose: str) -> list[np.ndarray]:
    return [stream(seed, purpose, client=client).choice(own, int(share * len(own))) for client, own in enumerate(owned)]


# ---------------------------------------------------------------------------------------------- held out


def _hold_out_each(
    owned: Iterable[np.ndarray], labels: np.ndarray, share: float, seed: int, purpose: str
) -> tuple[tuple, tuple]:
    """(rest, held out) of every client, each client from its own stream of `purpose`."""
    return tuple(
        zip(
            *(
                _hold_out(index, labels, share, stream(seed, purpose, client=client))
                for client, index in enumerate(owned)
            )
        )
    )


def _hold_out(
    index: np.ndarray, labels: np.ndarray, share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(rest, held out) of one client: floor(share * size) images are held out, stratified by class.

    Copies of an image count as one and stay together.
    """
    # a fixed order to draw from: what a client holds out depends on which images it has, not on how it got them
    images = np.unique(index)
    present, count_C = np.unique(labels[images], return_counts=True)
    held_C = stratified_sizes(count_C, share, rng)
    held = [rng.permutation(images[labels[images] == label])[:size] for label, size in zip(present, held_C)]
    is_held = np.isin(index, np.concatenate([images[:0], *held]))
    return index[~is_held], index[is_held]


def stratified_sizes(count_C: np.ndarray, test_share: float, rng: np.random.Generator) -> np.ndarray:
    """Test images per class: floor(test_share * sum) in all, by largest remainder, ties at random.

    A class of two or more images keeps at least one for training (so a large test_share may give fewer in all).
    """
    limit_C = np.where(count_C >= 2, count_C - 1, count_C)
    total = min(floor(test_share * count_C.sum()), int(limit_C.sum()))
    quota_C = total * count_C / max(count_C.sum(), 1)
    test_C = np.minimum(np.floor(quota_C + 1e-9).astype(np.int64), limit_C)
    tie_C = rng.random(len(count_C))
    while (rest := total - int(test_C.sum())) > 0:
        open_C = np.flatnonzero(test_C < limit_C)
        best = open_C[np.lexsort((tie_C[open_C], -(quota_C - test_C)[open_C].round(9)))]
        test_C[best[:rest]] += 1
    return test_C


def pooled(partition: Partition) -> Partition:
    """The same images with one client, who has those of all."""
    join = lambda parts: (_sorted(np.concatenate(parts)),)
    train, test, val = map(join, (partition.train, partition.test, partition.val))
    return replace(partition, train=train, test=test, val=val, names=())


DIVIDE: dict[str, Callable[[Labels, np.ndarray, Rule], Divided]] = {
    "dirichlet": _dirichlet,
    "iid": _iid,
    "natural": _natural,
    "shards": _shards,
    "quantity": _quantity,
    "heuristic": _heuristic,
}
