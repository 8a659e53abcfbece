"""One file that describes a site (examples in slurm/sites), for the launcher, its checks and the sbatch scripts.

python -m hkd_hpc.jobs launch SPEC.toml --site site.toml --root DIR
site=$(python -m hkd_hpc.jobs site site.toml) && eval "$site" && sbatch "${SITE[@]}" slurm/fedhkd_cifar10.sh
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field, fields
from typing import Any

from hkd_hpc.common.errors import UsageError, obtainable
from hkd_hpc.common.settings import unknown
from hkd_hpc.config import load_toml
from hkd_hpc.jobs.options import Options, check_options, cores_of, default_ranks, setup_lines
from hkd_hpc.runtime.paths import expanded, path_text

OWN_KEYS = (
    "account",
    "partition",
    "qos",
    "constraint",
    "gres",
    "gpus-per-node",
)  # options of sbatch that are keys here
# options of sbatch that it also reads from SBATCH_<NAME>; the others travel on its command line
VARIABLES = (
    *OWN_KEYS,
    "exclusive",
    "clusters",
    "core-spec",
    "cpus-per-gpu",
    "delay-boot",
    "distribution",
    "gpu-bind",
    "gpu-freq",
    "gres-flags",
    "hint",
    "mem-bind",
    "network",
    "profile",
    "reservation",
    "thread-spec",
    "threads-per-core",
    "wckey",
)
# options that a key of the site file stands for, or that the launcher and the scripts need to set themselves
TAKEN = (
    *OWN_KEYS,
    "exclusive",
    "mem",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "cpus-per-task",
    "time",
    "signal",
    "output",
    "error",
    "open-mode",
    "requeue",
    "array",
    "job-name",
)


@dataclass(frozen=True)
class Container:
    """`command` with its options, the image and what is bound, e.g. /scratch; $VARIABLES and ~ in them are expanded."""

    image: str
    command: str = "apptainer exec"
    binds: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Site:
    """What one site asks for. None, 0, and empty: nothing is said to SLURM about it."""

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus_per_node: int = 0
    gres: str | None = None  # e.g. gpu:a100:4, where gpus_per_node is not understood
    cores_per_node: int = 0  # 0: not known. Where nodes are shared: those that go with gpus_per_node GPUs
    cores_free: int = 0  # of these, left to the system
    exclusive: bool = False
    mem_gb: float | None = None
    setup: list[str] = field(default_factory=list)  # shell lines: modules, a staged environment
    environment: dict[str, str] = field(default_factory=dict)  # exported after them
    python: str | None = None  # the command, quoted as for the shell
    container: Container | None = None  # `python` is then the one in it
    mpi: str | None = None  # of srun --mpi=
    launcher: str | None = None  # srun or mpirun; for the sbatch scripts, the launcher of sweeps always takes srun
    srun: list[str] = field(default_factory=list)  # further arguments
    max_queued: int = 0  # jobs that the site lets a user have; 0: any number
    sbatch: dict[str, Any] = field(default_factory=dict)  # further options, without their dashes; true: without a value

    @classmethod
    def read(cls, path: str | os.PathLike) -> Site:
        """Raises UsageError, one line that names file and key."""
        path = path_text(path, "--site ")
        try:
            values = checked("", cls, load_toml(path, "--site"))
            if "container" in values:
                values["container"] = Container(**checked("container.", Container, values["container"]))
            return cls(**values)._checked()
        except UsageError as error:
            raise error if path in str(error) else UsageError(f"--site {path}: {error}") from None

    def python_command(self) -> str | None:
        """What starts Python on a compute node, quoted as for the shell; None: the one that the user has active."""
        if self.container is None:
            return self.python
        image, *binds = (expanded(text, "container: ") for text in [self.container.image, *self.container.binds])
        bind = ["--bind", ",".join(binds)] if binds else []
        return f"{self.container.command} {shlex.join([*bind, image])} {self.python or 'python3'}"

    def options(self) -> dict[str, Any]:
        """The fields of Options that it fills; what it does not say is left out."""
        values = {name: getattr(self, name) for name in Options.__dataclass_fields__ if hasattr(self, name)}
        values |= {"python": self.python_command(), "srun_args": self.srun}
        return {name: value for name, value in values.items() if value not in (None, 0, [], {})}

    def exports(self) -> str:
        """Lines for `eval` in a shell: what sbatch and slurm/common.sh understand, and SITE, more options of sbatch."""
        given = self._sbatch_options()
        variables = {variable_of(name): str(value) for name, value in given.items() if name in VARIABLES}
        if self.mem_gb:
            variables["SBATCH_MEM_PER_NODE"] = f"{self.mem_gb * 1024:.0f}M"
        variables |= self._script_variables()
        more = {name: value for name, value in given.items() if name not in VARIABLES}
        arguments = [f"--{name}" if value is True else f"--{name}={value}" for name, value in more.items()]
        return "\n".join(
            [
                *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
                f"SITE=({shlex.join([*self._layout(), *arguments])})",
            ]
        )

    def _sbatch_options(self) -> dict[str, Any]:
        """Options of sbatch by their names; without those that the site says nothing of."""
        mine = {name: getattr(self, name.replace("-", "_")) for name in OWN_KEYS}
        mine["exclusive"] = "exclusive" if self.exclusive else None
        return {name: value for name, value in (mine | self.sbatch).items() if value}

    def _script_variables(self) -> dict[str, str]:
        """What slurm/common.sh reads."""
        variables = {
            "PYTHON": self.python_command(),
            "MPI": self.mpi,
            "LAUNCHER": self.launcher,
            "SRUN_ARGS": shlex.join(self.srun),
            "SETUP_LINES": "\n".join(setup_lines(self.setup, self.environment)),
        }
        found = {name: value for name, value in variables.items() if value}
        return found | {"VENV": ""} if self.python_command() else found  # the command brings its own environment

    def _layout(self) -> list[str]:
        """Tasks and cores of a node with GPUs."""
        options = Options(**self.options())
        ranks = default_ranks(options, clients=None)
        return [f"--ntasks={ranks}", f"--cpus-per-task={cores_of(options, ranks)}"] if options.gpus_of_node() else []

    def _checked(self) -> Site:
        """Itself. UsageError for what cannot be meant."""
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise UsageError(f"environment.{name}: is no name of a variable")
        for name in self.sbatch:
            if name in TAKEN or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
                raise UsageError(
                    f"sbatch.{name}: not allowed; {', '.join(TAKEN)} have keys of their own or are set by "
                    "the scripts, others are written as for sbatch, in small letters"
                )
        if self.launcher not in (None, "srun", "mpirun"):
            raise UsageError(f"launcher={self.launcher}: not allowed; launcher must be srun or mpirun")
        check_options(Options(**self.options()), "slurm")
        return self


def variable_of(option: str) -> str:
    """SBATCH_GPUS_PER_NODE"""
    return f"SBATCH_{option.replace('-', '_').upper()}"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


KINDS = {  # of a field's annotation: what it must be, and whether it is
    "str": ("text", _is_text),
    "int": ("a whole number >= 0", lambda value: _is_number(value) and isinstance(value, int)),
    "float": ("a number >= 0", _is_number),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "list[str]": ("a list of texts", lambda value: isinstance(value, list) and all(map(_is_text, value))),
    "dict[str, str]": (
        "a table of texts and numbers",
        lambda value: (
            isinstance(value, dict)
            and all((isinstance(item, str) and item.isprintable()) or _is_number(item) for item in value.values())
        ),
    ),
    "dict[str, Any]": (
        "a table of texts, numbers and true",
        lambda value: (
            isinstance(value, dict)
            and all(item is True or _is_text(item) or _is_number(item) for item in value.values())
        ),
    ),
    "Container": ("a table", lambda value: isinstance(value, dict)),
}


def checked(prefix: str, cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """The values, each as its field's annotation says. UsageError names the key and what is allowed."""
    known = {entry.name: entry for entry in fields(cls)}
    found = {}
    for name, value in values.items():
        if name not in known:
            listed = f"{obtainable('slurm/README.md')} lists them"
            raise UsageError(unknown(prefix + name, [prefix + other for other in known], listed))
        kind = known[name].type.removesuffix(" | None")
        allowed, fits = KINDS[kind]
        if not fits(value):
            raise UsageError(f"{prefix}{name}={value!r}: not allowed; {prefix}{name} must be {allowed}")
        found[name] = {key: str(item) for key, item in value.items()} if kind == "dict[str, str]" else value
    if cls is Container and "image" not in values:
        raise UsageError("container.image: is missing")
    return found
