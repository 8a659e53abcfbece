"""The trained models of a run. torch is imported only where a network is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hkd_hpc import config as config_module
from hkd_hpc.common.errors import UsageError
from hkd_hpc.models.images import Inputs, standardise
from hkd_hpc.models.settings import key_of
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.tree import load_tree

if TYPE_CHECKING:
    from torch import nn

    from hkd_hpc.models.predictor import Predictor

Arrays = dict[str, np.ndarray]  # a state dict


def read_model(run: Path, client: int | None, architecture: str = "") -> Arrays:
    """The state dict of the global model, or of one client. UsageError when the run does not hold it.

    Args:
        run: its folder.
        client: its number; None: the global model.
        architecture: of unequal models, which global one.
    """
    round, tree = newest_checkpoint(run)
    return state_dict(run, round, tree, client, architecture_of(run, tree, client, architecture))


def read_inputs(run: Path) -> Inputs:
    """Of which form the inputs of a run's networks are, and how they were normalised. UsageError as read_model."""
    return Inputs.of_record(newest_checkpoint(run)[1])


def make_model(run: Path, client: int | None, classes: int, architecture: str = "") -> Predictor:
    """The network with these weights, ready to predict. Arguments and UsageError as read_model."""
    import torch

    from hkd_hpc.models.family import member
    from hkd_hpc.models.predictor import Predictor

    round, tree = newest_checkpoint(run)
    name = architecture_of(run, tree, client, architecture)
    net = member(make_net(tree, classes), name)
    arrays = state_dict(run, round, tree, client, name)
    net.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    inputs = Inputs.of_record(tree)
    return Predictor(net, inputs.dtype, inputs.shape)


def architecture_of(run: Path, tree: dict[str, Any], client: int | None, asked: str) -> str:
    """Of the model that is asked for; UsageError unless that is one model of the run."""
    model = config_module.from_json(tree["config_json"]).model
    if asked and asked not in model.architectures:
        raise UsageError(f"{run}: has no architecture {asked}, but {', '.join(model.architectures)}")
    if client is None:
        if model.names and not asked:
            raise UsageError(
                f"{run}: its models are unequal, so there is a global one of each architecture: name a client, or one "
                f"of {', '.join(model.architectures)}"
            )
        return asked if model.names else ""
    if model.names and asked not in ("", model.member_of(client)):
        raise UsageError(f"{run}: client {client} has the architecture {model.member_of(client)}, not {asked}")
    return model.member_of(client)


def newest_checkpoint(run: Path) -> tuple[int, dict[str, Any]]:
    """(round, tree) of the newest good checkpoint; its weights need no rows."""
    newest = RunFolder(run).newest_good_path()
    if newest is None:
        raise UsageError(f"{run}: holds no good checkpoint; is it a run's folder, and has a round been completed?")
    return newest[0], load_tree(newest[1])


def state_dict(run: Path, round: int, tree: dict[str, Any], client: int | None, architecture: str) -> Arrays:
    """Of the checkpoint's global model of an architecture, or of one client's."""
    if client is not None:
        arrays = client_model(run, round, tree, client)
    else:
        arrays = {str(name): np.asarray(tree["global"][name]) for name in tree["global_names"]}
    if not architecture:
        return arrays
    prefix = f"{key_of(architecture)}."
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


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
    from hkd_hpc.models.family import members

    config = config_module.from_json(tree["config_json"])
    inputs = Inputs.of_record(tree)
    net = networks.build(config.model, classes, inputs.shape, config.run.seed, dtype=inputs.dtype)
    for one in members(net):
        standardise(one, inputs)
    return net
