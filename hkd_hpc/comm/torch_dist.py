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


def open_groups(control: Control | Alone, rank: int, size: int, address: str, nccl_ranks: tuple[int, ...]) -> Any:
    """Form the gloo group of all ranks and the group that sums: NCCL's ranks, else all ranks but 0, over gloo.

    address: of rank 0's host; the store listens there on a free port, which travels over the control plane.
    Returns the group that sums, None in a rank outside it.
    """
    _choose_interface(address)
    timeout = datetime.timedelta(seconds=control.timeout_s + EXTRA_S)
    store = _open_store(control, rank, address, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    ranks = summing_ranks(size, nccl_ranks)
    group = dist.new_group(list(ranks), backend="nccl" if nccl_ranks else "gloo", timeout=timeout)
    return group if rank in ranks else None


def summing_ranks(size: int, nccl_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Rank 0 has nothing to add: without it the sum is a smaller all-reduce, and the first of these sends it the result."""
    return nccl_ranks or tuple(range(1, size))


class TorchComm(Comm):
    """gloo on host memory; the sum on the devices if `nccl_ranks` is not empty."""

    def __init__(self, nccl_ranks: tuple[int, ...], group: Any, *args: Any) -> None:
        super().__init__(*args)
        self._on_devices, self._group, self._staging = bool(nccl_ranks), group, HostStaging()
        self._first = summing_ranks(self.size, nccl_ranks)[0]

    def close(self) -> None:
        """Take the groups down."""
        dist.destroy_process_group()

    def _sum(self, buffer: torch.Tensor) -> None:
        staged = buffer.is_cuda and not self._on_devices
        summed = self._staging.like(buffer).copy_(buffer) if staged else buffer
        with _errors():
            if self._group is not None:
                dist.all_reduce(summed, group=self._group)
            self._relay(summed)
        if staged:
            buffer.copy_(summed)

    def _relay(self, summed: torch.Tensor) -> None:
        """From the first rank that summed to rank 0, over host memory."""
        if self._first == 0 or self.rank not in (0, self._first):
            return
        host = self._staging.like(summed) if summed.is_cuda else summed
        if self.rank == self._first:
            dist.send(host.copy_(summed) if summed.is_cuda else host, 0)
        else:
            dist.recv(host, self._first)
            if summed.is_cuda:
                summed.copy_(host)

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
