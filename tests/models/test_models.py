"""The networks: exact sizes, one pass, settings that change layers, own models, initial weights from the seed alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hkd_hpc.common.errors import UsageError
from hkd_hpc.models import networks
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.images import normalise
from hkd_hpc.models.settings import ModelSettings

IMAGE = (3, 32, 32)
OWN = """
import torch
from torch import nn

class Good(nn.Module):
    def __init__(self, classes, latent):
        super().__init__()
        self.body, self.norm = nn.Conv2d(3, latent, 32), nn.BatchNorm2d(latent)
        self.classifier = nn.Linear(latent, classes)
    def forward(self, x):
        feature = self.norm(self.body(x)).flatten(1)
        return feature, self.classifier(feature)

class LogitsOnly(Good):
    def forward(self, x):
        return super().forward(x)[1]

class Swapped(Good):
    def forward(self, x):
        return super().forward(x)[::-1]

class NoClassifier(nn.Module):
    def __init__(self, classes, latent):
        super().__init__()
        self.head = nn.Linear(latent, classes)

class FeatureIsNoTensor(Good):
    def forward(self, x):
        return None, super().forward(x)[1]

not_a_class = 3
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """The name of an importable module with the classes above."""
    (tmp_path / "toy_own_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "toy_own_models"


def build(classes: int = 10, seed: int = 0, **settings) -> nn.Module:
    return networks.build(ModelSettings(**settings), classes, IMAGE, seed)


def layers(net: nn.Module, kind: type) -> list[nn.Module]:
    return [module for module in net.modules() if isinstance(module, kind)]


@pytest.mark.parametrize(
    "name, latent, classes, parameters, payload, norms",
    [
        ("resnet18", 64, 10, 11_209_994, 11_219_594, 20),  # CIFAR10
        ("resnet18", 64, 100, 11_215_844, 11_225_444, 20),  # CIFAR100
        ("shufflenet_v2", 32, 10, 1_286_734, 1_302_914, 56),  # SVHN
    ],
)
def test_models_of_the_paper_have_exactly_its_parameters(name, latent, classes, parameters, payload, norms):
    net = build(classes, name=name, latent=latent)
    flat = FlatModel(net)
    assert flat.parameter_count == parameters == sum(p.numel() for p in net.parameters())
    assert flat.payload_floats == payload
    assert len(layers(net, nn.BatchNorm2d)) == len(flat.counters) == norms
    assert isinstance(net.classifier, nn.Linear)
    assert net.classifier.in_features == latent
    assert isinstance(net.latent_norm, nn.Identity)


@pytest.mark.parametrize(
    "name, parameters",
    [
        # 3*32*9 + 64 + 32*64*9 + 128 + 64*128*9 + 256 + 128*64 + 64 + 64*10 + 10
        ("small", 864 + 64 + 18_432 + 128 + 73_728 + 256 + 8_256 + 650),
        # 3*6*25 + 6, 6*16*25 + 16, 400*120 + 120, 120*84 + 84, 84*84 + 84, 84*64 + 64, 64*10 + 10; it has no stem
        ("moon_cnn", 456 + 2_416 + 48_120 + 10_164 + 7_140 + 5_440 + 650),
        ("resnet18", 11_209_994 - 3 * 64 * 7 * 7 + 3 * 64 * 3 * 3),
        ("shufflenet_v2", 1_286_734 + 32 * (1024 + 1) + 32 * 10),  # latent 64 instead of 32; the stem has 3 x 3 anyway
    ],
)
def test_cifar_stem(name, parameters):
    net = build(name=name, stem="cifar")
    assert FlatModel(net).parameter_count == parameters
    assert not layers(net, nn.MaxPool2d) or name == "moon_cnn"


def test_moons_network_by_its_parts():
    """Convolution, ReLU, pooling twice; 120, 84, then 84 and 256 of the projection head."""
    net, x_BCHW = build(name="moon_cnn", latent=256), torch.rand(2, *IMAGE)
    feature_BD, _ = net(x_BCHW)
    for convolution in layers(net, nn.Conv2d):
        x_BCHW = nn.functional.max_pool2d(convolution(x_BCHW).relu(), 2)
    x_BD = x_BCHW.flatten(1)
    *first, last, _ = layers(net, nn.Linear)
    for linear in first:
        x_BD = linear(x_BD).relu()
    assert [layer.out_features for layer in layers(net, nn.Linear)] == [120, 84, 84, 256, 10]
    torch.testing.assert_close(last(x_BD), feature_BD)


@pytest.mark.parametrize("side, passes_through", [(32, True), (16, False), (40, False)])
def test_moons_network_pools_only_what_is_not_of_its_size(side, passes_through):
    """A pooling that does nothing has no backward pass, of which torch has no deterministic one for GPUs."""
    net, seen = build(name="moon_cnn"), []
    [pool] = layers(net, nn.AdaptiveAvgPool2d)
    pool.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    net(torch.rand(2, 3, side, side))
    [(before, after)] = seen
    assert (after is before) is passes_through
    assert torch.equal(after, nn.functional.adaptive_avg_pool2d(before, 5))


def test_images_that_are_too_small_for_a_network():
    with pytest.raises(
        UsageError, match="model.name=moon_cnn: needs images of 16 x 16 pixels or more; these have 8 x 32"
    ):
        networks.build(ModelSettings(name="moon_cnn"), 10, (1, 8, 32), 0)
    assert networks.build(ModelSettings(name="moon_cnn"), 10, (1, 16, 16), 0)(torch.rand(2, 1, 16, 16))[1].shape == (
        2,
        10,
    )


@pytest.mark.parametrize("name", ["small", "resnet18", "shufflenet_v2", "moon_cnn"])
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_one_pass_gives_feature_and_logits(name, stem):
    net = build(name=name, latent=16, stem=stem).eval()
    with torch.no_grad():
        feature_BD, logits_BC = net(torch.rand(2, *IMAGE))
        assert feature_BD.shape == (2, 16)
        assert logits_BC.shape == (2, 10)
        assert torch.equal(net.classifier(feature_BD), logits_BC)


@pytest.mark.parametrize("name, latent", [("small", 64), ("resnet18", 64), ("shufflenet_v2", 32)])
def test_group_norm_leaves_no_batch_norm_and_the_same_parameters(name, latent):
    plain, group = build(name=name, latent=latent), build(name=name, latent=latent, norm="group")
    assert not layers(group, nn.BatchNorm2d)
    assert not networks.has_batch_norm(group)
    assert networks.has_batch_norm(plain)
    assert len(layers(group, nn.GroupNorm)) == len(layers(plain, nn.BatchNorm2d))
    assert all(g.num_channels % g.num_groups == 0 and g.num_groups <= 32 for g in layers(group, nn.GroupNorm))
    flat = FlatModel(group)
    assert flat.parameter_count == FlatModel(plain).parameter_count == flat.payload_floats
    assert not flat.counters
    group(torch.rand(1, *IMAGE))  # one image can be trained on


def test_latent_norm_adds_buffers_but_no_parameter():
    plain, normed = build(name="small"), build(name="small", latent_norm="batch")
    assert FlatModel(normed).parameter_count == FlatModel(plain).parameter_count
    assert FlatModel(normed).payload_floats == FlatModel(plain).payload_floats + 2 * 64
    feature_BD, _ = normed.train()(torch.rand(50, *IMAGE))
    np.testing.assert_allclose(feature_BD.mean(0).detach().numpy(), 0, atol=1e-5)
    assert float(feature_BD.detach().var(0, unbiased=False).max()) < 1.001


def test_initial_weights_are_a_function_of_the_seed_alone():
    first = build(seed=5, name="small").state_dict()
    torch.manual_seed(99)
    torch.rand(7)
    state = torch.get_rng_state()
    second, other = build(seed=5, name="small").state_dict(), build(seed=6, name="small").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])
    assert torch.equal(torch.get_rng_state(), state)


