"""The control plane: who is where, who is alive, do all do the same, and one clear end for all when something fails.

A star of TCP connections with the coordinator, rank 0, in the middle. In each process one thread owns the sockets, so
that it notices a dead rank and ends the process while the main thread computes or waits in a collective. Messages are
small JSON objects, see wire.Message. A connection that closes before the last barrier means that its rank is dead.
"""

from __future__ import annotations

import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from hkd_hpc.comm.control.link import Link
from hkd_hpc.comm.control.rendezvous import Member
from hkd_hpc.comm.control.watch import launcher_alive, shortly, write_stderr
from hkd_hpc.comm.control.wire import Message
from hkd_hpc.common.errors import RunError
from hkd_hpc.common.stop import Terminated, Termination, handled

POLL_S = 0.25
LONGEST_TURN_S = 5.0
LAUNCHER_POLL_S = 0.5
EXIT_S = 20.0  # a failing main thread waits so long for the control thread to end the process
SIGTERM_S = (
    0.1  # mpirun ends the survivors of a dead rank by SIGTERM, and kills them .5 s later: name the dead one first
)
CONTINUED_S = 2.0
LINK_ERROR_S = 1.0  # a broken transfer is mostly the echo of a dead rank: time for the cause to be named first
TEXT_LIMIT = 60000
END = ["the end of the job"]  # key of the last barrier
ENDING = "The whole job ends here."


Links = dict[int, socket.socket]  # by rank
Chain = tuple[tuple[int, int], ...]  # see watch.launcher_chain


class Place(NamedTuple):
    """Where a rank is: round, phase, and the client whose turn it is."""

    round: int | None = None
    phase: str = "start-up"
    client: int | None = None

    def __str__(self) -> str:
        parts = [f"round {self.round}"] * (self.round is not None) + [f"phase {self.phase}"]
        return ", ".join(parts + [f"client {self.client}"] * (self.client is not None))


class Failure(NamedTuple):
    """What is printed once for the whole job, and the exit code of every rank."""

    text: str
    code: int
    is_echo: bool = False  # probably the consequence of another rank's death
    is_hang: bool = False  # somebody is waited for in vain: the stacks of all ranks are collected before it is printed


