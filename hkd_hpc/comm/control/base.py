"""The control plane: who is where, who is alive, do all do the same, and one clear end for all when something fails.

A star of TCP connections with rank 0 in the middle. In each process one thread owns the sockets, so that it hears of a
dead rank and ends the process while the main thread computes or sits in a collective. Messages are small JSON objects.

To rank 0:    at (round, phase, client), steps (taken so far), enter (a meeting), failed (text, code), told (its stack)
From rank 0:  at (its own place; also the heartbeat), go / stop (the answer to enter), ask (for the stack), abort (code)
A connection that closes before the last meeting means that its rank is dead.
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
from contextlib import contextmanager
from typing import Any, NamedTuple

from hkd_hpc.comm.control.link import Link
from hkd_hpc.comm.control.rendezvous import Member
from hkd_hpc.comm.control.watch import launcher_alive, speak
from hkd_hpc.errors import RunError

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
END = ["the end of the job"]
RESUME_ADVICE = "The whole job ends here; finished checkpoints are kept, --resume goes on from the last one."


class Place(NamedTuple):
    """Where a rank is."""

    round: int | None = None
    phase: str = "start-up"
    client: int | None = None

    def __str__(self) -> str:
        parts = [f"round {self.round}"] * (self.round is not None) + [f"phase {self.phase}"]
        return ", ".join(parts + [f"client {self.client}"] * (self.client is not None))


class Failure(NamedTuple):
    """What is said once for the whole job, and the exit code of every rank."""

    text: str
    code: int
    is_echo: bool = False  # probably the consequence of another rank's death
    is_hang: bool = False  # somebody is waited for in vain: all are asked where they are before it is said


class Terminated(BaseException):
    """SIGTERM came: raised in the main thread of a single process, so that it can say so and let go of what it
    holds.
    """


class NullControl:
    """The control plane of a single process."""

    timeout_s = 0.0

    def __init__(self) -> None:
        self.place = Place()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _raise_terminated)

    def set_status(self, round: int | None, phase: str, client: int | None = None) -> None:
        """Note where we are."""
        self.place = Place(round, phase, client)

    def watch_steps(self, count: Callable[[], int]) -> None:
        """Nobody watches."""

    def meet(self, key: Sequence[Any], value: Any = None) -> list[Any]:
        """There is nobody to wait for."""
        return [value]

    @contextmanager
    def transfer(self, what: str, at_least_s: float = 0.0) -> Iterator[None]:
        """Nothing travels."""
        yield

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Nobody interrupts."""
        yield

    def report_failure(self, failure: Failure) -> None:
        """Say it."""
        speak(f"hkd_hpc: {failure.text}")

    def goodbye(self) -> None:
        """Nobody to tell."""
        if signal.getsignal(signal.SIGTERM) is _raise_terminated:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Control:
    """What both ends of the star share: the thread, its posts from the main thread, signals and watches."""

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        links: dict[int, socket.socket],
        chain: tuple[tuple[int, int], ...],
        timeout_s: float,
    ) -> None:
        self.rank, self.members, self.timeout_s, self.place = rank, tuple(members), timeout_s, Place()
        self._chain, self._chain_seen_s = chain, 0.0
        self._clock_s, self._turned_s = 0.0, time.monotonic()
        self._posts: deque[dict[str, Any]] = deque()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._waits_since_s: float | None = None
        self._transfer: tuple[str, float, float] | None = None
        self._terminated_s: float | None = None
        self._continued_s: float | None = None
        self._count_steps: Callable[[], int] = int
        self._finished, self._saving = False, threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._links = {peer: Link(link, self._selector, peer) for peer, link in links.items()}
        self._listen_to_wakes()
        self._thread = threading.Thread(target=self._run, name="hkd-control", daemon=True)
        self._thread.start()

    # ---- for the main thread ----

    def set_status(self, round: int | None, phase: str, client: int | None = None) -> None:
        """Tell rank 0 (rank 0: tell all) where this rank is. Never blocks, never fails."""
        self.place = Place(round, phase, client)
        self._tell({"kind": "at", "place": self.place})

    def watch_steps(self, count: Callable[[], int]) -> None:
        """`count` tells how many steps this rank has taken so far: taking some is a sign of life."""
        self._count_steps = count

    def meet(self, key: Sequence[Any], value: Any = None) -> list[Any]:
        """Wait until every rank is at the meeting `key`; returns their values by rank, None for a rank that has none.

        Raises RunError in every rank that waits when two ranks are at different meetings, and when a rank stays away
        for timeout_s without a sign of life.
        """
        if self._finished:
            raise RunError(f"{name_of(key)} after the end of the job")
        self._waits_since_s = self._clock_s
        self._tell({"kind": "enter", "key": list(key), "value": value})
        answer = self._answers.get()
        self._waits_since_s = None
        if answer["kind"] == "stop":
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

    def report_failure(self, failure: Failure) -> None:
        """Have the failure said once for the whole job, and end all ranks. Does not return."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would only hide the message
        if not self._thread.is_alive():
            speak(f"hkd_hpc: {failure.text}")
            leave(failure.code)
        if failure.is_echo:
            time.sleep(LINK_ERROR_S)
        self._post({"kind": "failed", "text": failure.text[:TEXT_LIMIT], "code": failure.code})
        time.sleep(EXIT_S)
        os._exit(failure.code)

    def goodbye(self) -> None:
        """The normal end: wait for all ranks; from then on a closed connection is no failure."""
        self.meet(END)
        self._thread.join(EXIT_S)
        self._forget()

    # ---- in the control thread ----

    def _run(self) -> None:
        try:
            while not self._finished:
                self._turn()
        except BaseException as error:  # a silent control thread would be a job that hangs
            speak(f"hkd_hpc: rank {self.rank}: the control thread failed: {type(error).__name__}: {error}")
            leave(1)

    def _turn(self) -> None:
        events = self._selector.select(SIGTERM_S / 2 if self._terminated_s else POLL_S)
        self._advance_clock()
        for event, _ in events:
            if event.data == "wake":
                self._on_wake()
            else:
                self._on_link(event.data)
        while self._posts and not self._finished:
            self._heard(self.rank, self._posts.popleft())
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
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _noted:
            self._terminated_s = self._terminated_s or self._clock_s

    def _on_link(self, peer: int) -> None:
        messages, is_open = self._links[peer].receive()
        for message in messages:
            self._heard(peer, message)
        if not is_open and not self._finished:
            self._lost(peer)

    def _check_watches(self, now_s: float) -> None:
        if now_s - self._chain_seen_s > LAUNCHER_POLL_S:
            self._chain_seen_s = now_s
            if not launcher_alive(self._chain):
                self._fail(Failure(f"the launcher (pid {self._chain[-1][1]}) has ended. {RESUME_ADVICE}", 1))
        if self._terminated_s and now_s - self._terminated_s > SIGTERM_S:
            self._terminated_s = None
            self._fail(Failure(f"{self._here()} was ended by signal 15 (SIGTERM). {RESUME_ADVICE}", 143))
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

    def _tell(self, message: dict[str, Any]) -> None:
        """A message from the main thread, sent before this returns: even a crash in the next line has its place."""
        raise NotImplementedError

    def _heard(self, peer: int, message: dict[str, Any]) -> None:
        """A message from another rank."""
        raise NotImplementedError

    def _lost(self, peer: int) -> None:
        """A connection closed."""
        raise NotImplementedError

    def _fail(self, failure: Failure) -> None:
        """End the job from this rank's control thread."""
        raise NotImplementedError

    def _tick(self, now_s: float) -> None:
        """Whatever is due."""
        raise NotImplementedError

    # ---- wake-ups: posts, signals, forks ----

    def _post(self, message: dict[str, Any]) -> None:
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
            signal.signal(signal.SIGTERM, _noted)
            signal.signal(signal.SIGCONT, _noted)
        _let_go_in_forked_children(weakref.ref(self))

    def _forget(self) -> None:
        """Let go of sockets and signals: after the end, and in forked children, which would keep connections open.

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
            if signal.getsignal(number) is _noted:
                signal.signal(number, signal.SIG_DFL)


def name_of(key: Sequence[Any]) -> str:
    """A meeting's name for people."""
    if len(key) != 6:
        return " ".join(str(part) for part in key)
    call, operation, kind, round, phase, nbytes = key
    return f"{operation} of {kind} ({Place(round, phase)}, {nbytes} bytes{f', call {call}' if call else ''})"


def leave(code: int) -> None:
    """End the process now: no atexit (MPI's would block), but what was printed gets out, if that takes no time."""
    flusher = threading.Thread(target=_flush_streams, daemon=True)
    flusher.start()
    flusher.join(0.5)
    os._exit(code)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


def _let_go_in_forked_children(reference: weakref.ref[Control]) -> None:
    """A child must not keep connections open, nor pass its own SIGTERM to its parent's thread, not even at birth."""
    masks: list[set[int | signal.Signals]] = []

    def before() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]))

    def after_in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def after_in_child() -> None:
        control = reference()
        if control is not None:
            control._forget()
        after_in_parent()

    os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after_in_child)


def _raise_terminated(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise Terminated


def _noted(number: int, frame: Any) -> None:
    """The handler of SIGTERM and SIGCONT does nothing: the control thread learns of the signal and acts."""
