"""Speed on one GPU (bench.gpu [--data FILE.npz] [--minutes M]), within about 12 minutes.

The trial is that of `--preset cifar10`: 10 clients of 375 images, ResNet18, 5 local epochs, 50 rounds, with test and
checkpoint in each; random images of CIFAR10's shape, or those in FILE. A few of its rounds are run in this process, and
50 times their median stands for the trial: extrapolated. The first two are left out: in these libraries wake and graphs
are recorded. Rows: FedAvg and FedHKD as usual, with graphs, and with graphs and as many concurrent clients as were
fastest with FedAvg; those in TF32 and bfloat16; every scheme on ResNet18 and ShuffleNetV2; and plain PyTorch that
trains the same clients one after the other, with no test. A row that fails says why; what there was no time for is
said so.

--quick --device cpu: tiny, to see that it runs; its numbers mean nothing. Exit code 2: no GPU, or wrong arguments.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from hkd_hpc import assemble, rounds, run, schemes
from hkd_hpc import config as config_module
from hkd_hpc.comm.control.base import NullControl
from hkd_hpc.comm.transports.base import RankInfo
from hkd_hpc.comm.transports.local import LocalComm
from hkd_hpc.common.command import Parser, exit_code
from hkd_hpc.common.errors import UsageError
from hkd_hpc.common.settings import first_paragraph
from hkd_hpc.config.command_line import ResumeOptions
from hkd_hpc.runtime.machine import header
from hkd_hpc.runtime.paths import path_argument
from hkd_hpc.store.folder import RunFolder

from . import bare_loop
from .table import number

WARM_UP = 2  # rounds
TRIAL_ROUNDS = 50
CLIENT_FACTORS = 1 + 2 + 5  # the trials of 10, 20 and 50 clients, in trials of 10
REFERENCE, OURS = schemes.REFERENCE, schemes.DEFAULT
MODELS = {"resnet18": 2, "shufflenet_v2": 1}  # and the data sets of the paper's Table 1 with each
LATENT = {"resnet18": 64, "shufflenet_v2": 32, "small": 8}
USUAL = ("run.graphs=off", "run.lanes=1")


@dataclass(frozen=True)
class Sizes:
    """`row_s`: a row ends with the measured round in which it has taken so long."""

    train: int = 50_000
    test: int = 10_000
    own: int = 375
    max_rounds: int = 5
    row_s: float = 30.0
    lanes: tuple[int, ...] = (1, 2, 5, 10)
    schemes: tuple[str, ...] = tuple(schemes.PAPER)
    settings: tuple[str, ...] = ()
    model: str | None = None  # None: the one that the row says


QUICK = Sizes(
    120,
    20,
    8,
    1,
    0.0,
    (1, 2),
    ("fedavg", "fedmd"),
    ("fed.clients=2", "train.epochs=1", "data.fraction=0.2", "train.batch_size=4"),
    "small",
)


class Bench:
    """Measures rows, prints each at once, and remembers the seconds of a round: None where there are none."""

    def __init__(self, sizes: Sizes, device: torch.device, data: Path, folder: Path, end_s: float):
        self.sizes, self.device, self.data, self.folder, self.end_s = sizes, device, data, folder, end_s
        self.bare_s: float | None = None

    def settings(self, scheme: str, model: str, more: tuple[str, ...]) -> config_module.Config:
        model = self.sizes.model or model
        return config_module.resolve(
            ("cifar10",),
            None,
            (
                "data.name=file",
                f"data.path={self.data}",
                f"scheme.name={scheme}",
                f"model.name={model}",
                f"model.latent={LATENT[model]}",
                f"run.device={self.device.type}",
                *self.sizes.settings,
                *more,
            ),
        )

    def trial(self, scheme: str, model: str, *more: str) -> float | None:
        """Seconds of a round, None where there was no time or it failed."""
        return self.row(f"{scheme} {model} {' '.join(more)}", lambda: self.play(self.settings(scheme, model, more)))

    def bare_row(self, model: str) -> None:
        """What the rows of this model are divided by."""
        self.bare_s = None
        self.bare_s = self.row(f"plain PyTorch, {model}, no test", lambda: self.bare(model))

    def row(self, title: str, measure: Callable[[], list[float]]) -> float | None:
        """One line: the median of what `measure` gives, and what it means for a trial."""
        try:
            seconds = measure() if time.monotonic() < self.end_s else None
        except Exception as error:  # one row that fails must not cost the others
            print(f"{title:78s} failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
            return None
        if seconds is None:
            print(f"{title:78s} not measured: no time left", flush=True)
            return None
        round_s = median(seconds)
        numbers = number(round_s), number(TRIAL_ROUNDS * round_s), number(round_s / self.bare_s) if self.bare_s else "-"
        print(f"{title:78s} {' '.join(f'{text:>8s}' for text in numbers)}  {len(seconds)} rounds", flush=True)
        return round_s

    def play(self, config: config_module.Config) -> list[float]:
        """Seconds of the rounds of a run of one process, after the first two."""
        gc.collect()  # the row before must not hold memory
        assemble.set_up_torch(config, self.device)
        comm = LocalComm(NullControl(), RankInfo(0, ["here"], 0, 1, self.device, "one process"))
        with tempfile.TemporaryDirectory(dir=self.folder) as name, contextlib.redirect_stdout(io.StringIO()):
            folder = RunFolder(Path(name))
            folder.create()
            part = assemble.build(config, comm, folder)
            run.start(part, ResumeOptions())
            seconds: list[float] = []
            start_s = time.monotonic()
            while len(seconds) < WARM_UP + self.sizes.max_rounds and (
                len(seconds) <= WARM_UP or time.monotonic() - start_s < self.sizes.row_s
            ):
                seconds.append(self.timed(lambda: rounds.one_round(part, len(seconds) + 1)))
        return seconds[WARM_UP:]

    def bare(self, model: str) -> list[float]:
        """Seconds of a round in plain PyTorch."""
        config = self.settings(REFERENCE, model, ())
        assemble.set_up_torch(config, self.device)  # fp32 as ours: of itself torch computes convolutions in TF32
        net = bare_loop.build("J" if model == "resnet18" else "S").to(self.device)
        clients = [
            (x.to(self.device), y.to(self.device))
            for x, y in (bare_loop.make_images(client, self.sizes.own) for client in range(config.fed.clients))
        ]
        bare_loop.train(net, *clients[0], 1)  # the libraries wake

        def train_all() -> None:
            for x, y in clients:
                bare_loop.train(net, x, y, config.train.epochs)

        return [self.timed(train_all) for _ in range(min(3, self.sizes.max_rounds))]

    def timed(self, work: Callable[[], object]) -> float:
        start_s = time.perf_counter()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start_s


def all_rows(bench: Bench) -> None:
    bench.bare_row("resnet18")
    bench.trial(REFERENCE, "resnet18", *USUAL)
    by_concurrent = {
        lanes: bench.trial(REFERENCE, "resnet18", "run.graphs=on", f"run.lanes={lanes}") for lanes in bench.sizes.lanes
    }
    measured = {lanes: seconds for lanes, seconds in by_concurrent.items() if seconds is not None}
    best = ("run.graphs=on", f"run.lanes={min(measured, key=lambda lanes: measured[lanes]) if measured else 1}")
    for more in (USUAL, ("run.graphs=on", "run.lanes=1")):
        bench.trial(OURS, "resnet18", *more)
    bench.trial(REFERENCE, "resnet18", *best, "model.convolution=library")
    for precision in ("tf32", "bf16"):
        for scheme in (REFERENCE, OURS):
            bench.trial(scheme, "resnet18", *best, f"train.precision={precision}")
    print(f"every scheme, with {' '.join(best)}:", flush=True)
    total_s = 0.0
    for model, data_sets in MODELS.items():
        if model != "resnet18":
            bench.bare_row(model)
        for scheme in bench.sizes.schemes:
            round_s = bench.trial(scheme, model, *best)
            total_s += data_sets * CLIENT_FACTORS * TRIAL_ROUNDS * (float("nan") if round_s is None else round_s)
    hours = f"{number(total_s / 3600)} GPU hours" if total_s == total_s else "unknown, since rows are missing"
    trials = 3 * sum(MODELS.values()) * len(bench.sizes.schemes)
    print(
        f"all {trials} trials of the paper's Table 1, one seed, a round as long as it has clients (extrapolated): "
        f"{hours}",
        flush=True,
    )


def write_images(path: Path, sizes: Sizes) -> None:
    """Random images, for what they show makes no difference to the time."""
    random = np.random.default_rng(0)
    draw = lambda count: random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
    labels = lambda count: np.arange(count) % 10
    train, test = sizes.train, sizes.test
    np.savez(path, x_train=draw(train), y_train=labels(train), x_test=draw(test), y_test=labels(test))


def device_line(device: torch.device) -> str:
    if device.type == "cpu":
        return "device: cpu"
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"device: {torch.cuda.get_device_name()}, {runtime}"


@exit_code
def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog=f"python -m {__package__}.gpu", description=first_paragraph(__doc__))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: to see that it runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cuda is ROCm too")
    parser.add_argument(
        "--data", type=path_argument, help="an .npz with x_train y_train x_test y_test instead of random images"
    )
    parser.add_argument("--minutes", type=float, default=12.0, help="no row begins in the last one (12)")
    options = parser.parse_args(arguments)
    if not 1 < options.minutes < 10_000:
        raise UsageError(f"--minutes {options.minutes:g}: must be above 1, of which the last begins no row")
    if options.data and not options.data.is_file():
        raise UsageError(f"--data {options.data}: no such file")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no GPU: torch.cuda.is_available() is false; --quick --device cpu shows that it runs")
    if options.device == "cpu" and not options.quick:
        raise UsageError("--device cpu: only with --quick")
    sizes, end_s = QUICK if options.quick else Sizes(), time.monotonic() + 60 * (options.minutes - 1)
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    print(
        f"{header()}\n{device_line(device)}\n{'':78s} {'round s':>8s} {'trial s':>8s} {'/ bare':>8s}\n"
        f"{'':78s} {'':>8s} extrapolated to {TRIAL_ROUNDS} rounds",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder, "data.npz")
        if not options.data:
            write_images(data, sizes)
        all_rows(Bench(sizes, device, data, Path(folder), end_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