class NullControl:
    """The control plane of a single process."""

    timeout_s = 0.0
    ending = ENDING
    raising_signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.place = Place()
        self._record_failure: Callable[[str], None] = nowhere
        self._give_back: Callable[[], None] = nothing
        self._termination = Termination()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._termination)

    def set_status(self, round: int | None, phase: str, client: int | None = None) -> None:
        """Note where we are. Raises Terminated where SIGTERM came and was swallowed."""
        self.place = Place(round, phase, client)
        if self._termination.came:
            raise Terminated

    def watch_steps(self, count: Callable[[], int]) -> None:
        """Nobody watches."""

    def places(self) -> dict[int, Place]:
        """Where this process is."""
        return {0: self.place}

    def record_failures(self, record: Callable[[str], None]) -> None:
        """`record` gets what is printed of a failure too."""
        self._record_failure = record

    def give_back_after_failure(self, give_back: Callable[[], None]) -> None:
        """`give_back` is called where a failure ends this process."""
        self._give_back = give_back

    def barrier(self, key: Sequence[Any], value: Any = None) -> list[Any]:
        """No other rank to wait for."""
        return [value]

    @contextmanager
    def transfer(self, what: str, at_least_s: float = 0.0) -> Iterator[None]:
        """Nothing travels."""
        yield

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Nobody interrupts."""
        yield

    @contextmanager
    def removed_at_failure(self, path: str) -> Iterator[None]:
        """Nobody else's failure ends this process."""
        yield

    def report_failure(self, failure: Failure) -> None:
        """Print it."""
        with handled((signal.SIGINT, signal.SIGTERM), _ignore):  # a second one would only hide the message
            write_stderr(f"hkd_hpc: {failure.text}")
            self._record_failure(failure.text)
            self._give_back()

    def finish(self) -> None:
        """Give the signal back; outside of the main thread it was never taken."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is self._termination:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Control:
    """What coordinator and peers share: the control thread, its posts from the main thread, signals and watches.

    The main thread calls the public methods; all else runs in the control thread.

    Attributes:
        timeout_s: how long a rank may give no sign of life while others wait for it.
        place: where this rank is, as `set_status` says.
        ending: a sentence below what went wrong: that the job ends, and what is left of its work, which the program
            knows and may set.
        raising_signals: those that raise an exception in the main thread.
    """

    ending = ENDING
    raising_signals: Sequence[int] = (signal.SIGINT,)

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        links: Links,
        chain: Chain,
        timeout_s: float,
    ) -> None:
        self.rank, self.members, self.timeout_s, self.place = rank, tuple(members), timeout_s, Place()
        self._chain, self._chain_seen_s = chain, 0.0
        self._clock_s, self._turned_s = 0.0, time.monotonic()
        self._posts: deque[Message] = deque()
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._waiting_since_s: float | None = None
        self._transfer: tuple[str, float, float] | None = None
        self._terminated_s: float | None = None
        self._continued_s: float | None = None
        self._count_steps: Callable[[], int] = int
        self._record_failure: Callable[[str], None] = nowhere
        self._give_back: Callable[[], None] = nothing
        self._finished, self._saving = False, threading.Lock()
        self._leftovers: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._links = {peer: Link(link, self._selector, peer) for peer, link in links.items()}
        self._listen_to_wakes()
        self._thread = threading.Thread(target=self._run, name="hkd-control", daemon=True)
        self._thread.start()

    # ---- for the main thread ----

    def set_status(self, round: int | None, phase: str, client: int | None = None) -> None:
        """Send rank 0 (rank 0: send all) where this rank is. Never blocks, never fails."""
        self.place = Place(round, phase, client)
        self._send({"kind": "status", "place": self.place})

    def watch_steps(self, count: Callable[[], int]) -> None:
        """`count` gives the number of steps this rank has taken so far: taking some is a sign of life."""
        self._count_steps = count

    def places(self) -> dict[int, Place]:
        """Where each rank was last seen: on rank 0 of all, elsewhere of this one."""
        return {self.rank: self.place}

    def record_failures(self, record: Callable[[str], None]) -> None:
        """On rank 0 `record` gets what is printed of a failure of the job too; it is waited for half a second."""
        self._record_failure = record

    def give_back_after_failure(self, give_back: Callable[[], None]) -> None:
        """On rank 0 `give_back` is called where a failure of the job ends this process, whose main thread may be
        anywhere but in `uninterrupted`; it is waited for half a second.
        """
        self._give_back = give_back

    def barrier(self, key: Sequence[Any], value: Any = None) -> list[Any]:
        """Wait until every rank is at this barrier, and gather a value of each.

        Args:
            key: what the barrier is for; the same in every rank.
            value: of this rank, anything that JSON can hold, small.

        Returns:
            The values by rank, None for a rank that has none.

        Raises:
            RunError: in every rank that waits, when two ranks are at different barriers, or when a rank stays away for
                timeout_s without a sign of life.
        """
        if self._finished:
            raise RunError(f"{name_of(key)} after the end of the job")
        self._waiting_since_s = self._clock_s
        self._send({"kind": "enter", "key": list(key), "value": value})
        answer = self._answers.get()
        self._waiting_since_s = None
        if answer["kind"] == "reject":
            raise RunError(answer["text"])
        return answer["values"] or [None] * len(self.members)

    @contextmanager
    def transfer(self, what: str, at_least_s: float = 0.0) -> Iterator[None]:
        """While bytes travel: the control thread ends the job if that takes longer than timeout_s, and than
        at_least_s.
        """
        self._transfer = (what, self._clock_s, max(self.timeout_s, at_least_s))
        try:
            yield
        finally:
            self._transfer = None

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """While files are written: if another rank fails meanwhile, this process ends only after it, within seconds."""
        with self._saving:
            yield

    @contextmanager
    def removed_at_failure(self, path: str) -> Iterator[None]:
        """Within it the file is removed where a failure, of whichever rank, ends this process."""
        self._leftovers.add(path)
        try:
            yield
        finally:
            self._leftovers.discard(path)

    def report_failure(self, failure: Failure) -> None:
        """Have the failure printed once for the whole job, and end all ranks. Does not return."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would only hide the message
        if not self._thread.is_alive():
            write_stderr(f"hkd_hpc: {failure.text}")
            self._leave(failure.code)
        if failure.is_echo:
            time.sleep(LINK_ERROR_S)
        self._post({"kind": "failed", "text": failure.text[:TEXT_LIMIT], "code": failure.code})
        time.sleep(EXIT_S)
        os._exit(failure.code)

    def finish(self) -> None:
        """The normal end: wait for all ranks; from then on a closed connection is no failure."""
        self.barrier(END)
        self._thread.join(EXIT_S)
        self._close()

    # ---- in the control thread ----

    def _run(self) -> None:
        try:
            while not self._finished:
                self._turn()
        except BaseException as error:  # a silent control thread would be a job that hangs
            write_stderr(f"hkd_hpc: rank {self.rank}: the control thread failed: {type(error).__name__}: {error}")
            self._leave(1)

    def _leave(self, code: int) -> NoReturn:
        for path in self._leftovers.copy():
            with suppress(OSError):
                os.unlink(path)
        leave(code)

    def _turn(self) -> None:
        events = self._selector.select(SIGTERM_S / 2 if self._terminated_s else POLL_S)
        self._advance_clock()
        for event, _ in events:
            if event.data == "wake":
                self._on_wake()
            else:
                self._on_link(event.data)
        while self._posts and not self._finished:
            self._on_message(self.rank, self._posts.popleft())
        if not self._finished:
            self._check_watches(self._clock_s)

    def _advance_clock(self) -> None:
        """Seconds that this process lived: a job that was suspended as a whole (SLURM does that) is not late."""
        turned_s = time.monotonic()
        self._clock_s += min(turned_s - self._turned_s, LONGEST_TURN_S)
        self._turned_s = turned_s

    def _on_wake(self) -> None:
        numbers = self._wake_reader.recv(4096)
        if signal.SIGCONT in numbers:
            self._continued_s = self._clock_s
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _leave_to_control_thread:
            self._terminated_s = self._terminated_s or self._clock_s

    def _on_link(self, peer: int) -> None:
        messages, is_open = self._links[peer].receive()
        for message in messages:
            self._on_message(peer, message)
        if not is_open and not self._finished:
            self._on_closed(peer)

    def _check_watches(self, now_s: float) -> None:
        if now_s - self._chain_seen_s > LAUNCHER_POLL_S:
            self._chain_seen_s = now_s
            if not launcher_alive(self._chain):
                self._fail(Failure(f"the launcher (pid {self._chain[-1][1]}) has ended. {self.ending}", 1))
        if self._terminated_s and now_s - self._terminated_s > SIGTERM_S:
            self._terminated_s = None
            self._fail(Failure(f"{self._here()} was ended by signal 15 (SIGTERM). {self.ending}", 143))
        transfer = self._transfer
        if transfer and now_s - transfer[1] > transfer[2]:
            self._transfer = None
            self._fail(Failure(f"{self._here()}: {transfer[0]} did not end within {transfer[2]:g} s", 1, is_hang=True))
        self._tick(now_s)

    def _is_ended_by_launcher(self) -> bool:
        """Whether SIGCONT came a moment ago: mpirun sends it before the SIGTERM with which it ends all ranks."""
        return self._continued_s is not None and self._clock_s - self._continued_s < CONTINUED_S

    def _here(self) -> str:
        return f"{self.members[self.rank]}, {self.place}"

    def _send(self, message: Message) -> None:
        """A message from the main thread, sent before this returns: even a crash in the next line has its place."""
        raise NotImplementedError

    def _on_message(self, peer: int, message: Message) -> None:
        """A message from another rank."""
        raise NotImplementedError

    def _on_closed(self, peer: int) -> None:
        """A connection closed."""
        raise NotImplementedError

    def _fail(self, failure: Failure) -> None:
        """End the job from this rank's control thread."""
        raise NotImplementedError

    def _tick(self, now_s: float) -> None:
        """Whatever is due."""
        raise NotImplementedError

    # ---- wake-ups: posts, signals, forks ----

    def _post(self, message: Message) -> None:
        self._posts.append(message)
        try:
            self._wake_writer.send(b"\0")
        except OSError:
            pass  # the buffer is full of wake-ups already

    def _listen_to_wakes(self) -> None:
        """Python writes the numbers of signals to the same socket, so the thread learns of them whatever main does."""
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, "wake")
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
            signal.signal(signal.SIGTERM, _leave_to_control_thread)
            signal.signal(signal.SIGCONT, _leave_to_control_thread)
        _close_in_forked_children(weakref.ref(self))

    def _close(self) -> None:
        """Release sockets and signals: after the end, and in forked children, which would keep connections open.

        Closes only: taking a connection out of the selector would, in a child, take it out of its parent's too.
        """
        if threading.current_thread() is threading.main_thread():
            self._give_signals_back()
        self._selector.close()
        for link in self._links.values():
            link.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _give_signals_back(self) -> None:
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._wake_writer.fileno()):
            signal.set_wakeup_fd(current)
        for number in (signal.SIGTERM, signal.SIGCONT):
            if signal.getsignal(number) is _leave_to_control_thread:
                signal.signal(number, signal.SIG_DFL)


