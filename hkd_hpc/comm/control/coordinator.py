"""The two ends of a connection of the control plane: rank 0 (Coordinator), and every other rank (Peer)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from hkd_hpc.comm.control import diagnostics
from hkd_hpc.comm.control.base import (
    END,
    POLL_S,
    Chain,
    Control,
    Failure,
    Links,
    Place,
    name_of,
)
from hkd_hpc.comm.control.rendezvous import Member
from hkd_hpc.comm.control.watch import shortly, write_mpirun_stderr, write_stderr
from hkd_hpc.comm.control.wire import Message, pack

HEARTBEAT_S = 2.0
SAVE_FIRST_S, SAVE_S = 1.5, 8.0  # a save that is under way is waited for, first before the other ranks are ended
ANSWER_S = 2.0  # a failing rank waits so long for rank 0 to print its message
LOST_S = 0.3  # within this the ranks that were lost together with rank 0 have ended too
STAY_S = 1.5  # whoever says that rank 0 has ended stays so long, so that the ranks above see that there is somebody
MACHINE_S, LONGEST_S = 3.0, 9.0  # the machines take turns in saying it, which the launcher cuts short
STACK_WAIT_S = 1.0  # rank 0 waits so long for the stacks of the others; below ANSWER_S


class Coordinator(Control):
    """Rank 0: knows where every rank is, completes the barriers, prints for all."""

    def __init__(self, members: Sequence[Member], links: Links, chain: Chain, timeout_s: float) -> None:
        self._waiting: dict[int, Entry] = {}
        self._broken: str | None = None
        self._heartbeat_s = 0.0
        self._seen = {member.rank: (Place(), 0.0) for member in members}
        self._steps: dict[int, int] = {}
        self._stacks: dict[int, str] = {}
        self._stack_request: tuple[float, Callable[[], None]] | None = None  # until when, and what to do then
        super().__init__(0, members, links, chain, timeout_s)  # starts the control thread: last

    def places(self) -> dict[int, Place]:
        """Where each rank was last seen, this one included."""
        return {**{rank: place for rank, (place, _) in self._seen.copy().items()}, self.rank: self.place}

    def _send(self, message: Message) -> None:
        if message["kind"] == "status":
            self._send_all(message)
        self._post(message)

    def _on_message(self, peer: int, message: Message) -> None:
        if message["kind"] == "status":
            self._seen[peer] = Place(*message["place"]), self._clock_s
        elif message["kind"] == "enter":
            self._enter(peer, message)
        elif message["kind"] == "steps":
            self._seen[peer] = self._seen[peer][0], self._clock_s
            self._steps[peer] = message["steps"]
        elif message["kind"] == "stack":
            self._stacks[peer] = message["stack"]
        elif message["kind"] == "failed":
            self._fail(Failure(message["text"], message["code"], is_hang=message.get("is_hang", False)))

    def _enter(self, peer: int, message: Message) -> None:
        entry = Entry(message["key"], message["value"], self._clock_s)
        self._waiting[peer] = entry
        self._broken = self._broken or self._mismatch(peer, entry)
        if self._broken:
            self._reject_waiting(self._broken)
        elif len(self._waiting) == len(self.members):
            self._release(entry)

    def _release(self, entry: Entry) -> None:
        values = [self._waiting[member.rank].value for member in self.members]
        self._waiting.clear()
        # what each of a thousand ranks gets must not grow with the ranks where nobody has a value
        message: Message = {"kind": "release", "values": values if any(value is not None for value in values) else []}
        self._send_all(message)
        self._answers.put(message)
        if entry.key == END:
            self._drain()
            self._finished = True

    def _reject_waiting(self, text: str) -> None:
        for rank in list(self._waiting):
            del self._waiting[rank]
            self._answer(rank, {"kind": "reject", "text": text})

    def _answer(self, rank: int, message: Message) -> None:
        if rank == 0:
            self._answers.put(message)
        else:
            self._links[rank].send(message)

    def _mismatch(self, peer: int, entry: Entry) -> str | None:
        """One line if another rank waits elsewhere: neither barrier can ever be complete."""
        others = [rank for rank in self._waiting if rank != peer][:1]  # all that wait are at one barrier: one is enough
        if not others or self._waiting[others[0]].key == entry.key:
            return None
        rank = min(rank for rank in self._waiting if rank != peer)
        return (
            f"ranks are out of step: rank {peer} is at {name_of(entry.key)}, "
            f"rank {rank} at {name_of(self._waiting[rank].key)}"
        )

    def _tick(self, now_s: float) -> None:
        if now_s - self._heartbeat_s > HEARTBEAT_S:
            self._heartbeat_s = now_s
            self._send_all({"kind": "status", "place": self.place})
        if self._stack_request:
            until_s, then = self._stack_request
            if now_s > until_s or len(self._stacks) == len(self._links):
                then()
            return
        for entry in list(self._waiting.values())[:1]:  # the one that waits longest
            unresponsive = [
                m.rank
                for m in self.members
                if m.rank not in self._waiting and self._is_unresponsive(m.rank, entry, now_s)
            ]
            if unresponsive:
                text = (
                    f"{self.members[unresponsive[0]]} did not reach {name_of(entry.key)} within "
                    f"{self.timeout_s:g} s (comm.timeout_s); last seen in {self._last_seen(unresponsive[0])}"
                )
                self._request_stacks(partial(self._end_wait, text, unresponsive))

    def _request_stacks(self, then: Callable[[], None]) -> None:
        """Ask all for their stacks, and call `then` when they have answered, or not in time."""
        self._stack_request = self._clock_s + STACK_WAIT_S, then
        self._send_all({"kind": "request_stack"})

    def _end_wait(self, text: str, unresponsive: list[int]) -> None:
        """All that wait raise RunError; a rank that arrived after all is waited for again."""
        self._stack_request = None
        if all(rank in self._waiting for rank in unresponsive) or not self._waiting:
            return
        self._broken = f"{text}\n{self._summary(unresponsive, diagnostics.ADVICE_HANG)}"
        self._reject_waiting(self._broken)

    def _summary(self, unresponsive: Sequence[int], advice: str) -> str:
        """Where all ranks are, and the stacks of the unresponsive ones."""
        stacks = self._stacks | {0: diagnostics.stack_of_main()}
        states = []
        for member in self.members:
            place, seen_s = self._seen[member.rank]
            step = (
                f", step {self._steps[member.rank]}" if place.phase == "training" and member.rank in self._steps else ""
            )
            is_stuck, here = member.rank in unresponsive, member.machine == self.members[0].machine
            silent = "it does not answer" if is_stuck and member.rank not in stacks else ""
            found = [diagnostics.condition_of(member.pid) if is_stuck and here else "", silent]
            states.append(
                diagnostics.RankState(
                    member.rank,
                    str(member),
                    f"{place}{step}",
                    self._clock_s - seen_s,
                    member.rank in self._waiting,
                    ", ".join(filter(None, found)),
                    stacks.get(member.rank, "") if is_stuck else "",
                )
            )
        return diagnostics.summary(states, f"{advice} {self.ending}")

    def _is_unresponsive(self, rank: int, entry: Entry, now_s: float) -> bool:
        return now_s - max(entry.since_s, self._seen[rank][1]) > self.timeout_s

    def _last_seen(self, rank: int) -> str:
        place, seen_s = self._seen[rank]
        return f"{place}, {self._clock_s - seen_s:.1f} s ago"

    def _on_closed(self, peer: int) -> None:
        self._fail(
            Failure(
                f"{self.members[peer]} ended without an error message; last seen in {self._last_seen(peer)}.\n"
                f"{self._summary([], diagnostics.ADVICE_DEAD)}",
                1,
            )
        )

    def _fail(self, failure: Failure) -> None:
        if failure.is_hang:
            if not self._stack_request:
                self._request_stacks(lambda: self._fail(self._with_summary(failure)))
            return
        write_stderr(f"hkd_hpc: {failure.text}")
        if failure.code == 128 + signal.SIGTERM and self._is_ended_by_launcher():
            write_mpirun_stderr(self._chain[-1][1], f"hkd_hpc: {failure.text}")
        # When others end, the launcher soon ends this rank too. At a barrier, where it waits in vain, nothing is saved.
        saved = 0 in self._waiting or self._saving.acquire(timeout=SAVE_FIRST_S)
        if saved:
            shortly(self._give_back)
        self._send_all({"kind": "abort", "code": failure.code})
        self._drain()
        shortly(partial(self._record_failure, failure.text))
        if not saved and (self._transfer or self._saving.acquire(timeout=SAVE_S)):
            shortly(self._give_back)
        self._leave(failure.code)

    def _with_summary(self, failure: Failure) -> Failure:
        """Of a transfer that hangs: everybody is in it."""
        everybody = [member.rank for member in self.members]
        return Failure(f"{failure.text}\n{self._summary(everybody, diagnostics.ADVICE_HANG)}", failure.code)

    def _send_all(self, message: Message) -> None:
        data = pack(message)
        for link in self._links.values():
            link.send(data)

    def _drain(self) -> None:
        deadline_s = time.monotonic() + 1.0
        for link in self._links.values():
            link.drain(deadline_s)


class Peer(Control):
    """Every other rank: sends rank 0 where it is, and ends when rank 0 says so or has ended."""

    def __init__(self, rank: int, members: Sequence[Member], links: Links, chain: Chain, timeout_s: float) -> None:
        self._coordinator_place = Place()
        self._received_s = 0.0
        self._failure: tuple[Failure, float] | None = None
        self._finishing = False
        self._steps, self._steps_s = 0, 0.0
        super().__init__(rank, members, links, chain, timeout_s)  # starts the control thread: last

    def _send(self, message: Message) -> None:
        self._finishing = message.get("key") == END
        self._links[0].send(message)

    def _on_message(self, peer: int, message: Message) -> None:
        if message["kind"] == "failed":  # from this rank's own main thread
            self._fail(Failure(message["text"], message["code"]))
            return
        self._received_s = self._clock_s
        if message["kind"] == "request_stack":
            self._links[0].send({"kind": "stack", "stack": diagnostics.stack_of_main()})
        elif message["kind"] == "status":
            self._coordinator_place = Place(*message["place"])
        elif message["kind"] == "abort":
            self._leave(message["code"])
        else:
            self._finished = self._finishing and message["kind"] == "release"
            self._answers.put(message)

    def _on_closed(self, peer: int) -> None:
        """Rank 0 has ended: the lowest rank that is left says so, unless this one had something to say to it."""
        if self._failure and self.rank > 1:
            write_stderr(f"hkd_hpc: {self._failure[0].text}")
            self._leave(1)
        last_seen = f"last seen in {self._coordinator_place}, {self._clock_s - self._received_s:.1f} s ago"
        if self._is_lowest_left():
            write_stderr(f"hkd_hpc: {self.members[0]} ended without an error message; {last_seen}. {self.ending}")
            time.sleep(STAY_S)
        self._leave(1)

    def _is_lowest_left(self) -> bool:
        """Whether no lower rank speaks of rank 0's end. Of this machine that can be seen; a rank of a later machine
        waits until the launcher, were there a lower one, would have ended this rank.
        """
        peers, here = self.members[1:], self.members[self.rank].machine
        lower = [member.pid for member in peers[: self.rank - 1] if member.machine == here]
        if lower:
            time.sleep(LOST_S)
        if not all(map(diagnostics.is_gone, lower)):
            self._wait_for_end_of(lower)
            return False
        machines = list(dict.fromkeys(member.machine for member in peers))
        time.sleep(min(MACHINE_S * machines.index(here), LONGEST_S))
        return True

    def _wait_for_end_of(self, pids: Sequence[int]) -> None:
        """Leave after them: a launcher that sees one rank leave ends the others, and they are to speak first."""
        deadline_s = time.monotonic() + LONGEST_S + 2 * STAY_S
        while not all(map(diagnostics.is_gone, pids)) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)

    def _fail(self, failure: Failure) -> None:
        """Let rank 0 print it; if it does not answer, print it here. The launcher's SIGTERM then means that it was."""
        if self._failure:
            self._leave(self._failure[0].code)
        self._failure = failure, self._clock_s + ANSWER_S + 0.5 * (self.rank - 1)
        self._links[0].send({"kind": "failed", "text": failure.text, "code": failure.code, "is_hang": failure.is_hang})

    def _tick(self, now_s: float) -> None:
        steps = self._count_steps()
        if steps != self._steps and now_s - self._steps_s > min(HEARTBEAT_S, self.timeout_s / 4):
            self._steps, self._steps_s = steps, now_s
            self._links[0].send({"kind": "steps", "steps": steps})
        if self._failure and now_s > self._failure[1]:
            if not self._is_reported():
                write_stderr(f"hkd_hpc: {self._failure[0].text}")
            self._leave(self._failure[0].code)
        self._check_coordinator(now_s)

    def _is_reported(self) -> bool:
        """Whether a lower rank of this machine, which prints first, has ended: all of them fail for one reason."""
        here = self.members[self.rank].machine
        return any(diagnostics.is_gone(member.pid) for member in self.members[1 : self.rank] if member.machine == here)

    def _check_coordinator(self, now_s: float) -> None:
        """A coordinator that is silent while this rank waits: end the wait."""
        since_s, limit_s = self._waiting_since_s, self.timeout_s + 3 * HEARTBEAT_S
        if since_s is None or now_s - max(since_s, self._received_s) <= limit_s:
            return
        self._waiting_since_s = None
        other, here = self.members[0], self.members[self.rank].machine
        found = diagnostics.condition_of(other.pid) if other.machine == here else ""
        text = (
            f"{other} sent no heartbeat for {self.timeout_s:g} s (comm.timeout_s); "
            f"last seen in {self._coordinator_place}{found and f'; {found}'}. {diagnostics.ADVICE_HANG} {self.ending}"
        )
        self._answers.put({"kind": "reject", "text": text})


class Entry(NamedTuple):
    """A rank that waits at a barrier."""

    key: list[Any]
    value: Any
    since_s: float
