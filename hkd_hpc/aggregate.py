"""Averages that depend on no order: of the clients' weights (fixed point) and of their per-class knowledge (counts).

Fixed point: each client adds round(n * x * 2^k), a whole number, held in float64. While every |x| <= LIMIT no sum
exceeds 2^53, so float64 holds it exactly, the sum over clients and ranks is exact in any order, and the average is the
same bit for bit on 1, 2, 4 or 11 ranks. (int64 would have 9 bits more, but converting to it costs more than the
transfer.) n is the client's number of training images (Eq. 1 of the paper: weights |D_i| / N), or 1 for each client
(fed.average=uniform); N is summed too, so the weights sum to one over the clients that really delivered. The error of
the average of m clients, before it is rounded to float32, is at most (m / 2) * 2^-k / N, which is m * (T / N) * 2^-37
at most, with T the N of all clients of the federation: of ten equal clients, whether all or some of them deliver,
7.3e-11, less than a tenth of the float32 step of a weight of .01.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from hkd_hpc.common.errors import RunError
from hkd_hpc.common.lazy import torch
from hkd_hpc.models.precision import real

if TYPE_CHECKING:
    Tensors = dict[str, torch.Tensor]

AGGREGATIONS = ("count", "uniform", "last")  # of per-class knowledge

LIMIT = 65536.0
USABLE = "usable weights"
CHUNK = 1 << 18  # numbers a pass: a chunk of float64 stays in the core's own cache


class FixedPointSum:
    """Exact weighted sum of float32 vectors of one length, made, moved and divided piece by piece.

        mean = (sum_i round(n_i * x_i * 2^bits)) / (N * 2^bits),    N = sum_i n_i

    The last vector added is converted only when the pieces are asked for, so that with one client per rank the sum
    never lies in memory as a whole; `flush` converts it before, when its memory is needed for the next client.

    Args:
        length: numbers of a vector, V.
        total_weight: an upper bound of N, over all clients of a round.
        device: where the vectors are.
        spans: (start, stop) of what is summed of the vectors, ascending; without them all of it. The rest must be alike
            in all clients: nothing moves it, and `mean_into` leaves it as it is.
        what: is summed, for a message.
    """

    def __init__(
        self,
        length: int,
        total_weight: int,
        device: torch.device | str = "cpu",
        spans: Sequence[tuple[int, int]] | None = None,
        what: str = USABLE,
    ):
        self.what = what
        self.spans = [(0, length)] if spans is None else list(spans)
        self.offsets = list(itertools.accumulate((stop - start for start, stop in self.spans), initial=0))
        self.length, self.device = self.offsets[-1], torch.device(device)
        self.bits = 53 - math.ceil(math.log2(LIMIT)) - math.ceil(math.log2(max(total_weight, 2)))
        self._flushed_V: torch.Tensor | None = None  # float64; kept from round to round
        self._piece = torch.empty(0, dtype=torch.float64, device=device)
        self._chunk = CHUNK if self.device.type == "cpu" else max(self.length, 1)
        self.clear()

    @property
    def numbers(self) -> int:
        """How many are summed: the values, and N."""
        return self.length + 1

    def clear(self) -> None:
        """Forget everything that was added."""
        self._weight, self._has_flushed = 0, False
        self._last: tuple[torch.Tensor, int] | None = None

    def add(self, values_V: torch.Tensor, weight: int) -> tuple[float, float] | None:
        """Add weight * values_V, which must stay as it is until `flush` or the last of the `pieces`.

        Args:
            values_V: float32.
            weight: n_i, a whole number.

        Returns:
            None; (smallest, largest) of a vector with NaN, infinity or |x| > LIMIT, of which nothing is added.
        """
        rejected = self.rejects(values_V)
        if not rejected:
            self.flush()
            self._last = (values_V, weight)
            self._weight += weight
        return rejected

    @staticmethod
    def rejects(values_V: torch.Tensor) -> tuple[float, float] | None:
        """Whether a vector cannot be added.

        Args:
            values_V: float32.

        Returns:
            (smallest, largest) of one with NaN, infinity or |x| > LIMIT; None for any other.
        """
        if not len(values_V):
            return None
        low, high = (float(bound) for bound in torch.aminmax(values_V))
        return None if low >= -LIMIT and high <= LIMIT else (low, high)  # NaN fails both

    def flush(self) -> None:
        """Take in the last vector, before its memory is used for something else."""
        if self._last is None:
            return
        if self._flushed_V is None:
            self._flushed_V = torch.empty(self.length, dtype=torch.float64, device=self.device)
        for start in range(0, self.length, self._chunk):
            flushed = self._flushed_V[start : start + self._chunk]
            flushed.copy_(self._part(start, start + len(flushed)))
        self._last, self._has_flushed = None, True

    def pieces(self, size: int) -> Iterator[torch.Tensor]:
        """What is to be summed over the ranks: N, then the values. N comes first, because the mean of the first piece
        needs it.

        Args:
            size: numbers of a piece, at most.

        Yields:
            (size,) float64 whole numbers, the last piece perhaps shorter: one reused tensor. What is written into a
            piece is not kept.
        """
        for offset in range(0, self.length + 1, size):
            lead = int(offset == 0)
            piece = self._part(offset - 1 + lead, min(offset + size - 1, self.length), lead)
            if lead:
                piece[0] = self._weight
            yield piece

    def _part(self, start: int, stop: int, lead: int = 0) -> torch.Tensor:
        """Numbers start .. stop of the sum so far, in the reused tensor, after `lead` free numbers."""
        piece = self._scratch(lead + stop - start)
        part = piece[lead:]
        if self._last is not None:
            values_V, weight = self._last
            for offset, view in self._views(values_V, start, stop):
                part[offset : offset + len(view)].copy_(view)
            part.mul_(weight * 2.0**self.bits).round_()
        if self._has_flushed and self._flushed_V is not None:
            flushed = self._flushed_V[start:stop]
            part.add_(flushed) if self._last is not None else part.copy_(flushed)
        elif self._last is None:
            part.zero_()
        return piece

    def _views(self, vector_V: torch.Tensor, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(offset from `start`, view of the vector) of the parts that numbers start .. stop of the sum stand for."""
        for (first, last), offset in zip(self.spans, self.offsets):
            low, high = max(start - offset, 0), min(stop - offset, last - first)
            if low < high:
                yield offset + low - start, vector_V[first + low : first + high]

    def parts(self, vector_V: torch.Tensor) -> list[torch.Tensor]:
        """What is summed of a vector.

        Args:
            vector_V: of the length of those that are added.

        Returns:
            A view for each of the spans.
        """
        return [vector_V[start:stop] for start, stop in self.spans]

    def _scratch(self, size: int) -> torch.Tensor:
        if len(self._piece) < size:
            self._piece = torch.empty(size, dtype=torch.float64, device=self.device)
        return self._piece[:size]

    def mean_into(self, out_V: torch.Tensor, summed: Iterable[torch.Tensor], may_be_empty: bool = False) -> float:
        """Write the weighted mean into out_V; without pieces (rank 0 of many) nothing happens.

        Args:
            out_V: float32; outside of the spans it stays as it is.
            summed: the `pieces`, summed over the ranks.
            may_be_empty: where no client delivered anything, out_V stays as it is.

        Returns:
            N; 0 without pieces.

        Raises:
            RunError: no client delivered anything, and it may not be empty.
        """
        start, factor, weight = 0, None, 0.0
        for piece in summed:
            if factor is None:
                weight, piece = float(piece[0]), piece[1:]
                factor = self._factor(weight, may_be_empty)
            if not factor:
                continue  # the exchange of the other pieces goes on: all ranks are in it
            piece.mul_(factor).add_(0.0)  # -0 becomes 0, as it does where a rank that has nothing to add took part
            for offset, view in self._views(out_V, start, start + len(piece)):
                view.copy_(piece[offset : offset + len(view)])  # in place: no temporary tensor
            start += len(piece)
        return weight

    def _factor(self, total_weight: float, may_be_empty: bool) -> float:
        if may_be_empty and not total_weight:
            return 0.0
        require_weight(total_weight, self.what)
        return 1.0 / (total_weight * 2.0**self.bits)


