"""Three whole rounds of every scheme, by the product's own job and by plain NumPy in float64: models, losses, reports,
messages and local tests; and some of these as literal numbers, so that a change of both sides would be noticed.

Two clients of 13 and 9 images: batches of 8 and 5, and one of 9 (a last batch of one is merged). Round 1 is unassisted;
the learning rate is halved in round 3. Class 0 reaches nu = .25 at client 0 alone, class 1 at both, class 2 at client 1
alone, class 3 nowhere.
"""

from __future__ import annotations

import functools
from collections import OrderedDict

import numpy as np
import numpy_oracle as oracle
import pytest
import torch
from federation import Federation
from torch import nn

from hkd_hpc.models.networks import Net
from hkd_hpc.models.precision import real

pytestmark = pytest.mark.kernels

# Both sides in float64: after three rounds no number is more than 4e-11 apart, which is the rounding of the exact sum
# (aggregate.py). The schemes' own terms move weights by more than .004 (last test).
NEAR = {"rtol": 0, "atol": 1e-9}
SIX_DIGITS = {"rtol": 0, "atol": 1e-6}  # of the literals


# ---- two networks as a user brings them, and two clients


class Dense(Net):
    """Pixels pooled to 2 x 2, Linear, BatchNorm, ReLU, Linear; a classifier."""

    def __init__(self, classes: int, latent: int):
        super().__init__(
            nn.Sequential(
                nn.AdaptiveAvgPool2d(2),
                nn.Flatten(),
                nn.Linear(12, 8, bias=False),
                nn.BatchNorm1d(8),
                nn.ReLU(),
                nn.Linear(8, latent),
            ),
            latent,
            classes,
        )
        draw_weights(self)


class Convolutional(Net):
    """Pixels pooled to 4 x 4, two convolutions, the second one the last stage; mean, Linear; a classifier."""

    def __init__(self, classes: int, latent: int):
        first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.ReLU())
        last = nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        layers = OrderedDict(
            shrink=nn.AdaptiveAvgPool2d(4),
            first=first,
            last_stage=last,
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(8, latent),
        )
        super().__init__(nn.Sequential(layers), latent, classes)
        draw_weights(self)


def draw_weights(net: nn.Module) -> None:
    """By NumPy, so that no literal below depends on torch's generator."""
    random = np.random.default_rng(0)
    for name, parameter in net.named_parameters():
        scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3
        centre = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0  # of BatchNorm's scales
        parameter.data = real(torch.from_numpy(random.normal(centre, scale, parameter.shape).astype("f4")))


def save_clients(path):
    """Two clients that own 26 and 18 images, train on half as many and are tested on 30; images are of 8 x 8 blocks."""
    random = np.random.default_rng(5)
    labels = [0] * 10 + [1] * 11 + [2] * 3 + [3] * 2 + [1] * 8 + [2] * 8 + [3] * 2
    arrays = {
        f"x_{split}": random.integers(0, 256, (count, 3, 4, 4), dtype=np.uint8).repeat(8, 2).repeat(8, 3)
        for split, count in (("train", 44), ("test", 60))
    }
    np.savez(
        path,
        y_train=labels,
        y_test=np.arange(60) % 4,
        client_train=np.repeat([0, 1], [26, 18]),
        client_test=np.repeat([0, 1], 30),
        **arrays,
    )
    return path


# ---- both sides

SETTINGS = (
    "data.partition=natural",
    "data.fraction=0.5",
    "data.public_fraction=0.25",
    "fed.clients=2",
    "fed.rounds=3",
    "train.epochs=3",
    "train.batch_size=8",
    "train.lr=0.01",
    "train.lr_halve_every=2",
    "model.latent=5",
)
OWN = {
    "fedgen": (
        "scheme.noise_size=3",
        "scheme.hidden=6",
        "scheme.generator_batch=5",
        "scheme.generator_epochs=2",
        "scheme.generator_steps=2",
    ),
    "fedhkd": ("scheme.nu=0.25",),
    "fedhkd_star": ("scheme.nu=0.25",),
    "fedrep": ("scheme.head_epochs=2",),
}  # all else as the paper has it


