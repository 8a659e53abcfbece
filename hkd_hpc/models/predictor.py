"""A trained network for those who have images, and no business with how it was trained."""

from __future__ import annotations

import torch

from hkd_hpc.models.images import normalise


class Predictor(torch.nn.Module):
    """Takes images as they lie in the data set, and gives logits; in eval mode, without gradients.

    Args:
        net: gives (feature_BD, logits_BC) of normalised images.

    Attributes:
        net: the same; for features call it with `hkd_hpc.models.images.normalise(x_BCHW)`.
    """

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net
        self.eval().requires_grad_(False)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The logits of images.

        Args:
            x_BCHW: (B, channels, height, width) uint8, of the channels and size that the run was trained on; they
                are normalised here, to float32 in [-1, 1].

        Returns:
            (B, classes) float32; `.argmax(1)` are the classes that are predicted, `.softmax(1)` their probabilities.

        Raises:
            TypeError: images of another type, whose range nobody knows.
        """
        if x_BCHW.dtype != torch.uint8:
            raise TypeError(f"images are {x_BCHW.dtype}; give them as torch.uint8, 0 to 255, as they lie in the data")
        return self.net(normalise(x_BCHW))[1]
