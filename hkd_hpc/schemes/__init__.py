"""The schemes: one file each, one line each here. `get` also finds a user's own as module:Class."""

from __future__ import annotations

import dataclasses

from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.settings import KINDS, is_setting, type_text
from hkd_hpc.runtime.own_code import load_object

# those of the FedHKD paper: what "all" means where schemes are compared
PAPER = {
    "fedavg": "hkd_hpc.schemes.fedavg:FedAvg",
    "fedprox": "hkd_hpc.schemes.fedprox:FedProx",
    "moon": "hkd_hpc.schemes.moon:Moon",
    "fedalign": "hkd_hpc.schemes.fedalign:FedAlign",
    "fedgen": "hkd_hpc.schemes.fedgen:FedGen",
    "fedmd": "hkd_hpc.schemes.fedmd:FedMD",
    "fedproto": "hkd_hpc.schemes.fedproto:FedProto",
    "fedhkd": "hkd_hpc.schemes.fedhkd:FedHKD",
    "fedhkd_star": "hkd_hpc.schemes.fedhkd:FedHKDStar",
}
REGISTRY = {
    **PAPER,
    "fedntd": "hkd_hpc.schemes.fedntd:FedNTD",
    "fedbn": "hkd_hpc.schemes.fedbn:FedBN",
    "fedrep": "hkd_hpc.schemes.fedrep:FedRep",
    "ditto": "hkd_hpc.schemes.ditto:Ditto",
    "scaffold": "hkd_hpc.schemes.scaffold:Scaffold",
    "feddyn": "hkd_hpc.schemes.feddyn:FedDyn",
}

# not schemes but controls: what nobody exchanges, and what nobody keeps apart
CONTROLS = {
    "local": "hkd_hpc.schemes.local:Local",
    "central": "hkd_hpc.schemes.central:Central",
}
DEFAULT = "fedhkd"
REFERENCE = "fedavg"  # what all others are compared with


def get(name: str):
    """The class of a scheme or control, or of module:Class. UsageError lists the names when it is none of these."""
    known = {**REGISTRY, **CONTROLS}
    if name not in known and ":" not in name:
        raise UsageError(f"scheme.name={name}: no such scheme; known: {', '.join(known)}, or your own as module:Class")
    return load_object(known.get(name, name), f"scheme.name={name}")


def settings_of(name: str) -> type:
    """The settings dataclass of a scheme, its field `name` included. Built-in schemes cost no import of torch."""
    found = getattr(get(name), "Settings", None)
    fields = dataclasses.fields(found) if isinstance(found, type) and dataclasses.is_dataclass(found) else ()
    if not isinstance(found, type) or "name" not in {field.name for field in fields}:
        raise UsageError(f"scheme.name={name}: is no scheme; it must be a subclass of hkd_hpc.schemes.base.Scheme")
    odd = [field for field in fields if not is_setting(field)]
    if odd:
        raise UsageError(
            f"scheme.name={name}: {found.__name__}.{odd[0].name}: {type_text(odd[0])} is no setting; it must be "
            f"made with hkd_hpc.common.settings.setting(default, help, ...) and be one of {', '.join(KINDS)}, or None "
            "too"
        )
    return found
