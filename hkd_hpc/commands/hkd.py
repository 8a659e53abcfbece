"""`hkd COMMAND ...`: each command is its `python -m` form, exit code included; only its own module is imported."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from hkd_hpc.common.command import exit_code, started_by
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.rank import guess_rank


class Command(NamedTuple):
    """What `hkd NAME ...` stands for: `python -m module *first ...`."""

    module: str
    help: str
    first: tuple[str, ...] = ()


BUNDLED = "hkd_hpc.commands.bundled"
COMMANDS = {
    "train": Command("hkd_hpc.train", "one run; `mpirun -n 11 hkd train` for 11 ranks"),
    "data": Command(
        "hkd_hpc.data", "get an official data set: prepare NAME --dir DIR; who gets which images: show, partition"
    ),
    "sweep": Command("hkd_hpc.jobs", "many runs as one study, under SLURM or here: launch, status, table, ..."),
    "compare": Command("hkd_hpc.compare", "all schemes on the same data and seeds, and what separates them"),
    "check": Command("hkd_hpc.check", "is a run's folder good? --repair saves what can be saved"),
    "report": Command("hkd_hpc.report", "runs or studies as one HTML page: tables, figures, what happened"),
    "export": Command("hkd_hpc.export", "a trained model as .pt or .safetensors; rounds as CSV, for TensorBoard"),
    "doctor": Command("hkd_hpc.doctor", "is this machine fit for a run? `mpirun -n 11 hkd doctor`, under a minute"),
    "slurm": Command(BUNDLED, "sbatch scripts and site files: copy DIR, list", ("slurm",)),
    "specs": Command(BUNDLED, "specs for sweep and compare: copy DIR, list", ("specs",)),
    "examples": Command(BUNDLED, "a scheme, a logger and data of one's own: copy DIR, list", ("examples",)),
    "docs": Command(BUNDLED, "the pages that messages name: copy DIR, list", ("docs",)),
    "bench": Command("hkd_hpc.tools.bench", "speed and memory against a plain PyTorch loop, 11 minutes"),
    "faults": Command("hkd_hpc.tools.fault_injection", "small jobs, broken on purpose, must survive: --minutes M"),
}


@exit_code
def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; 2 when there is none of that name. Every rank of a job calls this."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in OPTIONS:
        if guess_rank(os.environ) == 0:
            print(OPTIONS[name]())
        return 0
    if name not in COMMANDS:
        raise UsageError(unknown_text(name))
    module, _, first = COMMANDS[name]
    sys.argv[1:] = [*first, *rest]
    if "" not in sys.path:
        sys.path.append("")  # modules of one's own in this folder, as with `python -m`; last: they hide no package
    hkd = "hkd" if Path(sys.argv[0]).name == "hkd" else "python -m hkd_hpc"
    with started_by(hkd if first else f"{hkd} {name}", module):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def help_text() -> str:
    lines = [f"  {name:9s}{command.help}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: hkd COMMAND ...; hkd COMMAND --help; hkd --version", "", *lines])


def version_text() -> str:
    from hkd_hpc.runtime import versions  # reads the packages' metadata

    return versions.text()


OPTIONS: dict[str, Callable[[], str]] = {"--help": help_text, "-h": help_text, "--version": version_text}


def unknown_text(name: str) -> str:
    near = get_close_matches(name, [*COMMANDS, *OPTIONS], n=1)
    hint = f"did you mean hkd {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    return f"{name!r}: no such command of hkd; {hint}"
