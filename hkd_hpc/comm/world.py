"""The world of a job, from its first line to its last: `with World.open() as world: comm = world.connect()`.

`open` comes before torch: it reads the launcher's hints, starts MPI if MPI started us, and brings up the control plane.
From then on any failure of any rank ends the whole job with one message. `connect` imports torch, and picks devices and
transport.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from hkd_hpc.comm.control.base import Control, Failure, NullControl, leave
from hkd_hpc.comm.control.coordinator import Coordinator, Peer
from hkd_hpc.comm.control.rendezvous import (
    Address,
    AlreadyReported,
    Member,
    Topology,
    accept_all,
    derived_address,
    join,
    listen,
    machine_name,
    random_address,
)
from hkd_hpc.comm.control.watch import EndGuard, ForkedGuard, StartGuard, launcher_chain, write_stderr
from hkd_hpc.comm.devices import device_offset
from hkd_hpc.comm.interfaces import LOCALHOST
from hkd_hpc.comm.launchers import Hint, check_world, read_hint, without_mpi
from hkd_hpc.common.errors import LinkError, RunError, UsageError
from hkd_hpc.common.rank import guess_rank
from hkd_hpc.common.stop import RAISED_BY, Terminated, handled, interrupts_held
from hkd_hpc.runtime.frames import place_of, trace_of

if TYPE_CHECKING:  # a world opens without numpy: the late imports below spare it and torch, and point downward
    from hkd_hpc.comm.transports.base import Comm
    from hkd_hpc.comm.transports.mpi import MpiWorld

START_TIMEOUT_S = 120.0  # for the last rank to arrive; a rank that ended is noticed within seconds
LONGEST_ERROR = 2000  # characters before the traceback
FINALIZE_S = 60.0  # for MPI to end; nothing is lost by then
LESS_MEMORY = "fewer ranks a GPU, run.lanes=1, or a smaller train.batch_size"
OTHERS_WAIT_S = 3.0  # before the world is complete rank 0 prints first


class World:
    """All processes of the job. Use as a context manager: what leaves the block decides how the job ends.

    Whatever leaves it in any rank, one message is printed for the whole job, and every rank ends with one exit code:
    2 for UsageError, 1 for RunError, 130 for KeyboardInterrupt, each with one line; 1 for other exceptions, with the
    line of a user's own code that failed and the traceback; for SystemExit its code, or 1 where that is 0.

    Attributes:
        hint: what the launcher said about this process.
        topology: the processes of all ranks.
        rank, size, hosts: this rank, how many there are, and their hosts by rank.
        control: the control plane.
        address: of rank 0's host, where the control plane listens.
    """

    def __init__(
        self,
        hint: Hint,
        members: Sequence[Member],
        control: Control | NullControl,
        address: str,
        mpi: MpiWorld | None = None,
    ) -> None:
        self.hint, self.topology = hint, Topology(hint.rank, tuple(members))
        self.rank, self.size, self.hosts = hint.rank, self.topology.size, self.topology.hosts
        self.control, self.address, self._mpi = control, address, mpi
        self._comm: Comm | None = None

    @classmethod
    def open(
        cls,
        backend: str = "auto",
        timeout_s: float = 1800.0,
        start_timeout_s: float = START_TIMEOUT_S,
        env: Mapping[str, str] = os.environ,
    ) -> World:
        """Find the other ranks and bring up the control plane. Imports no torch.

        Args:
            backend: "gloo" does without MPI under srun; the others use MPI where MPI started us.
            timeout_s: how long a rank may give no sign of life while others wait for it.
            start_timeout_s: how long the ranks may take to arrive here.
            env: the environment with the launcher's variables.

        Returns:
            The world, to be entered with `with`.

        Raises:
            SystemExit: with code 2 or 1, after one line, where the world cannot be opened.
        """
        try:
            return cls.find(backend, timeout_s, start_timeout_s, env)
        except AlreadyReported as reported:
            raise SystemExit(reported.code) from None
        except (UsageError, RunError) as error:
            end_alone(error, env)

    @classmethod
    def find(cls, backend: str, timeout_s: float, start_timeout_s: float, env: Mapping[str, str]) -> World:
        """As `open`, but what is wrong is for the caller to tell.

        Args:
            backend: as in `open`.
            timeout_s: as in `open`.
            start_timeout_s: as in `open`.
            env: the environment, perhaps with a launcher's variables.

        Returns:
            The world, to be entered with `with`.

        Raises:
            UsageError, RunError: where the world cannot be opened; SplitWorld, a kind of the first, where the ranks do
                not see each other.
            AlreadyReported: where rank 0 tells why.
        """
        device_offset(env)
        hint = read_hint(env)
        hint = without_mpi(hint, env) if backend == "gloo" else hint
        if hint.size == 1:
            return cls(hint, [Member.here(0)], NullControl(), LOCALHOST)
        guard = StartGuard.begin(hint, start_timeout_s)
        opener = _open_mpi if hint.launcher == "mpi" else _open
        return opener(hint, guard, timeout_s, env)

    @classmethod
    def alone(cls, env: Mapping[str, str] = os.environ) -> World:
        """A world of this process within somebody else's program: what leaves its block is raised as it is.

        Args:
            env: the environment, perhaps with a launcher's variables.

        Returns:
            The world, to be entered with `with`.

        Raises:
            UsageError: a launcher has started this process as one of several ranks.
        """
        hint = read_hint(env)
        if hint.size > 1:
            raise UsageError(
                f"this process is rank {hint.rank} of {hint.size} ({hint.rank_name}), and hkd_hpc.train trains in one "
                f"process; for {hint.size} ranks start python -m hkd_hpc.train in place of this program"
            )
        return _SingleProcessWorld(Hint("none", 0, 1), [Member.here(0)], NullControl(), LOCALHOST)

    def connect(self, device: str = "auto", backend: str = "auto") -> Comm:
        """Import torch, choose this rank's device and the transport of all, and connect.

        Args:
            device: "auto", "cpu" or "cuda".
            backend: what carries the weights: "auto", "mpi", "gloo" or "nccl", see devices.choose_backend.

        Returns:
            The communicator, which the world closes.

        Raises:
            UsageError: for a device or a backend that is unknown or cannot be had.
            RunError: where a rank does not arrive in time.
        """
        from hkd_hpc.comm.connect import connect

        self.control.set_status(None, "import of torch")
        self._comm = connect(
            self.control, self.topology, self.address, self._mpi, device, backend, self._signals_safe()
        )
        self.control.set_status(None, "set-up")
        return self._comm

    def share(self, value: Any) -> Any:
        """Share a value of rank 0; possible before `connect`.

        Args:
            value: on rank 0 anything that JSON can hold, small; ignored on the others.

        Returns:
            Rank 0's value, in every rank.

        Raises:
            RunError: where a rank does not arrive in time.
        """
        return self.control.barrier(["settings"], value)[0]

    def mpi_libraries(self) -> tuple[str, str] | None:
        """Which MPI this is.

        Returns:
            (the MPI that mpi4py was built for, the one that is loaded), as they name themselves; None in a world
            without MPI.
        """
        return self._mpi.libraries() if self._mpi else None

    def _signals_safe(self) -> AbstractContextManager[None]:
        """Within it a signal that elsewhere raises an exception ends the job at once; one that is ignored stays so."""
        raising = [number for number in self.control.raising_signals if callable(signal.getsignal(number))]
        return handled(raising, self._end_by)

    def _end_by(self, number: int, frame: object) -> NoReturn:
        """A handler of a signal: as its exception, wherever it would come to."""
        failure = self._failure(RAISED_BY[signal.Signals(number)]())
        self.control.report_failure(failure)
        leave(failure.code)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            error = self._finish()
        if error is None:
            return
        self.control.report_failure(self._failure(error))
        raise SystemExit(self._failure(error).code) from None

    def _finish(self) -> BaseException | None:
        """The normal end of all ranks; returns what went wrong, if something did."""
        try:
            self.control.finish()
            end_s = max(self.control.timeout_s, FINALIZE_S)
            with ForkedGuard(EndGuard(self.rank, end_s)) if self._mpi else nullcontext():
                if self._comm is not None:
                    self._comm.close()
                if self._mpi is not None:
                    self._mpi.finish()
        except Exception as error:
            return error
        return None

    def _failure(self, error: BaseException) -> Failure:
        """What to say about an exception, and the exit code."""
        where = (
            f"{self.topology.members[self.rank]}, {self.control.place}" if self.size > 1 else str(self.control.place)
        )
        if isinstance(error, UsageError):
            return Failure(str(error), 2)
        if isinstance(error, RunError):
            return Failure(f"{where}: {error}", 1, is_echo=isinstance(error, LinkError))
        if isinstance(error, KeyboardInterrupt):
            return Failure(f"{where}: interrupted", 128 + signal.SIGINT)
        if isinstance(error, Terminated):
            return Failure(f"{where}: ended by signal 15 (SIGTERM). {self.control.ending}", 128 + signal.SIGTERM)
        if isinstance(error, SystemExit):
            code = (
                error.code % 256 or 1 if isinstance(error.code, int) else 1
            )  # the system keeps 8 bits: 256 would be success
            return Failure(f"{where}: left the job with sys.exit({error.code!r}) before its end", code)
        if type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU; torch may not be loaded here
            text = ". ".join(text_of(error).split(". ")[:2])  # what it is, and how much was asked for
            return Failure(f"{where}: {place_of(error)}{text}; {LESS_MEMORY}", 1)
        headline = f"{where}: {place_of(error)}failed with {type(error).__name__}: {text_of(error)}"
        return Failure(f"{headline}\n{trace_of(error)}", 1)


class _SingleProcessWorld(World):
    """Ends neither the process nor its signals' handlers."""

    def _signals_safe(self) -> AbstractContextManager[None]:
        return interrupts_held()

    def __exit__(self, *_: object) -> None:
        self.control.finish()
        if self._comm is not None:
            self._comm.close()


