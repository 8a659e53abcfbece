"""What section `privacy` asks of the other settings."""

from __future__ import annotations

from hkd_hpc.common.errors import UsageError
from hkd_hpc.config.sections import Config
from hkd_hpc.config.updates import check_updates
from hkd_hpc.privacy.settings import RELEASE


def check_privacy(config: Config) -> None:
    """UsageError for settings of section `privacy` that cannot stand, or not beside the others."""
    privacy = config.privacy
    check_updates(config)
    if privacy.mode == RELEASE and config.run.client_models:
        raise UsageError(
            "privacy.mode=release: run.client_models=true sends every client's own model, without noise, to rank 0; "
            "give run.client_models=false"
        )
    if privacy.secure_sum and config.run.client_models:
        raise UsageError(
            "privacy.secure_sum=true: run.client_models=true sends each client's own model to rank 0; give "
            "run.client_models=false"
        )
