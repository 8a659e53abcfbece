"""Adam and clipping on the flat buffer against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.optimizer import Adam, clip_gradients

pytestmark = pytest.mark.kernels


def two_equal_nets() -> tuple[FlatModel, nn.Module]:
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    flat, plain = FlatModel(make()), make()
    plain.load_state_dict(flat.net.state_dict())
    return flat, plain


def backward(net: nn.Module, step: int) -> None:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
    nn.functional.cross_entropy(net(x), torch.arange(16) % 3).backward()


def largest_difference(flat: FlatModel, plain: nn.Module) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(flat.net.state_dict().values(), plain.state_dict().values()))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("clip", [None, 0.05])
def test_twenty_steps_equal_torch(clip):
    flat, plain = two_equal_nets()
    adam, reference = Adam(flat), torch.optim.Adam(plain.parameters(), lr=1e-2)
    for step in range(20):
        flat.grad_P.zero_()
        reference.zero_grad()
        backward(flat.net, step)
        backward(plain, step)
        if clip:
            clip_gradients([flat.grad_P[:10], flat.grad_P[10:]], clip)
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        adam.step(1e-2)
        reference.step()
        assert largest_difference(flat, plain) < 1e-12
    assert float((flat.parameters_P).abs().sum()) > 0


def test_first_step_by_hand():
    """Step 1 of Adam moves every weight by lr * g / (|g| + eps), whatever the size of the gradient."""
    flat = FlatModel(nn.Linear(2, 1, bias=False))
    start = flat.net.weight.detach().clone()
    flat.grad_P[:2] = torch.tensor([1e-3, -50.0])
    Adam(flat).step(0.1)
    moved = (flat.net.weight.detach() - start)[0].tolist()
    assert moved == pytest.approx([-0.1, 0.1], rel=1e-4)


def test_gaps_of_the_buffer_never_move():
    flat, _ = two_equal_nets()
    adam = Adam(flat)
    for step in range(3):
        backward(flat.net, step)
        adam.step(0.1)
    used = torch.zeros_like(flat.parameters_P, dtype=torch.bool)
    for span in flat.layout:
        used[span.offset : span.offset + span.size] = True
    assert int((~used).sum()) > 0
    assert not flat.parameters_P[~used].any()


def test_reset_forgets_everything():
    flat, _ = two_equal_nets()
    start_V, adam = flat.values_V.clone(), Adam(flat)
    results = []
    for _ in range(2):
        flat.load(start_V, [])
        adam.reset()
        for step in range(3):
            flat.grad_P.zero_()
            backward(flat.net, step)
            adam.step(1e-2)
        results.append(flat.values_V.clone())
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "gradient, norm, clipped",
    [
        ([3.0, 4.0], 1.0, [0.6, 0.8]),
        ([3.0, 4.0], 5.0, [3.0, 4.0]),
        ([3.0, 4.0], 100.0, [3.0, 4.0]),
        ([0.0, 0.0], 1.0, [0.0, 0.0]),
    ],
)
def test_clip_by_hand(gradient, norm, clipped):
    grad_P = torch.tensor(gradient)
    clip_gradients([grad_P[:1], grad_P[1:]], norm)
    assert grad_P.tolist() == pytest.approx(clipped, rel=1e-6)
