"""What a launch is going to cost, before it costs anything: seconds, GPU hours, memory and disk of each cell. No torch.

Seconds of a round come, in this order, from
1. rounds that this study has run: the median of the same scheme and data, else of another scheme, by their speeds;
2. the reference, one H200, where GPUs are asked for and this machine has none;
3. a few timed FedAvg steps on this machine (jobs.probe), by the scheme's speed.
They are scaled by what the busiest worker trains in a round: clients x images x epochs. Bytes are of the real objects.
"""
from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from hkd_hpc import __version__, schemes, versions
from hkd_hpc.cohort import round_half_up
from hkd_hpc.config import Config
from hkd_hpc.data.partition import floor
from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.report import bytes_text, seconds_text
from hkd_hpc.store.atomic import replace_text
from hkd_hpc.store.tree import BadFile, load_tree
from jobs import probe
from jobs.options import Options
from jobs.sweep import Cell

# a round / FedAvg's, ResNet18, measured (README, Results); GPUs may differ
SLOWDOWN = {"fedavg": 1.0, "fedprox": 1.07, "moon": 1.11, "fedalign": 1.20, "fedgen": 1.01, "fedmd": 2.08,
            "fedproto": 1.04, "fedhkd_star": 1.04, "fedhkd": 1.04, "local": 1.0, "central": 1.0}
# FedHKD, preset cifar10 (10 clients x 375 images x 5 epochs, ResNet18), one H200, one rank: 3.0 to 4.1 s a round
REFERENCE_S, REFERENCE_IMAGES, REFERENCE_SCHEME = 3.5, 10 * 375 * 5, "fedhkd"
REFERENCE_TEXT = "from a measurement on one H200 (FedHKD, preset cifar10, one rank: 3.0 to 4.1 s a round), scaled"
PROBE_FILE = "probe.json"
SAVE_BYTES_PER_S = 1e8  # written, flushed, read back and hashed twice
HDF5 = 1.02  # a file / its arrays, measured on a ResNet18's checkpoint
FILE_BYTES = 60_000  # of an HDF5 file beside its arrays, and of log and settings: roughly
ROW_BYTES, CLIENT_ROW_BYTES = 500, 150  # of a round in metrics.h5, and of each client in it: roughly
GUESS_MARGIN = 0.5  # a time that was not measured in this study may be twice too long: no refusal on its account


# ---- the work of a cell


@dataclass(frozen=True)
class DataFacts:
    """Images of both splits, classes, and (channels, height, width) as networks see them."""

    train: int
    test: int
    classes: int
    shape: tuple[int, int, int] = (3, 32, 32)


OFFICIAL = {"cifar10": DataFacts(50_000, 10_000, 10), "cifar100": DataFacts(50_000, 10_000, 100),
            "svhn": DataFacts(73_257, 26_032, 10), "fmnist": DataFacts(5_000, 1_000, 10)}


@lru_cache
def data_facts(name: str, path: str, image_size: int | None) -> DataFacts | None:
    """From the heads of the files; None where they cannot be read, which others say."""
    try:
        if name == "folder":
            return _folder_facts(Path(path), image_size)
        return _file_facts(Path(path)) if name == "file" else OFFICIAL[name]
    except (OSError, KeyError, ValueError, UsageError):
        return None


def _file_facts(path: Path) -> DataFacts:
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            y_train, y_test = file["y_train"], file["y_test"]
            with file.zip.open("x_train.npy") as raw:
                version = np.lib.format.read_magic(raw)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape = read(raw)[0]
    else:
        import h5py

        with h5py.File(path, "r") as file:
            y_train, y_test, shape = file["y_train"][()], file["y_test"][()], file["x_train"].shape
    sides = shape[1:] if len(shape) == 3 else shape[2:] if shape[1] in (1, 3) else shape[1:3]
    return DataFacts(len(y_train), len(y_test), int(max(y_train.max(), y_test.max())) + 1,
                     (3, *(max(32, side) for side in sides)))


