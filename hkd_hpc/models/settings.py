"""Section `model` of the settings."""

from __future__ import annotations

from dataclasses import dataclass

from hkd_hpc.common.settings import setting
from hkd_hpc.models.registry import DEFAULT, MODELS, WITH_STEM


@dataclass(frozen=True)
class ModelSettings:
    """The network (models/)."""

    name: str = setting(DEFAULT, f"{', '.join(MODELS)}, or your own as module:Class")
    names: str = setting(
        "",
        "unequal models: names with commas between, assigned to the clients in turn, so that as many names as clients "
        "give each its own; empty: all have model.name",
    )
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
    def assigned(self) -> tuple[str, ...]:
        """The architectures of the first clients, which the others repeat."""
        return tuple(name.strip() for name in self.names.split(",")) if self.names else (self.name,)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Each name once."""
        return tuple(dict.fromkeys(self.assigned))

    @property
    def members(self) -> tuple[str, ...]:
        """Of a run's network (models/family.py): unequal models by their names; where all are alike, one without a
        name."""
        return self.architectures if self.names else ("",)

    def member_of(self, client: int) -> str:
        """The member that a client trains, by its number."""
        return self.assigned[client % len(self.assigned)] if self.names else ""

    @property
    def title(self) -> str:
        """What messages call the model, or the models."""
        return " + ".join(self.architectures)

    @property
    def needs_torchvision(self) -> bool:
        """Whether a model is made of torchvision's parts."""
        return any(name in MODELS and MODELS[name].from_torchvision for name in self.architectures)


def key_of(name: str) -> str:
    """The name of an architecture among the modules of a network, where no name has a dot."""
    return name.replace(".", "_")
