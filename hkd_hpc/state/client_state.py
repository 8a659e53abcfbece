"""What clients keep from one round to the next: its form as bytes, and its way to rank 0 and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import numpy as np
import torch

from hkd_hpc import payload
from hkd_hpc.client import OWN_MODEL, Client
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.models.precision import real_type
from hkd_hpc.training import LocalTrainer
from hkd_hpc.worker import Worker

# of each rank: larger blocks leave the cache, smaller ones cost barriers (measured, 3 and 11 ranks)
CHUNK_BYTES = 1 << 20

State = dict[str, np.ndarray]  # of one client, by the tensor's name
States = dict[int, State]  # by client


def shapes_of(trainer: LocalTrainer, is_last: bool) -> payload.Shapes:
    """What a client may keep: the scheme's state, and in the last round its own model."""
    shapes = trainer.scheme.client_state_shapes() | trainer.own_shapes()
    if is_last and trainer.config.run.client_models:
        shapes[OWN_MODEL] = tuple(trainer.flat.values_V.shape)
    return shapes


def pack(shapes: payload.Shapes, state: Mapping[str, torch.Tensor | np.ndarray]) -> np.ndarray:
    """A client's state as uint8: float32s, first which tensors it holds, then all, absent ones 0."""
    held = np.array([name in state for name in shapes], real_type())
    parts = [
        torch.as_tensor(state[name]).detach().cpu().numpy().reshape(-1)
        if name in state
        else np.zeros(math.prod(shape), real_type())
        for name, shape in shapes.items()
    ]
    return np.concatenate([held, *parts], dtype=real_type()).view(np.uint8)


def unpack(shapes: payload.Shapes, block: np.ndarray) -> State:
    """The inverse of `pack`: what is held, as float32 arrays of their own."""
    ends = np.cumsum([len(shapes), *map(math.prod, shapes.values())])
    held, *parts = np.split(block.view(real_type()), ends)
    return {name: np.array(part).reshape(shape) for (name, shape), has, part in zip(shapes.items(), held, parts) if has}


def collect(worker: Worker, rank_of: list[int], round: int, is_last: bool) -> States:
    """All ranks: what the clients keep after a round, on rank 0; elsewhere, and where nothing is kept, nothing.

    Slot by slot, so that rank 0 never holds more than one client of each rank twice.
    """
    comm, shapes = worker.comm, shapes_of(worker.trainer, is_last)
    if not shapes:
        return {}
    comm.at(round, "state")
    states: States = {}
    for slot in range(worker.slots):
        state = worker.clients[slot].state if slot < len(worker.clients) else {}
        rows = gather_in_chunks(comm, pack(shapes, state))
        for rank, client in enumerate(clients_at(slot, rank_of, comm.size)):
            if rows is not None and client is not None:
                states[client] = unpack(shapes, rows[rank])
    return {client: state for client, state in states.items() if state}


def distribute(worker: Worker, states: States) -> None:
    """All ranks: rank 0's states go to where each client lives now, which may be another rank than before. The models
    of a round that was the last (run.client_models) stay behind: it is the last no more."""
    comm, trainer = worker.comm, worker.trainer
    shapes = shapes_of(trainer, is_last=False)
    here: dict[int, Client] = {client.id: client for client in worker.clients}
    for client in json.loads(comm.share_text(json.dumps(sorted(states)))):
        block = pack(shapes, states.get(client, {}))
        comm.broadcast(block, "start")
        if client in here:
            kept = unpack(shapes, block)
            here[client].state = {name: torch.from_numpy(array).to(comm.device) for name, array in kept.items()}


def clients_at(slot: int, rank_of: list[int], ranks: int) -> list[int | None]:
    """By rank: the client in this slot there."""
    hosted = [[client for client, own in enumerate(rank_of) if own == rank] for rank in range(ranks)]
    return [clients[slot] if slot < len(clients) else None for clients in hosted]


def gather_in_chunks(comm: Comm, block: np.ndarray) -> np.ndarray | None:
    """(size, bytes) on rank 0. In pieces, so that no transport needs a second copy of everything."""
    rows = np.empty((comm.size, len(block)), np.uint8) if comm.rank == 0 else None
    for start in range(0, len(block), CHUNK_BYTES):
        part = comm.gather(block[start : start + CHUNK_BYTES], "state")
        if rows is not None and part is not None:
            rows[:, start : start + CHUNK_BYTES] = part
    return rows
