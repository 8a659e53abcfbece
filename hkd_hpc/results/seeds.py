"""One run counts for a seed: a copy of it, or the same run once more, is no further evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hkd_hpc.results.run import Run

SEED = "run.seed"


def by_seed(runs: Iterable[Run]) -> dict[int, Run]:
    """Of runs that differ in the seed alone, the one that counts for each: the first complete one, else the first."""
    found: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: run.state != "complete"):
        found.setdefault(run.settings.get(SEED, 0), run)
    return found


def copies(runs: Sequence[Run]) -> dict[Run, str]:
    """Those of them that do not count, each with a line that says why."""
    counted = by_seed(runs)
    return {
        run: f"{run.path}: has the settings and the seed {seed} of {counted[seed].path}, which is counted"
        for run in runs
        if run is not counted[seed := run.settings.get(SEED, 0)]
    }
