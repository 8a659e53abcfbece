"""Networks in which one image moves what others give, each in its own way, and one that only looks so."""

import random

import numpy as np
import torch
from tiny_models import Normed, Tiny
from torch import nn


class OfBatch(Tiny):
    """BatchNorm without running statistics normalises by the batch, in eval mode too."""

    def __init__(self, classes: int, latent: int):
        super().__init__(classes, latent)
        self.extractor.append(nn.BatchNorm1d(latent, track_running_stats=False))


class Kept(Tiny):
    """Keeps a mean of what it trained on, in no state dict."""

    def __init__(self, classes: int, latent: int):
        super().__init__(classes, latent)
        self.register_buffer("mean_D", torch.zeros(latent), persistent=False)


class Centred(Tiny):
    """Takes the mean of the batch from its features."""

    def forward(self, x_BCHW):
        feature_BD = self.extractor(x_BCHW)
        feature_BD = feature_BD - feature_BD.mean(0)
        return feature_BD, self.classifier(feature_BD)


class Constant(Tiny):
    """Adds a constant, a parameter that requires no gradient."""

    def __init__(self, classes: int, latent: int):
        super().__init__(classes, latent)
        self.shift_D = nn.Parameter(torch.ones(latent), requires_grad=False)

    def forward(self, x_BCHW):
        feature_BD = self.extractor(x_BCHW) + self.shift_D
        return feature_BD, self.classifier(feature_BD)


class Remembers(Kept):
    """Adds a mean of what it trained on before, which no state dict has."""

    def forward(self, x_BCHW):
        feature_BD = self.extractor(x_BCHW)
        if self.training:
            self.mean_D.mul_(0.9).add_(feature_BD.detach().mean(0), alpha=0.1)
        feature_BD = feature_BD + self.mean_D
        return feature_BD, self.classifier(feature_BD)


class Replaces(Kept):
    """The same, with a new tensor in each batch."""

    def forward(self, x_BCHW):
        feature_BD = self.extractor(x_BCHW)
        self.mean_D = self.mean_D + 1
        return feature_BD, self.classifier(feature_BD)


class Fills(Normed):
    """Computes a constant with its first batch; has BatchNorm."""

    def __init__(self, classes: int, latent: int):
        super().__init__(classes, latent)
        self.register_buffer("mean_D", torch.zeros(latent), persistent=False)

    def forward(self, x_BCHW):
        feature_BD = self.extractor(x_BCHW)
        self.mean_D.fill_(0.5)
        feature_BD = feature_BD + self.mean_D
        return feature_BD, self.classifier(feature_BD)


class Draws(Tiny):
    """Draws its first weights and its noise from numpy and Python."""

    def __init__(self, classes: int, latent: int):
        super().__init__(classes, latent)
        with torch.no_grad():
            self.classifier.bias.fill_(np.random.uniform())

    def forward(self, x_BCHW):
        feature_BD = self.extractor(x_BCHW)
        if self.training:
            feature_BD = feature_BD * (np.random.uniform() + random.random())
        return feature_BD, self.classifier(feature_BD)
