"""This host's addresses and network interfaces, and a check of those that the environment names for gloo and NCCL."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping

from hkd_hpc.common.errors import UsageError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOCALHOST = "127.0.0.1"
ANY_PORT = 9  # nothing is sent there: a datagram socket that is connected knows its own address


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


def own_address(peers: list[str]) -> str:
    """An address of this host that other hosts can reach: the one on the route to the first peer that has a name."""
    for peer in [*peers, "10.255.255.255"]:
        try:
            found = own_address_towards(socket.gethostbyname(peer))
        except OSError:
            continue
        if not found.startswith("127."):
            return found
    return LOCALHOST


def own_address_towards(address: str) -> str:
    """The address of this host on the route to another. Raises OSError where there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, ANY_PORT))
        return probe.getsockname()[0]


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this IPv4 address, None if there is none."""
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface, None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _problem(env: Mapping[str, str], variable: str, present: list[str], syntax: str) -> str:
    return (
        f"{variable}={env[variable]}: does not name network interfaces of host {socket.gethostname()}, which has "
        f"{', '.join(present)}; name one (it {syntax}), or unset it"
    )
