"""Ours beside pfl-research and Flower (bench.peers [--env DIR] [--quick]); half an hour on 2 cores.

Workloads J and S of tools.bench: 10 clients, one local epoch, weights and BatchNorm's statistics averaged, no
evaluation, two processes that train with one thread each. The bare loop, ours, pfl-research and Flower run them in
turn, again and again. The first round of a run does not count, nor does our last, in which we test and save. A ratio is
that of two medians of one turn. Memory is the largest sum of the PSS of a run's processes, without those that only
start others.

The peers live in an environment of their own, made on first use (6 GB), with torch as here. Each must first come to the
weights and statistics of the plain loop in tools/peers/workload.py, on small clients. What cannot be installed, does
not run or trains something else has its reason in the table, whose other rows are made all the same; the exit code is 1
then.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from hkd_hpc.analysis.tables import Table
from hkd_hpc.comm.control.watch import descendants
from hkd_hpc.common.command import Parser, exit_code
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.settings import first_paragraph
from hkd_hpc.runtime.paths import path_argument
from hkd_hpc.runtime.versions import installed

from . import whole_round
from .processes import BenchError, Child, environment, peak_until
from .table import heading, number

HOME = Path(__file__).resolve().parents[2]  # where `tools` is a package, also for a Python that lacks hkd_hpc
GIGA = 1e9
BATCH = 64
TAIL = 4000  # characters of a failed run's output
EXCEPTION = re.compile(r"\b\w*(Error|Exception): ")
BARE, OURS = "bare loop, 2 processes", "hkd_hpc"
INSTALL_S, RUN_S = 3600.0, 1800.0  # what takes longer hangs
TOLERANCE = 1e-6  # relative; all sum in float32 or better, in orders of their own
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Peer:
    """`requirement` is for pip; `launcher` is what only starts the processes of `module`."""

    name: str
    requirement: str
    module: str
    launcher: tuple[str, ...] = ()


PEERS = (
    Peer("pfl-research", "pfl[pytorch]==0.6.0", "tools.peers.pfl_research", TORCHRUN),
    Peer("Flower simulation", "flwr[simulation]==1.42.0", "tools.peers.flower"),
)
PLAIN = Peer("plain loop", "", "tools.peers.workload")


@dataclass(frozen=True)
class Sizes:
    """Images of a client, rounds of a run that count, and images of a client where the peers are checked."""

    images: int = 375
    rounds: int = 3
    check_images: int = 72  # two batches, the second one short


QUICK = Sizes(images=72, rounds=1)


@dataclass
class Measurement:
    """What was measured of one system and workload: a number for each turn, or why there is none."""

    round_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    why: str = ""

    def add(self, round_s: list[float], peak_bytes: int) -> None:
        self.round_s.append(median(round_s))
        self.peak_bytes.append(peak_bytes)


# --- the environment of the peers


def pip_install(python: Path, *requirements: str) -> None:
    """BenchError with pip's first complaint."""
    try:
        done = subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", *requirements],
            check=False,
            text=True,
            capture_output=True,
            timeout=INSTALL_S,
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"pip install {requirements[-1]}: not done after {INSTALL_S:.0f} s") from None
    if done.returncode:
        complaints = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise BenchError(f"pip install {requirements[-1]}: {(complaints or ['?'])[0]}")


def same_torch() -> list[str]:
    """Requirements: the releases of torch and torchvision that run here, without the build's tag."""
    return [f"{package}=={(installed(package) or '?').partition('+')[0]}" for package in ("torch", "torchvision")]


def install(env: Path, peer: Peer) -> Path:
    """The Python that has the peer. What is there already is not installed again."""
    python = env / "bin" / "python"
    if not python.exists():
        done = subprocess.run([sys.executable, "-m", "venv", str(env)], check=False, text=True, capture_output=True)
        if done.returncode:
            raise BenchError(
                f"--env {env}: no environment could be made there: "
                f"{' '.join((done.stderr or done.stdout).split())[:200]}"
            )
    pip_install(python, *same_torch(), peer.requirement)
    return python


# --- runs