def text_of(error: BaseException) -> str:
    """What an exception of a user's own code says: it may be very long, or fail itself."""
    try:
        text = str(error)
    except Exception:
        return "(its text cannot be had)"
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}... ({len(text)} characters)"


def end_alone(error: UsageError | RunError, env: Mapping[str, str] = os.environ) -> NoReturn:
    """End the process for an error before the world is complete: rank 0 prints it first and so ends the others.

    Raises SystemExit with code 2 (UsageError) or 1.
    """
    let_rank_0_speak_first(env)
    write_stderr(f"hkd_hpc: {error}")
    raise SystemExit(2 if isinstance(error, UsageError) else 1) from None


def let_rank_0_speak_first(env: Mapping[str, str] = os.environ) -> None:
    """Wait on the other ranks, while the world is not complete: where rank 0 ends, the launcher ends them too."""
    if guess_rank(env) != 0:
        time.sleep(OTHERS_WAIT_S)


def _open_mpi(hint: Hint, guard: StartGuard, timeout_s: float, env: Mapping[str, str]) -> World:
    """MPI_Init, then the control plane on a port that rank 0 passes on by MPI."""
    from hkd_hpc.comm.transports.mpi import MpiWorld

    with ForkedGuard(guard):
        mpi = MpiWorld()
        _check_world(mpi, hint)
        hint = Hint("mpi", mpi.comm.rank, mpi.comm.size, hint.local_rank, hint.local_size, hint.rank_name)
        machines = mpi.gather_names(machine_name())
        address, listener = _share_address(mpi, machines, env)
        return _open_control(hint, address, listener, guard, timeout_s, mpi)


