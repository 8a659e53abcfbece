"""The trained models of a run. torch is imported only where a network is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hkd_hpc import config as config_module
from hkd_hpc.errors import UsageError
from hkd_hpc.models.images import Inputs, standardise
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.tree import load_tree

if TYPE_CHECKING:
    from torch import nn

    from hkd_hpc.models.predictor import Predictor

Arrays = dict[str, np.ndarray]  # a state dict


def read_model(run: Path, client: int | None) -> Arrays:
    """The state dict of the global model, or of one client. UsageError when the run does not hold it."""
    return state_dict(run, *newest_checkpoint(run), client)


def read_inputs(run: Path) -> Inputs:
    """Of which form the inputs of a run's networks are, and how they were normalised. UsageError as read_model."""
    return Inputs.of_record(newest_checkpoint(run)[1])


def make_model(run: Path, client: int | None, classes: int) -> Predictor:
    """The network with these weights, ready to predict. UsageError as read_model."""
    import torch

    from hkd_hpc.models.predictor import Predictor

    round, tree = newest_checkpoint(run)
    net = make_net(tree, classes)
    arrays = state_dict(run, round, tree, client)
    net.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return Predictor(net, Inputs.of_record(tree).dtype)


def newest_checkpoint(run: Path) -> tuple[int, dict[str, Any]]:
    """(round, tree) of the newest good checkpoint; its weights need no rows."""
    newest = RunFolder(run).newest_good_path()
    if newest is None:
        raise UsageError(f"{run}: holds no good checkpoint; is it a run's folder, and has a round been completed?")
    return newest[0], load_tree(newest[1])


def state_dict(run: Path, round: int, tree: dict[str, Any], client: int | None) -> Arrays:
    """Of the checkpoint's global model, or of one client's."""
    if client is not None:
        return client_model(run, round, tree, client)
    return {str(name): np.asarray(tree["global"][name]) for name in tree["global_names"]}


def client_model(run: Path, round: int, tree: dict[str, Any], client: int) -> Arrays:
    """A client's flat vector laid out like the global state dict; its integer buffers are the global ones."""
    import torch

    from hkd_hpc.client import OWN_MODEL
    from hkd_hpc.models.flat import FlatModel

    held = {int(c): state[OWN_MODEL] for c, state in tree.get("client_states", {}).items() if OWN_MODEL in state}
    if client not in held:
        there = ", ".join(map(str, sorted(held)))
        raise UsageError(
            f"{run}: no model of client {client}: round {round} holds those of {there or 'none'}; they are kept "
            "after the last round of a run with run.client_models=true, for the clients that count in it; in a study "
            "only with --keep-state"
        )
    flat = FlatModel(make_net(tree, tree["partition"]["train_count"].shape[1]))
    return flat.arrays(
        torch.from_numpy(held[client]), flat.load_arrays(tree["global"], torch.zeros_like(flat.values_V))
    )


def make_net(tree: dict[str, Any], classes: int) -> nn.Module:
    """The network of a checkpoint's settings, on the CPU, with initial weights."""
    from hkd_hpc.models import networks

    config = config_module.from_json(tree["config_json"])
    inputs = Inputs.of_record(tree)
    net = networks.build(config.model, classes, inputs.shape, config.run.seed, dtype=inputs.dtype)
    standardise(net, inputs)
    return net
