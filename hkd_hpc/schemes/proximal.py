"""The pull towards the received weights that several schemes share, computed on the flat buffer: autograd never sees
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hkd_hpc.aggregate import CHUNK
from hkd_hpc.lazy import torch

if TYPE_CHECKING:
    from hkd_hpc.client import Client


def pull(client: Client, mu: float) -> torch.Tensor:
    """(mu / 2) ||w - w_received||^2 over the trainable parameters, in a scheme's `loss`.

    Args:
        client: while it trains.
        mu: weight of the term.

    Returns:
        The value. Its gradient mu (w - w_received) takes the place of the zeros to which the backward pass adds.
    """
    flat = client.flat
    square = torch.zeros((), device=flat.grad_P.device)
    size = CHUNK if flat.grad_P.device.type == "cpu" else max(len(flat.grad_P), 1)
    active = map(flat.active, (flat.grad_P, flat.parameters_P.detach(), client.received_P))
    for span in zip(*active):  # what lies between never differs
        for grad, own, received in zip(*(part.split(size) for part in span)):
            torch.sub(own, received, out=grad)
            square = square + grad.dot(grad)
            grad.mul_(mu)
    return 0.5 * mu * square
