"""Whether a network takes what is in the data's files, as far as their heads tell."""

from __future__ import annotations

from hkd_hpc.config.sections import Config
from hkd_hpc.data.sizes import kind_of
from hkd_hpc.models.registry import require_images


def check_fit(config: Config) -> None:
    """UsageError if a built-in network is to take rows or sequences. Quick: what only reading would tell passes."""
    kind = kind_of(config.data)
    if kind:
        for name in config.model.architectures:
            require_images(name, kind)
