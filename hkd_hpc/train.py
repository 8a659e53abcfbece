"""Train: `mpirun -n 11 python -m hkd_hpc.train [options] [section.key=value ...]`; --help lists them all.

Order of events, the same on every rank: settings are read and checked; the world opens (MPI, control plane), so that
the job ends as one from here on; rank 0 looks at the data and the run folder; torch (only now: wrong input must not
cost the minute that importing it takes many ranks); rounds.
Exit codes: 0 done, 1 the job failed, 2 wrong input (one line says what), 75 stopped by a signal (--resume goes on).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hkd_hpc import __version__
from hkd_hpc import config as config_module
from hkd_hpc.comm import World
from hkd_hpc.comm.control.base import leave
from hkd_hpc.comm.launchers import guess_rank
from hkd_hpc.config import CommSettings, Config, identity, presets
from hkd_hpc.config.effects import without_effect
from hkd_hpc.console import messages
from hkd_hpc.errors import LocalUsageError, UsageError
from hkd_hpc.lazy import torch_environment
from hkd_hpc.runtime import environment, versions
from hkd_hpc.runtime.paths import expanded
from hkd_hpc.stop import STOPPED, StopRequest, handlers_kept
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.lock import RunLock
from hkd_hpc.store.tree import open_tree

HOLDER_WAIT_S = 20.0  # the ranks of a job that failed or was killed may need seconds to end


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    config: Config
    asked: dict[str, Any]  # the settings given by preset, file or name, raw
    soft: set[str]  # those of them that only a preset gave, or a run's config.json
    out: Path | None  # None: a new folder below runs/
    resume: bool
    may_begin: bool  # --resume=auto: a new run where there is none
    allow_change: bool
    strict_code: bool
    dry_run: bool


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UsageErrors, so that they are told once per job."""

    def error(self, message: str):
        ignored = "ignored explicit argument"  # as argparse says, though it refuses
        message = message.replace(f"--resume: {ignored}", "--resume: only --resume or --resume=auto is allowed, not")
        message = message.replace(ignored, "takes no value, not")
        raise UsageError(f"{message}; {self.prog} --help lists the options")


def make_parser() -> Parser:
    parser = Parser(
        prog="python -m hkd_hpc.train",
        add_help=False,
        allow_abbrev=False,
        description="Federated training; one MPI rank is one client, rank 0 the server.",
    )
    parser.add_argument(
        "--preset",
        action="append",
        default=[],
        metavar="P",
        help="named settings, may be repeated: " + ", ".join(presets.PRESETS),
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="settings from a TOML file, one table per section; or from the config.json of a run, which is repeated",
    )
    parser.add_argument("--out", metavar="DIR", help="the run's folder (default: runs/<time>-<scheme>-<data>-s<seed>)")
    parser.add_argument(
        "--resume", action="store_const", const="run", help="go on from the newest good checkpoint in --out"
    )
    parser.add_argument(
        "--resume=auto",
        action="store_const",
        const="auto",
        dest="resume",
        help="the same, or begin a new run where --out holds none, as jobs do that may be requeued",
    )
    parser.add_argument(
        "--allow-change",
        action="store_true",
        help="with --resume: go on with other settings from here; recorded in the run",
    )
    parser.add_argument(
        "--strict-code",
        action="store_true",
        help="with --resume: refuse to go on with other code than that of the rounds before",
    )
    parser.add_argument("--dry-run", action="store_true", help="print settings, plan, class histogram, memory and stop")
    parser.add_argument("--help", "-h", action="store_true", help="this text and all settings")
    parser.add_argument("--version", action="store_true", help="version, the code's revision, packages")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="settings, over everything else")
    return parser


def parse(arguments: list[str]) -> Request | str:
    """The request, or a text to print. Raises UsageError."""
    parser = make_parser()
    options = parser.parse_intermixed_args(arguments)
    if options.help:
        asked, _ = config_module.collect(options.preset, options.config, options.settings)
        return parser.format_help() + "\n" + config_module.help_text(asked.get("scheme.name"))
    if options.version:
        return versions.text()
    asked, soft = config_module.collect(options.preset, options.config, options.settings)
    config = config_module.from_values(asked, soft, whole=not options.resume)
    if options.out is not None and (not options.out or "\0" in options.out):
        raise UsageError(f"--out {options.out}: is {'no name of a folder' if options.out else 'empty'}; name a folder")
    if options.resume and not options.out:
        raise UsageError("--resume: say which run to resume with --out DIR")
    if options.allow_change and not options.resume:
        raise UsageError("--allow-change: is for --resume; a new run takes any settings")
    if options.strict_code and not options.resume:
        raise UsageError("--strict-code: is for --resume; a new run takes any code")
    out = None if options.out is None else Path(os.path.abspath(expanded(options.out, "--out ")))
    return Request(
        config_module.absolute_paths(config),
        asked,
        soft,
        out,
        options.resume is not None,
        options.resume == "auto",
        options.allow_change,
        options.strict_code,
        options.dry_run,
    )


