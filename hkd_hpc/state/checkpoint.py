"""The complete state after a round, and its form in a checkpoint: `pack` and `unpack`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hkd_hpc import payload
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.state.client_state import States


@dataclass(frozen=True)
class RoundState:
    """What the next round starts from.

    Attributes:
        round: completed rounds.
        weights_V: the global model's floats, (V,).
        counters: its integer buffers.
        message: the server's message to all clients, one record.
        client_states: what each client keeps, by its number; only where a checkpoint is due.
        server_optimizer: what fed.server_optimizer keeps, by name; only where a checkpoint is due.
        initial: what the run began with of all that never travels, by name.
    """

    round: int
    weights_V: torch.Tensor
    counters: list[torch.Tensor]
    message: np.ndarray
    client_states: States
    server_optimizer: dict[str, torch.Tensor] = field(default_factory=dict)
    initial: dict[str, torch.Tensor] = field(default_factory=dict)


def pack(state: RoundState, arrays: dict[str, np.ndarray], server_state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """For store.save_tree, beside the record and its rows.

    Args:
        state: the state after the round.
        arrays: its global model as a state dict (FlatModel.arrays).
        server_state: what the scheme's server keeps.

    Returns:
        The tree: "round", "global", "message", "server", "client_states"; "server_optimizer" and "initial" where
        there is any.
    """
    message = state.message[0]
    tensors = {name: tensor.numpy() for name, tensor in payload.tensors_of(message).items()}
    as_arrays = lambda kept: {name: tensor.cpu().numpy() for name, tensor in kept.items()}
    optional = {"server_optimizer": state.server_optimizer, "initial": state.initial}
    return {
        "round": state.round,
        "global": arrays,
        "global_names": np.array(list(arrays)),
        "message": {"counters": message["counters"], **tensors},
        "server": as_arrays(server_state),
        "client_states": {str(client): kept for client, kept in sorted(state.client_states.items())},
    } | {part: as_arrays(kept) for part, kept in optional.items() if kept}


def unpack(tree: dict[str, Any], flat: FlatModel, message_type: np.dtype) -> tuple[RoundState, dict[str, torch.Tensor]]:
    """The inverse of `pack`.

    Args:
        tree: a checkpoint.
        flat: the model; its device is where the weights go.
        message_type: of the message's record.

    Returns:
        The state after the round, and what the scheme's server keeps.
    """
    message = np.zeros(1, message_type)
    stored = dict(tree["message"])
    message[0]["counters"] = stored.pop("counters")
    payload.fill(message[0], stored)
    weights_V = torch.zeros_like(flat.values_V)
    counters = flat.load_arrays(tree["global"], weights_V)
    states = {int(client): kept for client, kept in tree.get("client_states", {}).items()}
    server_state, optimizer, initial = (
        {name: torch.as_tensor(np.array(array)) for name, array in tree.get(part, {}).items()}
        for part in ("server", "server_optimizer", "initial")
    )
    return RoundState(int(tree["round"]), weights_V, counters, message, states, optimizer, initial), server_state
