"""`python -m hkd_hpc.train` that notes when it starts and when the first local training begins, for tools.bench.

Each process appends lines "start PID SECONDS" and "step PID SECONDS" (since the epoch) to the file $HKD_BENCH_STAMPS.
"""
from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import runpy
import sys
import time

WATCHED = "hkd_hpc.client"


def stamp(event: str) -> None:
    with open(os.environ["HKD_BENCH_STAMPS"], "a") as file:
        file.write(f"{event} {os.getpid()} {time.time()}\n")


class Watch(importlib.abc.MetaPathFinder):
    """Changes the watched module when it is imported by somebody else: importing it here would load torch too early."""

    def find_spec(self, name, path, target=None):
        if name != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), note_first_step(module.Workbench))
        return spec


def note_first_step(workbench: type) -> None:
    run = workbench.run

    @functools.wraps(run)
    def first_run(*arguments, **named):
        workbench.run = run
        stamp("step")
        return run(*arguments, **named)

    workbench.run = first_run


if __name__ == "__main__":
    stamp("start")
    sys.meta_path.insert(0, Watch())
    runpy.run_module("hkd_hpc.train", run_name="__main__", alter_sys=True)
