"""`python -m hkd_hpc.train` that notes what tools.bench wants to know, and changes nothing.

Each rank appends lines to the file $HKD_BENCH_STAMPS: "start PID SECONDS" when Python runs, "data PID INODE" for the
shared data file it maps while it builds its part, "step PID SECONDS" when its first local training begins.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

WATCHED = "hkd_hpc.training"
DATA_FILE = "hkd_hpc-data-"


def stamp(event: str, value: object) -> None:
    with open(os.environ["HKD_BENCH_STAMPS"], "a") as file:
        file.write(f"{event} {os.getpid()} {value}\n")


def stamp_data() -> None:
    lines = Path("/proc/self/maps").read_text().splitlines()
    for inode in sorted({line.split()[4] for line in lines if DATA_FILE in line}):
        stamp("data", inode)


class Watch(importlib.abc.MetaPathFinder):
    """Changes the watched module when somebody else imports it: importing it here would load torch too early."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            spec.loader = WatchingLoader(spec.loader)
        return spec


class WatchingLoader(importlib.abc.Loader):
    """Loads the watched module and changes it."""

    def __init__(self, loader: importlib.abc.Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        watch(module.LocalTrainer)


def watch(trainer: type) -> None:
    before_first(trainer, "__init__", stamp_data)  # made while the data set is still mapped
    before_first(trainer, "run", lambda: stamp("step", time.time()))


def before_first(owner: type, name: str, action: Callable[[], object]) -> None:
    """Have `action` called before the first call of a method, once."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def first_call(*arguments, **named):
        setattr(owner, name, method)
        action()
        return method(*arguments, **named)

    setattr(owner, name, first_call)


if __name__ == "__main__":
    stamp("start", time.time())
    sys.meta_path.insert(0, Watch())
    runpy.run_module("hkd_hpc.train", run_name="__main__", alter_sys=True)
