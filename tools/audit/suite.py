"""Lower bounds of epsilon from the real release code, beside the ledger's figures, in 3 minutes on one core (audit
[--quick]); `--membership RUN` instead: attacks on a trained run.

Two federations differ in one row of one client, the worst there is. Each trial is a report, or all rounds of a run,
made by the product's own code with noise of its own; an adversary who knows all but the noise says which of the two it
was (bound.py). Bounds at 95 %. Exit code 0: every bound lies where it must; 1: one lies above a figure of the ledger,
or what must be caught was not; 2: wrong arguments.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hkd_hpc.analysis.tables import aligned
from hkd_hpc.common.command import Parser, exit_code, program_of, tell
from hkd_hpc.common.settings import first_paragraph
from hkd_hpc.common.words import counted
from hkd_hpc.config.protection import mechanism_of
from hkd_hpc.privacy import accounting
from hkd_hpc.privacy.releases import FEATURES
from hkd_hpc.runtime.machine import header
from hkd_hpc.runtime.paths import path_argument

from . import inputs, membership
from .bound import Bound, lower_bound
from .claims import ledger_of, paper_epsilon
from .floats import scores_of
from .reports import Pair, report_scores, run_scores
from .table import FALSE, HEADINGS, HOLDS, NONE, Row

Scores = tuple[np.ndarray, np.ndarray]

DELTA = 1e-5
PAPER = ("privacy.mechanism=paper", "privacy.multiplier=7")
VECTOR = ("privacy.mechanism=vector",)
OFF = ("privacy.mechanism=off", "privacy.clip=l2")
CODE = ("scheme.noise=code", "scheme.clip=box")
WHOLE = (
    "privacy.mechanism=vector",
    "privacy.predictions=true",
    "privacy.extractor=received",
    "privacy.update_clip=1e-4",
    "privacy.epsilon=4",
    "fed.average=uniform",
)
TRAINING = ("train.optimizer=adam", "train.lr=0.01", "train.epochs=5", "train.batch_size=16")
SILENT = ("privacy.multiplier=0", "privacy.epsilon=none")


@dataclass(frozen=True)
class Sizes:
    """How much is tried.

    Attributes:
        trials: reports of each data set.
        composed: of each data set, where a trial is `rounds` reports.
        runs: of each data set, of `run_rounds` rounds.
        trainings: of the extractor, by each data set.
    """

    trials: int = 5_000
    composed: int = 500
    rounds: int = 20
    runs: int = 400
    run_rounds: int = 3
    trainings: int = 5


QUICK = Sizes(trials=500, composed=60, rounds=5, runs=20, run_rounds=1, trainings=2)


def bound_of(found: Scores) -> Bound:
    """At the ledger's delta."""
    return lower_bound(*found, DELTA)


def paper(sizes: Sizes) -> list[Row]:
    """The paper's noise, its clip enforced: its own figure, and the ledger's."""
    pair = Pair.of("several", PAPER, SILENT)
    bound, release = bound_of(report_scores(pair, sizes.trials)), "paper: one report"
    return [
        Row(release, "the paper's: one coordinate", paper_epsilon(7, DELTA), bound, FALSE),
        features(release, pair, 1, bound),
    ]


def features(release: str, pair: Pair, rounds: int, bound: Bound, must: str = HOLDS) -> Row:
    """The ledger's figure of the features alone, for a fixed extractor."""
    mu = float(ledger_of(pair.d, rounds).mu("fixed", [FEATURES]).max())
    return Row(release, "ledger: features, fixed extractor", accounting.epsilon(mu, DELTA), bound, must, mu)


def vector(sizes: Sizes) -> list[Row]:
    """The noise for the whole vector: one report with a small multiplier, and many with that of the paper."""
    rows = []
    for multiplier, trials, rounds in ((1, sizes.trials, 1), (7, sizes.composed, sizes.rounds)):
        pair = Pair.of("several", [*VECTOR, f"privacy.multiplier={multiplier}"], SILENT)
        release = f"vector, multiplier {multiplier}: {counted(rounds, 'report')}"
        rows.append(features(release, pair, rounds, bound_of(report_scores(pair, trials, rounds))))
    return rows


