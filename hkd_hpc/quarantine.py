"""Which clients may enter the average: none with NaN, infinity or absurd sizes in its weights, buffers, knowledge or
loss, nor with logits on its own test or validation images that are not finite.

A client that may not is invalid: it counts with weight 0, the others are renormalised, and the first tensor to blame is
told and recorded.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hkd_hpc.aggregate import LIMIT
from hkd_hpc.models.flat import FlatModel

OK, INVALID_WEIGHTS, TOO_FEW_IMAGES, INVALID_REPORT, INVALID_LOSS, DROPPED_OUT, STRAGGLER, INVALID_TEST = range(8)
INVALID = (INVALID_WEIGHTS, INVALID_REPORT, INVALID_LOSS, INVALID_TEST)
STATUS = {
    OK: "ok",
    INVALID_WEIGHTS: "weights",
    TOO_FEW_IMAGES: "too few images to train",
    INVALID_REPORT: "report to the server",
    INVALID_LOSS: "loss",
    INVALID_TEST: "predictions",
    DROPPED_OUT: "did not answer (fed.drop_rate)",
    STRAGGLER: "came too late (fed.straggler_rate)",
}
COUNTS = "count_C"  # of a report: images by class (Scheme.report_shapes)
UPDATE = "change of all weights, L2 norm"
NOISED = "weights with the noise of privacy.update_multiplier"
TESTS = ("local test", "validation")  # the number that goes with them: images whose logits are not finite
NONFINITE = "images whose logits are not finite"


@dataclass(frozen=True)
class Finding:
    """What makes a client invalid in a round: its status, the tensor, and the number in it, or its norm; of TESTS the
    images."""

    status: int
    tensor: str
    value: float


def names(flat: FlatModel, reports: Iterable[str], terms: Iterable[str]) -> list[str]:
    """All that a Finding can name, the same on every rank, so that its place in this list can travel."""
    return [
        UPDATE,
        *TESTS,
        NOISED,
        *(span.name for span in flat.layout),
        *(f"report {name}" for name in reports),
        *(f"loss {term}" for term in terms),
    ]


def invalid_weights(flat: FlatModel) -> Finding | None:
    """The first tensor of the model with a number that is not finite, or beyond aggregate.LIMIT."""
    tensors = flat.tensors()
    return next(
        (
            Finding(INVALID_WEIGHTS, name, value)
            for name, tensor in tensors.items()
            if (value := invalid_number(tensor)) is not None
        ),
        None,
    )


def invalid_update(flat: FlatModel, received_V: torch.Tensor, max_norm: float) -> Finding | None:
    """A change of the weights since the start of the round whose L2 norm is beyond max_norm (0: any will do)."""
    if not max_norm:
        return None
    norm = float(torch.linalg.vector_norm(flat.values_V - received_V, dtype=torch.float64))
    return None if norm <= max_norm else Finding(INVALID_WEIGHTS, UPDATE, norm)


def invalid_noise(bounds: tuple[float, float]) -> Finding:
    """Weights that only the noise on them made too large: (smallest, largest) of what should have been sent."""
    return Finding(INVALID_WEIGHTS, NOISED, max(bounds, key=abs))


def invalid_report(report: dict[str, torch.Tensor], max_norm: float) -> Finding | None:
    """The first tensor of a report with a bad number, or an L2 norm beyond max_norm (0: any will do); counts of images
    may be as large as they are."""
    for name, tensor in report.items():
        is_count = name == COUNTS
        value = first_of(tensor, ~((tensor >= 0) & tensor.isfinite())) if is_count else invalid_number(tensor)
        if value is None and max_norm and not is_count and float(tensor.double().norm()) > max_norm:
            value = float(tensor.double().norm())
        if value is not None:
            return Finding(INVALID_REPORT, f"report {name}", value)
    return None


def invalid_loss(loss_by_term: dict[str, float]) -> Finding | None:
    """The first term that is not finite."""
    return next(
        (
            Finding(INVALID_LOSS, f"loss {term}", value)
            for term, value in loss_by_term.items()
            if not abs(value) < float("inf")
        ),
        None,
    )


def invalid_test(*nonfinite: int) -> Finding | None:
    """The first of TESTS, given the images of each whose logits are not finite, that has some."""
    return next((Finding(INVALID_TEST, name, count) for name, count in zip(TESTS, nonfinite) if count), None)


def describe(tensor: str, value: float) -> str:
    """A Finding for people: "loss soft has nan", "local test has 3 images whose logits are not finite"."""
    return f"{tensor} has {value:.6g}" + f" {NONFINITE}" * (tensor in TESTS)


def invalid_number(tensor: torch.Tensor) -> float | None:
    """The first number that is not finite or beyond aggregate.LIMIT."""
    return first_of(tensor, ~(tensor.abs() <= LIMIT))  # NaN is not <= anything


def first_of(tensor: torch.Tensor, bad: torch.Tensor) -> float | None:
    """The first of its numbers that is bad."""
    return float(tensor[bad].reshape(-1)[0]) if bool(bad.any()) else None
