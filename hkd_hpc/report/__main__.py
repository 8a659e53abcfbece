"""Runs or whole studies as one HTML file for the browser: tables, figures, what happened, how to reproduce it.

python -m hkd_hpc.report RUN|STUDY ... --out report.html [--figures DIR [--each-run]]
python -m hkd_hpc.report RUN --follow [--wait]
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path

from hkd_hpc.common.command import Parser, exit_code, program_of
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.settings import first_paragraph
from hkd_hpc.common.words import counted
from hkd_hpc.console import messages
from hkd_hpc.figures import write_figures
from hkd_hpc.report import page
from hkd_hpc.report.follow import follow
from hkd_hpc.results import Run, find_runs
from hkd_hpc.runtime.paths import named_path
from hkd_hpc.store.atomic import replace_text

OUT = "report.html"
SUFFIXES = (".html", ".htm")
MANY = 100  # runs, of which a process more reads enough to pay for its start
MOST_READERS = 4  # processes, however many cores: what they have read is taken by one
READ = {"local_test_accuracy", "report_s", "status", "train_s"}  # columns of clients of which all runs' are shown


@exit_code
def main(arguments: list[str] | None = None) -> int:
    """0 done; 1 the report could not be written, or the followed run is broken; 2 wrong input: one line; 75 that run is
    stopped.
    """
    options = make_parser().parse_args(arguments)
    if options.each_run and options.figures is None:
        raise UsageError("--each-run: is for --figures; name a folder for them")
    return follow_one(options) if options.follow or options.wait else write(options)


def make_parser() -> Parser:
    parser = Parser(prog=program_of("hkd_hpc.report"), description=first_paragraph(__doc__))
    parser.add_argument("paths", nargs="+", metavar="RUN|STUDY", help="folders of runs, sweeps, comparisons")
    parser.add_argument("--out", metavar="FILE.html", help=f"the report (default: {OUT})")
    parser.add_argument("--figures", metavar="DIR", help="write the figures there too: PDF, SVG, PNG and CSV")
    parser.add_argument(
        "--each-run", action="store_true", help="with --figures: of many runs also those that the report has of one"
    )
    parser.add_argument("--follow", action="store_true", help="no report: show one run while it trains, until its end")
    parser.add_argument(
        "--wait", action="store_true", help="with --follow: wait for a run that is not there, or stopped"
    )
    return parser


def follow_one(options: Namespace) -> int:
    """Show a run in the terminal; its exit code. UsageError where that is not one run."""
    if not options.follow:
        raise UsageError("--wait: is for --follow; a report is made of what is there")
    for name in ("out", "figures"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name}: --follow writes nothing; make the report without it, at any time")
    if len(options.paths) != 1:
        raise UsageError(f"--follow: shows one run, and {len(options.paths)} are named; name one")
    return follow(options.paths[0], options.wait)


def write(options: Namespace) -> int:
    out = checked_out(OUT if options.out is None else options.out)
    folder = None if options.figures is None else checked_folder(options.figures)
    runs = runs_at(options.paths)
    found = page.page_of(runs)
    replace_text(out, page.html_of(found))
    messages.say(f"{out}: {told(runs)}")
    if folder:
        drawn = page.figures_for_paper(found, options.each_run)
        write_figures(drawn, folder)
        hint = "" if options.each_run or not found.drawn[1:] else "; --each-run writes those of single runs too"
        messages.say(f"{folder}: {len(drawn)} figures, each as PDF, SVG, PNG and CSV{hint}")
    return 0


def checked_out(path: str) -> Path:
    """Where the report goes. UsageError where it cannot, is no HTML, or would replace what is no report."""
    out = named_path(path, "--out ")
    if out.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--out {out}: a report is HTML; name a file that ends in .html (figures: --figures DIR)")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}; make it, or name another")
    if out.is_dir():
        raise UsageError(f"--out {out}: is a folder; name a file, for example {out / 'report.html'}")
    if out.exists() and (not out.is_file() or page.MARK.encode() not in out.open("rb").read(500)):
        raise UsageError(f"--out {out}: is there, and is no report; name another file, or remove it")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out}: {out.parent} cannot be written to; name another folder")
    return out


def checked_folder(path: str) -> Path:
    """Where the figures go. UsageError where they cannot."""
    folder = named_path(path, "--figures ")
    place = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        what = "cannot be written to" if place.is_dir() else "is a file"
        raise UsageError(f"--figures {folder}: {place} {what}; name a folder that can be made and written to")
    return folder


def runs_at(paths: list[str]) -> list[Run]:
    """The runs at all paths, each once. UsageError where there is none."""
    found: dict[Path, Run] = {}
    for path in paths:
        below = find_runs(path)
        if not below:
            raise UsageError(f"{path}: holds no run (neither config.json nor metrics.h5 nor a checkpoint)")
        found |= {run.path.resolve(): run for run in below}
    runs = read(list(found.values()))
    problems = [run.problem for run in runs]
    if all(problems):
        more = f"; {len(problems) - 1} more are broken" if problems[1:] else ""
        raise UsageError(f"nothing to report: {problems[0]}{more}")
    return runs


def read(runs: list[Run]) -> list[Run]:
    """The same runs, their files read: by several cores where they are many, for HDF5 reads one file at a time."""
    if len(runs) < MANY:
        return runs
    with readers() as pool:
        return list(pool.map(looked_at, runs, chunksize=8))


def readers() -> ProcessPoolExecutor:
    """Processes that end with this one, also where it is killed."""
    return ProcessPoolExecutor(min(MOST_READERS, len(os.sched_getaffinity(0))), initializer=end_with_parent)


def end_with_parent() -> None:
    """A process that waits for one that was killed would wait for ever."""
    threading.Thread(target=end_after, args=(multiprocessing.parent_process(),), daemon=True).start()


def end_after(process: BaseProcess) -> None:
    process.join()
    os._exit(1)


def looked_at(run: Run) -> Run:
    """With what every report needs of it in memory."""
    if not run.problem:
        for name in READ & set(run.client_columns):
            run.client_columns[name]
    return run


def told(runs: list[Run]) -> str:
    broken = sum(run.state == "broken" for run in runs)
    return counted(len(runs), "run") + (f", {broken} broken" if broken else "")


if __name__ == "__main__":
    sys.exit(main())