def _folder_facts(path: Path, image_size: int | None) -> DataFacts:
    from hkd_hpc.data.folder import read_image

    names = sorted(entry.name for entry in os.scandir(path / "train") if entry.is_dir())
    counts = [sum(len(os.listdir(path / split / name)) for name in names) for split in ("train", "test")]
    first = path / "train" / names[0]
    sides = (image_size,) * 2 if image_size else read_image(first / sorted(os.listdir(first))[0], None).shape[:2]
    return DataFacts(*counts, len(names), (3, *(max(32, side) for side in sides)))


@dataclass(frozen=True)
class Work:
    """What a cell does in a round. `images`: each client's training images; `tests`: those of its local test."""

    config: Config
    facts: DataFacts

    @cached_property
    def _pools(self) -> bool:
        return schemes.get(self.config.scheme.name).pools_data

    @property
    def clients(self) -> int:
        return 1 if self._pools else self.config.fed.clients

    @property
    def cohort(self) -> int:
        return max(1, round_half_up(self.config.fed.participation * self.clients))

    @property
    def images(self) -> int:
        dealt = self._dealt
        kept = dealt - floor(0.25 * dealt)
        return max(1, (kept - floor(self.config.data.val_fraction * kept)) * self._times)

    @property
    def tests(self) -> int:
        return floor(0.25 * self._dealt) * self._times

    @property
    def _dealt(self) -> int:
        return floor(self.config.data.fraction * self.facts.train / self.config.fed.clients)

    @property
    def _times(self) -> int:
        return self.config.fed.clients if self._pools else 1

    def trained(self, workers: int) -> int:
        """Images that the busiest of so many workers trains on in a round, each as often as it is used."""
        return math.ceil(self.cohort / workers) * self.images * self.config.train.epochs

    def tested(self, workers: int, ranks: int) -> float:
        """Images that it tests in a round; in one process the global test is no other rank's."""
        every = self.config.run.evaluate_every
        return math.ceil(self.cohort / workers) * self.tests + (self.facts.test / every if ranks == 1 else 0)


def workers_of(ranks: int, gpus: int) -> int:
    """Who trains at the same time: client ranks, or the GPUs that they share."""
    return max(1, min(ranks - 1, gpus) if gpus else ranks - 1)


def slowdown(scheme: str) -> float:
    """A round / FedAvg's: measured; of a scheme that was not, what it is to reach or the paper says; else 1."""
    if scheme in SLOWDOWN:
        return SLOWDOWN[scheme]
    return max((value for value in schemes.get(scheme).slowdown if value), default=1.0)


# ---- rounds of this study


@dataclass(frozen=True)
class Measured:
    """Seconds of one image in a round of a finished or running cell, everything that a round does included."""

    scheme: str
    data: tuple
    on_gpu: bool
    image_s: float
    rounds: int


def measured(root: Path, cells: Iterable[Cell]) -> list[Measured]:
    """What the cells of a study have shown so far."""
    return [found for cell in cells if (found := _measured(root / cell.name / "metrics.h5", cell))]


def _measured(path: Path, cell: Cell) -> Measured | None:
    config = cell.config()
    facts = facts_of(config)
    try:
        tree = load_tree(path, only=["rounds/wall_s", "rounds/seconds/evaluate_and_save", "world"])
    except BadFile:
        return None
    if facts is None or not len(tree["rounds"]["wall_s"]):
        return None
    ranks, places = int(tree["world"]["ranks"]), tree["world"]["plan"].partition("devices: ")[2].split("; ")
    gpus = sum("cpu" not in place for place in places)
    beside_s = tree["rounds"]["seconds"]["evaluate_and_save"] * (ranks == 1)
    trained = Work(config, facts).trained(workers_of(ranks, gpus))
    return Measured(config.scheme.name, data_key(config), gpus > 0,
                    float(np.median(tree["rounds"]["wall_s"] + beside_s)) / trained, len(tree["rounds"]["wall_s"]))


def facts_of(config: Config) -> DataFacts | None:
    return data_facts(config.data.name, config.data.path, config.data.image_size)


