"""The network of a run, with its first weights, the same on every rank."""

from __future__ import annotations

import torch

from hkd_hpc.assembly.agreement import require_equal
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import Config
from hkd_hpc.data import sources
from hkd_hpc.models import networks
from hkd_hpc.models.family import members
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.images import Inputs, standardise


def make_model(config: Config, dataset: sources.DataSet, device: torch.device) -> FlatModel:
    """With the initial weights of the run."""
    return FlatModel(make_net(config, dataset, device), device)


def make_net(config: Config, dataset: sources.DataSet, device: torch.device) -> torch.nn.Module:
    """The same before its tensors are moved, and rejected where they are not float32."""
    inputs = inputs_of(dataset)
    net = networks.build(config.model, dataset.classes, inputs.shape, config.run.seed, device, inputs.dtype)
    if config.train.precision == "bf16":
        for one in members(net):
            networks.train_in_bf16(one)
    for one in members(net):
        if inputs.kind == "sequences":
            largest = max(int(x.max(initial=0)) for x in (dataset.x_train, dataset.x_test))
            what = f"model.name={config.model.title}"
            networks.probe(one, torch.full_like(inputs.zeros(2), largest), inputs.kind, what)
        standardise(one, inputs, device)
    return net


def inputs_of(dataset: sources.DataSet) -> Inputs:
    """Of which form a network's inputs are, and how they are normalised."""
    x_train = dataset.x_train
    return Inputs(x_train.shape[1:], x_train.dtype.name, dataset.mean, dataset.std)


def agreed_net(comm: Comm, config: Config, dataset: sources.DataSet) -> torch.nn.Module:
    """The network, of the same shapes and dtypes on all ranks. One that only some ranks can make is told with a
    rank.
    """
    try:
        net, problem = make_net(config, dataset, comm.device), None
    except UsageError as error:
        net, problem = torch.nn.Module(), error
    require_equal(comm, {"model": {"its problem": str(problem), **shapes_of(net)}})
    if problem:
        raise problem
    return net


def shapes_of(net: torch.nn.Module) -> dict[str, str]:
    """Shape and dtype of each tensor of the state dict."""
    return {
        name: f"{tuple(value.shape)} {value.dtype}"
        for name, value in net.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