def test_images_become_numbers_from_minus_one_to_one():
    x = torch.arange(256, dtype=torch.uint8)
    expected = (np.arange(256) / 255 - 0.5) / 0.5
    assert normalise(x).dtype == torch.float32
    np.testing.assert_allclose(normalise(x).numpy(), expected, atol=2e-7)
    assert x.tolist() == list(range(256))  # the input is not changed


def test_own_model(own_module):
    net = build(classes=7, name=f"{own_module}:Good", latent=5)
    assert net.classifier.weight.shape == (7, 5)
    assert net.training
    again = build(classes=7, name=f"{own_module}:Good", latent=5)
    assert torch.equal(net.body.weight, again.body.weight)
    assert int(net.norm.num_batches_tracked) == 0  # the trial pass left no trace
    assert not layers(build(name=f"{own_module}:Good", norm="group"), nn.BatchNorm2d)


@pytest.mark.parametrize(
    "name, message",
    [
        ("no_such_module_here:Net", "cannot import no_such_module_here"),
        ("{own}:Nope", "has no Nope"),
        ("{own}:", "class name after the colon"),
        (":Net", "module:Class"),
        ("{own}:LogitsOnly", r"must return \(feature_BD, logits_BC\) with C = 10"),
        ("{own}:Swapped", r"must return \(feature_BD, logits_BC\) with C = 10"),
        ("{own}:NoClassifier", "classifier"),
    ],
)
def test_own_models_that_cannot_work_are_rejected_in_one_line(own_module, name, message):
    name = name.format(own=own_module)
    with pytest.raises(UsageError, match=message) as caught:
        build(name=name, latent=5)
    assert str(caught.value).startswith(f"model.name={name}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["{own}:FeatureIsNoTensor", "{own}:not_a_class", ".relative:Net"])
def test_own_models_that_fail_at_once_are_rejected_in_one_line(own_module, name):
    name = name.format(own=own_module)
    with pytest.raises(UsageError) as caught:
        build(name=name, latent=5)
    assert str(caught.value).startswith(f"model.name={name}")
    assert "\n" not in str(caught.value)
