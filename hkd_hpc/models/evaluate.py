"""Passes in eval mode without autograd: predictions, accuracy, and BatchNorm statistics measured anew."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F

from hkd_hpc.analysis.classification import NAN, accuracy_by_class, f1_by_class, mean_of_known
from hkd_hpc.models.images import normalise

BATCH = 250  # fixed, so that a result never depends on a setting of the training


@dataclass(frozen=True)
class Tested:
    """A test of n images: correct predictions, the sum of cross-entropies in nat, and images whose logits are not all
    finite.

    Those are never correct: the argmax of NaN is a class too. `confusion_CC` has the others by true and predicted
    class; `macro_auc` is NaN where nobody asked for it. All measures are NaN without images, and where one of these has
    no finite prediction.
    """

    n: int = 0
    correct: int = 0
    loss: float = 0.0
    nonfinite: int = 0
    confusion_CC: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64), compare=False)
    macro_auc: float = NAN

    @property
    def correct_C(self) -> tuple[int, ...]:
        """The correct predictions of each class."""
        return tuple(self.confusion_CC.diagonal().tolist())

    @property
    def accuracy(self) -> float:
        """The share that is predicted right."""
        return self.correct / self.n if self.n and not self.nonfinite else NAN

    @property
    def balanced_accuracy(self) -> float:
        """Mean accuracy of the classes."""
        return NAN if self.nonfinite else mean_of_known(accuracy_by_class(self.confusion_CC))

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes."""
        return NAN if self.nonfinite else mean_of_known(f1_by_class(self.confusion_CC))


def predict(net: torch.nn.Module, x_uint8: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(feature_ND, logits_NC) of all images in eval mode, in their order; the module is back in train mode after it."""
    net.eval()
    with torch.inference_mode():
        parts = [net(normalise(x)) for x in x_uint8.split(BATCH)]
    net.train()
    return torch.cat([feature for feature, _ in parts]), torch.cat([logits for _, logits in parts])


def test(net: torch.nn.Module, x_uint8: torch.Tensor, y_N: torch.Tensor) -> Tested:
    """What the module makes of these images and labels."""
    return measured(predict(net, x_uint8)[1], y_N) if len(x_uint8) else Tested()


def test_with_auc(net: torch.nn.Module, x_uint8: torch.Tensor, y_N: torch.Tensor) -> Tested:
    """The same with the AUC, for which the images are sorted once for each class."""
    if not len(x_uint8):
        return Tested()
    _, logits_NC = predict(net, x_uint8)
    tested = measured(logits_NC, y_N)
    return tested if tested.nonfinite else replace(tested, macro_auc=mean_of_known(auc_by_class(logits_NC, y_N)))


def measured(logits_NC: torch.Tensor, y_N: torch.Tensor) -> Tested:
    """What these logits are worth, N at least 1."""
    confusion_CC = confusion(logits_NC, y_N).cpu().numpy()  # one wait for the device
    loss = float(F.cross_entropy(logits_NC, y_N, reduction="sum"))
    nonfinite = len(y_N) - int(confusion_CC.sum())
    return Tested(len(y_N), int(confusion_CC.trace()), loss, nonfinite, confusion_CC)


def confusion(logits_NC: torch.Tensor, y_N: torch.Tensor) -> torch.Tensor:
    """(C, C) images by true and predicted class, without those whose logits are not all finite."""
    classes, is_finite_N = logits_NC.shape[1], logits_NC.isfinite().all(1)
    cell_N = y_N * classes + logits_NC.argmax(1)
    counts = torch.zeros(classes * classes, dtype=torch.int64, device=y_N.device)
    return counts.index_add(0, cell_N, is_finite_N.long()).view(classes, classes)


def auc_by_class(logits_NC: torch.Tensor, y_N: torch.Tensor) -> np.ndarray:
    """(C,) of each class against all others by its probability, finite logits given; NaN of a class that has no images,
    or all of them.
    """
    score_NC = F.log_softmax(logits_NC.double(), 1)  # a float32 rounds the surest predictions to ties
    return np.array([auc(score_N, y_N == own) for own, score_N in enumerate(score_NC.T.contiguous())])


def auc(score_N: torch.Tensor, is_own_N: torch.Tensor) -> float:
    """The chance that an own one's score is above another's, a tie counting half; NaN without any of either."""
    own, other = score_N[is_own_N].sort().values, score_N[~is_own_N]
    twice_lost = torch.searchsorted(own, other) + torch.searchsorted(own, other, right=True)  # a tie: half of a pair
    pairs = len(own) * len(other)
    return 1 - int(twice_lost.sum()) / (2 * pairs) if pairs else NAN


def pooled(tests: Sequence[Tested]) -> Tested:
    """The tests of several models on the same images as one; the AUC is the mean of theirs."""
    if len(tests) == 1:
        return tests[0]
    n, correct, nonfinite = (sum(getattr(one, name) for one in tests) for name in ("n", "correct", "nonfinite"))
    return Tested(
        n,
        correct,
        math.fsum(one.loss for one in tests),
        nonfinite,
        np.sum([one.confusion_CC for one in tests], axis=0),
        float(np.mean([one.macro_auc for one in tests])),
    )


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
