"""Convolutions on small maps as matrix products: which products, and that they are the library's function."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hkd_hpc import config
from hkd_hpc.models import networks
from hkd_hpc.models.convolution import SmallMapConv2d, Strip, reformulate, strips
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.registry import MODELS
from hkd_hpc.models.settings import ModelSettings

pytestmark = pytest.mark.kernels

IMAGE = (3, 32, 32)


def test_the_products_by_hand():
    """3 x 3 with padding on one pixel: the centre tap. On 2 x 2: each output pixel sees both rows, both columns at
    once.
    """
    assert strips((1, 1), (3, 3), (1, 1), (1, 1)) == (Strip(0, 0, 0, slice(0, 1), 1, slice(1, 2)),)
    both, left, right = slice(0, 2), slice(1, 3), slice(0, 2)
    assert strips((2, 2), (3, 3), (1, 1), (1, 1)) == (
        Strip(0, 0, 0, both, 1, left),
        Strip(0, 0, 1, both, 2, left),
        Strip(0, 1, 0, both, 1, right),
        Strip(0, 1, 1, both, 2, right),
        Strip(1, 0, 0, both, 0, left),
        Strip(1, 0, 1, both, 1, left),
        Strip(1, 1, 0, both, 0, right),
        Strip(1, 1, 1, both, 1, right),
    )


def tapped(conv: nn.Conv2d, height: int, width: int) -> SmallMapConv2d:
    reformulate(conv, (conv.in_channels, height, width))
    assert isinstance(conv, SmallMapConv2d)
    return conv


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "height, width, kernel, stride, padding",
    [
        (1, 1, 3, 1, 1),
        (2, 2, 3, 1, 1),
        (2, 2, 3, 2, 1),
        (4, 4, 3, 2, 1),
        (2, 1, 3, 1, 1),
        (1, 4, 3, 1, 1),
        (3, 3, 2, 1, 0),
        (4, 3, 5, 2, 2),
        (1, 1, 7, 2, 3),
        (2, 2, (3, 1), 1, (1, 0)),
        (2, 2, 1, 1, 0),
        (4, 4, 1, 2, 0),
        (1, 1, 1, 2, 1),
        (5, 4, 4, 3, 1),
    ],
)
def test_the_library_s_function_and_all_gradients_in_float64(height, width, kernel, stride, padding, channels_last):
    torch.manual_seed(0)
    library = nn.Conv2d(5, 7, kernel, stride, padding, bias=False).double()
    ours = tapped(nn.Conv2d(5, 7, kernel, stride, padding, bias=False), height, width).double()
    ours.load_state_dict(library.state_dict())
    x = torch.randn(6, 5, height, width, dtype=torch.float64)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [conv(each) for conv, each in zip((library, ours), inputs)]
    pull = torch.randn_like(outputs[0])
    for output in outputs:
        (output * pull).sum().backward()
    for expected, got in [outputs, [each.grad for each in inputs], (library.weight.grad, ours.weight.grad)]:
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_what_is_left_to_the_library():
    for conv, size in [
        (nn.Conv2d(4, 4, 3, padding=1, bias=False), 3),  # nine pixels
        (nn.Conv2d(4, 4, 3, padding=1, bias=True), 1),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), 1),
        (nn.Conv2d(4, 4, 3, padding=2, dilation=2, bias=False), 1),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", bias=False), 2),
    ]:
        reformulate(conv, (4, size, size))
        assert type(conv) is nn.Conv2d


def test_a_map_of_another_size_is_rejected():
    conv = tapped(nn.Conv2d(2, 2, 3, padding=1, bias=False), 2, 2)
    with pytest.raises(RuntimeError, match=r"made for maps of \(2, 2\) pixels got \(4, 2\).*model.convolution=library"):
        conv(torch.zeros(1, 2, 4, 2))
    assert tapped(nn.Conv2d(2, 3, 1, bias=False), 2, 2)(torch.zeros(1, 2, 4, 2)).shape == (
        1,
        3,
        4,
        2,
    )  # one matrix a pixel


def test_a_gradient_goes_straight_to_its_place_only_in_the_step_s_own_backward_pass():
    """Two uses of a layer in one pass; a gradient asked for by itself leaves the buffer alone."""
    torch.manual_seed(0)
    library, ours = nn.Conv2d(4, 4, 3, padding=1, bias=False), tapped(nn.Conv2d(4, 4, 3, padding=1, bias=False), 2, 2)
    ours.load_state_dict(library.state_dict())
    flat = FlatModel(ours)
    x = torch.randn(3, 4, 2, 2)
    value = lambda conv: conv(torch.relu(conv(x))).square().sum()
    value(library).backward()
    (asked,) = torch.autograd.grad(value(ours), ours.weight)
    torch.testing.assert_close(asked, library.weight.grad)
    assert not flat.grad_P.any()
    flat.backward(value(ours))
    flat.backward(value(ours))
    torch.testing.assert_close(ours.weight.grad, 2 * library.weight.grad)
    assert ours.weight.grad.data_ptr() == flat.grad_P.data_ptr()
    assert not ours.adds_to_grad


def test_dead_taps_by_hand():
    """On one pixel only tap 4 of 9 lives; with stride 2 on 2 x 2 taps 4 5 7 8. A weight of 2 x 3 channels: 6 floats a
    tap.
    """
    one = tapped(nn.Conv2d(3, 2, 3, padding=1, bias=False), 1, 1)
    assert one.inactive_spans() == [(6 * tap, 6 * tap + 6) for tap in (0, 1, 2, 3, 5, 6, 7, 8)]
    four = tapped(nn.Conv2d(3, 2, 3, 2, padding=1, bias=False), 2, 2)
    assert four.inactive_spans() == [(6 * tap, 6 * tap + 6) for tap in (0, 1, 2, 3, 6)]
    assert FlatModel(one).active_spans == [(24, 30), (54, 64)]  # 54 floats, to the next multiple of 16
    assert FlatModel(four).active_spans == [(24, 36), (42, 64)]
    normed = FlatModel(nn.Sequential(tapped(nn.Conv2d(3, 2, 3, padding=1, bias=False), 1, 1), nn.BatchNorm2d(2)))
    assert normed.averaged_spans == [(24, 30), (54, 96), (96, 128)]  # 16 of scale, 16 of shift; then mean and variance


def test_dead_floats_of_resnet18_by_hand():
    """Stage 4 sees 2 x 2, then 1 x 1: five of nine taps of 256 x 512 and eight of nine of three times 512 x 512 are
    dead.
    """
    flat = FlatModel(networks.build(ModelSettings(name="resnet18"), 10, IMAGE, 0))
    live = sum(stop - start for start, stop in flat.active_spans)
    assert len(flat.parameters_P) - live == 5 * 256 * 512 + 3 * 8 * 512 * 512
    assert sum(len(part) for part in flat.active(flat.grad_P)) == live


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_one_step_of_a_network_agrees_with_the_library_to_rounding(name, norm):
    """Same initial weights, bit for bit; the same loss, gradient and prediction but for rounding; dead taps never
    move.
    """
    x, y = torch.randn(8, *IMAGE), torch.arange(8) % 10
    built = [
        networks.build(ModelSettings(name=name, norm=norm, convolution=how), 10, IMAGE, 0)
        for how in ("library", "taps")
    ]
    start = [{n: t.clone() for n, t in net.state_dict().items()} for net in built]
    assert all(torch.equal(start[0][n], start[1][n]) for n in start[0])
    for net in built:
        net.double()
    losses = [F.cross_entropy(net(x.double())[1], y) for net in built]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
    for expected, got in zip(built[0].parameters(), built[1].parameters()):
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-8, atol=1e-10)  # through up to 50 layers


def test_the_order_in_memory_is_part_of_what_ranks_agree_on():
    taps, library = (
        FlatModel(networks.build(ModelSettings(name="resnet18", convolution=how), 10, IMAGE, 0)).schema()
        for how in ("taps", "library")
    )
    assert taps != library
    assert "extractor.layer4.1.conv2.weight (512, 512, 3, 3) (2, 3, 1, 0) float32" in taps
    assert "extractor.layer4.1.conv2.weight (512, 512, 3, 3) (0, 1, 2, 3) float32" in library


def test_the_order_in_memory_is_the_same_for_every_device():
    """A checkpoint of a CPU is resumed on a GPU: clients' own models are stored as flat vectors."""
    schemas = {
        device: FlatModel(networks.build(ModelSettings(name="shufflenet_v2"), 10, IMAGE, 0, device)).schema()
        for device in ("cpu", "cuda")
    }
    assert schemas["cpu"] == schemas["cuda"]


def test_arrays_have_the_state_dict_s_order_whatever_the_memory_s():
    net = networks.build(ModelSettings(name="resnet18"), 10, IMAGE, 0)
    expected = {name: tensor.clone().numpy() for name, tensor in net.state_dict().items()}
    flat = FlatModel(net)
    arrays = flat.arrays(flat.values_V, flat.counters)
    assert list(arrays) == list(expected)
    assert all(np.array_equal(arrays[name], expected[name]) for name in arrays)
    other = torch.zeros_like(flat.values_V)
    flat.load_arrays(arrays, other)
    assert torch.equal(other, flat.values_V)


def test_settings_stored_before_the_switch_mean_the_library():
    import json

    stored = json.loads(config.resolve().to_json())
    assert config.from_json(json.dumps(stored)).model.convolution == "taps"
    del stored["model"]["convolution"]
    assert config.from_json(json.dumps(stored)).model.convolution == "library"
