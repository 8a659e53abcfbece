"""The doctor in ranks that are broken on purpose: FAULTS="no_locks" python faulty_doctor.py -m hkd_hpc.doctor ...

The small transfers only: those of a ResNet18 take seconds.
"""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
import sys
import time

from hkd_hpc.comm.transports.mpi import MpiComm
from hkd_hpc.common.rank import guess_rank
from hkd_hpc.doctor import collectives, files
from hkd_hpc.doctor.context import Context
from hkd_hpc.runtime import versions


def make_small() -> None:
    """The doctor moves and writes little."""
    collectives.TRANSFERS = tuple(t for t in collectives.TRANSFERS if t.nbytes < 10**6)
    files.WRITTEN_BYTES = 1 << 20


def one_gpu(rank: int) -> None:
    """Each rank names the same GPU."""
    Context.device = property(lambda context: "GPU-8a")


def wrong_sum(rank: int) -> None:
    """Rank 1 adds wrongly."""
    from hkd_hpc.comm.transports.torch_dist import TorchComm  # late: it brings torch, which slurm/common.sh needs not

    if rank == 1:
        for transport in (MpiComm, TorchComm):
            transport._sum = with_a_wrong_bit(transport._sum)


def with_a_wrong_bit(sum_):
    def wrong(self, piece):
        sum_(self, piece)
        piece[5] += 1

    return wrong


def other_torch(rank: int) -> None:
    """Rank 2 has one of its own."""
    if rank == 2:
        installed = versions.installed
        versions.installed = lambda package: "2.4.1" if package == "torch" else installed(package)


def fast_clock(rank: int) -> None:
    """That of rank 2 is ahead."""
    if rank == 2:
        clock = time.time
        time.time = lambda: clock() + 40


def no_locks(rank: int) -> None:
    """The kernel knows no flock in this process, as on Lustre mounted without it; and nobody keeps O_EXCL."""
    forbid_flock()
    make = os.open
    os.open = lambda path, flags, mode=0o777, **other: make(path, flags & ~os.O_EXCL, mode, **other)


def forbid_flock() -> None:
    """By a seccomp filter: of the system calls flock alone fails, with ENOSYS."""
    number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
    load_number, if_equal, fail, allow = (
        (0x20, 0, 0, 0),
        (0x15, 0, 1, number),
        (0x06, 0, 0, 0x50026),
        (0x06, 0, 0, 0x7FFF0000),
    )
    instructions = [load_number, if_equal, fail, allow]
    program = b"".join(
        code.to_bytes(2, "little") + bytes([yes, no]) + value.to_bytes(4, "little")
        for code, yes, no, value in instructions
    )
    held = ctypes.create_string_buffer(program, len(program))

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_seccomp, filter_mode, ctypes.byref(Filter(len(instructions), ctypes.addressof(held)))) == 0


FAULTS = {fault.__name__: fault for fault in (one_gpu, wrong_sum, other_torch, fast_clock, no_locks)}


def main() -> None:
    """Break this rank, then run the module as Python would."""
    make_small()
    for name in os.environ.get("FAULTS", "").split():
        FAULTS[name](guess_rank(os.environ))
    _, _, module, *arguments = sys.argv
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
