"""The control plane: who is where, who is alive, do all do the same, and one clear end for all when something fails.

A star of TCP connections with rank 0 in the middle. In each process one thread owns the sockets, so that it hears of a
dead rank and ends the process while the main thread computes or sits in a collective. Messages are small JSON objects.

To rank 0:    at (round, phase, client), enter (a meeting), failed (text, code)
From rank 0:  at (its own place; also the heartbeat), go / stop (the answer to enter), abort (code)
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from hkd_hpc.comm.rendezvous import Member
from hkd_hpc.comm.watch import launcher_alive, speak
from hkd_hpc.comm.wire import Unpacker, pack
from hkd_hpc.errors import RunError

POLL_S = 0.25
LAUNCHER_POLL_S = 0.5
HEARTBEAT_S = 2.0
ANSWER_S = 2.0     # a failing rank waits so long for rank 0 to speak for it
SIGTERM_S = 0.4    # mpirun ends the survivors of a dead rank by SIGTERM: time for the dead one to be named first
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


class Alone:
    """The control plane of a single process."""

    def __init__(self) -> None:
        self.place = Place()

    def set_status(self, round: int | None, phase: str, client: int | None = None) -> None:
        """Note where we are."""
        self.place = Place(round, phase, client)

    def meet(self, key: Sequence[Any], value: Any = None, ranks: Sequence[int] | None = None) -> list[Any]:
        """There is nobody to wait for."""
        return [value]

    @contextmanager
    def transfer(self, what: str) -> Iterator[None]:
        """Nothing travels."""
        yield

    def report_failure(self, failure: Failure) -> None:
        """Say it."""
        speak(f"hkd_hpc: {failure.text}")

    def goodbye(self) -> None:
        """Nobody to tell."""


class Control:
    """What both ends of the star share: the thread, its posts from the main thread, signals and watches."""

    def __init__(self, rank: int, members: Sequence[Member], links: dict[int, socket.socket],
                 chain: tuple[tuple[int, int], ...], timeout_s: float) -> None:
        self.rank, self.members, self.timeout_s, self.place = rank, tuple(members), timeout_s, Place()
        self._chain, self._chain_seen_s = chain, time.monotonic()
        self._posts: deque[dict[str, Any]] = deque()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._waits_since_s: float | None = None
        self._transfer: tuple[str, float] | None = None
        self._terminated_s: float | None = None
        self._finished = False
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
        self._post({"kind": "at", "place": self.place})

    def meet(self, key: Sequence[Any], value: Any = None, ranks: Sequence[int] | None = None) -> list[Any]:
        """Wait until all `ranks` (default: every rank) are at the meeting `key`; returns their values in that order.

        Raises RunError in every rank that waits when two ranks are at different meetings, and when a rank stays away
        for timeout_s without a sign of life.
        """
        self._waits_since_s = time.monotonic()
        self._post({"kind": "enter", "key": list(key), "value": value,
                    "ranks": list(ranks if ranks is not None else range(len(self.members)))})
        answer = self._answers.get()
        self._waits_since_s = None
        if answer["kind"] == "stop":
            raise RunError(answer["text"])
        return answer["values"]

    @contextmanager
    def transfer(self, what: str) -> Iterator[None]:
        """While bytes travel: the control thread ends the job if that takes longer than timeout_s."""
        self._transfer = (what, time.monotonic())
        try:
            yield
        finally:
            self._transfer = None

    def report_failure(self, failure: Failure) -> None:
        """Have the failure said once for the whole job, and end all ranks. Does not return."""
        if not self._thread.is_alive():
            speak(f"hkd_hpc: {failure.text}")
            leave(failure.code)
        if failure.is_echo:
            time.sleep(LINK_ERROR_S)
        self._post({"kind": "failed", "text": failure.text[:TEXT_LIMIT], "code": failure.code})
        time.sleep(10 * ANSWER_S)
        os._exit(failure.code)

    def goodbye(self) -> None:
        """The normal end: wait for all ranks; from then on a closed connection is no failure."""
        self.meet(END)
        self._thread.join(2 * ANSWER_S)
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
        for event, _ in self._selector.select(POLL_S):
            if event.data == "wake":
                self._on_wake()
            else:
                self._on_link(event.data)
        while self._posts and not self._finished:
            self._posted(self._posts.popleft())
        if not self._finished:
            self._check_watches(time.monotonic())

    def _on_wake(self) -> None:
        if signal.SIGTERM in self._wake_reader.recv(4096) and signal.getsignal(signal.SIGTERM) is _noted:
            self._terminated_s = self._terminated_s or time.monotonic()

    def _on_link(self, peer: int) -> None:
        messages, is_open = self._links[peer].receive()
        for message in messages:
            self._heard(peer, message)
        if not is_open and not self._finished:
            self._links[peer].close()
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
        if transfer and now_s - transfer[1] > self.timeout_s:
            self._transfer = None
            self._fail(Failure(f"{self._here()}: {transfer[0]} did not end within {self.timeout_s:g} s", 1))
        self._tick(now_s)

    def _here(self) -> str:
        return f"{self.members[self.rank]}, {self.place}"

    def _posted(self, message: dict[str, Any]) -> None:
        """A message from the main thread."""
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
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: forget() and forget()())

    def _forget(self) -> None:
        """Let go of sockets and signals: after the end, and in forked children, which would keep connections open."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _noted:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for link in self._links.values():
            link.close()
        self._wake_reader.close()
        self._wake_writer.close()
        self._selector.close()


