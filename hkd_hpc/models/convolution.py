"""Convolutions on maps of a few pixels, as matrix products over the taps of the kernel that meet the image.

A tap is a position of the kernel. A 3 x 3 convolution with padding on a 1 x 1 map uses one of its nine taps, on a 2 x 2
map sixteen of thirty-six products; the rest is padding, which the library multiplies all the same: with 32 x 32 images
half of a ResNet18's training time on a CPU. The weights of a tap that never meets the image have gradient zero and no
effect: they are inactive, and need not be stepped. All others are active.

Memory order of such a weight: taps, channels in, channels out (its shape stays (O, I, Y, X)), so that neighbouring taps
and their channels in are the rows of one matrix.

Shape letters: B batch, I and O channels in and out, H W pixels of a map, Y X taps of a kernel, K taps times I.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

LARGEST_MAP = 4  # pixels of the output up to which the products beat the library


class Strip(NamedTuple):
    """One product: the input pixels (in_y, in_x), times the taps (tap_y, tap_x), add to the output pixel (out_y,
    out_x).
    """

    out_y: int
    out_x: int
    in_y: int
    in_x: slice
    tap_y: int
    tap_x: slice


class SmallMapConv2d(nn.Conv2d):
    """An nn.Conv2d that on a CPU computes its function tap by tap; `reformulate` makes it from one.

    RuntimeError for maps of another size than that for which the taps were chosen.
    """

    map_HW: tuple[int, int]
    adds_to_grad = False  # see FlatModel.backward

    def forward(self, x_BIHW: torch.Tensor) -> torch.Tensor:
        if not self.is_pointwise and x_BIHW.shape[2:] != self.map_HW:
            raise RuntimeError(
                f"a layer made for maps of {self.map_HW} pixels got {tuple(x_BIHW.shape[2:])}; for images "
                "of several sizes set model.convolution=library"
            )
        if x_BIHW.device.type != "cpu":
            return super().forward(x_BIHW)
        return SmallMapConvolution.apply(x_BIHW.to(self.weight.dtype), self.weight, self)  # train.precision=bf16

    @property
    def is_pointwise(self) -> bool:
        """Whether it is one matrix for every pixel, however many there are."""
        return is_pointwise(self)

    @property
    def strips(self) -> tuple[Strip, ...]:
        return strips((1, 1) if self.is_pointwise else self.map_HW, self.kernel_size, self.stride, self.padding)

    def inactive_spans(self) -> list[tuple[int, int]]:
        """(start, stop) in the weight's memory of the weights of each tap that never meets the image."""
        active = {(s.tap_y, x) for s in self.strips for x in range(s.tap_x.start, s.tap_x.stop)}
        size, width = self.in_channels * self.out_channels, self.kernel_size[1]
        inactive = sorted(set(product(*map(range, self.kernel_size))) - active)
        return [((y * width + x) * size, (y * width + x + 1) * size) for y, x in inactive]


class SmallMapConvolution(torch.autograd.Function):
    """convolution(x_BIHW, weight_OIYX); weights in any memory order, those of `reformulate` without a copy.

    With conv.adds_to_grad the products themselves add to weight.grad, and autograd gets no gradient for the weight:
    that saves it a tensor of the weight's size and two passes over it.
    """

    @staticmethod
    def forward(ctx: Any, x_BIHW: torch.Tensor, weight_OIYX: torch.Tensor, conv: SmallMapConv2d) -> torch.Tensor:
        x_BHWI, weight_YXIO = pixels_first(x_BIHW, conv), taps_first(weight_OIYX)
        y_BHWO = x_BHWI.new_zeros(len(x_BHWI), *output_size(x_BHWI.shape[1:3], conv), weight_YXIO.shape[3])
        for strip in conv.strips:
            y_BHWO[:, strip.out_y, strip.out_x].addmm_(inputs_of(strip, x_BHWI), taps_of(strip, weight_YXIO))
        ctx.conv = conv
        ctx.save_for_backward(x_BIHW, weight_OIYX)
        return channels_second(y_BHWO, x_BIHW, conv)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BOHW: torch.Tensor):
        (x_BIHW, weight_OIYX), conv = ctx.saved_tensors, ctx.conv
        x_BHWI, weight_YXIO, grad_BHWO = (
            pixels_first(x_BIHW, conv),
            taps_first(weight_OIYX),
            pixels_first(grad_BOHW, conv),
        )
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if needs_x:
            grad_BHWI = x_BHWI.new_zeros(x_BHWI.shape)
            for strip in conv.strips:
                at = grad_BHWO[:, strip.out_y, strip.out_x]
                inputs_of(strip, grad_BHWI).addmm_(at, taps_of(strip, weight_YXIO).T)
            grad_x = channels_second(grad_BHWI, x_BIHW, conv)
        if needs_weight:
            grad_YXIO = taps_first(weight_OIYX.grad) if conv.adds_to_grad else torch.zeros_like(weight_YXIO)
            for strip in conv.strips:
                taps_of(strip, grad_YXIO).addmm_(inputs_of(strip, x_BHWI).T, grad_BHWO[:, strip.out_y, strip.out_x])
            grad_weight = None if conv.adds_to_grad else grad_YXIO.permute(3, 2, 0, 1)
        return grad_x, grad_weight, None


