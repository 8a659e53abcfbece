"""Verify a run's folder: `python -m hkd_hpc.check RUN [--repair OUT.h5]`.

One line a file: ok, or what is wrong and what to do. A run that was killed is good as long as --resume can resume it.
`--repair` writes a readable metrics file of the rows that can be saved, from metrics.h5, rows.hdf5 and the checkpoints;
nothing in RUN is touched. The code of a run's own scheme is imported, if its settings name one.
Exit code 0: good; 1: something is wrong; 2: there is no run, or wrong usage.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hkd_hpc.check.files import check_run
from hkd_hpc.check.repair import repair
from hkd_hpc.common.command import Parser, exit_code, program_of
from hkd_hpc.common.errors import UsageError
from hkd_hpc.console.messages import say
from hkd_hpc.runtime.paths import path_argument
from hkd_hpc.store.folder import RunFolder


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog=program_of("hkd_hpc.check"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=path_argument, help="the run's folder")
    parser.add_argument(
        "--repair", type=path_argument, metavar="OUT.h5", help="write the rows that can be saved to this new file"
    )
    return parser.parse_args(arguments)


def look(options: argparse.Namespace) -> int:
    """Check, repair if asked to; the exit code."""
    folder = RunFolder(options.run, warn=lambda text: None)
    try:
        if not folder.holds_run():
            nothing = "holds no run (neither config.json nor metrics.h5 nor a checkpoint)"
            raise UsageError(f"{options.run}: {nothing}{below(options.run)}")
        lines = check_run(folder)
    except OSError as error:
        raise UsageError(f"{options.run}: cannot be looked at ({error.strerror})") from None
    wrong = sum(line.problem for line in lines)
    say("\n".join([f"{options.run}:", *map(str, lines), f"{wrong} of {len(lines)} wrong" if wrong else "good"]))
    if options.repair:
        say(repair(folder, options.repair))
    return 1 if wrong else 0


def below(folder: Path) -> str:
    """What to do with the folder of a study: one run is checked at a time. Empty where there is none below."""
    runs = sorted(path for path in folder.iterdir() if RunFolder(path).holds_run()) if folder.is_dir() else []
    return f"; {len(runs)} below it hold one each: name one, such as {runs[0]}" if runs else ""


@exit_code
def main(arguments: list[str] | None = None) -> int:
    return look(parse(arguments))
