"""Optimizers and clipping on the flat buffer against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.optimizer import SGD, Adam, clip_gradients, make_optimizer, state_vectors

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


RULES = [  # name, weight decay, momentum, Nesterov; the optimiser of torch
    ("adam", 0.0, 0.0, False, torch.optim.Adam),
    ("adam", 0.1, 0.0, False, torch.optim.Adam),
    ("adamw", 0.1, 0.0, False, torch.optim.AdamW),
    ("sgd", 0.0, 0.0, False, torch.optim.SGD),
    ("sgd", 0.1, 0.0, False, torch.optim.SGD),
    ("sgd", 0.1, 0.9, False, torch.optim.SGD),
    ("sgd", 0.1, 0.9, True, torch.optim.SGD),
]


def new_gradients(flat, plain, reference, step):
    """Those of one batch, in both."""
    flat.grad_P.zero_()
    reference.zero_grad()
    backward(flat.net, step)
    backward(plain, step)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name, decay, momentum, nesterov, rule", RULES)
def test_twenty_steps_equal_torch(clip, name, decay, momentum, nesterov, rule):
    flat, plain = two_equal_nets()
    optimizer = make_optimizer(flat, name, decay, momentum, nesterov)
    own = {"momentum": momentum, "nesterov": nesterov} if name == "sgd" else {}
    reference = rule(plain.parameters(), lr=1e-2, weight_decay=decay, **own)
    for step in range(20):
        new_gradients(flat, plain, reference, step)
        if clip:
            clip_gradients([flat.grad_P[:10], flat.grad_P[10:]], clip)
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step(1e-2)
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


def test_three_steps_of_momentum_by_hand():
    """From 1, gradient 1, decay .5: g = 1.5, 1.425, 1.31625; v = 1.5, 2.175, 2.40375."""
    flat = FlatModel(nn.Linear(1, 1, bias=False))
    flat.net.weight.data.fill_(1.0)
    sgd, seen = SGD(flat, weight_decay=0.5, momentum=0.5), []
    for _ in range(3):
        flat.grad_P[0] = 1.0
        sgd.step(0.1)
        seen.append(flat.net.weight.item())
    assert seen == pytest.approx([0.85, 0.6325, 0.392125], rel=1e-6)


def test_a_rate_in_a_tensor_is_the_same_step():
    """As an epoch on a stage has it."""
    results = []
    for rate in (0.25, torch.tensor(0.25, dtype=torch.float64)):
        flat, _ = two_equal_nets()
        backward(flat.net, 0)
        SGD(flat, momentum=0.9).step(rate)
        results.append(flat.values_V)
    assert torch.equal(*results)


@pytest.mark.parametrize("name, decay, momentum, nesterov, rule", RULES)
def test_what_is_kept_is_what_is_counted(name, decay, momentum, nesterov, rule):
    flat, _ = two_equal_nets()
    kept = make_optimizer(flat, name, decay, momentum, nesterov).state
    assert sum(part.numel() for part in kept) // len(flat.parameters_P) == state_vectors(name, momentum)


@pytest.mark.parametrize("name, decay, momentum, nesterov, rule", RULES)
def test_gaps_of_the_buffer_never_move(name, decay, momentum, nesterov, rule):
    flat, _ = two_equal_nets()
    optimizer = make_optimizer(flat, name, decay, momentum, nesterov)
    for step in range(3):
        backward(flat.net, step)
        optimizer.step(0.1)
    used = torch.zeros_like(flat.parameters_P, dtype=torch.bool)
    for span in flat.layout:
        used[span.offset : span.offset + span.size] = True
    assert int((~used).sum()) > 0
    assert not flat.parameters_P[~used].any()


@pytest.mark.parametrize("name, decay, momentum, nesterov, rule", RULES)
def test_reset_forgets_everything(name, decay, momentum, nesterov, rule):
    flat, _ = two_equal_nets()
    start_V, optimizer = flat.values_V.clone(), make_optimizer(flat, name, decay, momentum, nesterov)
    results = []
    for _ in range(2):
        flat.load(start_V, [])
        optimizer.reset()
        for step in range(3):
            flat.grad_P.zero_()
            backward(flat.net, step)
            optimizer.step(1e-2)
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


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name, decay, momentum, nesterov, rule", RULES)
def test_what_requires_no_gradient_stays_as_with_torch(name, decay, momentum, nesterov, rule):
    make = lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    flat_net, plain = make(), make()
    plain.load_state_dict(flat_net.state_dict())
    for net in (flat_net, plain):
        net[0].weight.requires_grad_(False)
        net[2].bias.requires_grad_(False)
    flat, before = FlatModel(flat_net), plain[0].weight.clone()
    optimizer = make_optimizer(flat, name, decay, momentum, nesterov)
    own = {"momentum": momentum, "nesterov": nesterov} if name == "sgd" else {}
    reference = rule(plain.parameters(), lr=1e-2, weight_decay=decay, **own)
    for step in range(20):
        new_gradients(flat, plain, reference, step)
        optimizer.step(1e-2)
        reference.step()
    assert torch.equal(flat.net[0].weight, before)
    assert largest_difference(flat, plain) < 1e-10
