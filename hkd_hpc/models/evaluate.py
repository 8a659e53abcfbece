"""Passes in eval mode without autograd: predictions, accuracy, and BatchNorm statistics measured anew."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hkd_hpc.models.images import normalise

BATCH = 250  # fixed, so that a result never depends on a setting of the training


@dataclass(frozen=True)
class Tested:
    """A test of n images: correct predictions, the sum of cross-entropies in nat, and images whose logits are not all
    finite.

    Those are never correct: the argmax of NaN is a class too. `correct_C`: the correct predictions of each class.
    """

    n: int = 0
    correct: int = 0
    loss: float = 0.0
    nonfinite: int = 0
    correct_C: tuple[int, ...] = ()

    @property
    def accuracy(self) -> float:
        """NaN without images, and where one of them has no finite prediction."""
        return self.correct / self.n if self.n and not self.nonfinite else float("nan")


def predict(net: torch.nn.Module, x_uint8: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(feature_ND, logits_NC) of all images in eval mode, in their order; the module is back in train mode after it."""
    net.eval()
    with torch.inference_mode():
        parts = [net(normalise(x)) for x in x_uint8.split(BATCH)]
    net.train()
    return torch.cat([feature for feature, _ in parts]), torch.cat([logits for _, logits in parts])


def test(net: torch.nn.Module, x_uint8: torch.Tensor, y_N: torch.Tensor) -> Tested:
    """What the module makes of these images and labels."""
    if not len(x_uint8):
        return Tested()
    _, logits_NC = predict(net, x_uint8)
    finite_N = logits_NC.isfinite().all(1)
    correct_N = (logits_NC.argmax(1) == y_N) & finite_N
    correct_C = torch.zeros(logits_NC.shape[1], dtype=torch.int64, device=y_N.device).index_add(
        0, y_N, correct_N.long()
    )
    *correct, finite = torch.cat([correct_C, finite_N.sum()[None]]).tolist()  # one wait for the device
    loss = float(F.cross_entropy(logits_NC, y_N, reduction="sum"))
    return Tested(len(y_N), sum(correct), loss, len(y_N) - finite, tuple(correct))


def reestimate_batch_norm(net: torch.nn.Module, x_uint8: torch.Tensor) -> None:
    """Set BatchNorm's running statistics to the equal-weight mean over batches of these images, weights unchanged."""
    layers = [
        m for m in net.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and m.track_running_stats
    ]
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # cumulative mean
    net.eval()  # dropout stays off: it would draw from a stream that no client owns
    for layer in layers:
        layer.train()
    with torch.no_grad():
        for x in even_batches(x_uint8):
            net(normalise(x))
    for layer, momentum in zip(layers, momenta):
        layer.momentum = momentum
    net.train()


def even_batches(x_uint8: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Batches of nearly equal size (at most BATCH): a short last one would count as much as a full one."""
    return torch.tensor_split(x_uint8, max(1, -(-len(x_uint8) // BATCH)))
