"""The network interfaces that the environment names for gloo and NCCL: are there such ones on this host?"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from hkd_hpc.errors import UsageError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def check_interfaces(env: Mapping[str, str], with_nccl: bool, present: list[str] | None = None) -> None:
    """Raise UsageError where gloo, or NCCL if `with_nccl`, would find no interface, and say so in a trace of C++.

    present: names of this host's interfaces, else looked up.
    """
    present = [name for _, name in socket.if_nameindex()] if present is None else present
    gloo = env.get(GLOO, "").split(",") if env.get(GLOO) else []
    if not set(gloo) <= set(present):
        raise UsageError(_problem(env, GLOO, present, "lists whole names, and knows no ^"))
    if with_nccl and env.get(NCCL) and not nccl_choice(env[NCCL], present):
        raise UsageError(_problem(env, NCCL, present, "lists beginnings of names; =: whole names, ^: all others"))


def nccl_choice(text: str, present: list[str]) -> list[str]:
    """The interfaces that NCCL takes: those that begin with one of the names; `=`: that are one; `^`: all others."""
    names = text.removeprefix("^").removeprefix("=").split(",")
    is_exact, is_excluded = text.removeprefix("^").startswith("="), text.startswith("^")
    named = {name for name in present for wanted in names if (name == wanted if is_exact else name.startswith(wanted))}
    return [name for name in present if (name in named) != is_excluded]


def _problem(env: Mapping[str, str], variable: str, present: list[str], syntax: str) -> str:
    return (
        f"{variable}={env[variable]}: does not name network interfaces of host {socket.gethostname()}, which has "
        f"{', '.join(present)}; name one (it {syntax}), or unset it"
    )
