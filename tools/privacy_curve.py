"""Accuracy against epsilon of the whole release: python -m tools.privacy_curve --root DIR data.path=cifar10.npz

Trains what DIR has not yet of the runs of tools/specs/privacy_curve.toml (a command that was killed goes on where it
was), puts the finished ones into the table tools/study/data/privacy_curve.jsonl, prints it, draws
docs/privacy_curve.svg and writes the table into docs/privacy.md. With --collect it trains nothing; without --root it
shows the table that is there. Epsilon is that of a client, of all rounds and all kinds of release in the ledger: the
spec says how its noise follows from it.

Exit codes: 0 done, 1 a run failed, 2 wrong input.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from hkd_hpc.analysis.tables import Cell, Table, estimate
from hkd_hpc.common.command import Parser, exit_code
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.common.groups import grouped
from hkd_hpc.config import load_toml
from hkd_hpc.figures import Lines, Series
from hkd_hpc.figures.bands import band
from hkd_hpc.jobs import Sweep, launch
from hkd_hpc.runtime.paths import path_argument
from hkd_hpc.store.atomic import replace_text

from .study import drawings, records
from .study.records import Record
from .study.tables import DATA, SPECS

NAME = "privacy_curve"
SPEC = SPECS / f"{NAME}.toml"
DOCS = Path(__file__).resolve().parents[1] / "docs"
GOALS = ("local", "global")
BLOCK = re.compile(r"(<!-- privacy curve -->\n).*?(<!-- privacy curve end -->)", re.DOTALL)


def train(root: Path, overrides: Sequence[str]) -> None:
    """The runs that are not finished yet, one after the other, in this process. RunError where one of them fails."""
    study = launch(Sweep.from_toml(SPEC, overrides), "debug", root=root)
    left = [state.name for state in study.status() if state.state != "complete"]
    if left:
        raise RunError(f"{root}: {len(left)} runs are not complete, {left[0]} first; its log.txt says why")


def collect(root: Path, table: Path) -> list[Record]:
    """The finished runs, also of earlier times, in the table's file too."""
    found = records.merged(records.read(table), records.collected(root))
    records.write(table, found)
    return found


def place_of(record: Record) -> tuple[str, str]:
    """(scheme, epsilon), as the spec names them: the labels of its row."""
    scheme, _, epsilon = record.row.partition(", ")
    return scheme, epsilon


def axes() -> dict[str, list]:
    """Of the spec: seeds, and schemes with their epsilons."""
    return {name: list(values) for name, values in load_toml(str(SPEC), "spec")["axes"].items()}


def epsilons() -> list[str]:
    """In the order of the spec."""
    return list(dict.fromkeys(label.partition(", ")[2] for label in axes()["scheme"]))


def accuracies(runs: Iterable[Record], goal: str) -> list[float]:
    """Of the last round, a number a seed."""
    return [run.summary[f"{goal}_test_accuracy_last"] for run in runs]


def table_of(runs: Sequence[Record]) -> Table:
    """A row for each scheme and epsilon: mean, half of the 95 % interval and number of seeds."""
    places = grouped((place_of(run), run) for run in runs)
    rows: list[list[Cell | str]] = [
        [scheme, epsilon, *(estimate(accuracies(places[scheme, epsilon], goal)) for goal in GOALS)]
        for scheme in dict.fromkeys(scheme for scheme, _ in places)
        for epsilon in epsilons()
        if (scheme, epsilon) in places
    ]
    return Table(["scheme", "epsilon", *GOALS], rows, names=2)


def with_table(text: str, runs: Sequence[Record]) -> str:
    """The page with how many runs are finished, and their table, in its place."""
    asked = math.prod(map(len, axes().values()))
    return BLOCK.sub(
        lambda found: f"{found[1]}\n{len(runs)} of {asked} runs are finished.\n\n{table_of(runs)}\n\n{found[2]}", text
    )


def curve(runs: Sequence[Record]) -> Lines:
    """Local and global accuracy of each scheme against epsilon, over its seeds."""
    schemes = dict.fromkeys(scheme for scheme, _ in map(place_of, runs))
    return Lines(
        name=NAME,
        title="Accuracy against epsilon of the whole release",
        caption="Means over seeds after the last round, with 95 % intervals",
        x_label="epsilon of the whole release",
        y_label="accuracy",
        series=tuple(line(runs, scheme, goal) for goal in GOALS for scheme in schemes),
    )


def line(runs: Sequence[Record], scheme: str, goal: str) -> Series:
    """One scheme's, NaN where a seed is not finished."""
    seeds = sorted({run.seed for run in runs})
    found = {(run.seed, place_of(run)): run.summary[f"{goal}_test_accuracy_last"] for run in runs}
    y_SX = np.array([[found.get((seed, (scheme, x)), np.nan) for x in epsilons()] for seed in seeds])
    return drawings.rounded(band(scheme, np.array(epsilons()), y_SX, goal))


def main_parser() -> Parser:
    parser = Parser(
        prog=f"python -m {__package__}.privacy_curve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=path_argument, metavar="DIR", help="folder of the runs")
    parser.add_argument("--collect", action="store_true", help="train nothing, take the runs that are finished")
    parser.add_argument("--table", type=path_argument, default=DATA / f"{NAME}.jsonl", metavar="FILE")
    parser.add_argument(
        "--docs", type=path_argument, default=DOCS, metavar="DIR", help="where the figure goes, and privacy.md may be"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="where the data are: data.path")
    return parser


@exit_code
def main(arguments: list[str] | None = None) -> int:
    """0 done, 1 a run failed, 2 wrong input."""
    options = main_parser().parse_args(arguments)
    if options.root and not options.collect:
        train(options.root, options.overrides)
    runs = collect(options.root, options.table) if options.root else records.read(options.table)
    if not runs:
        raise UsageError(f"{options.table}: has no runs yet; --root DIR data.path=FILE trains them")
    drawings.write(curve(runs), options.docs)
    page = options.docs / "privacy.md"
    if page.exists():
        replace_text(page, with_table(page.read_text(), runs))
    print(table_of(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
