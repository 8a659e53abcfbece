"""Averages that depend on no order: of the clients' weights (fixed point) and of their per-class knowledge (counts).

Fixed point: each client adds round(n * x * 2^k) as int64, so the sum over clients and ranks is exact in any order, and
the average is the same bit for bit on 1, 2, 4 or 11 ranks. n is the client's number of training images (Eq. 1 of the
paper: weights |D_i| / M); the last element of the buffer adds up M itself, so the weights sum to one over the clients
that really delivered. k is chosen so that the sum cannot overflow while every |x| <= LIMIT; the error of the average is
at most (clients / 2) * 2^-k / M, about 1e-13.
"""
from __future__ import annotations

import math

from hkd_hpc.errors import RunError
from hkd_hpc.lazy import torch

LIMIT = 65536.0
CHUNK = 1 << 15  # floats a pass: the three temporaries of a chunk stay in the core's own cache


class FixedPointSum:
    """Exact weighted sum of float32 vectors of one length; `buffer` (int64, length + 1) is all-reduced."""

    def __init__(self, length: int, total_weight: int, device: torch.device | str = "cpu"):
        """`total_weight`: an upper bound of the sum of all weights over all clients of a round."""
        self.bits = 62 - math.ceil(math.log2(LIMIT)) - math.ceil(math.log2(max(total_weight, 2)))
        self.buffer = torch.zeros(length + 1, dtype=torch.int64, device=device)
        chunk = CHUNK if torch.device(device).type == "cpu" else length
        self._double = torch.empty(chunk, dtype=torch.float64, device=device)
        self._int = torch.empty(chunk, dtype=torch.int64, device=device)
        self._empty = True

    def clear(self) -> None:
        self._empty = True

    def add(self, values_V: torch.Tensor, weight: int) -> tuple[float, float] | None:
        """Add weight * values_V. With NaN, infinity or |x| > LIMIT nothing is added; then (smallest, largest) return."""
        refused = self.refuses(values_V)
        if refused:
            return refused
        for start in range(0, len(values_V), len(self._double)):
            self._add_chunk(start, values_V[start:start + len(self._double)], weight * 2.0 ** self.bits)
        self.buffer[-1] = weight + (0 if self._empty else self.buffer[-1])
        self._empty = False
        return None

    @staticmethod
    def refuses(values_V: torch.Tensor) -> tuple[float, float] | None:
        """(smallest, largest) of a vector that cannot be added, None for one that can."""
        low, high = (float(bound) for bound in torch.aminmax(values_V))
        return None if low >= -LIMIT and high <= LIMIT else (low, high)  # NaN fails both

    def _add_chunk(self, start: int, chunk: torch.Tensor, scale: float) -> None:
        double, target = self._double[:len(chunk)], self.buffer[start:start + len(chunk)]
        torch.mul(double.copy_(chunk), scale, out=double).round_()
        if self._empty:
            target.copy_(double)
        else:
            target.add_(self._int[:len(chunk)].copy_(double))

    def settle(self) -> torch.Tensor:
        """The buffer, ready for the all-reduce (zero when nothing was added)."""
        if self._empty:
            self.buffer.zero_()
        return self.buffer

    def mean_into(self, out_V: torch.Tensor) -> int:
        """Write the weighted mean into out_V, return the total weight. RunError when no client delivered anything."""
        total = int(self.buffer[-1])
        if total <= 0:
            raise RunError("no client of the cohort delivered usable weights, so there is nothing to average; the warnings "
                           "above say why, unless all have too few images")
        for start in range(0, len(out_V), len(self._double)):
            out = out_V[start:start + len(self._double)]
            double = self._double[:len(out)].copy_(self.buffer[start:start + len(out)])
            out.copy_(double.div_(total * 2.0 ** self.bits))
        return total


def mean_by_count(value_MCX: torch.Tensor, count_MC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per class j: sum_i count_ij value_ij / sum_i count_ij over the clients i with a count (paper, section 3.3).

    value_MCX: (clients, classes, size) float; count_MC: 0 where a client does not share the class, whose value is then
    ignored even if it is NaN. Returns (mean_CX float32, total count_C); a class nobody shares has count 0 and mean 0.
    """
    count = count_MC.double()
    value = torch.where(count[..., None] > 0, value_MCX.double(), 0.0)
    total_C = count.sum(0)
    mean_CX = (count[..., None] * value).sum(0) / total_C.clamp(min=1.0)[:, None]
    return mean_CX.float(), total_C