def _check_world(mpi: MpiWorld, hint: Hint) -> None:
    """Worlds of one rank each all see the same mistake: one of them says it."""
    try:
        check_world(mpi.comm.size, hint)
    except UsageError:
        if hint.rank == 0:
            raise
        raise AlreadyReported(2) from None


def _share_address(
    mpi: MpiWorld, machines: Sequence[str], env: Mapping[str, str]
) -> tuple[Address, socket.socket | None]:
    """Rank 0 listens and shares where, or why it cannot (then all raise UsageError)."""
    listener, text = None, ""
    if mpi.comm.rank == 0:
        try:
            address = random_address(machines, env)
            listener = listen(address)
            text = json.dumps([address.host, listener.getsockname()[1], address.token])
        except UsageError as error:
            text = json.dumps([str(error)])
    shared = json.loads(mpi.share(text))
    if len(shared) == 1:
        raise UsageError(shared[0]) if mpi.comm.rank == 0 else AlreadyReported(2)
    return Address(shared[0], (shared[1],), shared[2]), listener


def _open(hint: Hint, guard: StartGuard, timeout_s: float, env: Mapping[str, str]) -> World:
    """Without MPI: all ranks derive the same address from the job's names."""
    address = derived_address(hint, env)
    return _open_control(hint, address, listen(address) if hint.rank == 0 else None, guard, timeout_s, None)


def _open_control(
    hint: Hint,
    address: Address,
    listener: socket.socket | None,
    guard: StartGuard,
    timeout_s: float,
    mpi: MpiWorld | None,
) -> World:
    """Connect all ranks with rank 0 and start the control thread."""
    me, chain = Member.here(hint.rank), launcher_chain(hint.rank_name)
    if listener is not None:
        with listener:
            links, members = accept_all(listener, address.token, me, hint.size, guard.problem)
        control: Control = Coordinator(members, links, chain, timeout_s)
    else:
        link, members = join(address, me, hint.size, guard.problem)
        control = Peer(hint.rank, members, {0: link}, chain, timeout_s)
    return World(hint, members, control, address.host, mpi)
