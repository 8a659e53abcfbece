"""Is this machine fit for a run? `mpirun -n N python -m hkd_hpc.doctor`; also under srun and torchrun, or alone.

Looks at launcher, MPI, transport, cores, devices, packages, clocks, SLURM, the output folder's file system and the
collectives, in under a minute; --out DIR is left as it was. Each finding has a level, what it means and what mends it.
Exit codes: 0 nothing, notes or warnings; 1 an error (with --strict a warning too), or the job failed; 2 wrong input.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hkd_hpc import config as config_module
from hkd_hpc.comm import World
from hkd_hpc.comm.control.base import leave_after
from hkd_hpc.comm.control.rendezvous import AlreadyReported
from hkd_hpc.comm.world import let_rank_0_speak_first
from hkd_hpc.common.command import Parser, program_of
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.common.lazy import torch_environment
from hkd_hpc.common.rank import guess_rank
from hkd_hpc.common.settings import first_paragraph
from hkd_hpc.config import CommSettings, Config
from hkd_hpc.console import messages
from hkd_hpc.doctor import output
from hkd_hpc.doctor.findings import Section
from hkd_hpc.runtime import environment
from hkd_hpc.runtime.paths import named_path, nearest_existing

ENDING = "The examination ends here, as a run would."
LIMITS_S = {"comm.timeout_s": 60.0, "comm.start_timeout_s": 60.0}  # instead of a run's; settings as any other


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    config: Config
    out: Path
    as_json: bool
    strict: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine, as one rank of a job; every rank calls this.

    Args:
        arguments: the words of the command line; None: those of this process.

    Returns:
        The exit code, the same on every rank.

    Raises:
        SystemExit: 2 for wrong input, 1 where the job failed. Rank 0 has said why, in one line.
    """
    try:
        request: Request | str | UsageError = parse(sys.argv[1:] if arguments is None else arguments)
    except UsageError as problem:
        request = problem
    if isinstance(request, str):
        if guess_rank(os.environ) == 0:
            messages.say(request)
        return 0
    environment.prepare()
    world = open_world(request)
    with world:
        world.control.ending = ENDING
        if isinstance(request, UsageError):
            raise request
        return examine(world, request)


def parse(arguments: Sequence[str]) -> Request | str:
    """A command line: the request, or a text to print. UsageError, one line."""
    parser = make_parser()
    options = parser.parse_intermixed_args(list(arguments))
    if options.help:
        return parser.format_help()
    asked, soft = config_module.collect((), None, options.settings)
    config = config_module.from_values({**LIMITS_S, **asked}, soft)
    return Request(config, folder_at(options.out), options.json, options.strict)


def folder_at(path: str) -> Path:
    """Where runs would write. UsageError for a file, or below one."""
    out = Path(os.path.abspath(named_path(path, "--out ")))
    try:
        place = nearest_existing(out)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be looked at ({error.strerror})") from None
    if not place.is_dir():
        what = "is a file" if place == out else f"a file is in the way ({place})"
        raise UsageError(f"--out {out}: {what}; name a folder, or one that is new")
    return out


def make_parser() -> Parser:
    parser = Parser(
        prog=program_of("hkd_hpc.doctor"),
        add_help=False,
        allow_abbrev=False,
        description=first_paragraph(__doc__),
        epilog="settings: those of hkd_hpc.train; comm.*, run.device, run.threads, model.* and fed.clients count here",
    )
    parser.add_argument("--out", default="runs", metavar="DIR", help="where runs would write (default: runs)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of words")
    parser.add_argument("--strict", action="store_true", help="a warning gives exit code 1 too")
    parser.add_argument("--help", "-h", action="store_true", help="this text")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="settings of the run to come")
    return parser


# ---- the world


def open_world(request: Request | UsageError) -> World:
    """This job's world. SystemExit where there is none: that is a finding, told before."""
    comm = request.config.comm if isinstance(request, Request) else CommSettings()
    try:
        world = World.find(comm.backend, comm.timeout_s, comm.start_timeout_s, os.environ)
    except AlreadyReported:
        raise SystemExit(1) from None
    except (UsageError, RunError) as error:
        from hkd_hpc.doctor import launch  # late, as below: it brings numpy, whose threads are not set yet

        if guess_rank(os.environ):
            launch.await_first()  # most often rank 0, and maybe slow
            let_rank_0_speak_first()
        raise SystemExit(tell_alone(launch.without_world(error), request)) from None
    if world.size == 1:
        reject_unconnected(request)
    return world


def reject_unconnected(request: Request | UsageError) -> None:
    """SystemExit where a launcher that nobody knows started several processes: the first of them tells it."""
    from hkd_hpc.doctor import launch

    tasks = launch.alike(launch.task_of(os.getpid()))
    if len(tasks) < 2:
        return
    if launch.await_first():
        raise SystemExit(1)
    code = tell_alone(launch.unconnected_processes(len(tasks)), request)
    launch.await_others(len(tasks) - 1)
    raise SystemExit(code)


def tell_alone(section: Section, request: Request | UsageError) -> int:
    """Print the one section that there is; the exit code."""
    as_json = isinstance(request, Request) and request.as_json
    show([section], as_json, strict=False)
    return output.code_of([section], strict=False)


def show(sections: Sequence[Section], as_json: bool, strict: bool) -> None:
    """All at once."""
    if as_json:
        messages.say(output.document(sections, strict))
        return
    for section in sections:
        messages.say(output.section_text(section))
    messages.say(output.summary_text(sections, strict))


# ---- the examination


def examine(world: World, request: Request) -> int:
    """All ranks: connect, look at everything; rank 0 tells each section when it is done, so that a job that hangs has
    told those before it.
    """
    began_s, config = time.perf_counter(), request.config
    os.environ.update(torch_environment(config.run.threads))
    comm = world.connect(config.run.device, config.comm.backend)
    from hkd_hpc.doctor.context import Context
    from hkd_hpc.doctor.examine import sections

    found = []
    for section in sections(Context(world, comm, config, request.out)):
        found.append(section)
        if not request.as_json:
            messages.say(output.section_text(section))
    if comm.rank == 0 and request.as_json:
        messages.say(output.document(found, request.strict))
    elif comm.rank == 0:
        messages.say(f"{output.summary_text(found, request.strict)}, {time.perf_counter() - began_s:.1f} s")
    return comm.agree(output.code_of(found, request.strict))


def program() -> int:
    """main, of a process that ends with it."""
    return leave_after(main)


if __name__ == "__main__":
    sys.exit(program())
