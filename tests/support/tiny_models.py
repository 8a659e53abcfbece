"""Two networks of one's own that are trained in milliseconds, of unequal sizes; one of them has BatchNorm."""

from torch import nn


class Tiny(nn.Module):
    """Pools, flattens, and maps to the latent vector."""

    def __init__(self, classes: int, latent: int):
        super().__init__()
        self.extractor = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, latent))
        self.classifier = nn.Linear(latent, classes)

    def forward(self, x_BCHW):
        feature_BD = self.extractor(x_BCHW)
        return feature_BD, self.classifier(feature_BD)


class Normed(Tiny):
    """The same with a hidden layer and BatchNorm."""

    def __init__(self, classes: int, latent: int):
        super().__init__(classes, latent)
        self.extractor = nn.Sequential(
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(48, 24),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.Linear(24, latent),
        )
