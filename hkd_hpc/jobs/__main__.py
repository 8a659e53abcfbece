"""Many runs as one study: launch SPEC.toml --executor slurm|local|debug --root DIR; status, cancel, resubmit DIR."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable

from hkd_hpc.analysis.tables import SUFFIXES
from hkd_hpc.common.command import Parser, exit_code, program_of
from hkd_hpc.console import messages
from hkd_hpc.console.output import Screen
from hkd_hpc.jobs import results, watch
from hkd_hpc.jobs.arguments import add_options, given_options
from hkd_hpc.jobs.executors import SUBMIT
from hkd_hpc.jobs.launcher import options_at, plan
from hkd_hpc.jobs.site import Site
from hkd_hpc.jobs.study import Study, launch, resubmit, wait_or_cancel
from hkd_hpc.jobs.sweep import Sweep

COMMANDS = {
    "launch": "submit the trials of a spec that are not complete, running or queued",
    "status": "how every trial stands",
    "table": "the results and what separates the schemes, as Markdown, LaTeX, CSV or JSON",
    "cancel": "end all jobs of the study",
    "resubmit": "launch its trials again, with the same options",
    "site": "what a site file says, as lines for eval in a shell, for the sbatch scripts",
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options, `command` among them. Raises UsageError; --help ends the process."""
    parser = Parser(
        prog=program_of("hkd_hpc.jobs"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:10s}{text}" for name, text in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS, metavar="|".join(COMMANDS), help="each has its --help")
    command = parser.parse_args(arguments[:1]).command
    parser = Parser(prog=f"{parser.prog} {command}", description=COMMANDS[command])
    parser.set_defaults(command=command)
    ARGUMENTS.get(command, add_root)(parser)
    return parser.parse_intermixed_args(arguments[1:])


def add_root(parser: Parser) -> None:
    parser.add_argument("root", metavar="DIR", help="the study's folder")


def add_table(parser: Parser) -> None:
    add_root(parser)
    parser.add_argument("--strict-code", action="store_true", help="reject runs of different code; else a line says so")
    parser.add_argument("--format", choices=SUFFIXES, default="markdown", help="LaTeX is for the package booktabs")


def add_status(parser: Parser) -> None:
    add_root(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=10.0,
        metavar="SECONDS",
        help="again every so many seconds (10) until nothing is running or queued",
    )


def add_site(parser: Parser) -> None:
    parser.add_argument("site", metavar="FILE.toml", help="a site file; hkd slurm list has some")


def add_launch(parser: Parser) -> None:
    parser.add_argument("spec", metavar="SPEC.toml", help="the sweep; hkd specs list has some")
    parser.add_argument("--executor", choices=tuple(SUBMIT), default="slurm", help="default: slurm")
    parser.add_argument("--root", required=True, metavar="DIR", help="the study's folder; again: resume or extend it")
    parser.add_argument(
        "--dry-run", action="store_true", help="show what would be submitted, and what would be rejected"
    )
    parser.add_argument("--wait", action="store_true", help="until all jobs have ended; then show the table")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="for all trials, over the spec's")
    add_options(parser)


ARGUMENTS: dict[str, Callable[[Parser], None]] = {
    "launch": add_launch,
    "status": add_status,
    "table": add_table,
    "site": add_site,
}


def run(options: argparse.Namespace) -> int:
    if options.command == "launch":
        return run_launch(options)
    if options.command == "site":
        messages.say(Site.read(options.site).exports())
        return 0
    if options.command == "resubmit":
        resubmit(options.root)
        return 0
    study = Study(options.root)
    if options.command == "status":
        text = as_json if options.json else watch.table
        screen = Screen()
        watch.repeat(study.status, lambda states: screen.show(text(states)), options.watch)
    elif options.command == "table":
        messages.say(study.text(options.strict_code, options.format))
        return 1 if results.read(study.root, study.trials).faults else 0
    else:
        ended = study.cancel()
        messages.say(f"asked {len(ended)} job(s) to end" + (f": {' '.join(ended)}" if ended else ""))
    return 0


def run_launch(options: argparse.Namespace) -> int:
    sweep = Sweep.from_toml(options.spec, options.settings)
    chosen = given_options(options)
    if options.dry_run:
        messages.say(plan(sweep, options.executor, options.root, options_at(options.site, chosen)))
        return 0
    study = launch(sweep, options.executor, root=options.root, site=options.site, **chosen)
    if not options.wait and options.executor != "debug":
        return 0
    complete = wait_or_cancel(study, options.executor)
    messages.say(study.text())
    return 0 if complete else 1


def as_json(states: list[watch.TrialState]) -> str:
    """Numbers that were not measured are null."""
    rows = [
        {
            name.rstrip("_"): None if isinstance(value, float) and math.isnan(value) else value
            for name, value in dataclasses.asdict(state).items()
        }
        for state in states
    ]
    return json.dumps(rows, indent=1)


@exit_code
def main(arguments: list[str] | None = None) -> int:
    """0 done; 1 not all trials are complete, a table lacks a damaged one, or the system failed; 2 wrong input: one line
    for each problem."""
    return run(parse(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(main())
