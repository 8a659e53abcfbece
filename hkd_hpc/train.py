"""Train: `mpirun -n 11 python -m hkd_hpc.train [options] [section.key=value ...]`; --help lists them all.

Order of events, the same on every rank: settings are read and checked; the world opens (MPI, control plane), so that
the job ends as one from here on; rank 0 looks at the data and the run folder; torch (only now: wrong input must not
cost the minute that importing it takes many ranks); rounds. From Python the module is a function (in_this_process).
Exit codes: 0 done, 1 the job failed, 2 wrong input (one line says what), 75 stopped by a signal (--resume continues),
130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import _thread
import contextlib
import io
import itertools
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from hkd_hpc import config as config_module
from hkd_hpc import loggers, resume
from hkd_hpc.comm import World
from hkd_hpc.comm.control.base import leave_after
from hkd_hpc.common.command import exit_code
from hkd_hpc.common.errors import LocalUsageError, UsageError
from hkd_hpc.common.lazy import torch_environment
from hkd_hpc.common.rank import guess_rank
from hkd_hpc.common.stop import STOPPED, StopRequest, handlers_kept, interrupts_held
from hkd_hpc.config import CommSettings, Config
from hkd_hpc.config.command_line import Request, ResumeOptions, parse, understand
from hkd_hpc.config.effects import without_effect
from hkd_hpc.config.words import words_of
from hkd_hpc.console import messages, output
from hkd_hpc.console.output import Level
from hkd_hpc.data.sources import check_present
from hkd_hpc.models import initial
from hkd_hpc.results import Run
from hkd_hpc.runtime import environment, versions
from hkd_hpc.runtime.paths import path_text
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.lock import RunLock

ENDING = "The whole job ends here; finished checkpoints are kept, --resume continues from the last one."
HOLDER_WAIT_S = 20.0  # the ranks of a job that failed or was killed may need seconds to end


# --- order of events


def main(arguments: Sequence[str] | None = None, stop: StopRequest | None = None) -> int:
    """Train, as one rank of a job; every rank calls this.

    Args:
        arguments: the words of the command line; None: those of this process.
        stop: where a signal is recorded, for a caller with more to do; None: the caller need not know.

    Returns:
        The exit code: 0, or STOPPED where a signal ended the run before its last round.

    Raises:
        SystemExit: 1 the job failed, 2 wrong input, 130 Ctrl-C, 143 SIGTERM. Rank 0 has said why, in one line.
    """
    with (stop or StopRequest()).listening() as stop:  # already while a scheme of one's own is imported
        with handlers_kept():
            request = understand(sys.argv[1:] if arguments is None else arguments)
        if isinstance(request, str):
            if guess_rank(os.environ) == 0:
                messages.say(request)
            return 0
        environment.prepare()
        with output.opened(Level.NORMAL if isinstance(request, Exception) else request.level):
            complete = as_one_job(request, stop)
    return 0 if complete else STOPPED


def as_one_job(request: Request | Exception, stop: StopRequest) -> bool:
    """What was asked for, or what is wrong with it, in the world of all ranks; False when a signal stopped the run."""
    comm = request.config.comm if isinstance(request, Request) else CommSettings()
    with World.open(comm.backend, comm.timeout_s, comm.start_timeout_s) as world:
        world.control.ending = ENDING
        if isinstance(request, Exception):
            raise with_rank(request, world.rank)
        world.control.record_failures(output.current().record)
        return work(request, world, stop)


def with_rank(problem: Exception, rank: int) -> Exception:
    """What perhaps one rank alone sees is told with its number."""
    return UsageError(f"rank {rank}: {problem}") if rank and isinstance(problem, LocalUsageError) else problem


def work(request: Request, world: World, stop: StopRequest) -> bool:
    """The run in its folder; False when it was stopped before its end."""
    held, closing = contextlib.ExitStack(), threading.Lock()

    def give_back() -> None:
        with interrupts_held(), closing:  # who comes second waits for the first, for the process may end then
            held.close()

    world.control.give_back_after_failure(give_back)  # another rank's failure ends the process without coming by here
    try:
        return work_in(held.enter_context(run_folder(request, world.rank)), request, world, stop)
    finally:
        give_back()


def work_in(folder: RunFolder | None, request: Request, world: World, stop: StopRequest) -> bool:
    """Settings from rank 0, so that nothing set on one node only can change one rank; then torch; then the rounds.

    False when the run was stopped before its end.
    """
    text = world.share(settings_to_use(request, folder) if world.rank == 0 else None)
    if text is None:
        return True
    config = config_module.from_json(text)
    for line in without_effect(config, set(request.asked) - request.soft.keys()) if world.rank == 0 else ():
        messages.warn(line)
    os.environ.update(torch_environment(config.run.threads))
    with handlers_kept():
        comm = world.connect(config.run.device, config.comm.backend)
        from hkd_hpc import run  # imports torch

    if request.dry_run:
        run.show_plan(config, comm)
        return True
    return run.execute(config, comm, folder, request, stop)


def settings_to_use(request: Request, folder: RunFolder | None) -> str | None:
    """Rank 0: the settings as JSON, the stored ones on --resume; None when the run is complete already."""
    if folder is None or not request.resume:
        return config_module.with_clients_of_data(request.config, request.asked).to_json()
    config = resume.settings(request, folder)
    if config is None:
        return None
    check_machine(config, begins=not folder.checkpoints())
    return config.to_json()


def check_machine(config: Config, begins: bool) -> None:
    """Rank 0, before any rank pays for torch: what is installed, and whether the files are there. Raises UsageError.

    begins: whether the weights are the initial ones, and no checkpoint has them.
    """
    versions.check(config.model.title, config.model.needs_torchvision)
    check_present(config.data)
    config_module.check_fit(config)
    if begins:
        initial.check_present(config.model.init)
    loggers.classes_of(loggers.names_of(config.run.loggers))


# --- the run's folder


def look_first(request: Request) -> None:
    """Rank 0: whether a run could begin here, before anything is made for it. Raises UsageError."""
    try:
        if request.out:
            look_at_folder(request.out, request)
    except (OSError, ValueError) as error:  # a name that is too long, or in a folder that may not be read
        raise UsageError(
            f"--out {request.out}: cannot be looked at ({getattr(error, 'strerror', None) or error})"
        ) from None
    if not request.resume:
        check_machine(request.config, begins=True)


def look_at_folder(out: Path, options: ResumeOptions) -> None:
    """Raises UsageError for a file or a run in the way, OSError and ValueError where nobody can look."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; name a folder, or one that is new")
    if not options.resume:
        require_no_run(RunFolder(out))
    elif not options.may_begin and not RunFolder(out).holds_run():
        raise UsageError(f"--resume {out}: holds no run{likely(out)}; --resume=auto begins one there")


