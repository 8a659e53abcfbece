"""`python -m hkd_hpc.data prepare NAME --dir DIR`: get an official data set, for training never downloads.

`show` and `partition` say which images each client would get, and are in hkd_hpc/commands/partitions.py.
"""

from __future__ import annotations

import argparse
import sys

from hkd_hpc.common.command import Parser, exit_code, program_of
from hkd_hpc.common.errors import UsageError
from hkd_hpc.data.registry import BUNDLED, OFFICIAL, SOURCES
from hkd_hpc.runtime.paths import expanded

_USAGE = """PROG prepare NAME --dir DIR [--url BASE]
       PROG show [section.key=value ...] [--out FILE.png]
       PROG partition [section.key=value ...] --out FILE.npz"""
_OF_PARTITIONS = ("show", "partition")


def _parser() -> Parser:
    prog = program_of("hkd_hpc.data")
    parser = Parser(prog=prog, usage=_USAGE.replace("PROG", prog), description=__doc__, allow_abbrev=False)
    parser.add_argument("command", choices=["prepare", *_OF_PARTITIONS])
    parser.add_argument(
        "name",
        metavar="NAME",
        choices=[*BUNDLED, *OFFICIAL],
        help=f"one of {', '.join(OFFICIAL)} ({', '.join(BUNDLED)} ships with the package)",
    )
    parser.add_argument("--dir", metavar="DIR", help="where the files go: the data.dir of the training")
    parser.add_argument("--url", metavar="BASE", help="a mirror of the official files (http://, https:// or file://)")
    return parser


def _say(line: str) -> None:
    print(line, flush=True)


def _prepare(arguments: argparse.Namespace) -> None:
    from hkd_hpc.data.prepare import from_mirror, prepare

    if arguments.name in BUNDLED:
        return _say(f"{arguments.name} ships with the package: there is nothing to prepare")
    if not arguments.dir:
        raise UsageError(f"--dir is missing: {program_of('hkd_hpc.data')} prepare {arguments.name} --dir DIR")
    prepare(
        arguments.name,
        from_mirror(SOURCES[arguments.name].downloads, arguments.url),
        expanded(arguments.dir, "--dir "),
        _say,
    )


@exit_code
def main(argv: list[str]) -> int:
    """Run the command line; 0 is done, 1 could not be got, 2 wrong usage, 130 Ctrl-C: nothing incomplete is left."""
    if argv and argv[0] in _OF_PARTITIONS:
        from hkd_hpc.commands import partitions  # with settings and figures: `prepare` needs the standard library only

        return partitions.main(argv)
    _prepare(_parser().parse_args(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
