"""torch.distributed: gloo for everything on host memory, NCCL/RCCL for the weights where ranks have GPUs of their own.

All ranks form the gloo group. The NCCL group may leave rank 0 out; it then gets the sum from the group's first rank.
Knowledge (gather, broadcast) always takes the gloo group, since NCCL groups know no gather.
"""
from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hkd_hpc.comm.base import Comm, HostStaging, LinkError
from hkd_hpc.comm.control import Alone, Control
from hkd_hpc.comm.rendezvous import LOCALHOST, interface_of

EXTRA_S = 60  # torch's own time-outs strike later than the control plane's, which knows more


def open_groups(control: Control | Alone, rank: int, size: int, address: str, nccl_ranks: tuple[int, ...]) -> tuple[Any, Any]:
    """Form the gloo group and, if wanted, (the NCCL group, the gloo group of its first rank and rank 0), None if outside.

    address: of rank 0's host; the store listens there on a free port, which travels over the control plane.
    """
    _choose_interface(address)
    timeout = datetime.timedelta(seconds=control.timeout_s + EXTRA_S)
    store = _open_store(control, rank, address, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    if not nccl_ranks:
        return None, None
    devices = dist.new_group(list(nccl_ranks), backend="nccl", timeout=timeout)
    relay = None if nccl_ranks[0] == 0 else dist.new_group([0, nccl_ranks[0]], backend="gloo", timeout=timeout)
    return devices if rank in nccl_ranks else None, relay if rank in (0, nccl_ranks[0]) else None


class TorchComm(Comm):
    """gloo on host memory; the sum on the devices if `nccl_ranks` is not empty."""

    def __init__(self, nccl_ranks: tuple[int, ...], groups: tuple[Any, Any], *args: Any) -> None:
        super().__init__(*args)
        self._nccl_ranks, (self._devices, self._relay), self._staging = nccl_ranks, groups, HostStaging()

    def close(self) -> None:
        """Take the groups down."""
        dist.destroy_process_group()

    def _sum(self, buffer: torch.Tensor) -> None:
        if self._nccl_ranks:
            self._sum_on_devices(buffer)
            return
        host = buffer if buffer.device.type == "cpu" else self._staging.like(buffer).copy_(buffer)
        with _errors():
            dist.all_reduce(host)
        if host is not buffer:
            buffer.copy_(host)

    def _sum_on_devices(self, buffer: torch.Tensor) -> None:
        """Among the devices' ranks; then from the first of them to rank 0, as a broadcast between the two: point-to-point
        messages of gloo were seen to hang now and then with 45 MB on 11 ranks."""
        with _errors():
            if self._devices is not None:
                dist.all_reduce(buffer, group=self._devices)
                torch.cuda.synchronize(buffer.device)
            if self._relay is not None:
                host = buffer if buffer.device.type == "cpu" else self._staging.like(buffer).copy_(buffer)
                dist.broadcast(host, src=self._nccl_ranks[0], group=self._relay)
                if host is not buffer and self.rank == 0:
                    buffer.copy_(host)

    def _gather(self, block: np.ndarray, gathered: np.ndarray | None) -> None:
        rows = None if gathered is None else list(torch.from_numpy(gathered).unbind(0))
        if block.nbytes:
            with _errors():
                dist.gather(torch.from_numpy(block), rows, dst=0)

    def _broadcast(self, data: np.ndarray) -> None:
        if data.nbytes:
            with _errors():
                dist.broadcast(torch.from_numpy(data), src=0)


def _open_store(control: Control | Alone, rank: int, address: str, timeout: datetime.timedelta) -> dist.TCPStore:
    """Rank 0's key-value store, bound to the one address; torch alone would listen on all of them."""
    listener = socket.create_server((address, 0)) if rank == 0 else None
    port = control.meet(["store"], listener.getsockname()[1] if listener else None)[0]
    options = {"listen": {"master_listen_fd": listener.detach(), "is_master": True}} if listener else {}
    return dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False, use_libuv=False,
                         **options.get("listen", {"is_master": False}))


def _choose_interface(address: str) -> None:
    """Host names that do not resolve are common: tell gloo the interface, unless the user did."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    own = LOCALHOST if address == LOCALHOST else _own_address_towards(address)
    name = interface_of(own)
    if name:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _own_address_towards(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LinkError(f"torch.distributed: {str(error).splitlines()[0]}") from error