class GlobalStep:
    """Makes the new global weights of the mean, alike on every rank, so that nothing more travels.

    Attributes:
        state: what it keeps from round to round, by name: vectors of P floats; in checkpoints.
    """

    state: dict[str, torch.Tensor]

    def step(self, received_P: torch.Tensor, weights_P: torch.Tensor, share: float) -> None:
        """From the mean of the clients' weights to the new global weights.

        Args:
            received_P: the global weights that the clients received.
            weights_P: the mean of what they trained; becomes the new global weights.
            share: of those that delivered in the weight of all clients of the federation.
        """
        raise NotImplementedError

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a stored state; what it lacks stays as it is at first."""
        for name in self.state.keys() & state.keys():
            self.state[name].copy_(state[name])


def require_weight(total_weight: float, what: str = USABLE) -> None:
    """RunError when no client delivered anything; `what`: should have been delivered."""
    if total_weight <= 0:
        raise RunError(
            f"no client of the cohort delivered {what}, so there is nothing to average; the warnings above say why, "
            "unless all have too few images"
        )


def combine_by_class(rule: str, reports: Tensors, state: Tensors) -> Tensors:
    """The mean over clients of every tensor (M, C, X) in `reports`, class by class, and count_C, the images behind it.

    reports["count_C"] (M, C): 0 where a client does not share the class. A class nobody shares has count 0 and value 0;
    under the rule "last" it keeps what it had in an earlier round, which `state` remembers.
    """
    weight_MC = sharer_weights(rule, reports["count_C"])
    message = {name: mean_by_count(value, weight_MC)[0] for name, value in reports.items() if name != "count_C"}
    message["count_C"] = reports["count_C"].sum(0)
    return keep_old_classes(state, message) if rule == "last" else message


def sharer_weights(rule: str, count_MC: torch.Tensor) -> torch.Tensor:
    """(M, C): the weight of each client in the mean of each class; 0 where it does not share the class.

    count: its images of the class (paper, section 3.3). uniform: the same for all who share it. last: only the sharer
    with the highest number, as in the FedHKD authors' code, where each client overwrites what the one before it wrote.
    (There, a later client of the same round trains on it already. Concurrent clients cannot.)
    """
    if rule == "count":
        return count_MC
    shares_MC = real(count_MC > 0)
    if rule == "uniform":
        return shares_MC
    sharers_from_here_MC = shares_MC.flip(0).cumsum(0).flip(0)
    return shares_MC * (sharers_from_here_MC == 1)


def keep_old_classes(state: Tensors, message: Tensors) -> Tensors:
    """The message with the earlier entries of the classes that nobody shared in this round; `state` keeps a copy."""
    absent_C = message["count_C"] == 0
    for name, old in state.items():
        message[name][absent_C] = old[absent_C]
    state.update({name: tensor.clone() for name, tensor in message.items()})
    return message


def mean_by_count(value_MCX: torch.Tensor, count_MC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per class j: sum_i count_ij value_ij / sum_i count_ij over the clients i with a count (paper, section 3.3).

    value_MCX: (clients, classes, size) float; count_MC: 0 where a client does not share the class, whose value is then
    ignored even if it is NaN. Returns (mean_CX float32, total count_C); a class nobody shares has count 0 and mean 0.
    """
    count = count_MC.double()
    value = torch.where(count[..., None] > 0, value_MCX.double(), 0.0)
    total_C = count.sum(0)
    mean_CX = (count[..., None] * value).sum(0) / total_C.clamp(min=1.0)[:, None]
    return real(mean_CX), total_C