def run_peer(peer: Peer, python: Path, workload: str, images: int, rounds: int) -> tuple[dict, int]:
    """(what the peer's script printed, peak PSS of its processes in bytes). BenchError when it fails or hangs."""
    more = {
        "PYTHONPATH": str(HOME),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_HOME": str(python.parents[1] / "flwr"),
    }  # no peer reports its use to its makers
    command = [str(python), *peer.launcher, "-m", peer.module, workload, str(images), str(rounds)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**more),
        start_new_session=True,
    )
    own = [] if peer.launcher else [process.pid]
    try:
        with ThreadPoolExecutor() as beside:
            peak_bytes = beside.submit(
                peak_until, lambda: process.poll() is not None, lambda: own + descendants(process.pid)
            )
            try:
                output, _ = process.communicate(timeout=RUN_S)
            finally:
                end_group(process)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{peer.module}: not done after {RUN_S:.0f} s") from None
    results = [line for line in output.splitlines() if line.startswith('{"round_s"')]
    if process.returncode or not results:
        raise BenchError(f"{peer.module}: exit code {process.returncode}: {reason_in(output)}\n{output[-TAIL:]}")
    return json.loads(results[-1]), peak_bytes.result()


def reason_in(output: str) -> str:
    """The line of the first exception: torchrun's report comes after it, and ends in a rule."""
    lines = output.strip().splitlines() or ["no output"]
    return next((line for line in lines if EXCEPTION.search(line)), lines[-1])


def end_group(process: subprocess.Popen) -> None:
    """End it and all that it has started in its session: Ray's processes outlive a driver that is killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def compare(found: dict, plain: dict) -> None:
    """BenchError unless a peer's first round came to what the plain loop's did."""
    for name in ("parameters", "steps", "loss", "parameter_norm", "buffer_norm"):
        alike = np.shape(found[name]) == np.shape(plain[name])
        if not alike or not np.allclose(found[name], plain[name], rtol=TOLERANCE, atol=0):
            raise BenchError(f"trains something else: {name} {found[name]}, the plain loop {plain[name]}")


def check_timed(found: dict, sizes: Sizes) -> None:
    """BenchError unless a run made all steps of its rounds and the loss fell."""
    expected = [whole_round.CLIENTS * math.ceil(sizes.images / BATCH)] * (sizes.rounds + 1)
    if found["steps"] != expected:
        raise BenchError(f"trains something else: {found['steps']} steps in its rounds, {expected} expected")
    if not found["loss"][-1] < found["loss"][0]:
        raise BenchError(f"does not learn: loss {found['loss']}")


def run_ours(workload: str, sizes: Sizes) -> tuple[list[float], int]:
    last_only = f"run.evaluate_every={sizes.rounds + 2}", f"run.checkpoint_every={sizes.rounds + 2}"
    rounds = whole_round.run_program(workload, sizes.images, sizes.rounds, *last_only)
    return rounds.wall_s, rounds.peak_bytes


def run_bare(pair: list[Child], sizes: Sizes) -> tuple[list[float], int]:
    with ThreadPoolExecutor() as beside:
        training = beside.submit(lambda: [whole_round.run_bare(pair) for _ in range(sizes.rounds)])
        peak_bytes = peak_until(training.done, lambda: [child.process.pid for child in pair])
    return training.result(), peak_bytes


def run_timed(peer: Peer, python: Path, workload: str, sizes: Sizes) -> tuple[list[float], int]:
    found, peak_bytes = run_peer(peer, python, workload, sizes.images, sizes.rounds + 1)
    check_timed(found, sizes)
    return found["round_s"], peak_bytes


# --- the table


def row(name: str, version: str, found: dict[str, Measurement], bare: dict[str, Measurement]) -> list[str]:
    """A system's row; `found` and `bare` by workload."""
    cells: list[list[str]] = [[], [], []]
    for workload, of_workload in found.items():
        if of_workload.why or not of_workload.round_s:
            texts = of_workload.why or "–", "–", "–"
        else:
            ratios = [ours_s / bare_s for ours_s, bare_s in zip(of_workload.round_s, bare[workload].round_s)]
            spread = f" ({number(min(ratios))} to {number(max(ratios))})" if len(ratios) > 1 else ""
            texts = (
                number(median(of_workload.round_s)),
                "1" if of_workload is bare[workload] else number(median(ratios)) + spread,
                number(max(of_workload.peak_bytes) / GIGA),
            )
        for column, text in zip(cells, texts):
            column.append(" ".join(text.split()).replace("|", "/"))
    return [name, version, *(cell for column in cells for cell in column)]


