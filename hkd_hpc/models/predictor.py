"""A trained network for those who have images, and no business with how it was trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hkd_hpc.models.images import normalise


class Predictor(torch.nn.Module):
    """Takes inputs as the run's networks got them, before they were normalised, and gives logits; in eval mode, without
    gradients.

    Args:
        net: gives (feature_BD, logits_BC) of normalised inputs.
        dtype: of the inputs: uint8 or float32 of images, float32 of rows, int64 of sequences.
        shape: of one input, which others are checked against; empty: they are not.

    Attributes:
        net: the same; for features call it with `hkd_hpc.models.images.normalise(x_BCHW)`.
    """

    def __init__(self, net: torch.nn.Module, dtype: str = "uint8", shape: Sequence[int] = ()) -> None:
        super().__init__()
        self.net, self.dtype, self.shape = net, getattr(torch, dtype), tuple(shape)
        self.eval().requires_grad_(False)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The logits of images.

        Args:
            x_BCHW: (B, channels, height, width), of the channels and size that the run was trained on, (B, columns) or
                (B, length); they are normalised here, as in the run.

        Returns:
            (B, classes) float32; `.argmax(1)` are the classes that are predicted, `.softmax(1)` their probabilities.

        Raises:
            TypeError: inputs of another type, whose range nobody knows.
            ValueError: inputs of another shape.
        """
        if x_BCHW.dtype != self.dtype:
            what = "images are" if self.dtype == torch.uint8 else "inputs are"
            span = ", 0 to 255" * (self.dtype == torch.uint8)
            raise TypeError(f"{what} {x_BCHW.dtype}; give them as {self.dtype}{span}, as they lie in the data")
        if self.shape and tuple(x_BCHW.shape[1:]) != self.shape:
            expected = ", ".join(map(str, ("B", *self.shape)))
            raise ValueError(f"inputs are of shape {tuple(x_BCHW.shape)}; give them as ({expected}), B of them at once")
        return self.net(normalise(x_BCHW))[1]
