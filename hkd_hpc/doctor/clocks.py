"""Clock skew between rank 0 and the others: Cristian's algorithm, with a broadcast as question and a gather as answer.

A rank reads its clock after rank 0 has asked and before rank 0 has the answer, so the skew of its clock lies between
what it read less rank 0's time of the answer, and what it read less rank 0's time of the question. Several turns
narrow that down.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hkd_hpc.comm.devices import rank_list
from hkd_hpc.doctor.context import Context
from hkd_hpc.doctor.findings import ERROR, WARNING, Finding, Kind, Section
from hkd_hpc.store.lock import SILENT_S

NAME = "clocks"
TURNS = 10
SKEW_S = 1.0  # from here on logs of several hosts cannot be put in order
FAR_S = SILENT_S / 2  # from here on `status` may take a living job on another host for dead

SKEW = Kind(
    "clocks.skew",
    WARNING,
    "times in logs of several hosts cannot be compared; the numbers of a run do not depend on clocks",
    "have the site's administrators look at the time service of that host (chronyc tracking)",
)
FAR = Kind(
    "clocks.far",
    ERROR,
    "`hkd sweep status` and `check` may take a living run for dead, and the other way round",
    "another node (sbatch --exclude={host}), until its time service works (chronyc tracking)",
)


class Turn(NamedTuple):
    """Rank 0's clock before the question and after the answers, and the clock of each rank in between; seconds."""

    asked_s: float
    read_s: tuple[float, ...]
    answered_s: float


class Skew(NamedTuple):
    """A clock less rank 0's: at least and at most; seconds."""

    low_s: float
    high_s: float

    @property
    def certain_s(self) -> float:
        """By how much it is off for certain."""
        return max(self.low_s, -self.high_s, 0.0)


def collect(context: Context) -> Section | None:
    """All ranks take their turns; rank 0 reckons."""
    turns = [turn for turn in (take_turn(context) for _ in range(TURNS)) if turn]
    return section_of(list(context.comm.hosts), skews(turns)) if turns else None


def take_turn(context: Context) -> Turn | None:
    """One question and its answers; None on ranks other than 0."""
    asked_s = time.time()
    context.comm.broadcast(np.zeros(1, np.uint8), "control")
    own_s = np.array([time.time()])
    answers = context.comm.gather(own_s.view(np.uint8), "control")
    if answers is None:
        return None
    return Turn(asked_s, tuple(answers.view(np.float64)[:, 0].tolist()), time.time())


def skews(turns: Sequence[Turn]) -> list[Skew]:
    """By rank."""
    return [
        Skew(
            max(turn.read_s[rank] - turn.answered_s for turn in turns),
            min(turn.read_s[rank] - turn.asked_s for turn in turns),
        )
        for rank in range(len(turns[0].read_s))
    ]


def section_of(hosts: Sequence[str], found: Sequence[Skew]) -> Section:
    """The section, from the host and the skew of each rank."""
    if len(found) == 1:
        return Section(NAME, ["one process, one clock"], {"skew_s": []})
    certain, doubt = max(skew.certain_s for skew in found), max(skew.high_s - skew.low_s for skew in found)
    line = f"all within {1000 * certain:.1f} ms of rank 0's (known to {1000 * doubt:.1f} ms)"
    return Section(NAME, [line], {"skew_s": [list(skew) for skew in found]}, check(hosts, found))


def check(hosts: Sequence[str], found: Sequence[Skew]) -> list[Finding]:
    """One finding a host whose clock is off."""
    findings = []
    for host in dict.fromkeys(hosts):
        ranks = [rank for rank, skew in enumerate(found) if hosts[rank] == host and skew.certain_s > SKEW_S]
        if ranks:
            off_s = max(found[rank].certain_s for rank in ranks)
            text = f"the clock of {host} ({rank_list(ranks)}) is {off_s:.1f} s or more off rank 0's"
            findings.append((FAR if off_s > FAR_S else SKEW).found(text, host=host))
    return findings
