"""The two ends of the control plane's star: rank 0 in the middle (Coordinator), and every other rank (Peer)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from hkd_hpc.comm.control import diagnostics
from hkd_hpc.comm.control.base import END, RESUME_ADVICE, Control, Failure, Place, leave, name_of
from hkd_hpc.comm.control.watch import speak, speak_for_mpirun
from hkd_hpc.comm.control.wire import pack

HEARTBEAT_S = 2.0
SAVE_FIRST_S, SAVE_S = 1.5, 8.0  # a save that is under way is waited for, first before the other ranks are told
ANSWER_S = 2.0  # a failing rank waits so long for rank 0 to speak for it
INQUIRY_S = 1.0  # rank 0 waits so long for the stacks of the others; below ANSWER_S


class Coordinator(Control):
    """Rank 0: knows where everybody is, holds the meetings, speaks for all."""

    def __init__(self, *args: Any) -> None:
        self._waiting: dict[int, Entry] = {}
        self._broken: str | None = None
        self._beat_s = 0.0
        _rank, members, *_ = args
        self._seen = {member.rank: (Place(), 0.0) for member in members}
        self._steps: dict[int, int] = {}
        self._stacks: dict[int, str] = {}
        self._inquiry: tuple[float, Callable[[], None]] | None = None  # until when, and what to do then
        super().__init__(*args)

    def _tell(self, message: dict[str, Any]) -> None:
        if message["kind"] == "at":
            self._tell_all(message)
        self._post(message)

    def _heard(self, peer: int, message: dict[str, Any]) -> None:
        if message["kind"] == "at":
            self._seen[peer] = Place(*message["place"]), self._clock_s
        elif message["kind"] == "enter":
            self._enter(peer, message)
        elif message["kind"] == "steps":
            self._seen[peer] = self._seen[peer][0], self._clock_s
            self._steps[peer] = message["steps"]
        elif message["kind"] == "told":
            self._stacks[peer] = message["stack"]
        elif message["kind"] == "failed":
            self._fail(Failure(message["text"], message["code"], is_hang=message.get("is_hang", False)))

    def _enter(self, peer: int, message: dict[str, Any]) -> None:
        entry = Entry(message["key"], message["value"], self._clock_s)
        self._waiting[peer] = entry
        self._broken = self._broken or self._clash(peer, entry)
        if self._broken:
            self._stop(self._broken)
        elif len(self._waiting) == len(self.members):
            self._go(entry)

    def _go(self, entry: Entry) -> None:
        values = [self._waiting[member.rank].value for member in self.members]
        self._waiting.clear()
        # what each of a thousand ranks gets must not grow with the ranks where there is nothing to tell
        message = {"kind": "go", "values": values if any(value is not None for value in values) else []}
        self._tell_all(message)
        self._answers.put(message)
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
        """One line if another rank waits elsewhere: neither meeting can ever be complete."""
        others = [rank for rank in self._waiting if rank != peer][:1]  # all that wait are at one place: the first tells
        if not others or self._waiting[others[0]].key == entry.key:
            return None
        rank = min(rank for rank in self._waiting if rank != peer)
        return (
            f"ranks are out of step: rank {peer} is at {name_of(entry.key)}, "
            f"rank {rank} at {name_of(self._waiting[rank].key)}"
        )

    def _tick(self, now_s: float) -> None:
        if now_s - self._beat_s > HEARTBEAT_S:
            self._beat_s = now_s
            self._tell_all({"kind": "at", "place": self.place})
        if self._inquiry:
            until_s, then = self._inquiry
            if now_s > until_s or len(self._stacks) == len(self._links):
                then()
            return
        for entry in list(self._waiting.values())[:1]:  # the one that waits longest
            late = [m.rank for m in self.members if m.rank not in self._waiting and self._is_late(m.rank, entry, now_s)]
            if late:
                text = (
                    f"{self.members[late[0]]} did not come to {name_of(entry.key)} within "
                    f"{self.timeout_s:g} s (comm.timeout_s); last seen in {self._last_seen(late[0])}"
                )
                self._inquire(partial(self._end_wait, text, late))

    def _inquire(self, then: Callable[[], None]) -> None:
        """Ask all for their stacks, and go on when they have answered, or not in time."""
        self._inquiry = self._clock_s + INQUIRY_S, then
        self._tell_all({"kind": "ask"})

    def _end_wait(self, text: str, late: list[int]) -> None:
        """All that wait raise RunError; who came after all meanwhile is waited for again."""
        self._inquiry = None
        if all(rank in self._waiting for rank in late) or not self._waiting:
            return
        self._broken = f"{text}\n{self._report(late, diagnostics.ADVICE_HANG)}"
        self._stop(self._broken)

    def _report(self, stuck: Sequence[int], advice: str) -> str:
        """Where all ranks are, and the stacks of the stuck ones."""
        stacks = self._stacks | {0: diagnostics.stack_of_main()}
        patients = []
        for member in self.members:
            place, seen_s = self._seen[member.rank]
            step = (
                f", step {self._steps[member.rank]}" if place.phase == "training" and member.rank in self._steps else ""
            )
            is_stuck, here = member.rank in stuck, member.machine == self.members[0].machine
            silent = "it does not answer" if is_stuck and member.rank not in stacks else ""
            found = [diagnostics.condition_of(member.pid) if is_stuck and here else "", silent]
            patients.append(
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
        return diagnostics.report(patients, advice)

    def _is_late(self, rank: int, entry: Entry, now_s: float) -> bool:
        return now_s - max(entry.since_s, self._seen[rank][1]) > self.timeout_s

    def _last_seen(self, rank: int) -> str:
        place, seen_s = self._seen[rank]
        return f"{place}, {self._clock_s - seen_s:.1f} s ago"

    def _lost(self, peer: int) -> None:
        self._fail(
            Failure(
                f"{self.members[peer]} ended without a word; last seen in {self._last_seen(peer)}.\n"
                f"{self._report([], diagnostics.ADVICE_DEAD)}",
                1,
            )
        )

    def _fail(self, failure: Failure) -> None:
        if failure.is_hang:
            if not self._inquiry:
                self._inquire(lambda: self._fail(self._with_report(failure)))
            return
        speak(f"hkd_hpc: {failure.text}")
        if failure.code == 128 + signal.SIGTERM and self._is_ended_by_launcher():
            speak_for_mpirun(self._chain[-1][1], f"hkd_hpc: {failure.text}")
        saved = self._saving.acquire(timeout=SAVE_FIRST_S)  # when others end, the launcher soon ends this rank too
        self._tell_all({"kind": "abort", "code": failure.code})
        self._drain()
        if not saved:
            self._saving.acquire(timeout=SAVE_S)
        leave(failure.code)

    def _with_report(self, failure: Failure) -> Failure:
        """Of a transfer that hangs: everybody is in it."""
        everybody = [member.rank for member in self.members]
        return Failure(f"{failure.text}\n{self._report(everybody, diagnostics.ADVICE_HANG)}", failure.code)

    def _tell_all(self, message: dict[str, Any]) -> None:
        data = pack(message)
        for link in self._links.values():
            link.send(data)

    def _drain(self) -> None:
        deadline_s = time.monotonic() + 1.0
        for link in self._links.values():
            link.drain(deadline_s)


class Peer(Control):
    """Every other rank: tells rank 0 where it is, and ends when rank 0 says so or is no more."""

    def __init__(self, *args: Any) -> None:
        self._hub_place = Place()
        self._heard_s = 0.0
        self._failure: tuple[Failure, float] | None = None
        self._finishing = False
        self._steps, self._steps_s = 0, 0.0
        super().__init__(*args)

    def _tell(self, message: dict[str, Any]) -> None:
        self._finishing = message.get("key") == END
        self._links[0].send(message)

    def _heard(self, peer: int, message: dict[str, Any]) -> None:
        if message["kind"] == "failed":  # from this rank's own main thread
            self._fail(Failure(message["text"], message["code"]))
            return
        self._heard_s = self._clock_s
        if message["kind"] == "ask":
            self._links[0].send({"kind": "told", "stack": diagnostics.stack_of_main()})
        elif message["kind"] == "at":
            self._hub_place = Place(*message["place"])
        elif message["kind"] == "abort":
            leave(message["code"])
        else:
            self._finished = self._finishing and message["kind"] == "go"
            self._answers.put(message)

    def _lost(self, peer: int) -> None:
        if self.rank == 1:
            speak(
                f"hkd_hpc: {self.members[0]} ended without a word; last seen in {self._hub_place}, "
                f"{self._clock_s - self._heard_s:.1f} s ago. {RESUME_ADVICE}"
            )
        elif self._failure:
            speak(f"hkd_hpc: {self._failure[0].text}")
        leave(1)

    def _fail(self, failure: Failure) -> None:
        """Let rank 0 say it; if it does not answer, say it here. The launcher's SIGTERM then means: it was said."""
        if self._failure:
            leave(self._failure[0].code)
        self._failure = failure, self._clock_s + ANSWER_S + 0.5 * (self.rank - 1)
        self._links[0].send({"kind": "failed", "text": failure.text, "code": failure.code, "is_hang": failure.is_hang})

    def _tick(self, now_s: float) -> None:
        steps = self._count_steps()
        if steps != self._steps and now_s - self._steps_s > min(HEARTBEAT_S, self.timeout_s / 4):
            self._steps, self._steps_s = steps, now_s
            self._links[0].send({"kind": "steps", "steps": steps})
        if self._failure and now_s > self._failure[1]:
            if not self._is_told():
                speak(f"hkd_hpc: {self._failure[0].text}")
            leave(self._failure[0].code)
        self._check_hub(now_s)

    def _is_told(self) -> bool:
        """Whether a lower rank of this machine, which speaks first, has ended: all of them fail for one reason."""
        here = self.members[self.rank].machine
        return any(diagnostics.is_gone(member.pid) for member in self.members[1 : self.rank] if member.machine == here)

    def _check_hub(self, now_s: float) -> None:
        waits_since_s = self._waits_since_s
        if waits_since_s is not None and now_s - max(waits_since_s, self._heard_s) > self.timeout_s + 3 * HEARTBEAT_S:
            self._waits_since_s = None
            hub = self.members[0]
            found = diagnostics.condition_of(hub.pid) if hub.machine == self.members[self.rank].machine else ""
            text = (
                f"{hub} has not been heard of for {self.timeout_s:g} s (comm.timeout_s); last seen in {self._hub_place}"
                f"{found and f'; {found}'}. {diagnostics.ADVICE_HANG}"
            )
            self._answers.put({"kind": "stop", "text": text})


class Entry(NamedTuple):
    """A rank that waits at a meeting."""

    key: list[Any]
    value: Any
    since_s: float
