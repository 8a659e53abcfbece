"""When a job hangs or loses a rank: where all ranks are, what the unresponsive do, and what can be done about it."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from hkd_hpc.comm.devices import rank_list
from hkd_hpc.common.groups import grouped
from hkd_hpc.common.processes import stat_of

FRAMES, STACKS, SINGLE = 15, 3, 12  # innermost frames of a stack; stacks shown; more ranks than this are grouped
STATES = {
    "T": "it is stopped (SIGSTOP, or a debugger)",
    "D": "it waits for a disk or a network file system",
    "Z": "it has ended, and its parent has not noticed",
}
ADVICE_HANG = (
    "What to do: a rank that only needs longer wants a larger comm.timeout_s; a stopped one wants kill -CONT, or "
    "another node; for a stack in user code see there."
)
ADVICE_DEAD = (
    "What to do: the machine or the launcher lost it, if nobody ended it: look for 'Out of memory' in dmesg or the "
    "batch system's log, and for a failed node."
)


@dataclass(frozen=True)
class RankState:
    """A rank: `name` for people, where it is and for how long, whether it waits for others, what else is known."""

    rank: int
    name: str
    place: str
    since_s: float
    waits: bool = False
    condition: str = ""
    stack: str = ""


def summary(states: Sequence[RankState], advice: str) -> str:
    """Lines below the headline: where all ranks are, the stacks, the advice."""
    lines = ["Where the ranks are:", *(f"  {line}" for line in where_lines(states))]
    for state in [state for state in states if state.stack][:STACKS]:
        lines += [f"What rank {state.rank} does:", state.stack.rstrip()]
    return "\n".join([*lines, advice])


def where_lines(states: Sequence[RankState]) -> list[str]:
    """A line for each rank; in large jobs, for all that are at the same place."""
    if len(states) <= SINGLE:
        return [f"{state.name}: {_state(state)}" for state in states]
    groups = grouped(((state.place, state.waits, state.condition), state) for state in states)
    return [
        f"{rank_list([state.rank for state in group])}: {_state(max(group, key=lambda state: state.since_s))}"
        for group in groups.values()
    ]


def _state(state: RankState) -> str:
    doing = [f"{state.place}, for {state.since_s:.1f} s", "waits for the others" * state.waits, state.condition]
    return "; ".join(filter(None, doing))


def stack_of_main() -> str:
    """The innermost frames of this process's main thread, as a traceback has them."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-FRAMES:]) if frame else ""


def is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended, reaped or not."""
    return stat_of(pid)[:1] in ([], ["Z"])


def condition_of(pid: int) -> str:
    """What this machine knows of one of its processes: stopped, waiting for a disk, swapped out; else nothing."""
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except (OSError, ValueError):
        return "its process is gone"
    swapped_mb = int(fields.get("VmSwap", "0").split()[0]) / 1024
    found = [
        STATES.get(fields.get("State", "?").strip()[:1], ""),
        f"{swapped_mb:.0f} MB of it are swapped out" * (swapped_mb > 50),
    ]
    return ", ".join(filter(None, found))