def table(found: dict[str, dict[str, Measurement]], versions: dict[str, str]) -> str:
    """`found`: by system, then by workload; the bare loop is among them."""
    workloads = list(found[BARE])
    head = [
        "system",
        "version",
        *(f"{workload}, s/round" for workload in workloads),
        *(f"{workload} / bare" for workload in workloads),
        *(f"peak PSS {workload}, GB" for workload in workloads),
    ]
    return Table(
        head, [row(name, versions[name], of_system, found[BARE]) for name, of_system in found.items()]
    ).markdown()


# --- the command


def attempt(found: Measurement, title: str, measure: Callable[[], tuple[list[float], int]]) -> None:
    """One measurement more of a system, unless it has failed before."""
    if found.why:
        return
    start_s, more = time.monotonic(), ""
    try:
        found.add(*measure())
    except BenchError as error:
        found.why, _, more = str(error).partition("\n")
    said = found.why or f"{number(found.round_s[-1])} s a round"
    print(
        f"{title}: {said}; {time.monotonic() - start_s:.0f} s in all",
        *more.splitlines(),
        sep="\n    ",
        file=sys.stderr,
        flush=True,
    )


def prepare(env: Path, peers: list[Peer], found: dict[str, dict[str, Measurement]], sizes: Sizes) -> dict[str, str]:
    """Install and check the peers; those that fail are marked. Versions by name."""
    versions: dict[str, str] = {}
    plain: dict[str, dict] = {}
    for peer in peers:
        versions[peer.name] = peer.requirement
        try:
            python = install(env, peer)
            for workload in found[peer.name]:
                result, _ = run_peer(peer, python, workload, sizes.check_images, 1)
                versions[peer.name] = ", ".join(map(" ".join, result["versions"].items()))
                plain[workload] = plain.get(workload) or run_peer(PLAIN, python, workload, sizes.check_images, 1)[0]
                compare(result, plain[workload])
                print(f"{peer.name}, workload {workload}: trains what the plain loop does", file=sys.stderr, flush=True)
        except (BenchError, OSError, subprocess.SubprocessError) as error:
            for of_workload in found[peer.name].values():
                of_workload.why = str(error).splitlines()[0]
            print(f"{peer.name}: {error}", file=sys.stderr, flush=True)
    return versions


def measure_workload(
    workload: str, turns: int, peers: list[Peer], env: Path, found: dict[str, dict[str, Measurement]], sizes: Sizes
) -> None:
    """All systems in turn."""
    pair = [Child(f"{__package__}.bare_loop", workload, str(sizes.images)) for _ in range(whole_round.RANKS - 1)]
    try:
        whole_round.run_bare(pair)  # warm up
        for turn in range(1, turns + 1):
            measures = {
                BARE: partial(run_bare, pair, sizes),
                OURS: partial(run_ours, workload, sizes),
                **{peer.name: partial(run_timed, peer, env / "bin" / "python", workload, sizes) for peer in peers},
            }
            for name, measure in measures.items():
                attempt(found[name][workload], f"turn {turn}, workload {workload}, {name}", measure)
    finally:
        for child in pair:
            child.close()


@exit_code
def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog=f"python -m {__package__}.peers", description=first_paragraph(__doc__))
    parser.add_argument(
        "--env", type=path_argument, default=Path(".bench_peers"), help="folder of the peers' environment"
    )
    parser.add_argument("--jobs", choices=("J", "S", "JS"), default="JS")
    parser.add_argument("--turns", type=int, default=3, help="how often each system runs each workload")
    parser.add_argument("--no-peers", action="store_true", help="the bare loop and ours alone; nothing is installed")
    parser.add_argument("--quick", action="store_true", help="a smoke test: tiny clients, one turn, no meaning")
    options = parser.parse_args(arguments)
    if options.turns < 1:
        raise UsageError(f"--turns {options.turns}: must be at least 1")
    sizes, turns = (QUICK, 1) if options.quick else (Sizes(), options.turns)
    peers = [] if options.no_peers else list(PEERS)
    found = {
        name: {workload: Measurement() for workload in options.jobs}
        for name in (BARE, OURS, *(peer.name for peer in peers))
    }
    env = options.env.resolve()
    versions = {BARE: f"torch {installed('torch')}", OURS: "this commit", **prepare(env, peers, found, sizes)}
    for workload in options.jobs:
        measure_workload(workload, turns, peers, env, found, sizes)
    print(heading(options.quick))
    print(table(found, versions))
    return int(any(of_workload.why for of_system in found.values() for of_workload in of_system.values()))


if __name__ == "__main__":
    sys.exit(main())