def likely(folder: Path) -> str:
    """'; did you mean ...?' where a folder of nearly that name, beside it, holds a run."""
    beside = {path.name: path for path in folder.parent.iterdir() if path.is_dir()} if folder.parent.is_dir() else {}
    near = [beside[name] for name in get_close_matches(folder.name, beside) if RunFolder(beside[name]).holds_run()]
    return f"; did you mean {near[0]}?" if near else ""


def require_no_run(folder: RunFolder) -> None:
    if folder.holds_run():
        raise UsageError(f"--out {folder.path}: holds a run already; --resume resumes it, or name another folder")


@contextlib.contextmanager
def run_folder(request: Request, rank: int, on_lost: Callable[[str], None] | None = None) -> Iterator[RunFolder | None]:
    """Rank 0: the folder, made and locked for as long as this is open; a dry run only looks at one to resume. Else
    None. `on_lost`: as RunLock takes it, in place of `lock_lost`.

    What this made goes again if nothing was written to it; what was there before, or is another job's, stays.
    """
    if rank or (request.dry_run and not request.resume):
        yield None
        return
    look_first(request)
    if request.dry_run and request.out:
        yield RunFolder(request.out, warn=messages.warn)
        return
    folder = RunFolder(request.out or new_folder(request.config), warn=messages.warn)
    made = [path for path in (folder.checkpoint_folder, folder.path) if not path.exists()]
    made += [folder.path] * (request.out is None)
    folder.create()
    unused = False
    try:
        with RunLock(folder.path, HOLDER_WAIT_S, messages.say, on_lost or lock_lost, makes_folder=True):
            folder.create()  # a job that failed in its start has perhaps taken it away with its lock
            if not request.resume:
                require_no_run(folder)  # one that began between the first look and the lock
            folder.clean()
            try:
                yield folder
            finally:
                unused = not folder.holds_run()
    finally:
        if unused:
            with contextlib.suppress(OSError):
                for path in made:
                    path.rmdir()


