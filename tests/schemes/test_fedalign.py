"""FedAlign: singular values against numpy, the student against a stage built by itself, and where the gradient goes."""

from __future__ import annotations

import dataclasses

import numpy as np
import plain
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock

from hkd_hpc.client import Batch
from hkd_hpc.models import networks
from hkd_hpc.models.settings import ModelSettings
from hkd_hpc.schemes import fedalign
from hkd_hpc.schemes.fedalign import FedAlignSettings, captured, largest_singular_value, slim

pytestmark = pytest.mark.kernels


def test_defaults_are_the_papers():
    assert dataclasses.asdict(FedAlignSettings()) == {"name": "fedalign", "mu": 0.45, "width": 0.25, "iterations": 10}


# ---- the largest singular value


def by_numpy(input_BCHW, output_BCHW) -> np.ndarray:
    size = output_BCHW.shape[2:]
    pooled = F.adaptive_avg_pool2d(input_BCHW.double(), size).flatten(2).numpy()
    maps = output_BCHW.double().flatten(2).numpy()
    return np.array([np.linalg.svd(a @ b.T / (size[0] * size[1]), compute_uv=False)[0] for a, b in zip(pooled, maps)])


def random_maps(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random(shape, dtype="float32"))


@pytest.mark.parametrize(
    "inside, outside",
    [
        ((5, 6, 4, 4), (5, 9, 4, 4)),
        ((5, 16, 8, 8), (5, 32, 4, 4)),
        ((3, 8, 6, 4), (3, 4, 3, 2)),
        ((2, 64, 2, 2), (2, 128, 1, 1)),
    ],
)
def test_largest_singular_value_of_maps(inside, outside):
    """Maps after a ReLU are not negative, so ten iterations from the all-ones vector are enough."""
    maps = random_maps(*inside), random_maps(*outside, seed=1)
    np.testing.assert_allclose(largest_singular_value(*maps, 10).numpy(), by_numpy(*maps), rtol=1e-5)


def test_largest_singular_value_of_signed_maps():
    maps = random_maps(6, 7, 4, 4) - 0.4, random_maps(6, 5, 4, 4, seed=1) - 0.3
    np.testing.assert_allclose(largest_singular_value(*maps, 300).numpy(), by_numpy(*maps), rtol=1e-4)


def test_one_by_one_maps_have_rank_one():
    """|f_in| |f_out| = 5 * 13."""
    maps = torch.tensor([[3.0, 4.0]]).reshape(1, 2, 1, 1), torch.tensor([[3.0, 4.0, 12.0]]).reshape(1, 3, 1, 1)
    assert largest_singular_value(*maps, 10).tolist() == pytest.approx([65.0], rel=1e-6)


def test_dead_and_huge_maps_have_finite_values_and_gradients():
    for scale in (0.0, 1e-6, 1e4):
        maps = random_maps(2, 6, 4, 4), (scale * random_maps(2, 3, 4, 4, seed=1)).requires_grad_()
        value_B = largest_singular_value(*maps, 10)
        value_B.sum().backward()
        assert torch.isfinite(value_B).all()
        assert torch.isfinite(maps[1].grad).all()


# ---- the slim stage


def small_stage() -> tuple[nn.Module, nn.Module]:
    def stage(inputs, outputs):
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())

    return build("small").last_stage, stage(16, 32)


def resnet_stage() -> tuple[nn.Module, nn.Module]:
    down = nn.Sequential(nn.Conv2d(64, 128, 1, stride=2, bias=False), nn.BatchNorm2d(128))
    return build("resnet18").last_stage, nn.Sequential(BasicBlock(64, 128, 2, down), BasicBlock(128, 128))


