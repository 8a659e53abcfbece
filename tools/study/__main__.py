"""The commands of the study. Exit codes: 0 done; 1 a page or a run that is not as recorded; 2 wrong input."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hkd_hpc.common.command import Parser, exit_code
from hkd_hpc.common.errors import RunError
from hkd_hpc.runtime.paths import path_argument

from ..bench.processes import BenchError
from . import __doc__ as ABOUT
from . import coverage, page, records, rerun, seconds
from .tables import ASKED, DATA, all_results, checked


def collect(options: argparse.Namespace) -> str:
    """The finished runs of a root into a table's file, if they are what its spec asks for."""
    path = options.out or DATA / f"{options.table}.jsonl"
    known = records.read(path)
    found = records.merged(known, records.collected(options.root))
    for asked in ASKED:
        if asked.name == options.table:
            checked(asked, found)
    records.write(path, found)
    return f"{path}: {len(found)} runs, {len(found) - len(known)} of them new"


def make_page(options: argparse.Namespace) -> str:
    """The page and its figures anew."""
    results = all_results()
    return "\n".join(str(path) for own in pages(options) for path in page.update(own, results))


def verify(options: argparse.Namespace) -> str:
    """Whether the page's numbers are those of the files."""
    results = all_results()
    for own in pages(options):
        page.verify(own, results)
    return f"{' and '.join(map(str, pages(options)))}: every number is that of the recorded runs"


def pages(options: argparse.Namespace) -> list[Path]:
    """An installed package has no README."""
    own = [path for path in (page.PAGE, page.README) if path == page.PAGE or path.exists()]
    return [options.page] if options.page else own


def run(options: argparse.Namespace) -> str:
    """One run once more."""
    record = rerun.recorded(DATA, options.table, options.row, options.seed)
    return rerun.compared(record, rerun.again(record, options.places, options.out))


def measure(options: argparse.Namespace) -> str:
    """FedHKD's seconds / FedAvg's."""
    try:
        seconds.add(seconds.measure())
    except BenchError as error:
        raise RunError(str(error)) from None
    return f"{seconds.FILE}\n{seconds.table()}"


def cover(options: argparse.Namespace) -> str:
    """The statistics on studies whose truth is known."""
    return str(coverage.table(options.studies))


def make_parser() -> Parser:
    parser = Parser(
        prog=f"python -m {__package__}", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    own = commands.add_parser("collect", help="the finished runs of a comparison or a sweep, into a table's file")
    own.add_argument("root", type=path_argument, metavar="ROOT", help="folder of the runs; runs may be added later")
    own.add_argument("table", metavar="TABLE", help="name of the table, as in docs/study.md")
    own.add_argument("--out", type=path_argument, metavar="FILE", help=f"in place of {DATA.name}/TABLE.jsonl")
    own.set_defaults(do=collect)

    for name, do, text in (
        ("page", make_page, "write the computed parts and the figures of docs/study.md"),
        ("verify", verify, "compare them with the recorded runs"),
    ):
        own = commands.add_parser(name, help=text)
        own.add_argument("--page", type=path_argument, metavar="FILE", help="default: docs/study.md and README.md")
        own.set_defaults(do=do)

    own = commands.add_parser("run", help="train one of the runs once more, and compare its weights")
    own.add_argument("table", metavar="TABLE")
    own.add_argument("row", metavar="ROW", help="scheme or choice, as the table has it")
    own.add_argument("seed", type=int, metavar="SEED")
    own.add_argument("places", nargs="*", metavar="section.key=value", help="where the data are: data.path=cifar10.npz")
    own.add_argument("--out", type=path_argument, metavar="DIR", help="keep the run in this folder")
    own.set_defaults(do=run)

    own = commands.add_parser("seconds", help="measure FedHKD's seconds / FedAvg's; 7 minutes on a quiet machine")
    own.set_defaults(do=measure)

    own = commands.add_parser("coverage", help="intervals and verdicts on studies whose truth is known")
    own.add_argument("--studies", type=int, default=1000, help="of each kind")
    own.set_defaults(do=cover)
    return parser


@exit_code
def main(arguments: list[str] | None = None) -> int:
    """0 done; 1 not as recorded; 2 wrong input."""
    options = make_parser().parse_args(arguments)
    print(options.do(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
