"""What section `privacy` asks of the other settings."""

from __future__ import annotations

import dataclasses

from hkd_hpc.config.sections import Config
from hkd_hpc.config.updates import check_updates
from hkd_hpc.errors import UsageError
from hkd_hpc.privacy.settings import PrivacySettings

NOT_YET = tuple(  # declared, and read by nothing so far
    field.name for field in dataclasses.fields(PrivacySettings) if not field.name.startswith("update_")
)


def check_privacy(config: Config) -> None:
    """UsageError for settings of section `privacy` that cannot stand beside the others."""
    for name in NOT_YET:
        value, default = getattr(config.privacy, name), getattr(PrivacySettings, name)
        if value != default:
            raise UsageError(f"privacy.{name}={value}: is not there yet; leave it at {str(default).lower()}")
    check_updates(config)