class Both:
    """Three rounds of one scheme. The oracle gets the images and the initial weights, and nothing else."""

    def __init__(self, name: str, path):
        net = "Convolutional" if name == "fedalign" else "Dense"
        run = Federation(path, name, *SETTINGS, f"model.name={__name__}:{net}", *OWN.get(name, ()))
        public = run.clients[0].x_public
        scheme = oracle.SCHEMES[name](None if public is None else oracle.images(public.numpy()))
        clients = [
            oracle.Client(c.id, *(t.numpy() for t in (c.x_train, c.y_train, c.x_test, c.y_test))) for c in run.clients
        ]
        self.name, self.labels = name, [client.y for client in clients]
        start = model_of(run, run.part, scheme.net)
        self.product = [product_round(run, scheme.net) for _ in range(3)]
        self.oracle = scheme.rounds(clients, start, 3)


def model_of(run, state, net):
    """(w, statistics) as the oracle has them."""
    arrays = run.flat.arrays(state.weights_V, state.counters)
    return oracle.join(arrays, net.shapes), oracle.join(arrays, net.statistics)


def without_gaps(run, net, name, values):
    """What travels of a scheme; a vector of all weights ("..._P") as the oracle has it."""
    if not name.endswith("_P"):
        return values
    flat = run.flat
    all_V = torch.cat([torch.from_numpy(np.array(values)), flat.statistics_S])
    return oracle.join(flat.arrays(all_V, flat.counters), net.shapes)


def product_round(run, net) -> oracle.Round:
    played = run.play(1)[0]
    tensors = played.reports["tensors"] if "tensors" in played.reports.dtype.names else np.zeros(2, [])
    names = tensors.dtype.names or ()
    reports = [{name: without_gaps(run, net, name, report[name]) for name in names} for report in tensors]
    losses = [dict(zip(run.scheme.terms, values)) for values in played.reports["loss"]]
    message = {name: without_gaps(run, net, name, tensor.numpy()) for name, tensor in run.message.items()}
    return oracle.Round(*model_of(run, played, net), message, losses, reports, played.reports["test_correct"].tolist())


@pytest.fixture(scope="module", params=oracle.SCHEMES)
def both(request, played):
    return played(request.param)


@pytest.fixture(scope="module")
def played(tmp_path_factory, module_in_float64):
    path = save_clients(tmp_path_factory.mktemp("data") / "clients.npz")
    return functools.cache(lambda name: Both(name, path))


def assert_same(own: dict, expected: dict) -> None:
    assert set(own) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(own[name], value, **NEAR, err_msg=name)


# ---- the product against the oracle


def test_the_clients_are_those_of_the_docstring(both):
    assert [np.bincount(labels).tolist() for labels in both.labels] == [[6, 4, 2, 1], [0, 3, 5, 1]]


def test_average_model_after_every_round(both):
    for own, expected in zip(both.product, both.oracle):
        np.testing.assert_allclose(own.weights, expected.weights, **NEAR)
        np.testing.assert_allclose(own.statistics, expected.statistics, **NEAR)


def test_loss_terms_of_every_client(both):
    for own, expected in zip(both.product, both.oracle):
        for client in (0, 1):
            assert_same(own.losses[client], expected.losses[client])


def test_reports_and_messages(both):
    for own, expected in zip(both.product, both.oracle):
        assert_same(own.message, expected.message)
        for client in (0, 1):
            assert_same(own.reports[client], expected.reports[client])


def test_local_tests(both):
    assert [own.correct for own in both.product] == [expected.correct for expected in both.oracle]


# ---- both against literal numbers, worked out once by the oracle