def inputs_of(strip: Strip, x_BHWI: torch.Tensor) -> torch.Tensor:
    """(B, K): the input pixels of a strip."""
    return x_BHWI[:, strip.in_y, strip.in_x].reshape(len(x_BHWI), -1)


def taps_of(strip: Strip, weight_YXIO: torch.Tensor) -> torch.Tensor:
    """(K, O): the taps of a strip, a view."""
    return weight_YXIO[strip.tap_y, strip.tap_x].view(-1, weight_YXIO.shape[3])


def pixels_first(x_BCHW: torch.Tensor, conv: SmallMapConv2d) -> torch.Tensor:
    """(B, H, W, C) with neighbouring channels; for a pointwise layer (B H W, 1, 1, C)."""
    x_BHWC = x_BCHW.permute(0, 2, 3, 1)
    if x_BHWC.stride(3) != 1:
        x_BHWC = x_BHWC.contiguous()
    return x_BHWC.reshape(-1, 1, 1, x_BHWC.shape[3]) if conv.is_pointwise else x_BHWC


def channels_second(x_BHWC: torch.Tensor, like_BCHW: torch.Tensor, conv: SmallMapConv2d) -> torch.Tensor:
    """The inverse of `pixels_first`, for a batch such as `like_BCHW`."""
    if conv.is_pointwise:
        batch, _, height, width = like_BCHW.shape
        x_BHWC = x_BHWC.view(batch, height, width, -1)
    return x_BHWC.permute(0, 3, 1, 2)


def taps_first(weight_OIYX: torch.Tensor) -> torch.Tensor:
    """(Y, X, I, O), contiguous."""
    return weight_OIYX.permute(2, 3, 1, 0).contiguous()


@cache
def strips(
    map_HW: Iterable[int], kernel_YX: Iterable[int], stride: Iterable[int], padding: Iterable[int]
) -> tuple[Strip, ...]:
    """All products of a convolution, in a fixed order."""
    rows, columns = (reaches(*each) for each in zip(map_HW, kernel_YX, stride, padding))
    return tuple(
        Strip(out_y, out_x, in_y.start + k, in_x, tap_y.start + k, tap_x)
        for out_y, (in_y, tap_y) in enumerate(rows)
        for out_x, (in_x, tap_x) in enumerate(columns)
        if in_x.start < in_x.stop
        for k in range(in_y.stop - in_y.start)
    )


def reaches(pixels: int, taps: int, stride: int, padding: int) -> list[tuple[slice, slice]]:
    """Along one axis, for each output pixel: the input pixels that it sees and the taps through which it sees them."""
    found = []
    for out in range((pixels + 2 * padding - taps) // stride + 1):
        corner = out * stride - padding
        first, last = max(0, -corner), max(0, min(taps, pixels - corner))
        found.append((slice(corner + first, corner + max(first, last)), slice(first, max(first, last))))
    return found


def output_size(map_HW: Iterable[int], conv: nn.Conv2d) -> tuple[int, int]:
    padding = map(int, conv.padding)
    height, width = (len(reaches(*each)) for each in zip(map_HW, conv.kernel_size, conv.stride, padding))
    return height, width


def is_pointwise(conv: nn.Conv2d) -> bool:
    return conv.kernel_size == (1, 1) and conv.stride == (1, 1) and conv.padding == (0, 0)


def reformulate(net: nn.Module, image_shape: tuple[int, ...]) -> None:
    """Every convolution of `net` that gains by it becomes a SmallMapConv2d, for images of this (C, H, W).

    Its weight is the same parameter with the same values in another memory order.
    """
    for conv, map_HW in maps_of(net, image_shape).items():
        if suits(conv, map_HW):
            conv.__class__ = SmallMapConv2d
            assert isinstance(conv, SmallMapConv2d)  # for mypy
            conv.map_HW = map_HW
            conv.weight.data = taps_first(conv.weight.data).permute(3, 2, 0, 1)


def prefer_channels_last(net: nn.Module) -> None:
    """Tell torch to compute pointwise and depthwise layers channels last: by strides alone, no weight moves in
    memory.
    """
    for conv in net.modules():
        if type(conv) is nn.Conv2d and (conv.kernel_size == (1, 1) or conv.weight.shape[1] == 1):
            conv.weight.data = conv.weight.data.to(memory_format=torch.channels_last)


def maps_of(net: nn.Module, image_shape: tuple[int, ...]) -> dict[nn.Conv2d, tuple[int, int]]:
    """The size (H, W) of what each plain convolution gets, by a pass of two black images in eval mode."""
    found: dict[nn.Conv2d, tuple[int, int]] = {}

    def record_size(conv: Any, inputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> None:
        height, width = inputs[0].shape[2:]
        found[conv] = height, width

    hooks = [module.register_forward_hook(record_size) for module in net.modules() if type(module) is nn.Conv2d]
    net.eval()
    with torch.no_grad():
        net(torch.zeros(2, *image_shape))
    net.train()
    for hook in hooks:
        hook.remove()
    return found


def suits(conv: nn.Conv2d, map_HW: tuple[int, int]) -> bool:
    """Whether a layer can be written as products, and is faster so."""
    height, width = output_size(map_HW, conv)
    plain = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding_mode == "zeros" and conv.bias is None
    return plain and height * width <= LARGEST_MAP
