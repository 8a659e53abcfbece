"""MPI: starting it, passing the rendezvous on, and the communicator. Only buffer calls; nothing is pickled."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from hkd_hpc.comm.transports.base import Comm, ControlPlane, HostStaging, RankInfo
from hkd_hpc.common.errors import LinkError, UsageError

if TYPE_CHECKING:
    import torch


SPLIT_S = 60.0  # of a loaded machine, as gloo's groups have
CRAY_GPU_SUPPORT = "MPICH_GPU_SUPPORT_ENABLED"


class MpiWorld:
    """MPI of this process, from MPI_Init to MPI_Finalize; every call is by the main thread. `remark`: for people."""

    def __init__(self) -> None:
        """Start MPI; blocks until all ranks do. Raises UsageError if there is no MPI library."""
        switched_off = os.environ.get(CRAY_GPU_SUPPORT, "0") != "0"
        os.environ[CRAY_GPU_SUPPORT] = "0"  # else Cray MPICH refuses to start without its library for GPUs linked in
        self.remark = "MPI carries host buffers; GPU support of Cray MPICH is switched off" if switched_off else ""
        try:
            import mpi4py

            mpi4py.rc.initialize = mpi4py.rc.finalize = False
            from mpi4py import MPI

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a wrong launcher: check_world says it better
                if not MPI.Is_initialized():
                    MPI.Init_thread(MPI.THREAD_FUNNELED)
        except (ImportError, RuntimeError) as error:
            raise UsageError(
                f"the job was started by an MPI launcher, but MPI cannot be loaded here "
                f"({str(error).splitlines()[0]}): install mpi4py and its MPI library (pip install "
                f"'hkd_hpc[mpi]'), or start with torchrun, or under srun set comm.backend=gloo"
            ) from error
        if MPI.Query_thread() < MPI.THREAD_FUNNELED:
            raise UsageError(
                "MPI was started for processes of one thread (MPI_THREAD_SINGLE), and this program has several: "
                "leave MPI_Init to it, or use an MPI library that gives MPI_THREAD_FUNNELED"
            )
        self.MPI = MPI
        self.comm = MPI.COMM_WORLD.Dup()  # what others of this process send on COMM_WORLD does not meet our messages
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)

    def gather_names(self, name: str) -> list[str]:
        """One short text of every rank, by rank, in every rank."""
        mine = np.frombuffer(name.encode()[:256].ljust(256, b"\0"), np.uint8).copy()
        names = np.empty((self.comm.size, 256), np.uint8)
        self.comm.Allgather(mine, names)
        return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in names]

    def share(self, text: str) -> str:
        """Rank 0's short text, in every rank."""
        data = np.frombuffer(text.encode()[:4096].ljust(4096, b"\0"), np.uint8).copy()
        self.comm.Bcast(data, root=0)
        return data.tobytes().rstrip(b"\0").decode()

    def libraries(self) -> tuple[str, str]:
        """(the MPI that mpi4py was built for, the one that is loaded), as they name themselves."""
        name, version = self.MPI.get_vendor()
        loaded = self.MPI.Get_library_version().split("\0")[0].splitlines()[0]
        return f"{name} {'.'.join(map(str, version))}", loaded.partition(", package:")[0]

    def finish(self) -> None:
        """MPI_Finalize, in the normal end only: it waits for all ranks, with Python's lock held."""
        self.comm.Free()
        self.MPI.Finalize()


class MpiComm(Comm):
    """Collectives of MPI on host memory; CUDA tensors pass through one pinned host buffer."""

    def __init__(self, mpi: MpiWorld, control: ControlPlane, info: RankInfo) -> None:
        super().__init__(control, info)
        self._mpi, self._staging = mpi, HostStaging()
        with self._control.transfer("the making of the client ranks' group by MPI", at_least_s=SPLIT_S):
            self._clients = mpi.comm.Split(min(self.rank, 1), self.rank)

    def close(self) -> None:
        """Free the client ranks' group, in the normal end only: all of them take part."""
        self._clients.Free()

    def _sum(self, piece: torch.Tensor) -> None:
        with self._errors(), self._staging.host(piece) as host:
            self._clients.Allreduce(self._mpi.MPI.IN_PLACE, wrapping(host.numpy()))

    def _relay(self, values: torch.Tensor) -> None:
        with self._errors(), self._staging.host(values, back=self.rank == 0) as host:
            if self.rank:
                self._mpi.comm.Send(host.numpy(), dest=0)
            else:
                self._mpi.comm.Recv(host.numpy(), source=1)

    def _gather(self, block: np.ndarray, gathered: np.ndarray | None) -> None:
        rows = None if gathered is None else np.ascontiguousarray(gathered)  # itself, unless its rows lie apart
        with self._errors():
            self._mpi.comm.Gather(block, rows, root=0)
        if gathered is not None and rows is not None and rows is not gathered:
            gathered[:] = rows

    def _broadcast(self, data: np.ndarray) -> None:
        with self._errors():
            self._mpi.comm.Bcast(data, root=0)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._mpi.MPI.Exception as error:
            raise LinkError(f"MPI: {error}") from error


def wrapping(values: np.ndarray) -> np.ndarray:
    """The same memory; int64 as uint64, whose sums C defines modulo 2^64."""
    return values.view(np.uint64) if values.dtype == np.int64 else values
