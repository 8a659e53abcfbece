"""Adam on the flat buffer: one fused call a step, no optimiser object (torch.optim would import torch._dynamo)."""

from __future__ import annotations

import torch

from hkd_hpc.models.flat import FlatModel


class Adam:
    """torch.optim.Adam with defaults (betas .9 .999, eps 1e-8, no weight decay) on the active weights of a model; its
    state is new in every round."""

    def __init__(self, flat: FlatModel):
        self.parameters, self.gradients = flat.active(flat.parameters_P), flat.active(flat.grad_P)
        self.means = [torch.zeros_like(part) for part in self.gradients]
        self.squares = [torch.zeros_like(part) for part in self.gradients]
        self.taken = torch.zeros((), dtype=torch.float32, device=flat.grad_P.device)
        self.steps = [self.taken] * len(self.parameters)

    def reset(self) -> None:
        torch._foreach_zero_([*self.means, *self.squares, self.taken])

    def zero_gradients(self) -> None:
        torch._foreach_zero_(self.gradients)

    def step(self, lr: float | torch.Tensor) -> None:
        self.taken.add_(1)
        torch._fused_adam_(
            self.parameters,
            self.gradients,
            self.means,
            self.squares,
            [],
            self.steps,
            lr=lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


def clip_gradients(parts: list[torch.Tensor], norm: float) -> None:
    """Scale the gradient to an L2 norm of at most `norm`, as torch.nn.utils.clip_grad_norm_ does; no host wait."""
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts)))
    torch._foreach_mul_(parts, (norm / (total + 1e-6)).clamp(max=1.0))
