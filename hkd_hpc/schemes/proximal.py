"""The pull towards given weights that several schemes share, computed on the flat buffer: autograd never sees
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkd_hpc.aggregate import CHUNK
from hkd_hpc.common.lazy import torch

if TYPE_CHECKING:
    from hkd_hpc.client import Client


def pull(client: Client, mu: float, centre_P: torch.Tensor | None = None) -> torch.Tensor:
    """(mu / 2) ||w - centre||^2 over the trainable parameters, in a scheme's `loss`.

    Args:
        client: while it trains.
        mu: weight of the term.
        centre_P: P floats; None: the received weights.

    Returns:
        The value. Its gradient mu (w - centre) takes the place of the zeros to which the backward pass adds.
    """
    centre_P = client.received_P if centre_P is None else centre_P
    flat = client.flat
    square = torch.zeros((), device=flat.grad_P.device)
    size = CHUNK if flat.grad_P.device.type == "cpu" else max(len(flat.grad_P), 1)
    active = map(flat.active, (flat.grad_P, flat.parameters_P.detach(), centre_P))
    for span in zip(*active):  # what lies between never differs
        for grad, own, centre in zip(*(part.split(size) for part in span)):
            torch.sub(own, centre, out=grad)
            square = square + grad.dot(grad)
            grad.mul_(mu)
    return 0.5 * mu * square
