"""python -m hkd_hpc.jobs launch SPEC.toml --executor slurm|local|debug --root DIR

status, table, cancel, resubmit DIR; site FILE.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys

from hkd_hpc.config.command_line import Parser
from hkd_hpc.console import messages
from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.jobs import results, watch
from hkd_hpc.jobs.checks import Problems
from hkd_hpc.jobs.executors import SUBMIT
from hkd_hpc.jobs.launcher import launch, options_at, plan, resubmit
from hkd_hpc.jobs.options import Options
from hkd_hpc.jobs.site import Site
from hkd_hpc.jobs.study import Study
from hkd_hpc.jobs.sweep import Sweep

NUMBERS = (
    "nodes",
    "cpus_per_task",
    "gpus_per_node",
    "time_min",
    "array_parallelism",
    "signal_delay_s",
    "parallel",
    "allocations",
    "slots",
    "max_queued",
    "cores_per_node",
    "cores_free",
)
TEXTS = ("partition", "account", "qos", "constraint", "gres", "mpi", "python")


COMMANDS = {
    "launch": "submit the cells of a spec that are not complete, running or queued",
    "status": "how every cell stands",
    "table": "the results, as Markdown",
    "cancel": "end all jobs of the study",
    "resubmit": "launch its cells again, with the same options",
    "site": "what a site file says, as lines for eval in a shell, for the sbatch scripts",
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options, `command` among them. Raises UsageError; --help ends the process."""
    parser = Parser(
        prog="python -m hkd_hpc.jobs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:10s}{text}" for name, text in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS, metavar="|".join(COMMANDS), help="each has its --help")
    command = parser.parse_args(arguments[:1]).command
    parser = Parser(prog=f"python -m hkd_hpc.jobs {command}", description=COMMANDS[command])
    parser.set_defaults(command=command)
    if command == "launch":
        add_launch(parser)
    elif command == "site":
        parser.add_argument("site", metavar="FILE.toml", help="see slurm/sites")
    else:
        parser.add_argument("root", metavar="DIR", help="the study's folder")
    if command == "table":
        parser.add_argument(
            "--strict-code", action="store_true", help="refuse runs of different code; else a line says so"
        )
    if command == "status":
        parser.add_argument("--json", action="store_true", help="for programs")
        parser.add_argument(
            "--watch",
            nargs="?",
            type=float,
            const=10.0,
            metavar="SECONDS",
            help="again every so many seconds (10) until nothing is running or queued",
        )
    return parser.parse_intermixed_args(arguments[1:])


def add_launch(command: argparse.ArgumentParser) -> None:
    command.add_argument("spec", metavar="SPEC.toml", help="the sweep; hkd specs list has some")
    command.add_argument("--executor", choices=tuple(SUBMIT), default="slurm")
    command.add_argument("--root", required=True, metavar="DIR", help="the study's folder; again: go on, or grow it")
    command.add_argument(
        "--dry-run", action="store_true", help="show what would be submitted, and what would be refused"
    )
    command.add_argument("--wait", action="store_true", help="until all jobs have ended; then show the table")
    command.add_argument(
        "--site", metavar="FILE.toml", help="for all options below that are not given; see slurm/sites"
    )
    command.add_argument(
        "--ranks",
        default=argparse.SUPPRESS,
        type=lambda text: int(text) if text.isdigit() else text,
        help="processes of a cell; clients: one for each client and one for the server (SLURM only); "
        "default: one, on several GPUs one for each and one for the server",
    )
    for field in dataclasses.fields(Options):
        if field.name in NUMBERS + TEXTS:
            kind = int if field.name in NUMBERS else str
            command.add_argument(
                f"--{field.name.replace('_', '-')}",
                type=kind,
                default=argparse.SUPPRESS,
                metavar="N" if kind is int else "X",
                help=f"default {field.default}",
            )
    command.add_argument(
        "--pack",
        action="store_true",
        default=argparse.SUPPRESS,
        help="--allocations jobs that take cell after cell until their time is up, --slots at a time on "
        "each GPU (without GPUs: on each node)",
    )
    command.add_argument("--exclusive", action="store_true", default=argparse.SUPPRESS, help="whole nodes")
    command.add_argument(
        "--strict-code",
        action="store_true",
        default=argparse.SUPPRESS,
        help="refuse where the code is not that with which cells began, or were submitted; else a line says so",
    )
    command.add_argument(
        "--keep-state",
        action="store_true",
        default=argparse.SUPPRESS,
        help="also of finished cells: clients' state and models; else a finished cell keeps its global "
        "model and metrics alone",
    )
    command.add_argument("--mem-gb", type=float, default=argparse.SUPPRESS, metavar="N")
    command.add_argument(
        "--setup",
        action="append",
        default=argparse.SUPPRESS,
        metavar="LINE",
        help="shell line before srun, after the site's",
    )
    command.add_argument("settings", nargs="*", metavar="section.key=value", help="for all cells, over the spec's")


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
        clear = "\x1b[H\x1b[J" if options.watch and sys.stdout.isatty() else ""
        watch.repeat(study.status, lambda states: messages.say(clear + text(states)), options.watch)
    elif options.command == "table":
        messages.say(study.table(options.strict_code))
        return 1 if results.read(study.root, study.cells).faults else 0
    else:
        ended = study.cancel()
        messages.say(f"asked {len(ended)} job(s) to end" + (f": {' '.join(ended)}" if ended else ""))
    return 0


def run_launch(options: argparse.Namespace) -> int:
    names = [name for name in Options.__dataclass_fields__ if hasattr(options, name)]
    sweep = Sweep.from_toml(options.spec, options.settings)
    chosen = {name: getattr(options, name) for name in names}
    if options.dry_run:
        messages.say(plan(sweep, options.executor, options.root, options_at(options.site, chosen)))
        return 0
    study = launch(sweep, options.executor, root=options.root, site=options.site, **chosen)
    if not options.wait and options.executor != "debug":
        return 0
    complete = study.wait()
    messages.say(study.table())
    return 0 if complete else 1


def as_json(states: list[watch.CellState]) -> str:
    """Numbers that were not measured are null."""
    rows = [
        {
            name.rstrip("_"): None if isinstance(value, float) and math.isnan(value) else value
            for name, value in dataclasses.asdict(state).items()
        }
        for state in states
    ]
    return json.dumps(rows, indent=1)


def main(arguments: list[str] | None = None) -> int:
    """0 done; 1 not all cells are complete, a table lacks a damaged one, or the system failed; 2 wrong input: one line
    for each problem."""
    try:
        return run(parse(sys.argv[1:] if arguments is None else arguments))
    except (UsageError, RunError) as error:
        for line in error.lines if isinstance(error, Problems) else [str(error)]:
            print(f"jobs: {line}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


if __name__ == "__main__":
    sys.exit(main())
