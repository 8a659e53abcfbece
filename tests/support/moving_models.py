"""Networks in which one image moves what others give, each in its own way, and one that only looks so."""

import torch
from tiny_models import Tiny
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
