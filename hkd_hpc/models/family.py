"""Unequal models: the architectures of all clients side by side in one module, so that one flat buffer holds them.

A client trains its own architecture and leaves the others as they came; each is averaged over the clients that have it
(worker.py). All end in a feature of `model.latent` numbers and a classifier on it, so that knowledge by class,
prototypes and predictions mean the same in each of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hkd_hpc.models.settings import key_of


class Family(nn.Module):
    """Networks by architecture. No image goes through the family: `member` gives one of them.

    Args:
        members: by the name of the architecture, as `model.names` has it.
    """

    def __init__(self, members: Mapping[str, nn.Module]):
        super().__init__()
        for name, net in members.items():
            self.add_module(key_of(name), net)


def prefix_of(net: nn.Module, name: str) -> str:
    """What the names of an architecture's tensors begin with in the state dict of a run's network."""
    return f"{key_of(name)}." if isinstance(net, Family) else ""


def member(net: nn.Module, name: str) -> nn.Module:
    """The network of a client with this architecture: of a family one of its members, else the network itself."""
    return net.get_submodule(key_of(name)) if isinstance(net, Family) else net


def members(net: nn.Module) -> list[nn.Module]:
    """All networks that images go through."""
    return list(net.children()) if isinstance(net, Family) else [net]