def data_key(config: Config) -> tuple:
    return config.data.name, os.path.basename(config.data.path), json.dumps(asdict(config.model), sort_keys=True)


def from_measured(found: list[Measured], scheme: str, key: tuple, on_gpu: bool) -> tuple[float, str] | None:
    """(seconds an image, where they come from)."""
    fitting = [m for m in found if m.data == key and m.on_gpu == on_gpu]
    same = [m for m in fitting if m.scheme == scheme]
    image_s = [m.image_s * (1 if same else slowdown(scheme) / slowdown(m.scheme)) for m in same or fitting]
    if not image_s:
        return None
    basis = "from rounds of this study" if same else "from rounds of another scheme in this study"
    return float(np.median(image_s)), basis


# ---- the probe


def kind_of(cell: Cell) -> str:
    """Cells that differ by their seeds alone are of one kind."""
    counted = {key: value for key, value in cell.settings.items()
               if key not in ("run.seed", "data.partition_seed", "data.dir")}
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16]


def ask_probe(root: Path, works: dict[str, tuple[Cell, Work]], device: str, timed: bool) -> dict:
    """The probe's answer for kinds of cells, as far as ROOT/probe.json does not have it."""
    request = {"threads": max(work.config.run.threads for _, work in works.values()), "device": device}
    machine = {**request, "host": platform.node(), "torch": versions.installed("torch"), "hkd_hpc": __version__}
    try:
        known = json.loads((root / PROBE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    if known.get("machine") != machine:
        known = {"machine": machine, "kinds": {}, "models": {}}
    described = {kind: _describe(cell, work) for kind, (cell, work) in works.items()}
    new = {kind: asked for kind, asked in described.items()
           if kind not in known["kinds"] or timed and asked["model"] not in known["models"]}
    if new:
        by_model = dict(sorted(new.items(), key=lambda item: item[1]["model"]))
        got = probe.ask({**request, "timed": timed, "kinds": by_model})
        known = {**got, "machine": machine, "kinds": known["kinds"] | got["kinds"],
                 "models": known["models"] | got["models"], "rss_bytes": max(got["rss_bytes"], known.get("rss_bytes", 0))}
    return known


def _describe(cell: Cell, work: Work) -> dict:
    facts, config = work.facts, work.config
    model = [asdict(config.model), facts.classes, facts.shape, min(config.train.batch_size, work.images)]
    return {"arguments": cell.arguments(), "classes": facts.classes, "shape": facts.shape, "images": facts.train,
            "own": work.images, "model": json.dumps(model, sort_keys=True)}


# ---- the forecast


@dataclass(frozen=True)
class Estimate:
    """Of one cell. memory_bytes: host memory of the node with rank 0; disk: at most while it runs, and when finished."""

    cell: Cell
    ranks: int
    round_s: float
    save_s: float
    wall_s: float
    gpu_hours: float
    memory_bytes: float
    running_bytes: float
    finished_bytes: float
    basis: str
    is_measured: bool


@dataclass
class Forecast:
    """Of the cells to start. `at_a_time`: how many run together. `problems`: a line for each reason to refuse."""

    root: Path
    executor: str
    options: Options
    at_a_time: int
    estimates: list[Estimate] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    probed: dict = field(default_factory=dict)

    @property
    def wall_s(self) -> float:
        """Of all cells: no shorter than the longest, nor than all of them dealt evenly."""
        walls_s = [estimate.wall_s for estimate in self.estimates]
        return max([sum(walls_s) / max(self.at_a_time, 1), *walls_s], default=0.0)

    @property
    def disk_bytes(self) -> float:
        """At most: those that run together at their largest, all others finished."""
        growth = sorted((e.running_bytes - e.finished_bytes for e in self.estimates), reverse=True)
        return self.finished_bytes + sum(growth[:self.at_a_time])

    @property
    def finished_bytes(self) -> float:
        return sum(estimate.finished_bytes for estimate in self.estimates)

    def remember(self) -> None:
        """Write what the probe found into the study's folder."""
        if self.probed:
            replace_text(self.root / PROBE_FILE, json.dumps(self.probed, indent=1))


def forecast(root: Path, todo: list[Cell], done: list[int], study: list[Cell], executor: str, options: Options,
             at_a_time: int) -> Forecast:
    """`done`: rounds that each cell of `todo` has behind it; `study`: all cells that may have been measured."""
    out = Forecast(root, executor, options, at_a_time)
    works = {cell.name: Work(config, facts) for cell in todo if (facts := facts_of(config := cell.config()))}
    if len(works) < len(todo):
        out.remarks.append(f"{len(todo) - len(works)} cells cannot be estimated before their data are there")
    if not works:
        return out
    gpus = gpus_of(executor, options)
    kinds = {kind_of(cell): (cell, works[cell.name]) for cell in todo if cell.name in works}
    cpu_only = all(work.config.run.device == "cpu" for work in works.values()) or (executor == "slurm" and not gpus)
    rounds = measured(root, study)
    timed = (has_gpu() or not gpus) and not all(
        from_measured(rounds, work.config.scheme.name, data_key(work.config), gpus > 0) for work in works.values())
    try:
        out.probed = ask_probe(root, kinds, "cpu" if cpu_only else "auto", timed)
    except UsageError as error:
        out.problems.append(str(error))
        return out
    except RunError as error:
        out.remarks.append(f"nothing can be estimated: {error}")
        return out
    if executor != "slurm":
        gpus = int(out.probed["device"] != "cpu")  # a GPU that this torch cannot use is none
    out.estimates = [estimate(cell, works[cell.name], left, out, rounds, gpus) for cell, left in zip(todo, done)
                     if cell.name in works]
    out.problems += [line for line in (no_room(out), *too_short(out), *too_little_memory(out)) if line]
    out.remarks += short_notice(out)
    return out


def gpus_of(executor: str, options: Options) -> int:
    """GPUs of a job; on this machine: 1 if it shows one."""
    if executor == "slurm":
        return options.nodes * options.gpus_of_node()
    return int(has_gpu())


def has_gpu() -> bool:
    """Whether this machine shows a GPU's device file, NVIDIA's or AMD's."""
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/kfd")


def estimate(cell: Cell, work: Work, done: int, out: Forecast, rounds: list[Measured], gpus: int) -> Estimate:
    config, options, sizes = work.config, out.options, out.probed["kinds"][kind_of(cell)]
    ranks = options.ranks_of(cell) if out.executor == "slurm" else 1
    gpus = 0 if config.run.device == "cpu" else gpus
    round_s, basis, is_measured = round_seconds(cell, work, ranks, gpus, out.probed, rounds)
    disk = disk_bytes(work, sizes, options.keep_state)
    save_s = disk["checkpoint"] / SAVE_BYTES_PER_S
    saves = 1 / config.run.checkpoint_every
    wall_s = out.probed["start_s"] + (config.fed.rounds - done) * (round_s + (0 if is_measured else saves * save_s))
    billed = options.nodes * options.gpus_of_node() if out.executor == "slurm" else gpus
    if options.pack:  # the cells of an allocation share it
        billed /= options.nodes * options.workers_per_node()
    return Estimate(cell, ranks, round_s, save_s, wall_s, billed * wall_s / 3600,
                    memory_bytes(work, sizes, ranks, options.nodes, gpus, out.probed["rss_bytes"]),
                    disk["running"], disk["finished"], basis, is_measured)


def round_seconds(cell: Cell, work: Work, ranks: int, gpus: int, probed: dict, rounds: list[Measured]
                  ) -> tuple[float, str, bool]:
    """(seconds of a round, where they come from, whether this study has measured them)."""
    scheme, workers = work.config.scheme.name, workers_of(ranks, gpus)
    trained = work.trained(workers)
    found = from_measured(rounds, scheme, data_key(work.config), gpus > 0)
    if found:
        return found[0] * trained, found[1], True
    times = probed["models"].get(_describe(cell, work)["model"])
    if times is None or (gpus and probed["device"] == "cpu"):
        relative = slowdown(scheme) / slowdown(REFERENCE_SCHEME)
        return REFERENCE_S * trained / REFERENCE_IMAGES * relative, REFERENCE_TEXT + _other_model(work), False
    tested = work.tested(workers, ranks)
    return (trained * times["train_s"] * slowdown(scheme) + tested * times["eval_s"],
            f"from FedAvg steps timed on this machine ({probed['device']}), scaled", False)


def _other_model(work: Work) -> str:
    model = work.config.model
    same = (model.name, model.stem, work.facts.shape) == ("resnet18", "imagenet", (3, 32, 32))
    return "" if same else f"; {model.name} taken to be as fast as its ResNet18"


def memory_bytes(work: Work, sizes: dict, ranks: int, nodes: int, gpus: int, rss_bytes: int) -> float:
    """Host memory of the node with rank 0: torch, model and activations of each rank as the probe had them, the images,
    and all clients' states, which rank 0 gathers to save them beside those that its node's clients hold."""
    image_bytes = math.prod(work.facts.shape)
    here, clients = math.ceil(ranks / nodes), math.ceil(work.clients / nodes)
    states = work.clients * state_bytes(work, sizes)
    held = 0 if gpus else clients * (work.images + work.tests) * image_bytes + states * clients / work.clients
    data = (work.facts.train + 2 * work.facts.test) * image_bytes
    return here * rss_bytes + data + held + 2 * states + 3 * sizes["flat_bytes"]


def state_bytes(work: Work, sizes: dict) -> int:
    """Of one client in the last checkpoint, which is the largest."""
    return sizes["state_bytes"] + sizes["flat_bytes"] * work.config.run.client_models


def disk_bytes(work: Work, sizes: dict, keep_state: bool) -> dict[str, float]:
    """checkpoint: the last; running: two and a temporary one; finished: final weights and metrics, or all of it."""
    rounds, clients = work.config.fed.rounds, work.clients
    rows = rounds * (ROW_BYTES + CLIENT_ROW_BYTES * clients)
    partition = 8 * clients * (work.images + work.tests) + 8 * clients * work.facts.classes
    metrics = FILE_BYTES + rows + partition
    usual = metrics + sizes["weights_bytes"] + 4 * sizes["message_bytes"] + clients * sizes["state_bytes"]
    last = usual + clients * sizes["flat_bytes"] * work.config.run.client_models
    finished = metrics + (usual * (rounds > 1) + last if keep_state else sizes["weights_bytes"] + FILE_BYTES)
    return {"checkpoint": last * HDF5, "running": (2 * metrics + 2 * usual + last) * HDF5, "finished": finished * HDF5}


# ---- what would be refused


def no_room(out: Forecast) -> str:
    place = next(path for path in (out.root, *out.root.parents) if path.exists())
    free_bytes = shutil.disk_usage(place).free
    if out.disk_bytes <= free_bytes:
        return ""
    means = ["name a folder on a larger disk"]
    option = {"slurm": "--array-parallelism", "local": "--parallel"}.get(out.executor)
    means += [f"{option} N for fewer cells at a time"] * (option is not None and out.at_a_time > 1)
    means += ["run.client_models=false"] * any(e.cell.config().run.client_models for e in out.estimates)
    return (f"--root {out.root}: {bytes_text(free_bytes)} are free there and {bytes_text(out.disk_bytes)} are needed "
            f"({bytes_text(out.finished_bytes)} when all is finished); {', or '.join(means)}")


def too_short(out: Forecast) -> list[str]:
    """The time limit against a round and its save, as far as that is known."""
    if out.executor != "slurm" or not out.estimates:
        return []
    needs = lambda e: (out.probed["start_s"] + e.round_s + e.save_s) * (1 if e.is_measured else GUESS_MARGIN)  # noqa: E731
    worst = max(out.estimates, key=needs)
    if needs(worst) <= out.options.time_min * 60:
        return []
    return [f"time_min={out.options.time_min}: a round of {worst.cell.name} takes about {seconds_text(worst.round_s)} and "
            f"its save {seconds_text(worst.save_s)} ({worst.basis}); --time-min "
            f"{math.ceil((2 * (worst.round_s + worst.save_s) + out.options.signal_delay_s) / 60)} leaves enough"]


def too_little_memory(out: Forecast) -> list[str]:
    if out.options.mem_gb is None or out.executor != "slurm" or not out.estimates:
        return []
    worst = max(out.estimates, key=lambda e: e.memory_bytes)
    if out.options.pack:
        return []  # how much its neighbours on the node need depends on which these are
    if worst.memory_bytes <= out.options.mem_gb * 2**30:
        return []
    return [f"mem_gb={out.options.mem_gb:g}: {worst.cell.name} needs about {bytes_text(worst.memory_bytes)} on its first "
            f"node ({worst.ranks} rank(s) in all); --mem-gb {math.ceil(1.2 * worst.memory_bytes / 2**30)}"]


def short_notice(out: Forecast) -> list[str]:
    if out.executor != "slurm" or not out.estimates:
        return []
    longest = max(out.estimates, key=lambda e: e.round_s + e.save_s)
    need_s = longest.round_s + longest.save_s
    if need_s <= out.options.signal_delay_s:
        return []
    return [f"a round and its save take up to {seconds_text(need_s)}, longer than the notice before the time limit: "
            f"that round is repeated after a requeue; --signal-delay-s {math.ceil(1.5 * need_s)} saves it"]


# ---- in words


def lines(out: Forecast, most: int = 40) -> list[str]:
    """A table of the cells, or of scheme, data and clients where they are many; sums; where the numbers come from."""
    if not out.estimates:
        return out.remarks
    hours = sum(e.gpu_hours for e in out.estimates)
    hours = f"{hours:.3g} GPU hours, " if hours else ""
    peak = f"disk {bytes_text(out.disk_bytes)} at most, {bytes_text(out.finished_bytes)} when finished"
    free = shutil.disk_usage(next(path for path in (out.root, *out.root.parents) if path.exists())).free
    return [*rows(out, most),
            f"in all about {hours}{seconds_text(out.wall_s)} with {out.at_a_time} at a time; {peak} "
            f"({bytes_text(free)} free there; a quota cannot be seen from here)",
            *(f"seconds of {count} cells: {basis}" for basis, count in Counter(e.basis for e in out.estimates).items()),
            "bytes: of the real model and scheme; memory: host memory of a cell's first node, as a probe here had it"
            + ", without what a GPU's libraries take" * (not out.probed["models"]), *out.remarks]


def rows(out: Forecast, most: int) -> list[str]:
    name: Callable[[Estimate], tuple] = lambda e: (e.cell.name,)  # noqa: E731
    head: tuple[str, ...] = ("cell",)
    if len(out.estimates) > most:
        name, head = (lambda e: tuple(str(e.cell.settings[key]) for key in ("scheme.name", "data.name", "fed.clients"))
                      ), ("scheme", "data", "clients")  # noqa: E731
    groups: dict[tuple, list[Estimate]] = {}
    for each in out.estimates:
        groups.setdefault((*name(each), each.ranks), []).append(each)
    table = [(*head, "ranks", "cells", "round", "a cell", "GPU h", "memory", "disk, running", "finished")]
    for key, group in groups.items():
        longest, largest = max(group, key=lambda e: e.wall_s), max(group, key=lambda e: e.running_bytes)
        table.append((*map(str, key), str(len(group)), seconds_text(longest.round_s), seconds_text(longest.wall_s),
                      f"{sum(e.gpu_hours for e in group):.3g}", bytes_text(max(e.memory_bytes for e in group)),
                      bytes_text(largest.running_bytes), bytes_text(largest.finished_bytes)))
    if not any(each.gpu_hours for each in out.estimates):
        table = [row[:-4] + row[-3:] for row in table]
    widths = [max(map(len, column)) for column in zip(*table)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in table]
