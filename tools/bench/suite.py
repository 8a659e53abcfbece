"""Speed and memory against their targets, in 11 minutes on 2 cores (bench [--quick] [--rows a,b]).
`--schemes all` instead: every scheme's round against the reference's, in 11 minutes too.

Only ratios within one run, alternated (A B A B ...), mean something on a shared machine; the median is judged, the
spread stands beside it. Workload J: clients of 375 images 3 x 32 x 32, ResNet18 with latent 64; workload S:
ShuffleNetV2 x1.0, latent 32; batch 64, last short batch kept, Adam 1e-3. Two of ten clients are trained, because ratios
are per client. Training rows: one process, one thread, no local test on either side; ours includes the report and the
exact sum. Their seconds are the CPU's: a thread that never waits takes as long on a core of its own, whoever else is
there. A scheme's round is a client's, the second or a later one: every class known, its own state there, as many public
images as it trains on; and the server's combine of ten reports, divided by the ten clients it serves. Exit code 0:
everything was measured, whatever the verdicts; 1: something crashed; 2: wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from hkd_hpc import schemes
from hkd_hpc.common.command import Parser, exit_code, program_of, tell
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.settings import first_paragraph
from hkd_hpc.schemes.base import Scheme

from . import scaling
from .processes import LIMIT_S, BenchError, Child, finish, peak_until, start_mpi
from .scaling import NUMBERS_J
from .table import Line, heading, table
from .whole_round import TARGETS, whole_round

GIGA = 1e9
CLIENTS_PER_RANK = 5  # workload J on 2 client ranks
CLIENTS = 10  # of a federation
REFERENCE, OURS = schemes.REFERENCE, schemes.DEFAULT


@dataclass(frozen=True)
class Sizes:
    """How much is measured. A pair is one alternation; after `min_pairs` a row stops when its time is used up."""

    images: int = 375
    clients: int = CLIENTS  # of a whole round
    rounds: int = 3  # of a run, without its first and last
    epochs: int = 5
    floats: int = 11_219_594  # parameters and BatchNorm buffers of workload J
    averaged: int = NUMBERS_J
    few_ranks: int = 3
    many_ranks: int = 11
    min_pairs: int = 3
    max_pairs: int = 7
    row_s: float = 75.0
    few_repeats: int = 7
    many_repeats: int = 3
    start_pairs: int = 3
    round_pairs: int = 3
    train: tuple[str, ...] = ("fed.rounds=1", "train.epochs=1")


QUICK = Sizes(
    images=16,
    clients=2,
    rounds=1,
    epochs=2,
    floats=100_000,
    averaged=50_000,
    few_ranks=2,
    many_ranks=3,
    min_pairs=1,
    max_pairs=1,
    few_repeats=1,
    many_repeats=1,
    start_pairs=1,
    round_pairs=1,
    train=("fed.rounds=1", "train.epochs=1", "data.fraction=0.02"),
)


@dataclass(frozen=True)
class Run:
    """What was seen of a default run. `peak_bytes`: PSS of its ranks together; `copies`: data files they map."""

    first_step_s: float
    peak_bytes: int
    copies: int


@dataclass
class Bench:
    """What the rows share: the children of the workload that is being measured, and seconds that other rows need."""

    sizes: Sizes
    children: dict[str, tuple[Child, Child]] = field(default_factory=dict)
    workload_j_client_s: float | None = None
    runs: list[Run] = field(default_factory=list)

    def pair_of(self, workload: str) -> tuple[Child, Child]:
        """(ours, bare) for a workload, started on first use; those of the other workload end."""
        if workload not in self.children:
            self.close()
            arguments = workload, str(self.sizes.images)
            self.children[workload] = (
                Child(f"{__package__}.client_round", *arguments),
                Child(f"{__package__}.bare_loop", *arguments),
            )
        return self.children[workload]

    def close(self) -> None:
        for child in [child for pair in self.children.values() for child in pair]:
            child.close()
        self.children.clear()


def alternate(
    sizes: Sizes, measure_a: Callable[[int], float], measure_b: Callable[[int], float]
) -> tuple[list[float], list[float]]:
    """Seconds of A and of B, taken in turn: a(0), b(0), a(1), b(1), ..."""
    a_s: list[float] = []
    b_s: list[float] = []
    start_s = time.monotonic()
    while len(a_s) < sizes.min_pairs or (len(a_s) < sizes.max_pairs and time.monotonic() - start_s < sizes.row_s):
        a_s.append(measure_a(len(a_s)))
        b_s.append(measure_b(len(b_s)))
    return a_s, b_s


def ratios(a_s: Sequence[float], b_s: Sequence[float]) -> tuple[float, ...]:
    return tuple(a / b for a, b in zip(a_s, b_s))


# --- rows


def reference(bench: Bench, workload: str) -> list[Line]:
    """The reference scheme against the bare loop."""
    ours, bare = bench.pair_of(workload)
    for child in (bare, ours):
        child.ask(f"{REFERENCE} 0 1")  # warm up
    request = f"{REFERENCE} 0,1 1"
    ours_s, bare_s = alternate(bench.sizes, lambda i: ours.ask(request), lambda i: bare.ask(request))
    if workload == "J":
        bench.workload_j_client_s = median(ours_s) / 2
    memory = ours.peak_bytes() / GIGA, bare.peak_bytes() / GIGA
    return [
        Line(f"{REFERENCE} round, workload {workload}: ours / bare loop", ratios(ours_s, bare_s), TARGETS[workload]),
        Line(f"  a client's epoch, workload {workload}: ours", tuple(s / 2 for s in ours_s), unit="s"),
        Line(f"  a client's epoch, workload {workload}: bare loop", tuple(s / 2 for s in bare_s), unit="s"),
        Line(f"  peak memory of the process, workload {workload}: ours", memory[:1], unit="GB"),
        Line(f"  peak memory of the process, workload {workload}: bare loop", memory[1:], unit="GB"),
    ]


def scheme_round(bench: Bench, workload: str, scheme: str) -> list[Line]:
    """A scheme against the reference scheme: a client's round, and its share of the server's combine."""
    ours, _ = bench.pair_of(workload)
    for name in (scheme, REFERENCE):  # warm up: what clients and server keep from an earlier round is there
        ours.ask(f"{name} 0,1 1")
        ours.ask(f"{name} combine {CLIENTS}")
    server_s = []

    def round_s(name: str, i: int) -> float:
        combine_s = ours.ask(f"{name} combine {CLIENTS}")
        server_s.extend([combine_s] * (name == scheme))
        return ours.ask(f"{name} {i % 2} {bench.sizes.epochs}") + combine_s / CLIENTS

    scheme_s, reference_s = alternate(bench.sizes, partial(round_s, scheme), partial(round_s, REFERENCE))
    to_reach, paper = schemes.get(scheme).about.slowdown
    known = f" (paper {paper})" if paper and workload == "J" else ""
    title = f"round of 5 epochs, workload {workload}: {scheme} / {REFERENCE}{known}"
    lines = [Line(title, ratios(scheme_s, reference_s), to_reach)]
    if schemes.get(scheme).combine is not Scheme.combine:
        lines.append(
            Line(f"  {scheme}, workload {workload}: server's combine of {CLIENTS} reports", tuple(server_s), unit="s")
        )
    return lines


def augmented(bench: Bench, workload: str) -> list[Line]:
    """The reference scheme with crops and mirror images against itself without."""
    ours, _ = bench.pair_of(workload)
    plain, cropped = f"{REFERENCE} 0 1", f"{REFERENCE} 0 1 crop_flip"
    for request in (cropped, plain):
        ours.ask(request)  # warm up
    cropped_s, plain_s = alternate(bench.sizes, lambda i: ours.ask(cropped), lambda i: ours.ask(plain))
    return [
        Line(
            f"{REFERENCE} round, workload {workload}: with train.augment=crop_flip / none",
            ratios(cropped_s, plain_s),
            1.1,
        )
    ]


def exchange_s(ranks: int, floats: int, repeats: int) -> dict[str, list[float]]:
    """Seconds by way of tools.bench.exchange."""
    process = start_mpi(ranks, "-m", f"{__package__}.exchange", str(floats), str(repeats))
    return json.loads(next(line for line in finish(process).splitlines() if line.startswith("{")))


def exchange(bench: Bench, ranks: int, repeats: int, title: str) -> list[Line]:
    """The lines that any number of ranks has."""
    found = exchange_s(ranks, bench.sizes.floats, repeats)
    return [
        Line(f"exact exchange, {title}: / bare all-reduce of its bytes", ratios(found["exact"], found["bare"]), 1.6),
        Line(f"exact exchange, {title}: / pickled state dicts", ratios(found["exact"], found["pickled"]), 1.0),
        Line(f"  exact exchange, {title}", tuple(found["exact"]), unit="s"),
    ]


def exchange_2(bench: Bench) -> list[Line]:
    sizes = bench.sizes
    lines = exchange(bench, sizes.few_ranks, sizes.few_repeats, "2 client ranks")
    if bench.workload_j_client_s is None:
        reference(bench, "J")
    assert bench.workload_j_client_s is not None
    round_s = CLIENTS_PER_RANK * bench.workload_j_client_s
    found = exchange_s(sizes.few_ranks, sizes.averaged, sizes.few_repeats)
    share = tuple(100 * seconds / round_s for seconds in found["exact"])
    return [*lines, Line("exact exchange, 2 client ranks: share of a round of workload J", share, 1.0, "%")]


def exchange_11(bench: Bench) -> list[Line]:
    return exchange(bench, bench.sizes.many_ranks, bench.sizes.many_repeats, "11 ranks")


def import_torch(sizes: Sizes) -> float:
    """Seconds of `mpirun -n 11 python -c "import torch"`."""
    start_s = time.time()
    finish(start_mpi(sizes.many_ranks, "-c", "import torch"))
    return time.time() - start_s


def default_run(bench: Bench) -> Run:
    """One default run of a round, watched."""
    sizes = bench.sizes
    with tempfile.TemporaryDirectory() as folder:
        stamps = Path(folder, "stamps")
        stamps.touch()
        start_s = time.time()
        process = start_mpi(
            sizes.many_ranks,
            "-m",
            f"{__package__}.start_up",
            "--out",
            f"{folder}/run",
            *sizes.train,
            HKD_BENCH_STAMPS=str(stamps),
        )
        peak_bytes = peak_after_first_step(process, stamps)
        output = finish(process, limit_s=1.0)
        steps, files = ([value for _, value in read_stamps(stamps, event)] for event in ("step", "data"))
    if not steps or len(files) != sizes.many_ranks:
        raise BenchError(f"{len(steps)} ranks trained and {len(files)} mapped the shared data\n{output[-2000:]}")
    bench.runs.append(Run(min(map(float, steps)) - start_s, peak_bytes, len(set(files))))
    return bench.runs[-1]


def peak_after_first_step(process: subprocess.Popen, stamps: Path) -> int:
    """Largest PSS of all ranks together, in bytes, when the job has ended. Start-up is not disturbed by looking."""
    until_s = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < until_s and not read_stamps(stamps, "step"):
        time.sleep(0.05)
    pids = [int(pid) for pid, _ in read_stamps(stamps, "start")]
    return peak_until(lambda: process.poll() is not None or time.monotonic() > until_s, lambda: pids, every_s=0.25)


def read_stamps(stamps: Path, event: str) -> list[tuple[str, str]]:
    """(pid, value) of the lines of an event."""
    fields = [line.split() for line in stamps.read_text().splitlines()]
    return [(pid, value) for kind, pid, value in fields if kind == event]


def rounds_of_ranks(bench: Bench, workload: str) -> list[Line]:
    """The reference scheme under mpirun against the bare loop in as many processes."""
    return whole_round(bench.sizes, workload)


def startup(bench: Bench) -> list[Line]:
    pairs = [(default_run(bench).first_step_s, import_torch(bench.sizes)) for _ in range(bench.sizes.start_pairs)]
    ours_s, torch_s = zip(*pairs)
    return [
        Line("mpirun -n 11 to the first training step / import torch alone", ratios(ours_s, torch_s), 1.2),
        Line("  to the first training step", ours_s, unit="s"),
        Line("  import torch alone", torch_s, unit="s"),
    ]


def memory(bench: Bench) -> list[Line]:
    if not bench.runs:
        default_run(bench)
    copies, peaks = zip(*((run.copies, run.peak_bytes / GIGA) for run in bench.runs))
    return [
        Line("default run, 11 ranks: data files mapped (copies on the node)", copies, 1.0),
        Line("  peak memory (PSS) of its ranks together", peaks, unit="GB"),
    ]


def scheme_rows(names: list[str], workloads: str = "JS") -> dict:
    """Rows by name, one workload after the other."""
    return {
        f"{name}_{workload.lower()}": partial(scheme_round, workload=workload, scheme=name)
        for workload in workloads
        for name in names
    }


ROWS = {
    f"{REFERENCE}_j": partial(reference, workload="J"),
    **scheme_rows([OURS], "J"),
    "augmented_j": partial(augmented, workload="J"),
    f"{REFERENCE}_s": partial(reference, workload="S"),
    **scheme_rows([OURS], "S"),
    "round_j": partial(rounds_of_ranks, workload="J"),
    "round_s": partial(rounds_of_ranks, workload="S"),
    "exchange_2": exchange_2,
    "exchange_11": exchange_11,
    "startup": startup,
    "memory": memory,
}
ALONE = (
    "round_j",
    "round_s",
    "exchange_2",
    "exchange_11",
    "startup",
    "memory",
)  # no child of another row may run beside them


def measure(sizes: Sizes, rows: dict, lines: list[Line]) -> None:
    """Append the lines of these rows. BenchError when one of them crashes."""
    with contextlib.closing(Bench(sizes)) as bench:
        for name, row in rows.items():
            start_s = time.monotonic()
            if name in ALONE:
                bench.close()
            lines += row(bench)
            print(f"{name}: measured in {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)


def rows_named(text: str) -> dict:
    """The rows of a list "a,b"."""
    names = text.split(",")
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such row: {', '.join(unknown)}; known: {', '.join(ROWS)}")
    return {name: ROWS[name] for name in names}


def rows_of_schemes(text: str) -> dict:
    """The rows of a list of schemes "a,b", your own as module:Class; "all": every one but the reference."""
    names = [name for name in schemes.PAPER if name != REFERENCE] if text == "all" else text.split(",")
    try:
        for name in names:
            schemes.settings_of(name)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return scheme_rows(names)


def run_scaling(quick: bool) -> int:
    """The exit code."""
    try:
        scaling.measure_and_predict(scaling.QUICK if quick else scaling.Sizes())
    except BenchError as error:
        return tell([f"--scaling: not complete: {error}"], 1)
    return 0


@exit_code
def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog=program_of(__package__), description=first_paragraph(__doc__))
    parser.add_argument("--quick", action="store_true", help="a smoke test: tiny sizes, the numbers mean nothing")
    parser.add_argument("--rows", type=rows_named, help=f"of {','.join(ROWS)}; without --schemes all of them")
    parser.add_argument(
        "--scaling", action="store_true", help="instead: by ranks and bytes, with the cost model; 5 minutes"
    )
    parser.add_argument("--schemes", type=rows_of_schemes, help="all, or a list of schemes, against the reference")
    options = parser.parse_args(arguments)
    if options.scaling and (options.rows or options.schemes):
        raise UsageError("--scaling: is a bench of its own, without --rows and --schemes")
    if options.scaling:
        return run_scaling(options.quick)
    rows = {**(options.rows or {}), **(options.schemes or {})} or ROWS
    lines: list[Line] = []
    failure = None
    try:
        measure(QUICK if options.quick else Sizes(), rows, lines)
    except BenchError as error:
        failure = error
    print(heading(options.quick))
    print(table(lines), flush=True)  # after a failure too: what was measured before it took minutes
    return tell([f"the table is not complete: {failure}"], 1) if failure else 0