def name_of(key: Sequence[Any]) -> str:
    """A barrier's name for people."""
    if len(key) != 6:
        return " ".join(str(part) for part in key)
    call, operation, kind, round, phase, nbytes = key
    return f"{operation} of {kind} ({Place(round, phase)}, {nbytes} bytes{f', call {call}' if call else ''})"


def nowhere(text: str) -> None:
    """Who records nothing."""


def nothing() -> None:
    """What there is to give back."""


def leave(code: int) -> NoReturn:
    """End the process now: no atexit (MPI's would block), but what was printed gets out, if that takes no time."""
    shortly(_flush_streams)
    os._exit(code)


def leave_after(main: Callable[[], int]) -> int:
    """What `main` of a process that ends with it returns; where it fails no thread of a user's own code may keep the
    process alive.
    """
    try:
        return main()
    except SystemExit as end:
        if isinstance(end.code, int) and end.code:
            leave(end.code)
        raise


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


def _close_in_forked_children(reference: weakref.ref[Control]) -> None:
    """A child must not keep connections open, nor pass its own SIGTERM to its parent's thread, not even at birth."""
    masks: list[set[int | signal.Signals]] = []

    def before() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]))

    def after_in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def after_in_child() -> None:
        control = reference()
        if control is not None:
            control._close()
        after_in_parent()

    os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after_in_child)


def _ignore(number: int, frame: object) -> None:
    """The handler of a signal that comes too late to change anything."""


def _leave_to_control_thread(number: int, frame: FrameType | None) -> None:
    """The handler of SIGTERM and SIGCONT does nothing: the control thread learns of the signal and acts."""
