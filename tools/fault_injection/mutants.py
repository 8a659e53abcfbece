"""The self-test of tools.torture: programs broken on purpose, each of which must be noticed, and a whole one."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from .faults import NAN
from .runner import Breakage, Say, torture, working_site

FEW_FAULTS = 6


class Build(NamedTuple):
    """What is broken, the kinds of fault that show it, and how it is broken in a rank's process."""

    name: str
    kinds: tuple[str, ...]
    breakage: Breakage | None


def write_in_place(rank: int) -> None:
    """Files are written under their own name, and not read back."""
    from hkd_hpc.store import tree

    tree.replace_file = lambda path, write, verify=None: write(path)


def draw_by_rank(rank: int) -> None:
    """The order of a client's batches depends on the rank where it lives."""
    from hkd_hpc import rng

    original = rng.derive
    rng.derive = lambda seed, purpose, *rest: original(seed + rank * (purpose == "batches"), purpose, *rest)


def let_nan_through(rank: int) -> None:
    """Nothing is asked of a client's weights before they are added."""
    from hkd_hpc.worker import Worker

    def add(self, client, trained):
        self.sum.add(self.bench.flat.values_V, self.weight_of(client))

    Worker._add = add


WRITES = ("SIGKILL in a checkpoint's write", "SIGKILL in metrics.h5's write")
BUILDS = (
    Build("checkpoints written in place, not verified", WRITES, write_in_place),
    Build("a random draw that depends on the rank", ("SIGKILL, all ranks",), draw_by_rank),
    Build("NaN let through the quarantine", ("SIGTERM", NAN), let_nan_through),
    Build("nothing broken", (*WRITES, "SIGTERM", NAN), None),
)


def self_test(say: Say) -> int:
    """0 if each broken build was noticed, and the whole one had nothing to notice."""
    right = [notices(build, say) == bool(build.breakage) for build in BUILDS]
    return 0 if all(right) else 1


def notices(build: Build, say: Say) -> bool:
    """Whether torture finds something wrong with it, within FEW_FAULTS faults."""
    found: list[str] = []
    with working_site(build.kinds, build.breakage) as site:
        enough = lambda tally: tally.failed or tally.faults >= FEW_FAULTS
        tally = torture(site, 0, itertools.count(), enough, found.append)
    verdict = "noticed" if tally.failed else "not noticed"
    say(f"{build.name}: {verdict} ({tally.faults} faults)" + "".join(f"\n  {text.splitlines()[0]}" for text in found))
    return tally.failed
