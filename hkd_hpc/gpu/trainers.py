"""Which trainer a rank uses: the plain one, or what run.graphs and run.lanes ask for."""

from __future__ import annotations

from collections.abc import Callable

from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.config import Config
from hkd_hpc.console import messages
from hkd_hpc.gpu import graphs
from hkd_hpc.gpu.concurrent import ConcurrentTrainer, Memory
from hkd_hpc.gpu.graphs import RecordingTrainer, declares
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.schemes.base import Scheme
from hkd_hpc.training import LocalTrainer


def trainer_for(
    flat: FlatModel, scheme: Scheme, config: Config, make_flat: Callable[[], FlatModel], comm: Comm
) -> LocalTrainer:
    """What trains this rank's clients. Rank 0 warns of what was asked for and cannot be had.

    Args:
        flat: the rank's model.
        make_flat: makes another one of the same kind, with memory of its own.
    """
    no_graphs = graphs.why_not(scheme, flat.net, flat.values_V.device) if config.run.graphs == "on" else "off"
    sequential = why_sequential(flat) if config.run.lanes > 1 else "one"
    if comm.rank == 0 and config.run.graphs == "on" and no_graphs:
        messages.warn(f"run.graphs=on has no effect: {no_graphs}")
    if comm.rank == 0 and config.run.lanes > 1 and sequential:
        messages.warn(f"run.lanes={config.run.lanes} has no effect: {sequential}")
    kind = LocalTrainer if no_graphs else RecordingTrainer
    first = kind(flat, scheme, config)
    if sequential:
        return first
    return ConcurrentTrainer([first], Memory(config.run.lanes, lambda: kind(make_flat(), scheme, config), comm.sharers))


def why_sequential(flat: FlatModel) -> str:
    """Why clients cannot be trained at the same time, empty where they can."""
    if flat.values_V.device.type == "cpu":
        return "there is no GPU; on CPUs, more ranks train clients side by side"
    if not declares(flat.net):
        return (
            f"{type(flat.net).__name__} does not say `cuda_graph_safe = True`: it may draw from torch's one generator"
        )
    return ""
