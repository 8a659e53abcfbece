"""torch.distributed: gloo for everything on host memory, NCCL/RCCL for the weights where ranks have GPUs of their own.

All ranks form the gloo group, and the client ranks a group that sums: NCCL, else gloo. Rank 0, which hosts no clients,
is outside it and gets the result by a relay over host memory. Knowledge (gather, broadcast) always takes the gloo group
of all, since NCCL groups know no gather.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from hkd_hpc.comm.interfaces import GLOO, interface_of, own_address_towards
from hkd_hpc.comm.transports.base import Comm, ControlPlane, HostStaging, RankInfo
from hkd_hpc.common.errors import LinkError

OPEN_S = 60.0  # many ranks that share few cores need seconds to connect
EXTRA_S = 60  # torch's own time-outs strike later than the control plane's, which knows more


def open_groups(
    control: ControlPlane, rank: int, size: int, address: str, on_devices: bool
) -> dist.ProcessGroup | None:
    """Form the gloo group of all ranks and the group of the client ranks that sums, over NCCL if `on_devices`.

    address: of rank 0's host; the store listens there on a free port, which travels over the control plane.
    Returns the group that sums, None in a rank outside it.
    """
    _choose_interface(address)
    timeout = datetime.timedelta(seconds=control.timeout_s + EXTRA_S)
    with control.transfer("the opening of torch's groups", at_least_s=OPEN_S), _errors():
        store = _open_store(control, rank, address, timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        group = dist.new_group(list(range(1, size)), backend="nccl" if on_devices else "gloo", timeout=timeout)
    return group if isinstance(group, dist.ProcessGroup) else None


class TorchComm(Comm):
    """gloo on host memory; the sum on the devices, over NCCL or RCCL, if `on_devices`."""

    piece = 1 << 22  # a call of gloo among many ranks costs milliseconds

    def __init__(
        self, on_devices: bool, group: dist.ProcessGroup | None, control: ControlPlane, info: RankInfo
    ) -> None:
        super().__init__(control, info)
        self._on_devices, self._group, self._staging = on_devices, group, HostStaging()
        if on_devices:
            self.piece = 1 << 40  # the whole buffer: only most_bytes divides it

    def close(self) -> None:
        """Take the groups down."""
        dist.destroy_process_group()

    def _sum(self, piece: torch.Tensor) -> None:
        with _errors():
            if self._on_devices:
                dist.all_reduce(piece, group=self._group)
                return
            with self._staging.host(piece) as host:
                dist.all_reduce(host, group=self._group)

    def _relay(self, values: torch.Tensor) -> None:
        with _errors(), self._staging.host(values, back=self.rank == 0) as host:
            if self.rank:
                dist.send(host, 0)
            else:
                dist.recv(host, 1)

    def _gather(self, block: np.ndarray, gathered: np.ndarray | None) -> None:
        rows = None if gathered is None else list(torch.from_numpy(gathered).unbind(0))
        with _errors():
            dist.gather(torch.from_numpy(block), rows, dst=0)

    def _broadcast(self, data: np.ndarray) -> None:
        with _errors():
            dist.broadcast(torch.from_numpy(data), src=0)


def _open_store(control: ControlPlane, rank: int, address: str, timeout: datetime.timedelta) -> dist.TCPStore:
    """Rank 0's key-value store, bound to the one address; torch alone would listen on all of them."""
    listener = socket.create_server((address, 0)) if rank == 0 else None
    port = control.barrier(["store"], listener.getsockname()[1] if listener else None)[0]
    open_store = partial(dist.TCPStore, address, port, timeout=timeout, wait_for_workers=False, use_libuv=False)
    if listener is None:
        return open_store(is_master=False)
    return open_store(is_master=True, master_listen_fd=listener.detach())


def _choose_interface(address: str) -> None:
    """Host names that do not resolve are common: set gloo's interface, unless the user did."""
    if os.environ.get(GLOO):
        return
    name = interface_of(own_address_towards(address))
    if name:
        os.environ[GLOO] = name


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LinkError(f"torch.distributed: {str(error).splitlines()[0]}") from error
