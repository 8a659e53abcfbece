"""A model as ONE flat float32 buffer: what is trained, stepped, all-reduced, hashed and stored without copies per
tensor.

Layout: every parameter, then every float buffer (BatchNorm's running statistics), each at an offset that is a multiple
of 16 floats (64 bytes, what vector instructions want), gaps zero. Parameters and buffers of the module become views.
Integer buffers (BatchNorm's batch counter) stay apart: they are never averaged. Each tensor keeps its own
memory order.

Active are all parameters but those that require no gradient, and the weights of a convolution that never meet the image
(convolution.py): no image changes these and they change no output. The optimizer leaves both alone, and they are not
averaged: they are alike in all clients.

Shape letters: P floats of parameters with gaps, S those of float buffers, V = P + S all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from hkd_hpc.common.errors import UsageError
from hkd_hpc.models.convolution import SmallMapConv2d
from hkd_hpc.models.family import member, prefix_of
from hkd_hpc.models.precision import real_type
from hkd_hpc.store.tree import is_name

ALIGN = 16

Spans = list[tuple[int, int]]  # (start, stop) in the flat buffer


@dataclass(frozen=True)
class TensorSpan:
    """Where one tensor of the state dict lies in the flat buffer; offset -1: an integer or bool tensor, kept apart.

    `alias`: a second name of a tensor that came before (tied weights); it takes no space of its own. `frozen`: a
    parameter that requires no gradient.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int
    is_parameter: bool
    alias: bool
    frozen: bool = False

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of more than one place, from the outermost in memory to the innermost."""
        return tuple(
            sorted((axis for axis, size in enumerate(self.shape) if size > 1), key=lambda axis: -self.strides[axis])
        )

    @property
    def trainable(self) -> bool:
        """Whether local training changes it by its gradient."""
        return self.is_parameter and not self.frozen

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class FlatModel:
    """A module whose floats lie in one vector, and whose gradients in another.

    Args:
        net: the module; its parameters and float buffers become views.
        device: where it goes.

    Attributes:
        net: the module.
        values_V: all V floats.
        parameters_P: the parameters in `values_V`, a view.
        statistics_S: the rest, BatchNorm's running statistics, a view.
        grad_P: the gradients, zero in the gaps.
        counters: the integer and bool buffers, which are never averaged.
        layout: where each tensor of the state dict lies.
        active_spans: (start, stop) of what the optimizer steps in `parameters_P`; of unequal models those of the
            member that is active (`activate`).

    Raises:
        UsageError: a tensor that cannot be averaged or stored: no float32, whole numbers or bool, not dense, or of a
            name that no file can have.
    """

    def __init__(self, net: torch.nn.Module, device: torch.device | str = "cpu"):
        self.net = net.to(device)
        self.layout, trainable, total = _layout(net)
        self.values_V = torch.zeros(total, device=device)
        self.parameters_P, self.statistics_S = self.values_V[:trainable], self.values_V[trainable:]
        self.small_map_convolutions = [module for module in net.modules() if isinstance(module, SmallMapConv2d)]
        self.counters = [tensor for span, (_, tensor) in zip(self.layout, _tensors(net)) if span.offset < 0]
        self._adopt()
        self._all_active_spans = self._active_spans()
        self.active_spans = self._all_active_spans

    def _adopt(self) -> None:
        """Move the module's tensors into the flat buffers: from here on they are views."""
        with torch.no_grad():
            for span, (_, tensor) in zip(self.layout, _tensors(self.net)):
                if span.offset < 0 or span.alias:
                    continue
                view = self._view(self.values_V, span)
                view.copy_(tensor)
                tensor.data = view

    @cached_property
    def grad_P(self) -> torch.Tensor:
        """The gradients, made when first asked for: where nobody trains they would be a model's memory for nothing."""
        grad_P = torch.zeros_like(self.parameters_P)
        for span, (_, tensor) in zip(self.layout, _tensors(self.net)):
            if span.trainable and not span.alias:
                tensor.grad = self._view(grad_P, span)
        return grad_P

    @cached_property
    def filled_V(self) -> torch.Tensor:
        """1 where a tensor lies in `values_V`, 0 in the gaps."""
        filled_V = torch.zeros_like(self.values_V)
        for view in self.tensors(filled_V).values():
            view.fill_(1)
        return filled_V

    @staticmethod
    def _view(flat: torch.Tensor, span: TensorSpan) -> torch.Tensor:
        return flat[span.offset : span.offset + span.size].as_strided(span.shape, span.strides)

    def _active_spans(self) -> Spans:
        """(start, stop) in `parameters_P`: what is left between frozen parameters and the inactive weights of
        convolutions."""
        spans = {id(tensor): span for span, (_, tensor) in zip(self.layout, _tensors(self.net))}
        weights = [(spans[id(conv.weight)], conv) for conv in self.small_map_convolutions]
        inactive = sorted(
            [(s.offset, s.offset + _aligned(s.size)) for s in self.layout if s.frozen and not s.alias]
            + [
                (span.offset + start, span.offset + stop)
                for span, conv in weights
                if not span.frozen
                for start, stop in conv.inactive_spans()
            ]
        )
        starts, stops = (
            [0, *(stop for _, stop in inactive)],
            [*(start for start, _ in inactive), len(self.parameters_P)],
        )
        return [(start, stop) for start, stop in zip(starts, stops) if start < stop]

    @property
    def averaged_spans(self) -> Spans:
        """(start, stop) in `values_V` of what training can change: the active spans, and the float buffers."""
        return [*self._all_active_spans, (len(self.parameters_P), len(self.values_V))]

    # --- unequal models (family.py): `name` is that of a member, or empty where all clients have the same

    def net_of(self, name: str) -> torch.nn.Module:
        """The network of the clients that have this member.

        Args:
            name: of the member; "" where all clients have the same network.

        Returns:
            The module, whose tensors are views of `values_V`.
        """
        return member(self.net, name)

    def activate(self, name: str) -> torch.nn.Module:
        """The same; its weights alone are active from now on."""
        self.active_spans = common(self._all_active_spans, self._spans_of_member(name))
        return self.net_of(name)

    def averaged_spans_of(self, name: str) -> Spans:
        """What is averaged over the clients that have this member."""
        return common(self.averaged_spans, self._spans_of_member(name))

    def statistics_spans_of(self, name: str) -> Spans:
        """(start, stop) of the member's float buffers in `statistics_S`."""
        start = len(self.parameters_P)
        whole = common([(start, len(self.values_V))], self._spans_of_member(name))
        return [(first - start, last - start) for first, last in whole]

    def floats_of(self, name: str, but: Spans) -> int:
        """The member's floats that travel, without those that begin within the spans `but`."""
        own = self._spans_of_member(name)
        return self.floats_in(own) - self.floats_in(common(own, but))

    def parameter_counts(self, names: Sequence[str]) -> dict[str, int]:
        """Trainable numbers of each member."""
        return {name: self.floats_in(self.parameter_spans_of(name)) for name in names}

    def parameter_spans_of(self, name: str) -> Spans:
        """(start, stop) of the member's trainable floats in `parameters_P`."""
        return common([(0, len(self.parameters_P))], self._spans_of_member(name))

    def _spans_of_member(self, name: str) -> Spans:
        prefix = prefix_of(self.net, name)
        if not prefix:
            return [(0, len(self.values_V))]
        return self.spans_of({span.name for span in self.layout if span.name.startswith(prefix)})

    def spans_of(self, names: Collection[str]) -> Spans:
        """Where tensors lie.

        Args:
            names: of the state dict; integer and bool buffers lie nowhere.

        Returns:
            [(start, stop)] in `values_V`, ascending, gaps included, neighbours in one.
        """
        ends = {s.offset: s.offset + _aligned(s.size) for s in self.layout if s.name in names and s.offset >= 0}
        spans: Spans = []
        for start, stop in sorted(ends.items()):
            if spans and spans[-1][1] == start:
                start, _ = spans.pop()
            spans.append((start, stop))
        return spans

    def floats_in(self, spans: Spans) -> int:
        """Trainable parameters and float buffers that begin within these spans, without gaps."""
        return sum(
            span.size
            for span in self.layout
            if not (span.alias or span.frozen) and any(start <= span.offset < stop for start, stop in spans)
        )

    def active(self, vector_P: torch.Tensor) -> list[torch.Tensor]:
        """The active spans of a vector of the trainable floats, as views."""
        return [vector_P[start:stop] for start, stop in self.active_spans]

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of `loss` to `grad_P`.

        Args:
            loss: a scalar, with its graph.
        """
        _ = self.grad_P  # there before autograd looks for it
        self._let_convolutions_add(True)
        try:
            loss.backward()
        finally:
            self._let_convolutions_add(False)

    def _let_convolutions_add(self, adds: bool) -> None:
        for conv in self.small_map_convolutions:
            conv.adds_to_grad = adds

    @property
    def payload_floats(self) -> int:
        """P + b of the paper's accounting: trainable parameters and float buffers, without gaps."""
        return self.floats_in([(0, len(self.values_V))])

    @property
    def parameter_count(self) -> int:
        """Trainable numbers, without gaps."""
        return sum(span.size for span in self.layout if span.trainable and not span.alias)

    def schema(self) -> str:
        """The layout as text: what all ranks must agree on before the first exchange.

        Returns:
            A line for each tensor of the state dict: name, shape, memory order, dtype, offset in floats, frozen.
        """
        return "\n".join(
            f"{s.name} {s.shape} {s.order} {s.dtype} {s.offset}" + " frozen" * s.frozen for s in self.layout
        )

    def arrays(self, values_V: torch.Tensor, counters: Iterable[torch.Tensor]) -> dict[str, np.ndarray]:
        """A state dict as arrays, for a file.

        Args:
            values_V: V floats in this layout.
            counters: the integer and bool buffers, in the order of the layout.

        Returns:
            {name: array} in C order, each of its tensor's shape and dtype.
        """
        flat, rest = values_V.detach().cpu(), iter(counters)
        tensors = {s.name: self._view(flat, s) if s.offset >= 0 else next(rest).cpu() for s in self.layout}
        return {name: np.asarray(tensor.numpy(), order="C") for name, tensor in tensors.items()}

    def tensors(self, values_V: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The float tensors of the state dict.

        Args:
            values_V: V floats in this layout; None: the model's own.

        Returns:
            {name: view of `values_V`}.
        """
        vector_V = self.values_V if values_V is None else values_V
        return {span.name: self._view(vector_V, span) for span in self.layout if span.offset >= 0}

    def tensors_of(self, name: str, values_V: torch.Tensor) -> dict[str, torch.Tensor]:
        """The float tensors of a member.

        Args:
            name: as of `net_of`.
            values_V: V floats in this layout.

        Returns:
            {name in the member's own state dict: view of `values_V`}.
        """
        prefix = prefix_of(self.net, name)
        found = self.tensors(values_V).items()
        return {key.removeprefix(prefix): tensor for key, tensor in found if key.startswith(prefix)}

    def load_arrays(self, arrays: dict[str, np.ndarray], values_V: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `arrays`.

        Args:
            arrays: {name: array} of every tensor of the layout.
            values_V: V floats, which are filled.

        Returns:
            The integer and bool buffers, in the order of the layout.

        Raises:
            KeyError: a tensor of the layout is missing.
        """
        counters = []
        for span in self.layout:
            tensor = torch.from_numpy(np.array(arrays[span.name])).to(getattr(torch, span.dtype))
            if span.offset < 0:
                counters.append(tensor)
            else:
                self._view(values_V, span).copy_(tensor)
        return counters

    def load(self, values_V: torch.Tensor, counters: Iterable[torch.Tensor]) -> None:
        """Set the module to the given values.

        Args:
            values_V: V floats in this layout, copied.
            counters: the integer and bool buffers, in the order of the layout, copied.
        """
        self.values_V.copy_(values_V)
        for own, given in zip(self.counters, counters):
            own.copy_(given)


def _tensors(net: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by name, in the order of the state dict."""
    own = {id(t) for t in [*net.parameters(), *net.buffers()]}
    return [(name, tensor) for name, tensor in net.state_dict(keep_vars=True).items() if id(tensor) in own]


def _layout(net: torch.nn.Module) -> tuple[list[TensorSpan], int, int]:
    """Spans in state-dict order; parameters take the offsets first, float buffers after them. Sizes P and V."""
    named, parameters = _tensors(net), {id(p) for p in net.parameters()}
    for name, tensor in named:
        _require_storable(name, tensor)
    offsets: dict[int, int] = {}
    total = trainable = 0
    for wanted in (True, False):
        for _, tensor in named:
            if tensor.dtype.is_floating_point and (id(tensor) in parameters) == wanted and id(tensor) not in offsets:
                offsets[id(tensor)] = total
                total += _aligned(tensor.numel())
        trainable = total if wanted else trainable
    seen: set[int] = set()
    layout = []
    for name, tensor in named:
        layout.append(
            TensorSpan(
                name,
                tuple(tensor.shape),
                torch.empty_like(tensor, device="meta").stride(),
                str(tensor.dtype).removeprefix("torch."),
                offsets.get(id(tensor), -1),
                id(tensor) in parameters,
                id(tensor) in seen,
                id(tensor) in parameters and not tensor.requires_grad,
            )
        )
        seen.add(id(tensor))
    return layout, trainable, total


def common(spans: Spans, others: Spans) -> Spans:
    """What lies within both, ascending."""
    both = ((max(a, c), min(b, d)) for a, b in spans for c, d in others)
    return sorted((start, stop) for start, stop in both if start < stop)


def _aligned(size: int) -> int:
    """Places of so many floats in the flat buffer."""
    return -(-size // ALIGN) * ALIGN


def _require_storable(name: str, tensor: torch.Tensor) -> None:
    """What is averaged and stored: floats of one kind, whole numbers and bools, under names that a file can have."""
    if not is_name(name):
        raise UsageError(
            f"model.name: {name!r} cannot be the name of a tensor in a file; it must be text without / and NUL"
        )
    if tensor.is_complex() or tensor.layout != torch.strided:
        kind = "complex" if tensor.is_complex() else tensor.layout
        raise UsageError(
            f"model.name: {name} is {kind}; the tensors of a model must be dense, and float32, whole numbers or bool"
        )
    if tensor.is_floating_point() and tensor.dtype != torch.get_default_dtype():
        raise UsageError(f"model.name: {name} is {tensor.dtype}; floats of a model must be {real_type()}")
