"""Section `model` of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.settings import setting

MODELS = ("small", "resnet18", "shufflenet_v2")


@dataclass(frozen=True)
class ModelSettings:
    """The network (models.py)."""

    name: str = setting("small", "small, resnet18, shufflenet_v2, or your own as module:Class")
    latent: int = setting(64, "size d of the feature vector", low=1, high=100_000)
    stem: str = setting(
        "imagenet",
        "first layers of resnet18 and shufflenet_v2; cifar: 3 x 3, no pooling",
        choices=("imagenet", "cifar"),
    )
    norm: str = setting(
        "batch", "normalisation layers; group: GroupNorm of 32 channels or fewer a group", choices=("batch", "group")
    )
    latent_norm: str = setting(
        "none", "batch: BatchNorm without parameters after the feature vector", choices=("none", "batch")
    )
    convolution: str = setting(
        "taps",
        "taps: the built-in networks compute convolutions on small maps as matrix products, "
        "channels last, faster on CPUs; library: all by torch",
        choices=("taps", "library"),
    )
