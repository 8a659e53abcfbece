"""Which clients may enter the average: none with NaN, infinity or absurd sizes in its weights, buffers, knowledge or
loss, nor with logits on its own test or validation images that are not finite.

A client that may not counts with weight 0, the others are renormalised, and the first bad tensor is told and recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hkd_hpc.aggregate import LIMIT
from hkd_hpc.models.flat import FlatModel

OK, REFUSED, NO_DATA, BAD_REPORT, BAD_LOSS, DROPPED, LATE, BAD_TEST = range(8)
BAD = (REFUSED, BAD_REPORT, BAD_LOSS, BAD_TEST)
STATUS = {
    OK: "ok",
    REFUSED: "weights",
    NO_DATA: "too few images to train",
    BAD_REPORT: "report to the server",
    BAD_LOSS: "loss",
    BAD_TEST: "predictions",
    DROPPED: "did not answer (fed.drop_rate)",
    LATE: "came too late (fed.straggler_rate)",
}
UPDATE = "change of all weights, L2 norm"
TESTS = ("local test", "validation")  # the number that goes with them: images whose logits are not finite
NONFINITE = "images whose logits are not finite"


@dataclass(frozen=True)
class Finding:
    """What is wrong with a client: its status, the tensor, and the number in it, or its norm; of TESTS the images."""

    status: int
    tensor: str
    value: float


def names(flat: FlatModel, reports, terms) -> list[str]:
    """All that a Finding can name, the same on every rank, so that its place in this list can travel."""
    return [
        UPDATE,
        *TESTS,
        *(slot.name for slot in flat.slots),
        *(f"report {name}" for name in reports),
        *(f"loss {term}" for term in terms),
    ]


def bad_weights(flat: FlatModel) -> Finding | None:
    """The first tensor of the model with a number that is not finite, or beyond aggregate.LIMIT."""
    tensors = flat.tensors()
    return next(
        (
            Finding(REFUSED, name, value)
            for name, tensor in tensors.items()
            if (value := bad_number(tensor)) is not None
        ),
        None,
    )


def bad_update(flat: FlatModel, received_V: torch.Tensor, max_norm: float) -> Finding | None:
    """A change of the weights since the start of the round whose L2 norm is beyond max_norm (0: any will do)."""
    if not max_norm:
        return None
    norm = float(torch.linalg.vector_norm(flat.values_V - received_V, dtype=torch.float64))
    return None if norm <= max_norm else Finding(REFUSED, UPDATE, norm)


def bad_report(report: dict[str, torch.Tensor], max_norm: float) -> Finding | None:
    """The first tensor of a report with a bad number, or an L2 norm beyond max_norm (0: any will do)."""
    for name, tensor in report.items():
        value = bad_number(tensor)
        if value is None and max_norm and float(tensor.double().norm()) > max_norm:
            value = float(tensor.double().norm())
        if value is not None:
            return Finding(BAD_REPORT, f"report {name}", value)
    return None


def bad_loss(loss_by_term: dict[str, float]) -> Finding | None:
    """The first term that is not finite."""
    return next(
        (
            Finding(BAD_LOSS, f"loss {term}", value)
            for term, value in loss_by_term.items()
            if not abs(value) < float("inf")
        ),
        None,
    )


def bad_test(*nonfinite: int) -> Finding | None:
    """The first of TESTS, given the images of each whose logits are not finite, that has some."""
    return next((Finding(BAD_TEST, name, count) for name, count in zip(TESTS, nonfinite) if count), None)


def words(tensor: str, value: float) -> str:
    """A Finding for people: "loss soft has nan", "local test has 3 images whose logits are not finite"."""
    return f"{tensor} has {value:.6g}" + f" {NONFINITE}" * (tensor in TESTS)


def bad_number(tensor: torch.Tensor) -> float | None:
    """The first number that is not finite or beyond aggregate.LIMIT."""
    bad = ~(tensor.abs() <= LIMIT)  # NaN is not <= anything
    return float(tensor[bad].reshape(-1)[0]) if bool(bad.any()) else None
