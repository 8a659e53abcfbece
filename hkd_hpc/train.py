"""Train: `mpirun -n 11 python -m hkd_hpc.train [--preset P] [--config FILE] [--out DIR] [--resume] [--dry-run] [section.key=value ...]`

Order of events, the same on every rank: settings are read and checked (no torch yet: wrong input must not cost a
minute); rank 0 looks at the run folder and the data; the world opens (MPI, control plane); torch; rounds.
Exit codes: 0 done, 1 the job failed, 2 wrong input (one line says what).
"""
from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hkd_hpc import __version__, config as config_module, presets, versions
from hkd_hpc.comm import World
from hkd_hpc.comm.world import Hint, read_hint
from hkd_hpc.config import Config
from hkd_hpc.errors import LocalUsageError, UsageError


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    config: Config
    asked: dict[str, Any]  # the settings given by preset, file or name, raw
    soft: set[str]  # those of them that only a preset gave
    out: Path
    resume: bool
    dry_run: bool


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors, so that they are told once per job."""

    def error(self, message: str):
        raise UsageError(f"{message}; python -m hkd_hpc.train --help lists the options")


def make_parser() -> Parser:
    parser = Parser(prog="python -m hkd_hpc.train", add_help=False, allow_abbrev=False,
                    description="Federated training; one MPI rank is one client, rank 0 the server.")
    parser.add_argument("--preset", action="append", default=[], metavar="P",
                        help="named settings, may be repeated: " + ", ".join(presets.PRESETS))
    parser.add_argument("--config", metavar="FILE.toml", help="settings from a TOML file, one table per section")
    parser.add_argument("--out", metavar="DIR", help="the run's folder (default: runs/<time>-<scheme>-<data>-s<seed>)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest good checkpoint in --out")
    parser.add_argument("--dry-run", action="store_true", help="print settings, plan, class histogram, memory and stop")
    parser.add_argument("--help", "-h", action="store_true", help="this text and all settings")
    parser.add_argument("--version", action="store_true", help="the version")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="settings, over everything else")
    return parser


def parse(arguments: list[str]) -> Request | str:
    """The request, or a text to print. Raises UsageError."""
    parser = make_parser()
    options = parser.parse_intermixed_args(arguments)
    if options.help:
        return parser.format_help() + "\n" + config_module.help_text()
    if options.version:
        return f"hkd_hpc {__version__}"
    asked, soft = config_module.collect(options.preset, options.config, options.settings)
    config = config_module.from_values(asked, soft)
    if options.resume and not options.out:
        raise UsageError("--resume: say which run to resume with --out DIR")
    out = options.out or time.strftime(f"runs/%Y%m%d-%H%M%S-{safe(config.scheme.name)}-{config.data.name}"
                                       f"-s{config.run.seed}")
    return Request(config_module.absolute_paths(config), asked, soft, Path(os.path.abspath(out)), options.resume,
                   options.dry_run)


def safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-" else "_" for c in name)


def stored_config(request: Request) -> Config | None:
    """The settings of the run to resume, if this rank can see one. UsageError when others were asked for."""
    from hkd_hpc.store.folder import RunFolder

    text = RunFolder(request.out).read_config() if request.resume else None
    if text is None:
        return None
    stored = config_module.from_json(text)
    changed = config_module.difference(stored, request.asked, request.soft)
    if changed:
        raise UsageError(f"--resume {request.out}: goes on with the stored settings; {changed}")
    return stored


def look_first(request: Request, config: Config) -> None:
    """Rank 0, before any rank pays for torch: what is installed, the folder, the data. Raises UsageError."""
    from hkd_hpc.data.sources import check_present
    from hkd_hpc.store.folder import RunFolder

    versions.check(config.model.name)
    if RunFolder(request.out).holds_run() and not request.resume and not request.dry_run:
        raise UsageError(f"--out {request.out}: holds a run already; --resume goes on with it, or name another folder")
    check_present(config.data.name, config.data.dir, config.data.path)


def main(arguments: list[str] | None = None) -> int:
    """The exit code. Every rank of a job calls this."""
    hint = Hint("none", 0, 1, None, None)
    try:
        hint = read_hint(os.environ)
        request = parse(sys.argv[1:] if arguments is None else arguments)
        if isinstance(request, str):
            if hint.rank == 0:
                print(request, flush=True)
            return 0
        config = stored_config(request) or request.config
        if hint.rank == 0:
            look_first(request, config)
    except UsageError as error:
        return refuse(error, hint.rank)
    return work(request, config)


def refuse(error: UsageError, rank: int) -> int:
    """One line per job: every rank sees the same wrong input, rank 0 tells it. What only one rank sees it tells itself,
    after rank 0 had its chance to end the job."""
    if rank and not isinstance(error, LocalUsageError):
        return 2
    if rank:
        time.sleep(2)
    print(f"hkd_hpc: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr, flush=True)
    return 2


def work(request: Request, config: Config) -> int:
    """Open the world, build this rank's part, run the rounds."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(config.run.threads)  # read when torch loads
    with World.open(backend=config.comm.backend, timeout_s=config.comm.timeout_s,
                    start_timeout_s=config.comm.start_timeout_s) as world:
        from hkd_hpc import assemble  # imports torch

        with assemble.run_folder(request, world.rank) as folder:
            comm = world.connect(device=config.run.device, backend=config.comm.backend)
            if request.dry_run:
                assemble.show_plan(config, comm)
            else:
                assemble.run(config, comm, folder, request.resume)
    return 0


if __name__ == "__main__":
    sys.exit(main())
