"""SGD, Adam and AdamW on the flat buffer: one fused call a step, no optimiser object (torch.optim would import
torch._dynamo).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hkd_hpc.models.flat import FlatModel


class Optimizer:
    """Steps the active weights of a model along its gradient, as the optimiser of torch.optim of that name does.

    Its state is new in every round.

    Attributes:
        parameters: the active spans of the weights, views.
        gradients: the same of the gradient.
        state: what it keeps from one step to the next.
    """

    def __init__(self, flat: FlatModel):
        self.parameters, self.gradients = flat.active(flat.parameters_P), flat.active(flat.grad_P)
        self.state: list[torch.Tensor] = []

    def _zeros(self) -> list[torch.Tensor]:
        """A state of the size of the gradients."""
        zeros = [torch.zeros_like(part) for part in self.gradients]
        self.state += zeros
        return zeros

    def reset(self) -> None:
        """Forget all steps so far."""
        if self.state:
            torch._foreach_zero_(self.state)

    def zero_gradients(self) -> None:
        """Before a backward pass, which adds."""
        torch._foreach_zero_(self.gradients)

    def step(self, lr: float | torch.Tensor) -> None:
        """One step with this learning rate."""
        raise NotImplementedError


class Adam(Optimizer):
    """torch.optim.Adam with betas .9 .999 and eps 1e-8; its weight decay is added to the gradient."""

    fused: Callable[..., None] = staticmethod(torch._fused_adam_)

    def __init__(self, flat: FlatModel, weight_decay: float = 0.0):
        super().__init__(flat)
        self.weight_decay = weight_decay
        self.means, self.squares = self._zeros(), self._zeros()
        self.taken = torch.zeros((), dtype=torch.float32, device=flat.grad_P.device)
        self.state.append(self.taken)
        self.steps = [self.taken] * len(self.parameters)

    def step(self, lr: float | torch.Tensor) -> None:
        """One step with this learning rate."""
        self.taken.add_(1)
        self.fused(
            self.parameters,
            self.gradients,
            self.means,
            self.squares,
            [],
            self.steps,
            lr=lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=self.weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


class AdamW(Adam):
    """torch.optim.AdamW: the same, but the decay shrinks the weights themselves, by lr * weight_decay a step."""

    fused: Callable[..., None] = staticmethod(torch._fused_adamw_)


class SGD(Optimizer):
    """torch.optim.SGD without dampening; its weight decay is added to the gradient."""

    def __init__(self, flat: FlatModel, weight_decay: float = 0.0, momentum: float = 0.0, nesterov: bool = False):
        super().__init__(flat)
        self.weight_decay, self.momentum, self.nesterov = weight_decay, momentum, nesterov
        self.velocities = self._zeros() if momentum else []

    def step(self, lr: float | torch.Tensor) -> None:
        """One step with this learning rate."""
        torch._fused_sgd_(
            self.parameters,
            self.gradients,
            self.velocities,
            lr=lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
            is_first_step=False,  # a velocity of zero makes the same of the first gradient
        )


def make_optimizer(flat: FlatModel, name: str, weight_decay: float, momentum: float, nesterov: bool) -> Optimizer:
    """The optimizer of train.optimizer.

    Args:
        flat: the model whose weights it steps.
        name: adam, adamw or sgd.
        weight_decay: of all active weights.
        momentum, nesterov: of SGD; the others have no such settings.

    Returns:
        It, without a step taken.
    """
    if name == "sgd":
        return SGD(flat, weight_decay, momentum, nesterov)
    return {"adam": Adam, "adamw": AdamW}[name](flat, weight_decay)


def state_vectors(name: str, momentum: float) -> int:
    """Vectors of the size of the active weights that it keeps: two moments, a velocity or nothing."""
    return int(momentum > 0) if name == "sgd" else 2


def clip_gradients(parts: list[torch.Tensor], norm: float) -> None:
    """Scale the gradient to an L2 norm of at most `norm`, as torch.nn.utils.clip_grad_norm_ does; no host wait."""
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts)))
    torch._foreach_mul_(parts, (norm / (total + 1e-6)).clamp(max=1.0))