class Hub(Control):
    """Rank 0: knows where everybody is, holds the meetings, speaks for all."""

    def __init__(self, *args: Any) -> None:
        self._waiting: dict[int, Entry] = {}
        self._broken: str | None = None
        self._beat_s = 0.0
        rank, members, *_ = args
        self._seen = {member.rank: (Place(), time.monotonic()) for member in members}
        super().__init__(*args)

    def _posted(self, message: dict[str, Any]) -> None:
        if message["kind"] == "at":
            self._tell_all(message)
        self._heard(0, message)

    def _heard(self, peer: int, message: dict[str, Any]) -> None:
        if message["kind"] == "at":
            self._seen[peer] = Place(*message["place"]), time.monotonic()
        elif message["kind"] == "enter":
            self._enter(peer, message)
        elif message["kind"] == "failed":
            self._fail(Failure(message["text"], message["code"]))

    def _enter(self, peer: int, message: dict[str, Any]) -> None:
        entry = Entry(message["key"], message["value"], message["ranks"], time.monotonic())
        self._waiting[peer] = entry
        self._broken = self._broken or self._clash(peer, entry)
        if self._broken:
            self._stop(self._broken)
        elif all(rank in self._waiting for rank in entry.ranks):
            self._go(entry)

    def _go(self, entry: Entry) -> None:
        values = [self._waiting.pop(rank).value for rank in entry.ranks]
        for rank in entry.ranks:
            self._answer(rank, {"kind": "go", "values": values})
        if entry.key == END:
            self._drain()
            self._finished = True

    def _stop(self, text: str) -> None:
        for rank in list(self._waiting):
            del self._waiting[rank]
            self._answer(rank, {"kind": "stop", "text": text})

    def _answer(self, rank: int, message: dict[str, Any]) -> None:
        if rank == 0:
            self._answers.put(message)
        else:
            self._links[rank].send(message)

    def _clash(self, peer: int, entry: Entry) -> str | None:
        """One line if `peer` is at a meeting that can never be complete, because a rank it waits for waits for it elsewhere."""
        for rank in entry.ranks:
            other = self._waiting.get(rank)
            if other and other.key != entry.key and (other.ranks == entry.ranks or peer in other.ranks):
                return f"ranks are out of step: rank {peer} is at {name_of(entry.key)}, rank {rank} at {name_of(other.key)}"
        return None

    def _tick(self, now_s: float) -> None:
        if now_s - self._beat_s > HEARTBEAT_S:
            self._beat_s = now_s
            self._tell_all({"kind": "at", "place": self.place})
        for entry in list(self._waiting.values()):
            late = [rank for rank in entry.ranks if rank not in self._waiting and self._is_late(rank, entry, now_s)]
            if late:
                self._broken = (f"{self.members[late[0]]} did not come to {name_of(entry.key)} within "
                                f"{self.timeout_s:g} s (comm.timeout_s); last seen in {self._last_seen(late[0])}")
                self._stop(self._broken)
                return

    def _is_late(self, rank: int, entry: Entry, now_s: float) -> bool:
        return now_s - max(entry.since_s, self._seen[rank][1]) > self.timeout_s

    def _last_seen(self, rank: int) -> str:
        place, seen_s = self._seen[rank]
        return f"{place}, {time.monotonic() - seen_s:.1f} s ago"

    def _lost(self, peer: int) -> None:
        self._fail(Failure(f"{self.members[peer]} ended without a word; last seen in {self._last_seen(peer)}. "
                           f"{RESUME_ADVICE}", 1))

    def _fail(self, failure: Failure) -> None:
        speak(f"hkd_hpc: {failure.text}")
        self._tell_all({"kind": "abort", "code": failure.code})
        self._drain()
        leave(failure.code)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for link in self._links.values():
            link.send(message)

    def _drain(self) -> None:
        deadline_s = time.monotonic() + 1.0
        for link in self._links.values():
            link.drain(deadline_s)


