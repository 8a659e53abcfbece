"""What a kind of trial needs, found by trying it: bytes of the real objects, seconds of a few real FedAvg steps.

`ask` starts a process of its own for it (probe_process), which reads a request and writes the answer, both JSON: torch
is imported only there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TypedDict

from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.common.lazy import torch_environment
from hkd_hpc.jobs.environment import import_path

LIMIT_S = 300.0  # of the whole probe: importing torch from a slow file system may take a minute


class Kind(TypedDict):
    """Trials that differ by their seeds alone.

    arguments: section.key=value; classes; shape, dtype: of an input (registry.Sizes); images: of the training split;
    own: training images of a client; model: names the model, which other kinds may share.
    """

    arguments: list[str]
    classes: int
    shape: tuple[int, ...]
    dtype: str
    images: int
    own: int
    model: str


class Request(TypedDict):
    """begun: when it was asked, seconds since 1970; device: "cpu", or "auto" for a GPU where there is one; timed:
    whether steps are; kinds: by any name."""

    begun: float
    threads: int
    device: str
    timed: bool
    kinds: dict[str, Kind]


class SchemeSizes(TypedDict):
    """Counts, and bytes of one client, of one record, or of the model as it is stored.

    state_bytes, last_state_bytes: what a client keeps, and what of it the last checkpoint has; initial_bytes: what each
    checkpoint has once for the clients that are still to join.
    """

    parameters: int
    held: int
    weights_bytes: int
    flat_bytes: int
    state_bytes: int
    last_state_bytes: int
    initial_bytes: int
    report_bytes: int
    message_bytes: int


class Times(TypedDict):
    """Seconds of one image, in local training by FedAvg and in a test."""

    train_s: float
    eval_s: float


class ProbeResult(TypedDict):
    """Sizes by kind, times by model; start_s: from `begun` to the first model; rss_bytes: of the process at most."""

    kinds: dict[str, SchemeSizes]
    models: dict[str, Times]
    start_s: float
    device: str
    rss_bytes: int


def ask(request: Request) -> ProbeResult:
    """The answer. UsageError with the line that a model or scheme cannot be built; RunError where none came in time."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hkd_hpc.jobs.probe_process"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env={**os.environ, **torch_environment(request["threads"]), **import_path()},
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"the probe did not end within {LIMIT_S:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason"]
        raise UsageError(f"the probe of model and scheme failed: {lines[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