def entropy(sizes: Sizes) -> list[Row]:
    """The same with noise of the operating system's entropy."""
    pair = Pair.of("several", [*VECTOR, "privacy.multiplier=1", "privacy.mode=release"], SILENT)
    bound = bound_of(report_scores(pair, sizes.trials))
    return [features("vector, multiplier 1, release mode: one report", pair, 1, bound)]


def floats(sizes: Sizes) -> list[Row]:
    """The same of an adversary who asks which numbers can have come of each mean."""
    multiplier = 7
    pair = Pair.of("several", [*VECTOR, f"privacy.multiplier={multiplier}", "privacy.mode=release"], SILENT)
    std = mechanism_of(pair.d.config).std(float(inputs.ROWS), inputs.LATENT)
    bound = bound_of(report_scores(pair, sizes.composed, scores=scores_of(std, inputs.LABEL)))
    return [features(f"vector, multiplier {multiplier}, release mode: float32 numbers", pair, 1, bound)]


def uncovered(sizes: Sizes) -> list[Row]:
    """What has no guarantee at all: no noise, and one draw for all classes of a client."""
    rows = []
    for release, settings, quiet in (("off", OFF, ()), ("code: one draw for all classes", CODE, ("scheme.noise=off",))):
        bound = bound_of(report_scores(Pair.of("several", settings, quiet), sizes.composed))
        rows.append(Row(f"{release}: one report", "ledger: no bound", math.inf, bound, NONE, math.inf))
    return rows


def retrained(sizes: Sizes) -> list[Row]:
    """The extractor trained by each of the neighbours: one row moves the features of all."""
    pair = Pair.of("trained", [*VECTOR, "privacy.multiplier=7", *TRAINING], SILENT)
    bound, release = (
        bound_of(report_scores(pair, sizes.trials, trainings=sizes.trainings)),
        "vector, extractor retrained",
    )
    mu = float(ledger_of(pair.d, 1).mu("whole", [FEATURES]).max())
    worst = Row(release, "ledger: features, trained extractor", accounting.epsilon(mu, DELTA), bound, HOLDS, mu)
    return [features(release, pair, 1, bound, FALSE), worst]


def whole(sizes: Sizes) -> list[Row]:
    """All that a client releases in a run that is asked for an epsilon."""
    pair = Pair.of("single", [*WHOLE, f"fed.rounds={sizes.run_rounds}"], SILENT)
    bound = bound_of(run_scores(pair, sizes.runs, sizes.run_rounds))
    mu = float(ledger_of(pair.d, sizes.run_rounds).mu().max())
    release = f"privacy.epsilon=4: {sizes.run_rounds} rounds"
    return [Row(release, "ledger: the whole release", accounting.epsilon(mu, DELTA), bound, HOLDS, mu)]


ROWS: dict[str, Callable[[Sizes], list[Row]]] = {
    "paper": paper,
    "vector": vector,
    "entropy": entropy,
    "floats": floats,
    "uncovered": uncovered,
    "retrained": retrained,
    "whole": whole,
}


def measured(sizes: Sizes) -> list[Row]:
    """All rows; how long each took goes to stderr."""
    found = []
    for name, make in ROWS.items():
        start_s = time.monotonic()
        found += make(sizes)
        print(f"{name}: {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
    return found


@exit_code
def main(arguments: list[str] | None = None) -> int:
    """0: as it must be; 1: a bound on the wrong side; 2: wrong input."""
    parser = Parser(prog=program_of(__package__), description=first_paragraph(__doc__))
    parser.add_argument("--quick", action="store_true", help="few trials: a smoke test, whose bounds are weak")
    parser.add_argument("--membership", type=path_argument, metavar="RUN", help="instead: attack this run's models")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more cost more than they give on tensors as small
    if options.membership:
        return attack(options.membership)
    rows = measured(QUICK if options.quick else Sizes())
    print(header(), *aligned([HEADINGS, *(row.cells for row in rows)]), sep="\n", flush=True)
    wrong = [f"{row.release}, {row.figure}: {row.verdict}" for row in rows if not row.is_right]
    return tell(wrong, 1) if wrong else 0


def attack(path: Path) -> int:
    """0: whatever the attacks find."""
    found, missing = membership.attacks(path)
    print(header(), *aligned([membership.HEADINGS, *(one.cells for one in found)]), *missing, sep="\n", flush=True)
    return 0
