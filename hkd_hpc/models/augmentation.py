"""Augmentation: images changed anew each time that a client trains on them, by the same rule for every scheme.

An augmentation is a function of images and a few whole numbers an image. These are drawn once an epoch on the host, so
that what is computed of them is the same on every device, and may be part of a recorded epoch (run.graphs).

Shape letters: B batch, N training images, C channels, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hkd_hpc.common.lazy import torch

if TYPE_CHECKING:
    import numpy as np

NAMES = ("none", "flip", "crop_flip", "crop_flip_reflect")


@dataclass(frozen=True)
class Augmentation:
    """A crop of the image's own size out of the image with a border, mirrored left to right in half of the cases.

    Attributes:
        padding: pixels of the border on each side; 0: no crop.
        reflects: whether the border is the mirrored image (its edge not repeated); else it is 0, which is black.
    """

    padding: int
    reflects: bool

    def draw(self, random: np.random.Generator, images: int) -> torch.Tensor:
        """(N, 3) int64 for so many images: the place in the image of the crop's upper left pixel (row and column from
        -padding to padding), and whether it is mirrored.
        """
        most = self.padding
        return torch.from_numpy(random.integers((-most, -most, 0), (most + 1, most + 1, 2), (images, 3)))

    def __call__(self, x_BCHW: torch.Tensor, drawn_B3: torch.Tensor) -> torch.Tensor:
        """The images as they are trained on; each pixel is one of the image or of the border.

        Args:
            x_BCHW: of any dtype.
            drawn_B3: for each of them, as `draw` gives it.

        Returns:
            Images of the same shape and dtype.
        """
        row_B1, column_B1, mirrored_B1 = drawn_B3.split(1, 1)
        height, width = x_BCHW.shape[2:]
        across_W = torch.arange(width, device=x_BCHW.device)
        row_BH = row_B1 + torch.arange(height, device=x_BCHW.device)
        column_BW = column_B1 + torch.where(mirrored_B1 > 0, across_W.flip(0), across_W)
        pixel_BHW = reflected(row_BH, height)[:, :, None] * width + reflected(column_BW, width)[:, None]
        index_BCP = pixel_BHW.flatten(1)[:, None].expand(-1, x_BCHW.shape[1], -1)
        out_BCHW = x_BCHW.flatten(2).gather(2, index_BCP).view(x_BCHW.shape)
        if self.padding and not self.reflects:
            out_BCHW.mul_((inside(row_BH, height)[:, :, None] & inside(column_BW, width)[:, None])[:, None])
        return out_BCHW


def augmentation(name: str, padding: int) -> Augmentation | None:
    """That of train.augment and train.augment_padding; None: images are trained on as they are."""
    if name == "none":
        return None
    return Augmentation(0 if name == "flip" else padding, name == "crop_flip_reflect")


def inside(place: torch.Tensor, size: int) -> torch.Tensor:
    """Whether these places are in the image, not in its border."""
    return (place >= 0) & (place < size)


def reflected(place: torch.Tensor, size: int) -> torch.Tensor:
    """Places -size < . < 2 size - 1 by those of the image of which they are the mirror image: -1 by 1, size by
    size - 2.
    """
    return (size - 1) - ((size - 1) - place.abs()).abs()