def new_folder(config: Config) -> Path:
    """runs/<time>-<scheme>-<data>-s<seed>, made here and now: of jobs that start in the same second each gets its
    own.
    """
    scheme, data = (
        "".join(c if c.isalnum() or c in "_-" else "_" for c in s.name) for s in (config.scheme, config.data)
    )
    name = time.strftime(f"%Y%m%d-%H%M%S-{scheme}-{data}-s{config.run.seed}")
    for path in (Path(os.path.abspath("runs"), name + suffix) for suffix in suffixes()):
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            if not path.is_dir():
                raise UsageError(f"{path}: a file is in the way; name a folder with --out") from None
        except OSError as error:
            raise UsageError(f"{path}: cannot be made ({error.strerror}); name a folder with --out") from None
    return path


def suffixes() -> Iterator[str]:
    """Nothing, -2, -3 and so on."""
    yield ""
    yield from (f"-{number}" for number in itertools.count(2))


def lock_lost(text: str) -> None:
    """Another job has taken the run's folder: to write on would spoil its files."""
    messages.warn(f"{text}; this job ends")
    os._exit(1)


# --- from Python


def in_this_process(
    settings: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike | None = None,
    preset: str | Sequence[str] = (),
    config: str | os.PathLike | None = None,
    resume: bool | Literal["auto"] = False,
    allow_change: bool = False,
    strict_code: bool = False,
    quiet: bool = False,
) -> Run:
    """Train in this process, as `python -m hkd_hpc.train` does: the same words, the same checks, the same bits.

    It may be called any number of times. Ctrl-C ends it with KeyboardInterrupt, and the run can be resumed.

    Args:
        settings: {"section.key": value}, over everything else; may be nested by section.
        out: The run's folder; None: runs/<time>-<scheme>-<data>-s<seed>.
        preset: A preset, or several, of which later ones win.
        config: A TOML file of settings, or the config.json of a run, which is repeated.
        resume: Whether to resume the run in `out`; "auto": or begin one where there is none.
        allow_change: With `resume`, whether to continue with other settings from here.
        strict_code: With `resume`, whether only with the code of the rounds before.
        quiet: Whether to print nothing; the run's log.txt has it all.

    Returns:
        The run. Its state is "stopped" where a signal (SIGUSR1, SIGUSR2) asked for the end after a round.

    Raises:
        UsageError: One line that says what is wrong with a setting, a folder or the data.
        RunError: The run could not go on.
    """
    places = {"--out": out, "--config": config}
    flags = {"--resume": resume is True, "--allow-change": allow_change, "--strict-code": strict_code, "--quiet": quiet}
    words = [f"{name}={path_text(value, f'{name} ')}" for name, value in places.items() if value is not None]
    presets = preset if isinstance(preset, Iterable) and not isinstance(preset, str) else [preset]
    words += [f"--preset={name}" for name in presets]
    words += [name for name, is_set in flags.items() if is_set]
    words += [] if isinstance(resume, bool) else [f"--resume={resume}"]
    with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():  # the accuracies at the end
        return Run(trained([*words, *words_of(settings or {})]))


def trained(words: Sequence[str]) -> Path:
    """Train as one process, and leave that as it was; the run's folder."""
    with environment.kept(), handlers_kept():
        request = parse(words)
        if not isinstance(request, Request):
            raise UsageError(f"{words}: only settings and options of a training are understood here")
        environment.prepare()
        with output.opened(request.level), StopRequest().listening() as stop, World.alone() as world:
            with run_folder(request, 0, interrupt) as folder:
                assert folder is not None  # which a dry run has not
                work_in(folder, request, world, stop)
            return folder.path


def interrupt(text: str) -> None:
    """As `lock_lost`, where the process is somebody else's."""
    messages.warn(f"{text}; this training ends")
    _thread.interrupt_main()


class TrainModule(types.ModuleType):
    """The module of the command, which called trains in this process: hkd_hpc.train({"fed.rounds": 3})."""

    __call__ = staticmethod(in_this_process)


sys.modules[__name__].__class__ = TrainModule


# --- the process


@exit_code
def program() -> int:
    """main, of a process that ends with it."""
    return leave_after(main)


if __name__ == "__main__":
    sys.exit(program())
