"""All settings as text for --help."""

from __future__ import annotations

import dataclasses
from typing import Any

from hkd_hpc import schemes
from hkd_hpc.common.settings import allowed_text, first_paragraph
from hkd_hpc.config.keys import str_or_shown
from hkd_hpc.config.sections import SECTIONS


def help_text(scheme: Any = None) -> str:
    """All settings, of this scheme too, with defaults and what is allowed, for --help. UsageError: no such scheme."""
    lines = []
    for section, cls in {"scheme": schemes.settings_of(str_or_shown(scheme or schemes.DEFAULT)), **SECTIONS}.items():
        lines += [f"{section}: {first_paragraph(cls.__doc__)}"]
        lines += [
            f"  {section}.{f.name}={f.default}\n      {f.metadata['help']} ({allowed_text(f)})"
            for f in dataclasses.fields(cls)
        ]
    return "\n".join(
        [
            *lines,
            f"schemes: {', '.join(schemes.REGISTRY)}, or your own as module:Class",
            f"controls, as scheme.name: {', '.join(schemes.CONTROLS)}",
        ]
    )
