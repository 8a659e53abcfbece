"""The built-in models, one entry each. Settings, help, checks and `networks.build` follow.

A model more is an entry here and a function that makes its extractor. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.common.errors import UsageError, obtainable


@dataclass(frozen=True)
class Model:
    """One built-in model.

    extractor: module:function of (settings, channels), which gives the nn.Module from images to the latent vector.
    """

    extractor: str
    last_stage: str  # the extractor's module that makes the last maps
    has_stem: bool = False  # reads model.stem
    from_torchvision: bool = False
    has_norm: bool = True  # reads model.norm
    least_side: int = 1  # pixels of an image


MODELS = {
    "small": Model("hkd_hpc.models.networks:small", "stage3"),
    "resnet18": Model("hkd_hpc.models.networks:resnet18", "layer4", has_stem=True, from_torchvision=True),
    "shufflenet_v2": Model("hkd_hpc.models.networks:shufflenet_v2", "conv5", has_stem=True, from_torchvision=True),
    "moon_cnn": Model("hkd_hpc.models.networks:moon_cnn", "stage2", has_norm=False, least_side=16),
}
DEFAULT = "small"
WITH_STEM = tuple(name for name, model in MODELS.items() if model.has_stem)


def require_images(name: str, kind: str) -> None:
    """UsageError if a built-in model is to take inputs of another kind ("rows", "sequences")."""
    if name in MODELS and kind != "images":
        raise UsageError(
            f"model.name={name}: takes images, and the data are {kind}; name a network of your own as "
            f"model.name=module:Class: {obtainable('docs/data.md, Rows and sequences')}"
        )
