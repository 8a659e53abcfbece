"""Neighbouring data sets, and a network that makes their difference as large as any: the worst case, on purpose.

Loaders for `data.name=module:function`. Rows of as many columns as the latent vector has, in three classes at two
clients. D and E differ in one row, the canary: the first of client 0, of the last class, whose features lie beyond
every clip, on one side in D and on the other in E.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

CLASSES, CLIENTS, LATENT = 3, 2, 64
LABEL = CLASSES - 1  # of the canary
ROWS = 8  # of each class and client
BEYOND = 1e3  # every clip
PULL = 20.0  # of a canary at the weights
SLOPE = 1e-3  # of the classifier: so small that its own gradient is the larger part of an update

Arrays = dict[str, np.ndarray]


class PassOn(nn.Module):
    """Begins as the identity, so that a row is its feature; its first two classes are the two sides of the canary, so
    that it is never predicted right, with opposite predictions and nearly opposite gradients."""

    def __init__(self, classes: int, latent: int):
        super().__init__()
        self.extractor = nn.Linear(latent, latent)
        self.classifier = nn.Linear(latent, classes)
        side_C1 = torch.tensor([1.0, -1.0, 0.0])[:classes, None]
        with torch.no_grad():
            self.extractor.weight.copy_(torch.eye(latent))
            self.classifier.weight.copy_(SLOPE * side_C1.expand(classes, latent))
            self.extractor.bias.zero_()
            self.classifier.bias.zero_()

    def forward(self, x_BF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        feature_BD = self.extractor(x_BF)
        return feature_BD, self.classifier(feature_BD)


def several_d() -> Arrays:
    """Every client has ROWS of each class, zeros but for the canary."""
    return data_set(zeros(ROWS), BEYOND)


def several_e() -> Arrays:
    """Its neighbour."""
    return data_set(zeros(ROWS), -BEYOND)


def single_d() -> Arrays:
    """Client 0 has the canary alone: its update is the canary's."""
    return data_set(zeros(1), BEYOND, alone=True)


def single_e() -> Arrays:
    """Its neighbour."""
    return data_set(zeros(1), -BEYOND, alone=True)


def trained_d() -> Arrays:
    """Three classes that overlap, and a canary that pulls at the weights without being beyond a clip."""
    return data_set(overlapping(), PULL)


def trained_e() -> Arrays:
    """Its neighbour."""
    return data_set(overlapping(), -PULL)


def zeros(count: int) -> np.ndarray:
    """(clients, classes, rows, columns)."""
    return np.zeros((CLIENTS, CLASSES, count, LATENT), np.float32)


def overlapping() -> np.ndarray:
    """The same: 32 rows of each class around a mean of its own."""
    random = np.random.default_rng(0)
    mean = 0.2 * random.standard_normal((CLASSES, 1, LATENT))
    return (mean + 0.5 * random.standard_normal((CLIENTS, CLASSES, 32, LATENT))).astype(np.float32)


def data_set(value: np.ndarray, canary: float, alone: bool = False) -> Arrays:
    """Training rows with the canary in every column of the first row of client 0 and class LABEL; the first row of each
    class and client is its test too. `alone`: client 0 has no other."""
    label, client = (index.ravel() for index in np.indices(value.shape[:3])[1::-1])
    x = value.reshape(-1, LATENT)
    first = np.arange(len(x)) % value.shape[2] == 0
    row = int(np.flatnonzero((client == 0) & (label == LABEL))[0])
    test = {"x_test": x[first], "y_test": label[first], "client_test": client[first]}
    x = x.copy()
    x[row] = canary
    kept = (client != 0) | (np.arange(len(x)) == row) if alone else np.full(len(x), True)
    return {"x_train": x[kept], "y_train": label[kept], "client_train": client[kept], **test}
