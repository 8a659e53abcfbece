"""From the words of a command line to the Request of a training run. Imports no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hkd_hpc import config as config_module
from hkd_hpc.common.command import Parser, program_of
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import Config, presets
from hkd_hpc.console.output import Level
from hkd_hpc.runtime import versions
from hkd_hpc.runtime.paths import expanded


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Whether a stored run is resumed, and what may differ from it."""

    resume: bool = False
    may_begin: bool = False  # --resume=auto: a new run where there is none
    allow_change: bool = False  # other settings or data from here on
    strict_code: bool = False  # only with the code of the rounds before


@dataclass(frozen=True, kw_only=True)
class Request(ResumeOptions):
    """What the command line asked for."""

    config: Config  # to resume: without settings of the stored run's scheme
    asked: dict[str, Any]  # the settings given by preset, file or name, raw
    soft: dict[str, str]  # which preset, or config.json of a run, gave those that nothing else did
    out: Path | None  # None: a new folder below runs/
    dry_run: bool
    level: Level = Level.NORMAL  # how much the terminal shows


class TrainParser(Parser):
    """Knows that --resume may have one value."""

    def error(self, message: str) -> NoReturn:
        ignored = "--resume: ignored explicit argument"
        super().error(message.replace(ignored, "--resume: only --resume or --resume=auto is allowed, not"))


# of every option: its names and what argparse makes of them
OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--preset",),
        {
            "action": "append",
            "default": [],
            "metavar": "P",
            "help": "named settings, may be repeated: " + ", ".join(presets.PRESETS),
        },
    ),
    (
        ("--config",),
        {
            "metavar": "FILE",
            "help": "settings from a TOML file, one table per section; or from the config.json of a run, which is "
            "repeated",
        },
    ),
    (("--out",), {"metavar": "DIR", "help": "the run's folder (default: runs/<time>-<scheme>-<data>-s<seed>)"}),
    (
        ("--resume",),
        {"action": "store_const", "const": "run", "help": "resume from the newest good checkpoint in --out"},
    ),
    (
        ("--resume=auto",),
        {
            "action": "store_const",
            "const": "auto",
            "dest": "resume",
            "help": "the same, or begin a new run where --out holds none, as jobs do that may be requeued",
        },
    ),
    (
        ("--allow-change",),
        {
            "action": "store_true",
            "help": "with --resume: continue with other settings from here; recorded in the run",
        },
    ),
    (
        ("--strict-code",),
        {"action": "store_true", "help": "with --resume: only with the code of the rounds before"},
    ),
    (("--dry-run",), {"action": "store_true", "help": "print plan, class histogram, memory and settings and stop"}),
    (("--quiet", "-q"), {"action": "store_true", "help": "print errors and the accuracies at the end alone"}),
    (
        ("--verbose", "-v"),
        {"action": "store_true", "help": "print also where each rank is, and what it did in a round"},
    ),
    (("--help", "-h"), {"action": "store_true", "help": "this text and all settings"}),
    (("--version",), {"action": "store_true", "help": "version, the code's revision, packages"}),
    (("settings",), {"nargs": "*", "metavar": "section.key=value", "help": "settings, over everything else"}),
)


def make_parser() -> Parser:
    parser = TrainParser(
        prog=program_of("hkd_hpc.train"),
        add_help=False,
        allow_abbrev=False,
        description="Federated training; rank 0 is the server, the other MPI ranks host the clients.",
    )
    for names, how in OPTIONS:
        parser.add_argument(*names, **how)
    return parser


def parse(arguments: Sequence[str]) -> Request | str:
    """Read a command line.

    Args:
        arguments: its words, without the program's name.

    Returns:
        The request, or a text to print (--help, --version).

    Raises:
        UsageError: One line that says which word is wrong, and what is allowed.
    """
    parser = make_parser()
    options = parser.parse_intermixed_args(list(arguments))
    if options.help:
        asked, _ = config_module.collect(options.preset, options.config, options.settings)
        return parser.format_help() + "\n" + config_module.help_text(asked.get("scheme.name"))
    if options.version:
        return versions.text()
    asked, soft = config_module.collect(options.preset, options.config, options.settings)
    of_stored = options.resume and "scheme.name" not in asked  # whose own settings are not known yet
    known = {key: value for key, value in asked.items() if not (of_stored and key.startswith("scheme."))}
    config = config_module.from_values(known, soft, complete=not options.resume)
    check_options(options)
    return Request(
        config=config_module.absolute_paths(config),
        asked=asked,
        soft=soft,
        out=None if options.out is None else Path(os.path.abspath(expanded(options.out, "--out "))),
        resume=options.resume is not None,
        may_begin=options.resume == "auto",
        allow_change=options.allow_change,
        strict_code=options.strict_code,
        dry_run=options.dry_run,
        level=Level.QUIET if options.quiet else Level.VERBOSE if options.verbose else Level.NORMAL,
    )


def check_options(options: argparse.Namespace) -> None:
    """UsageError for options that cannot stand as they are, or not without another."""
    if options.out is not None and (not options.out or "\0" in options.out):
        raise UsageError(f"--out {options.out}: is {'no name of a folder' if options.out else 'empty'}; name a folder")
    if options.resume and not options.out:
        raise UsageError("--resume: say which run to resume with --out DIR")
    if options.allow_change and not options.resume:
        raise UsageError("--allow-change: is for --resume; a new run takes any settings")
    if options.quiet and options.verbose:
        raise UsageError("--quiet --verbose: leave out one of them")
    if options.strict_code and not options.resume:
        raise UsageError("--strict-code: is for --resume; a new run takes any code")


def understand(arguments: Sequence[str]) -> Request | str | Exception:
    """As `parse`; what is wrong is returned, not raised: the job ends as one, once its ranks have met."""
    try:
        return parse(arguments)
    except Exception as problem:
        return problem
