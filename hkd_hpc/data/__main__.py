"""`python -m hkd_hpc.data prepare NAME --dir DIR`: get an official data set, for training never downloads."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from hkd_hpc.data.registry import BUNDLED, OFFICIAL, SOURCES
from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.runtime.paths import expanded

_USAGE = "python -m hkd_hpc.data prepare NAME --dir DIR [--url BASE]"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of argparse's usage block."""
        raise UsageError(f"{message}; usage: {_USAGE}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m hkd_hpc.data", usage=_USAGE, description=__doc__, allow_abbrev=False)
    parser.add_argument("command", choices=["prepare"])
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
        raise UsageError(f"--dir is missing: python -m hkd_hpc.data prepare {arguments.name} --dir DIR")
    prepare(
        arguments.name,
        from_mirror(SOURCES[arguments.name].downloads, arguments.url),
        expanded(arguments.dir, "--dir "),
        _say,
    )


def main(words: list[str]) -> int:
    """Run the command line; 0 is done, 1 could not be got, 2 wrong usage, 130 Ctrl-C."""
    try:
        _prepare(_parser().parse_args(words))
    except (UsageError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing incomplete was left", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
