"""FedHKD that also measures the gradients of its loss: `scheme.name=hkd_hpc.schemes.gradients:MeasuredFedHKD`.

The norms are recorded as terms of the loss (loss/gradient_soft of metrics.h5: mean over the images of the last local
epoch, in which alone they are measured). They are constants, so that training and its bits are those of FedHKD.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hkd_hpc.common.lazy import torch
from hkd_hpc.schemes.fedhkd import FedHKD

if TYPE_CHECKING:
    from hkd_hpc.client import Batch, Client
    from hkd_hpc.schemes.base import Tensors


class MeasuredFedHKD(FedHKD):
    """FedHKD with the norm of each term's gradient, over all parameters, beside the term."""

    terms = (*FedHKD.terms, *(f"gradient_{term}" for term in FedHKD.terms))
    cuda_graph_safe = False

    def loss(self, client: Client, batch: Batch) -> Tensors:
        values = super().loss(client, batch)
        measured = client.net.parameters() if client.epochs_left == 0 else ()
        parameters = [parameter for parameter in measured if parameter.requires_grad]
        return values | {f"gradient_{term}": gradient_norm(value, parameters) for term, value in values.items()}


def gradient_norm(value: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of one term; 0 of a term that is off, and where there are no parameters."""
    if not (parameters and value.requires_grad):
        return torch.zeros((), device=value.device)
    found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return torch.stack([gradient.norm() for gradient in found if gradient is not None]).norm()