def understand(arguments: list[str]) -> tuple[Request | str | None, Exception | None]:
    """(what was asked for, what is wrong with it). Nothing is raised: the job ends as one, once its ranks have met."""
    try:
        return parse(arguments), None
    except Exception as problem:
        return None, problem


def look_first(request: Request) -> None:
    """Rank 0: whether a run could begin here, before anything is made for it. Raises UsageError."""
    try:
        look_at_folder(request)
    except (OSError, ValueError) as error:  # a name that is too long, or in a folder that may not be read
        raise UsageError(
            f"--out {request.out}: cannot be looked at ({getattr(error, 'strerror', None) or error})"
        ) from None
    if not request.resume:
        check_machine(request.config)


def look_at_folder(request: Request) -> None:
    """Raises UsageError for a file or a run in the way, OSError and ValueError where nobody can look."""
    if request.out and request.out.exists() and not request.out.is_dir():
        raise UsageError(f"--out {request.out}: is a file; name a folder, or one that is new")
    if request.out and not request.resume:
        refuse_a_run(RunFolder(request.out))
    if request.resume and not request.may_begin and not RunFolder(request.out).holds_run():
        raise UsageError(f"--resume {request.out}: holds no run{likely(request.out)}; --resume=auto begins one there")


def likely(folder: Path) -> str:
    """'; did you mean ...?' where a folder of nearly that name, beside it, holds a run."""
    beside = {path.name: path for path in folder.parent.iterdir() if path.is_dir()} if folder.parent.is_dir() else {}
    near = [beside[name] for name in get_close_matches(folder.name, beside) if RunFolder(beside[name]).holds_run()]
    return f"; did you mean {near[0]}?" if near else ""


def check_machine(config: Config) -> None:
    """Rank 0, before any rank pays for torch: what is installed, and whether the data are there. Raises UsageError."""
    from hkd_hpc.data.sources import check_present

    versions.check(config.model.name)
    check_present(config.data.name, config.data.dir, config.data.path)


def refuse_a_run(folder: RunFolder) -> None:
    if folder.holds_run():
        raise UsageError(f"--out {folder.path}: holds a run already; --resume goes on with it, or name another folder")


@contextlib.contextmanager
def run_folder(request: Request, rank: int):
    """Rank 0: the folder, made and locked for as long as this is open; a dry run only looks at one to resume. Else
    None.

    What this made goes again if nothing was written to it; what was there before, or is another job's, stays.
    """
    if rank or (request.dry_run and not request.resume):
        yield None
        return
    look_first(request)
    if request.dry_run:
        yield RunFolder(request.out, warn=messages.warn)
        return
    made = request.out is None or not request.out.exists()
    folder = RunFolder(request.out or new_folder(request.config), warn=messages.warn)
    folder.create()
    unused = False
    try:
        with RunLock(folder.path, HOLDER_WAIT_S, messages.say, on_lost=lock_lost):
            folder.create()  # a job that failed in its start has perhaps taken it away with its lock
            if not request.resume:
                refuse_a_run(folder)  # one that began between the first look and the lock
            folder.clean()
            try:
                yield folder
            finally:
                unused = made and not folder.holds_run()
    finally:
        if unused:
            with contextlib.suppress(OSError):
                folder.checkpoint_folder.rmdir()
                folder.path.rmdir()


def new_folder(config: Config) -> Path:
    """runs/<time>-<scheme>-<data>-s<seed>, made here and now: of jobs that start in the same second each gets its
    own.
    """
    scheme = "".join(c if c.isalnum() or c in "_-" else "_" for c in config.scheme.name)
    name = time.strftime(f"%Y%m%d-%H%M%S-{scheme}-{config.data.name}-s{config.run.seed}")
    for number in itertools.count(1):
        path = Path(os.path.abspath("runs")) / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not path.is_dir():
                raise UsageError(f"{path}: a file is in the way; name a folder with --out") from None
        except OSError as error:
            raise UsageError(f"{path}: cannot be made ({error.strerror}); name a folder with --out") from None


def lock_lost(text: str) -> None:
    """Another job has taken the run's folder: to write on would spoil its files."""
    messages.warn(f"{text}; this job ends")
    os._exit(1)