def shufflenet_stage() -> tuple[nn.Module, nn.Module]:
    own = nn.Sequential(nn.Conv2d(116, 256, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU())
    return build("shufflenet_v2").last_stage, own


def build(name: str, **more) -> nn.Module:
    return networks.build(ModelSettings(name=name, latent=8, **more), 10, (3, 32, 32), 0)


def first_channels(quarter: nn.Module, full: nn.Module) -> nn.Module:
    """Give the quarter-width stage the first channels of the full one."""
    with torch.no_grad():
        for name, own in quarter.named_parameters():
            own.copy_(full.get_parameter(name)[tuple(slice(n) for n in own.shape)])
    return quarter.train()


def random_scales(stage: nn.Module) -> None:
    """BatchNorm's scales and shifts, so that it matters which of them are used."""
    with torch.no_grad():
        for parameter in stage.parameters():
            if parameter.dim() == 1:
                parameter.copy_(random_maps(len(parameter), seed=len(parameter)) + 0.5)


STAGES = {"small": (small_stage, 16), "resnet18": (resnet_stage, 64), "shufflenet_v2": (shufflenet_stage, 116)}


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", STAGES)
def test_student_is_a_stage_of_quarter_width(name, norm):
    make, inputs = STAGES[name]
    full, quarter = make()
    if norm == "group":
        for stage in (full, quarter):
            networks.replace_batch_norm(stage)
    random_scales(full)
    first_channels(quarter, full)
    x = random_maps(4, inputs, 4, 4)
    before = {name: tensor.clone() for name, tensor in full.state_dict().items()}
    out = slim(full, x, 0.25)
    np.testing.assert_allclose(out.detach().numpy(), quarter(x).detach().numpy(), atol=1e-5)
    assert out.shape[1] * 4 == [m for m in full.modules() if isinstance(m, nn.Conv2d)][-1].out_channels
    assert out.any()
    assert all(torch.equal(tensor, before[name]) for name, tensor in full.state_dict().items())
    out.sum().backward()


@pytest.mark.parametrize("name", ["small", "resnet18", "shufflenet_v2"])
def test_last_stage_is_what_makes_the_last_maps(name):
    net, x = build(name), random_maps(2, 3, 32, 32)
    with captured(net.last_stage) as maps:
        net(x)
    inside, outside = maps
    expected = {"small": (64, 128), "resnet18": (256, 512), "shufflenet_v2": (464, 1024)}
    assert (inside.shape[1], outside.shape[1]) == expected[name]
    with captured(net.last_stage) as again:
        pass
    net(x)
    assert not again
    assert len(maps) == 2


# ---- the term


@pytest.fixture
def prepared(toy_trainer, toy_client):
    """make(overrides...): (scheme, client, batch) of the small net on 6 images of 32 x 32."""

    def make(*overrides, **more):
        trainer, client = toy_trainer(build("small", **more), "fedalign", *overrides), toy_client([0, 1, 2] * 2)
        plain.prepare(trainer, client)
        trainer.scheme.begin(client)
        return trainer.scheme, client, Batch(2 * random_maps(6, 3, 32, 32) - 1, client.y_train, torch.arange(6))

    return make


@pytest.mark.parametrize("mu", [0.45, 2.0])
def test_value_of_the_term_is_mu_times_the_cross_entropy(prepared, mu):
    scheme, client, batch = prepared(f"scheme.mu={mu}")
    terms = scheme.loss(client, batch)
    assert tuple(terms) == scheme.terms == ("cross_entropy", "alignment")
    assert terms["alignment"].item() == pytest.approx(mu * terms["cross_entropy"].item(), rel=1e-5)


def expected_gradient(net, batch, mu: float) -> dict[str, torch.Tensor]:
    """Of mu stopgrad(CE / A) A in float64, A from exact singular values of an own quarter-width stage."""
    full = plain.double(net)
    x = batch.x_BCHW.double()
    with torch.no_grad():
        inside = full.extractor.stage2(full.extractor.stage1(x))
        outside = full.extractor.stage3(inside)
        entropy = F.cross_entropy(plain.double(net)(x)[1], batch.y_B)
    quarter = first_channels(small_stage()[1].double(), full.extractor.stage3)

    def value(a, b):
        a = F.adaptive_avg_pool2d(a, b.shape[2:]).flatten(2)
        return torch.linalg.svdvals(a @ b.flatten(2).transpose(1, 2) / (b.shape[2] * b.shape[3]))[:, 0]

    gap = (value(inside[:, :16], quarter(inside[:, :16])) - value(inside, outside)).square().mean()
    return plain.gradient(quarter, mu * (entropy / gap).detach() * gap)


def test_gradient_is_that_of_the_slice_and_of_nothing_else(prepared):
    scheme, client, batch = prepared()
    expected = expected_gradient(client.net, batch, 0.45)
    found = plain.gradient(client.net, scheme.loss(client, batch)["alignment"])
    for name, own in found.items():
        if not name.startswith("extractor.stage3."):
            assert not own.any(), name
            continue
        reference = expected[name.removeprefix("extractor.stage3.")]
        inner = tuple(slice(n) for n in reference.shape)
        scale = float(reference.abs().max())
        assert scale > 0
        np.testing.assert_allclose(own[inner].numpy(), reference.numpy(), atol=1e-3 * scale, err_msg=name)
        own[inner] = 0
        assert not own.any(), name


def test_a_small_step_brings_student_and_teacher_together(prepared):
    scheme, client, batch = prepared()

    @torch.no_grad()
    def gap():
        with captured(client.net.last_stage) as maps:
            client.net(batch.x_BCHW)
        inside, outside = maps
        student = largest_singular_value(inside[:, :16], slim(client.net.last_stage, inside[:, :16], 0.25), 10)
        return float((student - largest_singular_value(inside, outside, 10)).square().mean())

    before = gap()
    found = plain.gradient(client.net, scheme.loss(client, batch)["alignment"])
    with torch.no_grad():
        for name, parameter in client.net.named_parameters():
            parameter -= 1e-3 * found[name]
    assert gap() < before


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_student_leaves_running_statistics_alone(prepared, norm):
    buffers = []
    for mu in (0, 0.45):
        scheme, client, batch = prepared(f"scheme.mu={mu}", norm=norm)
        sum(scheme.loss(client, batch).values()).backward()
        buffers.append(list(client.net.named_buffers()))
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(*buffers))
    assert all(buffer.item() == 1 for name, buffer in buffers[1] if name.endswith("num_batches_tracked"))


def test_student_of_full_width_is_the_teacher(prepared):
    """The ratio CE / A is guarded: no NaN, and no gradient out of rounding errors."""
    scheme, client, batch = prepared("scheme.width=1")
    terms = scheme.loss(client, batch)
    found = plain.gradient(client.net, terms["alignment"])
    assert 0 <= terms["alignment"].item() <= 0.45 * terms["cross_entropy"].item() * 1.0001
    assert all(torch.isfinite(each).all() for each in found.values())
    assert max(float(each.abs().max()) for each in found.values()) < 1


def test_share_of_channels():
    assert [fedalign.share(channels, 0.25) for channels in (1, 3, 4, 64, 1024)] == [1, 1, 1, 16, 256]
