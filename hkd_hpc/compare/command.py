"""All schemes on the same data, weights and seeds, and what separates them.

    python -m hkd_hpc.compare SPEC.toml --root DIR

Every run is a plain `python -m hkd_hpc.train --resume=auto` in a folder of its own below DIR, several at a time on this
machine (`--jobs`) or under SLURM (`--executor slurm`), so a comparison that was killed is resumed when the same command
is given again, and finished runs are not repeated. Runs of one seed share partition, initial weights, cohorts and
batches, so schemes are compared pair by pair: the difference from the reference scheme is given with its 95 % interval
(Student's t over the seeds), and called a difference by an exact test that is corrected for the number of schemes
(hkd_hpc/analysis/statistics.py); with too few seeds for that, nothing is called.

A spec has the tables [study] (schemes, controls, seeds), [settings] (as of hkd_hpc.train, the same for all) and perhaps
[tuning]: every scheme then gets the same number of trials (hkd_hpc/compare/tuning.py). They run on a seed of their own
with `val_fraction` of the training images held out; for the local column the trial with the best local accuracy on
validation images counts, for the global column the one with the best global accuracy there. The chosen settings then
run on the spec's seeds without validation images, beside the paper's.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from hkd_hpc.analysis.tables import SUFFIXES, document
from hkd_hpc.common.command import FAILED, Parser, exit_code, program_of, tell
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.common.settings import first_paragraph
from hkd_hpc.compare.runs import check_origin, check_runs, check_settings, code_to_come
from hkd_hpc.compare.spec import Spec, read_spec
from hkd_hpc.compare.tables import tables_of
from hkd_hpc.compare.tuning import check_sampler
from hkd_hpc.compare.waves import ENDED, UNDECIDED, Execution, plan, planned, run_all
from hkd_hpc.config import split_override
from hkd_hpc.console import messages
from hkd_hpc.jobs.arguments import add_options, given_options
from hkd_hpc.jobs.executors import SUBMIT
from hkd_hpc.jobs.launcher import options_at, root_at
from hkd_hpc.jobs.logs import OURS
from hkd_hpc.jobs.watch import TrialState, counts
from hkd_hpc.store.atomic import replace_text
from hkd_hpc.store.folder import RunFolder

STATUS = "python -m hkd_hpc.jobs status"


def make_parser() -> Parser:
    parser = Parser(prog=program_of("hkd_hpc.compare"), description=first_paragraph(__doc__))
    add = parser.add_argument
    add("spec", metavar="SPEC.toml", help="what to compare; hkd specs list has some")
    add("--root", required=True, metavar="DIR", help="folder of all runs; give it again to resume")
    add("--executor", choices=tuple(SUBMIT), default="local", help="where the runs run; default: on this machine")
    add(
        "--jobs",
        type=int,
        metavar="N",
        dest="parallel",
        default=argparse.SUPPRESS,
        help="runs at a time on this machine",
    )
    add(
        "--wait",
        action="store_true",
        help="under SLURM, until all has run; else the same command, given again, continues",
    )
    add("--dry-run", action="store_true", help="show what would run, what it costs, and what would be rejected")
    add("--format", choices=SUFFIXES, default="markdown", help="of the tables; LaTeX with booktabs")
    add("settings", nargs="*", metavar="section.key=value", help="settings of all runs, over the spec's")
    add_options(parser, but=["parallel"])
    return parser


@exit_code
def main(arguments: list[str] | None = None) -> int:
    """0 done, or submitted; 1 a run failed; 2 wrong input: one line for each problem."""
    options = make_parser().parse_intermixed_args(arguments)
    spec, root, execution = prepared(options)
    if options.dry_run:
        messages.say(plan(spec, root, execution))
        return 0
    states = run_all(spec, root, execution)
    failures = failures_in(states, root)
    if any(state.state not in ENDED for state in states):
        return unfinished(states, failures, root)
    parts, faults = tables_of(spec, root, execution.options.strict_code)
    failures += faults + write(root, document(parts, options.format), options.format)
    return tell(failures, code=FAILED if failures else 0)


def prepared(options: argparse.Namespace) -> tuple[Spec, Path, Execution]:
    """What is compared, in which folder and where it runs, as far as that can be known without torch. UsageError."""
    root = root_at(options.root)
    spec = read_spec(options.spec)
    spec = replace(spec, settings={**spec.settings, **dict(map(split_override, options.settings))})
    execution = execution_asked(options)
    check_settings(spec)
    check_sampler(spec.tuning)
    runs, _ = planned(spec, root)
    check_runs(runs, root)
    check_origin(runs, root, execution.options.strict_code, code_to_come(runs, root))
    return spec, root, execution


def execution_asked(options: argparse.Namespace) -> Execution:
    given = given_options(options)
    if given.get("parallel", 1) < 1:
        raise UsageError(f"--jobs {given['parallel']}: must be 1 or more")
    if "parallel" in given and options.executor != "local":
        raise UsageError(
            f"--jobs: is for --executor local; with {options.executor} "
            + ("--array-parallelism says how many run at a time" if options.executor == "slurm" else "leave it away")
        )
    return Execution(options.executor, options_at(options.site, given), options.wait or options.executor != "slurm")


def unfinished(states: list[TrialState], failures: list[str], root: Path) -> int:
    """Say how far it is: what runs or waits, else what was stopped, is for the next start."""
    if any(state.state in UNDECIDED for state in states):
        messages.say(f"{counts(states)}; once they have ended, the same command continues ({STATUS} {root})")
        return 0
    return tell([*failures, "the same command resumes what was stopped"], FAILED)


def failures_in(states: list[TrialState], root: Path) -> list[str]:
    """A line for each trial that is not complete."""
    return [
        f"{state.name}: {state.error.removeprefix(OURS) or state.state}, see {RunFolder(root / state.name).log_path}"
        for state in states
        if state.state != "complete"
    ]


def write(root: Path, text: str, format: str) -> list[str]:
    """Say the tables and store them in the root; what went wrong with that."""
    path = root / f"table.{SUFFIXES[format]}"
    messages.say(f"\n{text}\n\n{path}")
    try:
        replace_text(path, text + "\n")
    except RunError as error:
        return [str(error)]
    return []
