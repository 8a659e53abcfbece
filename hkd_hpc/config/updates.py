"""What noise on the updates (privacy.update_multiplier) asks of the other settings."""

from __future__ import annotations

from hkd_hpc.common.errors import UsageError
from hkd_hpc.config.effects import has_batchnorm
from hkd_hpc.config.protection import shares_weights
from hkd_hpc.config.sections import Config


def check_updates(config: Config) -> None:
    """UsageError, one line with all of them, for settings with which that noise would not protect what it says."""
    multiplier = config.privacy.update_multiplier
    holes = update_holes(config) if multiplier and shares_weights(config) else []
    if holes:
        raise UsageError(f"privacy.update_multiplier={multiplier:g}: {'; '.join(holes)}")


def update_holes(config: Config) -> list[str]:
    """Each with what would mend it. What only partition and network tell: assembly.checks.require_private_updates."""
    fed, data, model = config.fed, config.data, config.model
    found = {
        "needs privacy.update_clip above 0, since no noise covers changes of any size": not config.privacy.update_clip,
        f"fed.average={fed.average} weighs a client by its data: give fed.average=uniform": fed.average == "images",
        f"fed.max_norm={fed.max_norm:g} rejects clients by their data: leave it at 0, privacy.update_clip is enough": (
            fed.max_norm > 0
        ),
        f"model.names={model.names}: the sum of one architecture has fewer clients: give model.name": bool(model.names),
        "BatchNorm's statistics would travel, and with noise its variances be negative: give model.norm=group and "
        "model.latent_norm=none": has_batchnorm(config),
        "data.normalise=measured is by mean and deviation of everybody's images: give data.mean and data.std": (
            data.normalise == "measured"
        ),
        f"run.stop_patience={config.run.stop_patience} ends the run by accuracies without noise: leave it at 0": (
            config.run.stop_patience > 0
        ),
    }
    return [hole for hole, is_open in found.items() if is_open]


def repeats_hole(config: Config) -> str:
    """Of a partition in which one image is several inputs of its client."""
    return f"data.partition={config.data.partition} gives an image to its client several times: take another"


def one_image_mend(config: Config, repeats_images: bool) -> str:
    """The setting with which one image of a client is one input, and moves no other; empty where it is so.

    repeats_images: whether the partition gives an image to its client several times.
    """
    if repeats_images:
        return "data.partition=dirichlet"
    return "data.normalise=fixed" if config.data.normalise == "measured" else ""
