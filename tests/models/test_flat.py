"""One flat buffer for a model: views, alignment, gradients, integer buffers apart, hash, arrays and back."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from federation import Federation, save_images
from torch import nn

from hkd_hpc import assemble, config, payload
from hkd_hpc.aggregate import FixedPointSum
from hkd_hpc.common.errors import UsageError
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.server import Images, Server
from hkd_hpc.store.digest import arrays_sha256
from hkd_hpc.worker import report_type, unpack_counters


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def test_sizes_by_hand():
    """Parameters 15 5 5 5 10 2 in places of 16; then running mean and variance of 5 each; the counter stays apart."""
    flat = FlatModel(small_net())
    assert (flat.parameter_count, flat.payload_floats) == (42, 52)
    assert (len(flat.parameters_P), len(flat.grad_P), len(flat.values_V)) == (96, 96, 128)
    assert {span.name: span.offset for span in flat.layout} == {
        "0.weight": 0,
        "0.bias": 16,
        "1.weight": 32,
        "1.bias": 48,
        "2.weight": 64,
        "2.bias": 80,
        "1.running_mean": 96,
        "1.running_var": 112,
        "1.num_batches_tracked": -1,
    }
    assert [tensor.dtype for tensor in flat.counters] == [torch.int64]


def test_adopting_a_net_changes_no_value_and_no_output():
    net = small_net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    x = torch.randn(4, 3)
    net.eval()
    expected = net(x)
    FlatModel(net)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert torch.equal(net(x), expected)


def test_module_and_buffer_are_the_same_memory():
    flat = FlatModel(small_net())
    flat.values_V[16] = 7.0
    assert float(flat.net[0].bias.detach()[0]) == 7.0
    with torch.no_grad():
        flat.net[1].running_mean[2] = 9.0
    assert float(flat.values_V[98]) == 9.0


def test_gradients_land_in_the_flat_buffer_and_gaps_stay_zero():
    flat, reference = FlatModel(small_net()), small_net()
    reference.load_state_dict(flat.net.state_dict())
    x = torch.randn(6, 3)
    flat.backward(flat.net(x).square().sum())
    reference(x).square().sum().backward()
    for span in (s for s in flat.layout if s.trainable):
        expected = reference.get_parameter(span.name).grad.reshape(-1)
        assert torch.equal(flat.grad_P[span.offset : span.offset + span.size], expected)
    used = sum(span.size for span in flat.layout if span.trainable)
    assert int((flat.grad_P != 0).sum()) <= used
    assert float(flat.grad_P[15]) == 0.0
    assert not flat.grad_P[21:32].any()


def test_train_mode_passes_move_statistics_inside_the_buffer():
    flat = FlatModel(small_net())
    flat.net.train()
    flat.net(torch.ones(4, 3) * 5)
    assert torch.equal(flat.net[1].running_mean, flat.values_V[96:101])
    assert float(flat.values_V[96:101].abs().sum()) > 0
    assert flat.counters[0].item() == 1
    assert flat.counters[0] is flat.net[1].num_batches_tracked


def test_load_copies_and_never_aliases():
    flat = FlatModel(small_net())
    values = torch.arange(128, dtype=torch.float32)
    flat.load(values, [torch.tensor(11)])
    values.zero_()
    assert float(flat.net[0].weight.detach()[0, 1]) == 1.0
    assert flat.net[1].num_batches_tracked.item() == 11


def test_arrays_are_a_state_dict_and_come_back():
    flat = FlatModel(small_net())
    flat.net(torch.randn(4, 3))
    arrays = flat.arrays(flat.values_V, flat.counters)
    state = flat.net.state_dict()
    assert list(arrays) == list(state)
    assert all(
        arrays[name].dtype == tensor.numpy().dtype and arrays[name].shape == tuple(tensor.shape)
        for name, tensor in state.items()
    )
    fresh = small_net()
    fresh.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, strict=True)
    again = torch.zeros_like(flat.values_V)
    counters = flat.load_arrays(arrays, again)
    assert torch.equal(again, flat.values_V)
    assert [c.item() for c in counters] == [1]
    assert counters[0].dtype == torch.int64


def test_hash_covers_names_dtypes_shapes_and_bytes():
    arrays = {"a": np.array([[1.0, 2.0]], np.float32), "n": np.array(3, np.int64)}
    text = hashlib.sha256(
        b"a <f4 (1, 2)\n" + np.array([1, 2], "<f4").tobytes() + b"n <i8 ()\n" + np.array(3, "<i8").tobytes()
    )
    assert arrays_sha256(arrays) == text.hexdigest()
    others = [
        {"b": arrays["a"], "n": arrays["n"]},
        {"a": arrays["a"].T, "n": arrays["n"]},
        {"a": arrays["a"].view(np.int32), "n": arrays["n"]},
        {"a": -arrays["a"], "n": arrays["n"]},
        {"a": arrays["a"], "n": np.array(4, np.int64)},
    ]
    assert len({arrays_sha256(tree) for tree in [arrays, *others]}) == 6


@pytest.mark.parametrize(
    "name, tensor, words",
    [
        ("a/b", torch.zeros(2), r"'a/b' cannot be the name of a tensor in a file"),
        ("a\0", torch.zeros(2), "cannot be the name"),
        ("\udcff", torch.zeros(2), "cannot be the name"),
        ("z", torch.zeros(2, dtype=torch.complex64), "z is complex"),
        ("s", torch.eye(2).to_sparse(), "s is torch.sparse_coo"),
    ],
)
def test_what_no_file_can_hold_is_rejected_before_the_first_round(name, tensor, words):
    net = small_net()
    net.register_buffer(name, tensor)
    with pytest.raises(UsageError, match=words) as caught:
        FlatModel(net)
    str(caught.value).encode()  # it can be printed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floats_are_rejected_by_name(dtype):
    net = small_net()
    net[2].to(dtype)
    with pytest.raises(UsageError, match="2.weight is torch"):
        FlatModel(net)


def test_tied_weights_are_stored_once():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    flat = FlatModel(net)
    assert flat.parameter_count == 16
    assert flat.payload_floats == 16
    assert [(span.name, span.alias, span.offset) for span in flat.layout] == [
        ("0.weight", False, 0),
        ("1.weight", True, 0),
    ]
    assert len(flat.values_V) == 16


def test_schema_tells_models_apart():
    first, second = small_net(), nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    assert FlatModel(first).schema() == FlatModel(small_net()).schema() != FlatModel(second).schema()


def test_batch_norm_of_two_clients_is_averaged_and_counters_stay_integers(toy_net, toy_trainer):
    """Running means 0 and 4 with 1 and 3 images: 3. Counters 3 and 4: the largest, as int64, never 3.75."""
    trainer = toy_trainer(toy_net(batch_norm=True))
    flat, total = trainer.flat, FixedPointSum(len(trainer.flat.values_V), 4)
    layer = flat.net.extractor[2]
    reports = np.zeros(2, report_type(trainer.scheme, 1))
    for client, (mean, counter, images) in enumerate([(0.0, 3, 1), (4.0, 4, 3)]):
        layer.running_mean.fill_(mean)
        layer.num_batches_tracked.fill_(counter)
        total.add(flat.values_V, images)
        total.flush()
        reports[client]["client"], reports[client]["counters"] = client, counter
    nothing = Images(torch.zeros(0, 3, 2, 2), torch.zeros(0))
    server = Server(config.resolve(), trainer, assemble.NOWHERE, nothing, nothing, {})
    message = server.combine(1, reports)
    total.mean_into(flat.values_V, total.pieces(1000))
    counters = unpack_counters(message[0]["counters"], flat.counters)
    flat.load(flat.values_V.clone(), counters)
    assert layer.running_mean.tolist() == [3.0] * 8
    assert layer.num_batches_tracked.dtype == torch.int64
    assert layer.num_batches_tracked.item() == 4
    assert payload.tensors_of(message) == {}


# ---- parameters that require no gradient


def frozen_net() -> nn.Module:
    """Of small_net all but the last layer's weight and BatchNorm's scale and shift."""
    net = small_net()
    for parameter in (net[0].weight, net[0].bias, net[2].bias):
        parameter.requires_grad_(False)
    return net


def test_a_frozen_parameter_is_neither_stepped_nor_averaged_nor_counted():
    """Trainable: scale and shift of 5, a weight of 10; they lie at 32, 48 and 64. Statistics of 5 and 5 at 96."""
    flat = FlatModel(frozen_net())
    assert flat.active_spans == [(32, 80)]
    assert flat.averaged_spans == [(32, 80), (96, 128)]
    assert (flat.parameter_count, flat.parameter_counts([""]), flat.payload_floats) == (20, {"": 20}, 30)
    assert [span.name for span in flat.layout if span.trainable] == ["1.weight", "1.bias", "2.weight"]
    assert [line.split()[0] for line in flat.schema().splitlines() if line.endswith(" frozen")] == [
        "0.weight",
        "0.bias",
        "2.bias",
    ]


class Frozen(nn.Module):
    """A body that stays, a layer and a head that are trained."""

    def __init__(self, classes: int, latent: int):
        super().__init__()
        self.extractor = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 12), nn.Linear(12, latent))
        self.extractor[2].requires_grad_(False)
        self.classifier = nn.Linear(latent, classes)

    def forward(self, x_BCHW):
        feature_BD = self.extractor(x_BCHW)
        return feature_BD, self.classifier(feature_BD)


class AllFrozen(Frozen):
    def __init__(self, classes: int, latent: int):
        super().__init__(classes, latent)
        self.requires_grad_(False)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.mark.parametrize("scheme", ["fedavg", "scaffold", "feddyn", "fedrep", "ditto"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_frozen_parameter_keeps_its_bits_in_a_federation_with_weight_decay(data, scheme, optimizer):
    run = Federation(
        data, scheme, f"model.name={__name__}:Frozen", "train.weight_decay=0.1", f"train.optimizer={optimizer}"
    )
    before = {name: tensor.clone() for name, tensor in run.flat.tensors(run.part.weights_V).items()}
    run.play(2)
    after = run.flat.tensors(run.part.weights_V)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"extractor.3.weight", "extractor.3.bias", "classifier.weight", "classifier.bias"}


def test_a_model_of_which_nothing_can_be_trained_is_wrong_input(data):
    with pytest.raises(UsageError, match="AllFrozen: no parameter requires a gradient, so none can be trained"):
        Federation(data, "fedavg", f"model.name={__name__}:AllFrozen")