class Spoke(Control):
    """Every other rank: tells rank 0 where it is, and ends when rank 0 says so or is no more."""

    def __init__(self, *args: Any) -> None:
        self._hub_place = Place()
        self._heard_s = time.monotonic()
        self._failure: tuple[Failure, float] | None = None
        self._finishing = False
        super().__init__(*args)

    def _posted(self, message: dict[str, Any]) -> None:
        if message["kind"] == "failed":
            self._fail(Failure(message["text"], message["code"]))
        else:
            self._finishing = message.get("key") == END
            self._links[0].send(message)

    def _heard(self, peer: int, message: dict[str, Any]) -> None:
        self._heard_s = time.monotonic()
        if message["kind"] == "at":
            self._hub_place = Place(*message["place"])
        elif message["kind"] == "abort":
            leave(message["code"])
        else:
            self._finished = self._finishing and message["kind"] == "go"
            self._answers.put(message)

    def _lost(self, peer: int) -> None:
        if self.rank == 1:
            speak(f"hkd_hpc: {self.members[0]} ended without a word; last seen in {self._hub_place}, "
                  f"{time.monotonic() - self._heard_s:.1f} s ago. {RESUME_ADVICE}")
        elif self._failure:
            speak(f"hkd_hpc: {self._failure[0].text}")
        leave(1)

    def _fail(self, failure: Failure) -> None:
        """Let rank 0 say it; if it does not answer, say it here. The launcher's SIGTERM then means: it was said."""
        if self._failure:
            leave(self._failure[0].code)
        self._failure = failure, time.monotonic() + ANSWER_S + 0.5 * (self.rank - 1)
        self._links[0].send({"kind": "failed", "text": failure.text, "code": failure.code})

    def _tick(self, now_s: float) -> None:
        if self._failure and now_s > self._failure[1]:
            speak(f"hkd_hpc: {self._failure[0].text}")
            leave(self._failure[0].code)
        waits_since_s = self._waits_since_s
        if waits_since_s and now_s - max(waits_since_s, self._heard_s) > self.timeout_s + 3 * HEARTBEAT_S:
            self._waits_since_s = None
            self._answers.put({"kind": "stop", "text": f"{self.members[0]} has not been heard of for {self.timeout_s:g} s "
                                                       f"(comm.timeout_s); last seen in {self._hub_place}"})


class Entry(NamedTuple):
    """A rank that waits at a meeting."""
    key: list[Any]
    value: Any
    ranks: list[int]
    since_s: float


class Link:
    """One connection: non-blocking, with a buffer for what the network does not take at once."""

    def __init__(self, link: socket.socket, selector: selectors.BaseSelector, peer: int) -> None:
        self._socket, self._selector, self._peer = link, selector, peer
        self._unpacker, self._unsent, self._open = Unpacker(), bytearray(), True
        link.setblocking(False)
        _detect_dead_hosts(link)
        selector.register(link, selectors.EVENT_READ, peer)

    def send(self, message: dict[str, Any]) -> None:
        """Send now or later, never block; what a closed connection does not take is lost."""
        self._unsent += pack(message)
        self._flush()

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """The messages that have arrived, and whether the connection is still open."""
        self._flush()
        try:
            data = self._socket.recv(1 << 16)
            return self._unpacker.feed(data), bool(data)
        except BlockingIOError:
            return [], True
        except (OSError, ValueError):
            return [], False

    def drain(self, deadline_s: float) -> None:
        """Send what is left, until the deadline."""
        while self._open and self._unsent and time.monotonic() < deadline_s:
            self._flush()
            time.sleep(0.005 * bool(self._unsent))

    def close(self) -> None:
        """Close; twice is fine."""
        if self._open:
            self._open = False
            try:
                self._selector.unregister(self._socket)
            except (KeyError, ValueError, OSError):
                pass
            self._socket.close()

    def _flush(self) -> None:
        try:
            while self._open and self._unsent:
                del self._unsent[:self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the reading side will see that it is closed
        if self._open:
            writes = selectors.EVENT_WRITE if self._unsent else 0
            self._selector.modify(self._socket, selectors.EVENT_READ | writes, self._peer)


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


def _noted(number: int, frame: Any) -> None:
    """The handler of SIGTERM does nothing: the control thread learns of the signal and acts."""


def _detect_dead_hosts(link: socket.socket) -> None:
    """A host that loses its power closes nothing: let TCP find out within seconds."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15000)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
