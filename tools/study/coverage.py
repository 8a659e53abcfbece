"""Whether the intervals and verdicts of the tables keep what they promise, on studies whose truth is known.

Accuracies are drawn as runs have them: a seed moves all schemes alike (its images, its weights), and each pair of a
scheme and a seed a little more. Every study goes through what `hkd compare` and docs/study.md use; a few of them as
files of runs, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.analysis.tables import Difference, Table
from hkd_hpc.results.differences import Accuracies, differences

from ..synthetic_runs import write_run
from .records import collected
from .tables import Results

SEEDS = (3, 5, 10)
DIFFERENCES = (0.0, 0.01)
SEED_STD, PAIR_STD = 0.02, 0.007  # of accuracies, as in the smoke test: over its seeds, and beside that
CALLED = ("better", "worse")
OTHERS = tuple(name for name in schemes.PAPER if name != schemes.REFERENCE)


@dataclass(frozen=True)
class Kept:
    """What was found in many studies of one kind.

    Attributes:
        seeds: of each study.
        true: difference of every scheme from the reference.
        covered: share of the 95 % intervals of one scheme that hold it.
        called: share of the studies that call any scheme better or worse.
    """

    seeds: int
    true: float
    covered: float
    called: float


def drawn(seeds: int, true: float, random: np.random.Generator) -> Accuracies:
    """The accuracies of one study: by scheme and goal, one a seed."""
    of_seed_S = random.normal(0.6, SEED_STD, seeds)
    value = lambda scheme: of_seed_S + random.normal(true * (scheme != schemes.REFERENCE), PAIR_STD, seeds)
    return {scheme: {"local": value(scheme).tolist()} for scheme in (schemes.REFERENCE, *OTHERS)}


def kept(studies: int, seeds: int, true: float) -> Kept:
    """What the tables of so many studies say, each through differences."""
    random = np.random.default_rng([seeds, round(1000 * true)])
    found = [differences(drawn(seeds, true, random), "local") for _ in range(studies)]
    first = [study[OTHERS[0]] for study in found]
    covered = [abs(cell.mean - true) <= cell.half for cell in first if isinstance(cell, Difference)]
    called = [
        any(isinstance(cell, Difference) and cell.verdict in CALLED for cell in study.values()) for study in found
    ]
    return Kept(seeds, true, float(np.mean(covered)), float(np.mean(called)))


def table(studies: int) -> Table:
    """Of all kinds of studies."""
    found = [kept(studies, seeds, true) for true in DIFFERENCES for seeds in SEEDS]
    rows = [[f"{one.true:.2f}", str(one.seeds), f"{one.covered:.1%}", f"{one.called:.1%}"] for one in found]
    return Table(["true difference", "seeds", "95 % intervals that hold it", "families that call any"], rows)


def from_files(found: Accuracies, root: Path) -> Accuracies:
    """The same study, written as runs below a folder and read back as the study reads runs."""
    for scheme, columns in found.items():
        for seed, local in enumerate(columns["local"]):
            overrides = [f"scheme.name={scheme}", f"run.seed={seed}", "fed.rounds=1"]
            write_run(root / f"{scheme}-paper-s{seed}", overrides, [local], [local], summary={})
    results = Results(collected(root))
    return {row: {"local": results.values(row, "local_test_accuracy_last").tolist()} for row in results.rows}
