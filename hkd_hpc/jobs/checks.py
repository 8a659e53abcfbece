"""What would make the jobs of a launch fail, found before anything is submitted."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from hkd_hpc import schemes
from hkd_hpc.config import Config
from hkd_hpc.data import public
from hkd_hpc.data.sources import check_present
from hkd_hpc.errors import UsageError
from hkd_hpc.jobs.executors import SUBMIT, environment, slurm_executor
from hkd_hpc.jobs.options import Options, check_options
from hkd_hpc.jobs.sweep import Cell
from hkd_hpc.jobs.work import facts_of
from hkd_hpc.runtime import versions


class Problems(UsageError):
    """All that is wrong; `lines`, one each."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("; ".join(lines))
        self.lines = list(lines)


def check(cells: list[Cell], executor: str, root: Path, options: Options) -> list[str]:
    """A line for each thing that would make the jobs fail; equal ones once."""
    if executor not in SUBMIT:
        return [f"executor {executor}: not known; one of {', '.join(SUBMIT)}"]
    tests = [partial(check_root, root), partial(check_options, options, executor)]
    tests += [check_slurm] * (executor == "slurm")
    # with another Python its packages count, not this one's
    tests += tests_of([cell.config() for cell in cells], installed_here=not options.python)
    problems = told(tests)
    if executor == "slurm" and not problems:
        problems += dict.fromkeys(refusals(cells, root, options))
    return problems


def tests_of(configs: list[Config], installed_here: bool = True) -> list[Callable[[], None]]:
    """What runs with these settings need, once each: data, public images for those who train on them, packages. Each
    raises UsageError."""
    files = dict.fromkeys((config.data.name, config.data.dir, config.data.path) for config in configs)
    models = dict.fromkeys((config.model.name, config.model.needs_torchvision) for config in configs)
    return [
        *(partial(check_present, *place) for place in files),
        *(partial(check_public_images, config) for config in configs if schemes.get(config.scheme.name).needs_public),
        *(partial(versions.check, *model) for model in models if installed_here),
    ]


def check_public_images(config: Config) -> None:
    """By the heads of the data's files; what cannot be read there others say."""
    facts = facts_of(config)
    if facts is not None:
        public.check(config.scheme.name, config.data, config.fed.clients, facts.train)


def told(tests: Iterable[Callable[[], None]]) -> list[str]:
    """What the tests say, equal lines once."""
    problems: dict[str, None] = {}
    for test in tests:
        try:
            test()
        except UsageError as error:
            problems[str(error)] = None
    return list(problems)


def check_no_file(root: Path) -> Path:
    """The folder that the root is or would be made in; UsageError for a file."""
    place = next(path for path in (root, *root.parents) if path.exists())
    if not place.is_dir():
        raise UsageError(f"--root {root}: {place} is a file; name a folder")
    return place


def check_root(root: Path) -> None:
    place = check_no_file(root)
    if not os.access(place, os.W_OK | os.X_OK):
        raise UsageError(f"--root {root}: {place} cannot be written to; name another folder")


def check_slurm() -> None:
    for program in ("sbatch", "srun", "squeue", "scancel"):
        if not shutil.which(program):
            raise UsageError(f"executor slurm: no {program} here; launch on a login node, or use --executor local")


def refusals(cells: list[Cell], root: Path, options: Options) -> list[str]:
    """What sbatch says against a job of each size; nothing is submitted."""
    found = []
    if not options.pack and options.nodes > (least := min(map(options.ranks_of, cells), default=options.nodes)):
        return [f"nodes={options.nodes}: more than the {least} rank(s) of a cell; --ranks N, or fewer --nodes"]
    packed = [options.nodes * options.workers_per_node()] if options.pack else []
    for ranks in packed or sorted({options.ranks_of(cell) for cell in cells}):
        try:
            text = slurm_executor(root, options, ranks)._executor._make_submission_file_text("true", "")
        except (NameError, ValueError, TypeError, AssertionError) as error:
            return [str(error).splitlines()[0]]
        with environment():
            answer = subprocess.run(["sbatch", "--test-only"], input=text, capture_output=True, text=True)
        if answer.returncode and not (is_about_size(answer.stderr) and all_down(options)):
            words = " ".join(answer.stderr.split()).removeprefix("sbatch: ").removeprefix("error: ")
            found.append(
                f"SLURM refuses a job of {ranks} rank(s) on {options.nodes} node(s): {words or 'no reason'}"
                + mend(words)
            )
    return found


SMALLER = (
    "fewer --ranks, --cpus-per-task or --gpus-per-node, more --nodes, or another --partition; "
    "sinfo -o '%P %D %c %m %G %l' says what there is"
)
MENDS = {
    "account": "another --account",
    "qos": "another --qos",
    "time limit": "a shorter --time-min, or another --partition",
    "emory": "a smaller --mem-gb",
    "node count": f"fewer --nodes, or as many ranks as nodes; {SMALLER}",
    "node configuration": SMALLER,
    "processors": SMALLER,
    "gres": "another --gpus-per-node, or another --partition",
    "partition": "another --partition; sinfo says which there are",
}


def is_about_size(words: str) -> bool:
    return "node configuration" in words or "node count" in words


def all_down(options: Options) -> bool:
    """Whether no node of the partition is up, as in a maintenance: jobs then wait, whatever sbatch --test-only says."""
    partition = [f"--partition={options.partition}"] if options.partition else []
    try:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--format=%T", *partition], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    states = answer.stdout.split()
    return bool(states) and all(
        state.startswith(("down", "drain", "maint", "fail", "reboot", "power")) for state in states
    )


def mend(words: str) -> str:
    """Which option ends this refusal of sbatch."""
    return next((f"; mended by {what}" for part, what in MENDS.items() if part in words or part in words.lower()), "")
