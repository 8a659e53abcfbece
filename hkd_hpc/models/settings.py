"""Section `model` of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.models.registry import DEFAULT, MODELS, WITH_STEM
from hkd_hpc.settings import setting


@dataclass(frozen=True)
class ModelSettings:
    """The network (models/)."""

    name: str = setting(DEFAULT, f"{', '.join(MODELS)}, or your own as module:Class")
    latent: int = setting(64, "size d of the feature vector", low=1, high=100_000)
    stem: str = setting(
        "imagenet",
        f"first layers of {' and '.join(WITH_STEM)}; cifar: 3 x 3, no pooling",
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

    init: str = setting(
        "",
        "file of initial weights: an export of a run, or a state dict (.pt, .pth, .safetensors) of the same model; "
        "torchvision's own of its models too. Else the seed's",
    )
    init_head: str = setting(
        "keep",
        "with model.init: keep: all is the file's; new: the classifier has the seed's weights (and the layer of the "
        "latent vector, where the file is torchvision's)",
        choices=("keep", "new"),
    )

    @property
    def needs_torchvision(self) -> bool:
        """Whether the model is made of torchvision's parts."""
        return self.name in MODELS and MODELS[self.name].from_torchvision