LITERAL = {  # loss terms of round 2 (last epoch) of each client; the classifier's bias after round 3
    "fedavg": ([[1.015238], [1.362154]], [0.328992, -0.500987, -0.086782, -0.168873]),
    "fedprox": ([[1.030473, 0.034897], [1.357525, 0.015848]], [0.327746, -0.502141, -0.084276, -0.167648]),
    "moon": ([[1.016531, 0.692575], [1.366889, 0.694237]], [0.33021, -0.500906, -0.090013, -0.168547]),
    "fedalign": ([[1.032956, 0.46483], [1.069424, 0.481241]], [-0.038323, -1.06266, 0.109976, 0.04953]),
    "fedgen": (
        [[1.241599, 7.576611, 0.425808], [1.636345, 9.367567, 0.544779]],
        [0.288191, -0.579389, -0.023976, -0.117423],
    ),
    "fedmd": ([[1.015214, 0.006922], [1.362353, 0.008292]], [0.329003, -0.502383, -0.084643, -0.169025]),
    "fedproto": ([[1.015415, 0.010873], [1.362205, 0.011375]], [0.329121, -0.50102, -0.087145, -0.168786]),
    "fedhkd": (
        [[1.015978, 0.034762, 0.832041], [1.361668, 0.034461, 0.964091]],
        [0.32895, -0.500668, -0.08716, -0.168759],
    ),
    "fedhkd_star": (
        [[1.014826, 0.034767, 0.0], [1.361646, 0.034461, 0.0]],
        [0.328916, -0.500683, -0.086761, -0.168843],
    ),
    "fedntd": ([[1.045944, 0.020473], [1.344992, 0.020979]], [0.32765, -0.500574, -0.06786, -0.173242]),
    "fedbn": ([[1.013308], [1.358678]], [0.328598, -0.501601, -0.086107, -0.168555]),
    "fedrep": ([[1.090856], [1.299978]], [0.326801, -0.530824, -0.088688, -0.134783]),
    "ditto": ([[1.067277, 0.07327], [1.171771, 0.094176]], [0.328992, -0.500987, -0.086782, -0.168873]),
    "feddyn": ([[0.9474, 0.003053], [1.274582, 0.00192]], [0.36102, -0.39385, -0.11073, -0.394107]),
    "scaffold": ([[1.145846], [1.387406]], [0.256092, -0.5001, -0.006255, -0.16751]),
}
MESSAGES = {  # of round 1: counts of all classes, and of class 1 what there is
    "fedproto": ([6, 7, 7, 2], {"feature_CD": [-0.24075, -0.30191, 0.16294, -0.19885, 0.24927]}),
    "fedhkd": (
        [6, 7, 5, 0],
        {
            "feature_CD": [12.28284, 7.35808, 11.41441, 0.80682, -0.86887],
            "soft_CC": [0.46799, 0.16644, 0.21993, 0.14565],
        },
    ),
}
MESSAGES["fedhkd_star"] = MESSAGES["fedhkd"]


@pytest.mark.parametrize("side", ["product", "oracle"])
def test_literal_losses_and_weights(both, side):
    rounds, (losses, bias_C) = getattr(both, side), LITERAL[both.name]
    np.testing.assert_allclose([list(terms.values()) for terms in rounds[1].losses], losses, **SIX_DIGITS)
    np.testing.assert_allclose(rounds[2].weights[-4:], bias_C, **SIX_DIGITS)


@pytest.mark.parametrize("side", ["product", "oracle"])
@pytest.mark.parametrize("name", MESSAGES)
def test_literal_messages(played, name, side):
    message, (counts, of_class_1) = getattr(played(name), side)[0].message, MESSAGES[name]
    assert message["count_C"].tolist() == counts
    for tensor, values in of_class_1.items():
        np.testing.assert_allclose(message[tensor][1], values, atol=1e-5)


MOVING = [name for name in oracle.SCHEMES if name not in ("fedavg", "fedalign", "ditto")]


@pytest.mark.parametrize("name", MOVING)
def test_a_schemes_own_terms_move_the_weights_far_more_than_the_tolerance(played, name):
    """So that a term with the right value and a wrong gradient would be seen."""
    own, without = (played(scheme).oracle[2].weights for scheme in (name, "fedavg"))
    assert np.abs(own - without).max() > 0.004