def settings_to_use(request: Request, folder: RunFolder | None) -> str | None:
    """Rank 0: the settings as JSON, the stored ones on --resume; None when the run is complete already."""
    text = stored_text(folder, request.dry_run) if folder and request.resume else None
    if text is None and not request.resume:
        return config_module.with_clients_of_data(request.config, request.asked).to_json()
    if text is None:
        config_module.check_together(request.config)
        config = config_module.with_clients_of_data(request.config, request.asked)
        messages.say(f"{request.out}: no run to resume; a new one starts")
    else:
        config = stored_settings(request, folder, text)
        done = len(folder.rounds().get("round", ()))
        if config.fed.rounds < done:
            raise UsageError(f"--allow-change: fed.rounds={config.fed.rounds}, but {done} rounds are done")
        if folder.summary() and config.fed.rounds == done:
            check_is_its_own(folder, config_module.from_json(text))
            messages.say(f"{folder.path}: already complete ({done} rounds); nothing to do")
            return None
    check_machine(config)
    return config.to_json()


def check_is_its_own(folder: RunFolder, config: Config) -> None:
    """UsageError for a complete metrics.h5 of other settings than config.json has: it was put there."""
    text = folder.record().get("config_json")
    other = identity.different(config_module.from_json(text), config) if text else ""
    if other:
        raise UsageError(
            f"--resume {folder.path}: metrics.h5 is that of another run ({other}); put back the one that belongs to "
            "config.json, or remove it to have it written anew from the last checkpoint"
        )


def stored_text(folder: RunFolder, dry_run: bool) -> str | None:
    """The run's settings as JSON, from its newest good checkpoint where config.json is gone; None: there is no run."""
    text = folder.read_config()
    if text is not None or not folder.holds_run():
        return text
    newest = folder.newest_good_path()
    if newest is None:
        raise UsageError(
            f"--resume {folder.path}: config.json is missing and no checkpoint is good; nothing can be gone on with"
        )
    with open_tree(newest[1]) as file:
        text = file.load("config_json")
    messages.warn(f"{folder.config_path} is missing: the settings are those in {newest[1].name}")
    if not dry_run:
        folder.write_config(text)
    return text


def stored_settings(request: Request, folder: RunFolder, text: str) -> Config:
    """The settings to go on with: those of the run, at the place that was asked for; with --allow-change others too.

    UsageError when others were asked for without it, or when those of the run cannot be read.
    """
    try:
        stored = config_module.from_json(text)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"--resume: {folder.config_path} is damaged ({error})") from None
    except UsageError as error:
        raise UsageError(f"--resume: {folder.config_path} does not fit hkd_hpc {__version__}: {error}") from None
    if request.allow_change:
        return config_module.changed(stored, request.asked, request.soft)
    different = config_module.difference(stored, request.asked, request.soft)
    if different:
        raise UsageError(
            f"--resume {folder.path}: goes on with the stored settings; {different} (--allow-change goes on "
            "with the others)"
        )
    return config_module.moved(stored, request.asked)


def main(arguments: list[str] | None = None) -> int:
    """The exit code. Every rank of a job calls this."""
    with StopRequest().listening() as stop:  # already while a scheme of one's own is imported
        with handlers_kept():
            request, problem = understand(sys.argv[1:] if arguments is None else arguments)
        if isinstance(request, str):
            if guess_rank(os.environ) == 0:
                messages.say(request)
            return 0
        comm = request.config.comm if request else CommSettings()
        environment.prepare()
        with World.open(comm.backend, comm.timeout_s, comm.start_timeout_s) as world:
            if problem:
                raise with_rank(problem, world.rank)
            complete = work(request, world, stop)
    return 0 if complete else STOPPED


def with_rank(problem: Exception, rank: int) -> Exception:
    """What perhaps one rank alone sees is told with its number."""
    return UsageError(f"rank {rank}: {problem}") if rank and isinstance(problem, LocalUsageError) else problem


def work(request: Request, world: World, stop: StopRequest) -> bool:
    """Settings from rank 0, so that nothing set on one node only can change one rank; then torch; then the rounds.

    False when the run was stopped before its end.
    """
    with run_folder(request, world.rank) as folder:
        text = world.share(settings_to_use(request, folder) if world.rank == 0 else None)
        if text is None:
            return True
        config = config_module.from_json(text)
        for line in without_effect(config, set(request.asked) - request.soft) if world.rank == 0 else ():
            messages.warn(line)
        os.environ.update(torch_environment(config.run.threads))
        with handlers_kept():
            comm = world.connect(config.run.device, config.comm.backend)
            from hkd_hpc import assemble  # imports torch

        if request.dry_run:
            assemble.show_plan(config, comm)
            return True
        return assemble.run(config, comm, folder, request, stop)


def program() -> int:
    """main, of a process that ends with it: after a failure no thread of a user's own code may keep it alive."""
    try:
        return main()
    except SystemExit as end:
        if isinstance(end.code, int) and end.code:
            leave(end.code)
        raise


if __name__ == "__main__":
    sys.exit(program())
