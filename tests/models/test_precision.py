"""train.precision: what bf16 changes and what it leaves alone, and that TF32 is off unless it is asked for on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
import toy
from federation import Federation, save_images

from hkd_hpc import assemble, config, schemes
from hkd_hpc.models import networks

pytestmark = pytest.mark.kernels


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture
def net():
    return networks.build(config.resolve(overrides=["model.latent=8"]).model, 10, (3, 32, 32), 0)


def gradients(net, x_BCHW) -> list[torch.Tensor]:
    feature_BD, logits_BC = net(x_BCHW)
    (feature_BD.square().mean() + logits_BC.square().mean()).backward()
    return [parameter.grad for parameter in net.parameters()]


def test_in_bf16_a_training_pass_is_close_and_a_test_the_same(net):
    x_BCHW = torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    mixed = copy.deepcopy(net)
    networks.train_in_bf16(mixed)
    close = (
        (0.03, zip(mixed(x_BCHW), net(x_BCHW))),  # bfloat16 has 8 bits: 2^-8 = .004 a rounding
        (0.25, zip(gradients(mixed, x_BCHW), gradients(net, x_BCHW))),
    )  # BatchNorm's backward pass is a difference
    for share, pairs in close:
        for own, exact in pairs:
            assert own.dtype == torch.float32
            assert not torch.equal(own, exact)
            assert (own - exact).norm() < share * exact.norm()
    mixed.load_state_dict(net.state_dict())
    mixed.eval(), net.eval()
    assert all(map(torch.equal, mixed(x_BCHW), net(x_BCHW)))


@pytest.mark.parametrize("scheme", {**schemes.REGISTRY, **schemes.CONTROLS})
def test_every_scheme_trains_in_bf16_with_weights_and_sums_in_fp32(data, scheme):
    exact, mixed = Federation(data, scheme), Federation(data, scheme, "train.precision=bf16")
    start_V = exact.part.weights_V.clone()
    [own], [other] = mixed.play(1), exact.play(1)
    assert own.weights_V.dtype == torch.float32
    assert not torch.equal(own.weights_V, other.weights_V)
    step, difference = other.weights_V - start_V, own.weights_V - other.weights_V
    assert difference.norm() < 0.5 * step.norm()  # Adam turns rounding in small gradients into whole steps
    for each in mixed.clients:
        assert all(tensor.dtype == torch.float32 for tensor in each.state.values())
    assert own.reports["loss"] == pytest.approx(other.reports["loss"], rel=0.02, abs=1e-3)


def test_bf16_needs_no_library_convolutions(data):
    """Both ways to compute small maps, and a network without BatchNorm."""
    for more in (("model.convolution=library",), ("model.norm=group",), ("model.latent_norm=batch",)):
        [played] = Federation(data, "fedalign", "train.precision=bf16", *more).play(1)
        assert not played.reports["status"].any()


@pytest.fixture
def torch_flags():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.get_num_threads()
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before[:2]
    torch.set_num_threads(before[2])


@pytest.mark.parametrize(
    "precision, device, allowed",
    [("fp32", "cuda", False), ("bf16", "cuda", False), ("tf32", "cuda", True), ("tf32", "cpu", False)],
)
def test_tf32_is_allowed_where_it_was_asked_for_on_a_gpu(torch_flags, precision, device, allowed):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not allowed
    assemble.set_up_torch(config.resolve(overrides=[f"train.precision={precision}"]), torch.device(device))
    assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is allowed


def test_on_resume_precision_is_rejected_while_graphs_and_lanes_are_places():
    stored = config.resolve()
    assert config.difference(stored, {"train.precision": "bf16"}) == "train.precision: stored fp32, asked bf16"
    assert config.difference(stored, {"run.graphs": "on", "run.lanes": "4"}) is None
    moved = config.moved(stored, {"run.graphs": "on", "run.lanes": "4", "train.precision": "bf16"})
    assert (moved.run.graphs, moved.run.lanes, moved.train.precision) == ("on", 4, "fp32")


def test_what_needs_a_gpu_is_said_in_a_line_each_and_changes_nothing(tmp_path, data):
    asked = ("run.graphs=on", "run.lanes=4", "train.precision=tf32")
    arguments = toy.settings(data, "fed.rounds=1", "run.device=cpu")
    first, second = toy.train_ok(2, *arguments, *asked, "--out", tmp_path / "asked")
    assert [line for line in first.splitlines() if "warning" in line] == [
        "hkd_hpc: warning: run.graphs=on has no effect: there is no GPU",
        "hkd_hpc: warning: run.lanes=4 has no effect: there is no GPU; on CPUs, more ranks train clients side by side",
        "hkd_hpc: warning: train.precision=tf32 is fp32 here: there is no GPU",
    ]
    assert "warning" not in second
    toy.train_ok(1, *arguments, "--out", tmp_path / "plain")
    assert toy.last_sha(tmp_path / "asked") == toy.last_sha(tmp_path / "plain")
