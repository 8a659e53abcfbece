"""How the jobs of a launch run, as options of a command."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

from hkd_hpc.common.command import Parser
from hkd_hpc.jobs.options import Options

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
UNSET = {  # what stands for a field that is None
    "cpus_per_task": "1, or the cores of a node divided among its ranks",
    "constraint": "any node",
    "gres": "as --gpus-per-node says",
    "python": "this one",
}
TEXTS = ("partition", "account", "qos", "constraint", "gres", "mpi", "python")

FLAGS = {
    "pack": "--allocations jobs that take trial after trial until their time is up, --slots at a time on each GPU "
    "(without GPUs: on each node)",
    "exclusive": "whole nodes",
    "strict_code": "reject where the code is not that with which trials began, or were submitted; else a line says so",
    "keep_state": "clients' state and models of finished trials too; else one keeps its global model and metrics alone",
}
RANKS_HELP = (
    "processes of a trial; clients: one for each client and one for the server (SLURM only); default: one, on several "
    "GPUs one for each and one for the server"
)


def add_options(parser: Parser, but: Sequence[str] = ()) -> None:
    """A site file, and the fields of Options, some of which may be left out.

    An option that is not given is no attribute of what is parsed, so that the site's value counts.
    """
    parser.add_argument("--site", metavar="FILE.toml", help="for all options below that are not given")
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    add("--ranks", type=lambda text: int(text) if text.isdigit() else text, help=RANKS_HELP)
    for field in (field for field in dataclasses.fields(Options) if field.name not in but):
        option = f"--{field.name.replace('_', '-')}"
        if field.name in NUMBERS:
            add(option, type=int, metavar="N", help=default_text(field))
        elif field.name in TEXTS:
            add(option, metavar="X", help=default_text(field))
        elif field.name in FLAGS:
            add(option, action="store_true", help=FLAGS[field.name])
    add("--mem-gb", type=float, metavar="N")
    add("--setup", action="append", metavar="LINE", help="shell line before srun, after the site's")


def default_text(field: dataclasses.Field) -> str:
    """What counts where an option is not given."""
    default = UNSET.get(field.name, "SLURM's own") if field.default is None else field.default
    return f"default: {default}"


def given_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Of what is parsed, the fields of Options that were given."""
    return {name: value for name, value in vars(parsed).items() if name in Options.__dataclass_fields__}
