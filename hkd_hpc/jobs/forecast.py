"""What a launch is going to cost, before it costs anything: seconds, GPU hours, memory and disk of each cell. No torch.

Seconds of a round come, in this order, from
1. rounds that this study has run: the median of the same scheme and data, else of another scheme, by their speeds;
2. the reference, one H200, where GPUs are asked for and this machine has none;
3. a few timed FedAvg steps on this machine (jobs.probe), by the scheme's speed.
They are scaled by what the busiest worker trains in a round: clients x images x epochs. What 2 and 3 do not know,
stragglers and the exchange between several ranks, is the cost model's (jobs.cost). Bytes are of the real objects.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hkd_hpc import __version__
from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.jobs import cost, probe, verdict
from hkd_hpc.jobs.options import Options
from hkd_hpc.jobs.sweep import Cell
from hkd_hpc.jobs.work import Measured, Work, data_key, facts_of, from_measured, measured, slowdown, workers_of
from hkd_hpc.runtime import versions
from hkd_hpc.store.atomic import replace_text

# FedHKD, preset cifar10 (10 clients x 375 images x 5 epochs, ResNet18), one H200, one rank: 3.0 to 4.1 s a round
REFERENCE_S, REFERENCE_IMAGES, REFERENCE_SCHEME = 3.5, 10 * 375 * 5, "fedhkd"
REFERENCE_TEXT = "from a measurement on one H200 (FedHKD, preset cifar10, one rank: 3.0 to 4.1 s a round), scaled"
PROBE_FILE = "probe.json"
SAVE_BYTES_PER_S = 1e8  # written, flushed, read back and hashed twice
HDF5 = 1.02  # a file / its arrays, measured on a ResNet18's checkpoint
FILE_BYTES = 60_000  # of an HDF5 file beside its arrays, and of log and settings: roughly
ROW_BYTES, CLIENT_ROW_BYTES = 500, 150  # of a round in metrics.h5, and of each client in it: roughly
HEAD_BYTES = 9_000  # of a round in a file that grows (store/head.py), until it is made anew at the latest half way


# ---- the probe


def kind_of(cell: Cell) -> str:
    """Cells that differ by their seeds alone are of one kind."""
    counted = {
        key: value for key, value in cell.settings.items() if key not in ("run.seed", "data.partition_seed", "data.dir")
    }
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16]


def ask_probe(root: Path, works: dict[str, tuple[Cell, Work]], device: str, timed: bool) -> dict:
    """The probe's answer for kinds of cells, as far as ROOT/probe.json does not have it."""
    request = {"threads": max(work.config.run.threads for _, work in works.values()), "device": device}
    machine = {**request, "host": platform.node(), "torch": versions.installed("torch"), "hkd_hpc": __version__}
    try:
        known = json.loads((root / PROBE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    if not isinstance(known, dict) or known.get("machine") != machine:
        known = {"machine": machine, "kinds": {}, "models": {}}
    described = {kind: _describe(cell, work) for kind, (cell, work) in works.items()}
    new = {
        kind: asked
        for kind, asked in described.items()
        if kind not in known["kinds"] or (timed and asked["model"] not in known["models"])
    }
    if new:
        by_model = dict(sorted(new.items(), key=lambda item: item[1]["model"]))
        got = probe.ask({**request, "timed": timed, "kinds": by_model})
        known = {
            **got,
            "machine": machine,
            "kinds": known["kinds"] | got["kinds"],
            "models": known["models"] | got["models"],
            "rss_bytes": max(got["rss_bytes"], known.get("rss_bytes", 0)),
        }
    return known


def _describe(cell: Cell, work: Work) -> dict:
    facts, config = work.facts, work.config
    model = [asdict(config.model), facts.classes, facts.shape, min(config.train.batch_size, work.images)]
    return {
        "arguments": cell.arguments(),
        "classes": facts.classes,
        "shape": facts.shape,
        "images": facts.train,
        "own": work.images,
        "model": json.dumps(model, sort_keys=True),
    }


# ---- the forecast


@dataclass(frozen=True)
class Estimate:
    """Of one cell. memory_bytes: host memory of the node with rank 0; disk: at most while it runs, and when
    finished.
    """

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
        return self.finished_bytes + sum(growth[: self.at_a_time])

    @property
    def finished_bytes(self) -> float:
        return sum(estimate.finished_bytes for estimate in self.estimates)

    def remember(self) -> None:
        """Write what the probe found into the study's folder."""
        if self.probed:
            replace_text(self.root / PROBE_FILE, json.dumps(self.probed, indent=1))


def forecast(
    root: Path, todo: list[Cell], done: list[int], study: list[Cell], executor: str, options: Options, at_a_time: int
) -> Forecast:
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
        from_measured(rounds, work.config.scheme.name, data_key(work.config), gpus > 0) for work in works.values()
    )
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
    out.estimates = [
        estimate(cell, works[cell.name], left, out, rounds, gpus)
        for cell, left in zip(todo, done)
        if cell.name in works
    ]
    out.problems += verdict.problems(out)
    out.remarks += verdict.remarks(out)
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
    save_s, each_s = disk["checkpoint"] / SAVE_BYTES_PER_S, round_s
    if not is_measured:
        server_s = disk["usual"] / SAVE_BYTES_PER_S / config.run.checkpoint_every
        found = cost_of(work, sizes, ranks, workers_of(ranks, gpus), round_s, server_s)
        round_s, each_s = found.without_server_s, found.round_s
        basis += f"; between ranks: {cost.CLUSTER_TEXT}" * (ranks > 1)
    wall_s = out.probed["start_s"] + (config.fed.rounds - done) * each_s + save_s
    billed = options.nodes * options.gpus_of_node() if out.executor == "slurm" else gpus
    if options.pack:  # the cells of an allocation share it
        billed /= options.nodes * options.workers_per_node()
    return Estimate(
        cell,
        ranks,
        round_s,
        save_s,
        wall_s,
        billed * wall_s / 3600,
        memory_bytes(work, sizes, ranks, options.nodes, gpus, out.probed["rss_bytes"]),
        disk["running"],
        disk["finished"],
        basis,
        is_measured,
    )


def round_seconds(
    cell: Cell, work: Work, ranks: int, gpus: int, probed: dict, rounds: list[Measured]
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
    return (
        trained * times["train_s"] * slowdown(scheme) + tested * times["eval_s"],
        f"from FedAvg steps timed on this machine ({probed['device']}), scaled",
        False,
    )


def cost_of(work: Work, sizes: dict, ranks: int, workers: int, busiest_s: float, server_s: float) -> cost.Cost:
    """A round by the cost model: `busiest_s` is what the busiest worker's clients take, `server_s` what rank 0 does
    beside.
    """
    load = cost.Load(
        work.cohort,
        work.images * work.config.train.epochs,
        sizes["flat_bytes"] // 4,
        sizes["report_bytes"],
        sizes["message_bytes"],
        server_s,
    )
    return cost.round_cost(load, ranks, workers, busiest_s / work.trained(workers), cost.CLUSTER)


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
    """usual: a checkpoint but the last; checkpoint: the last; running: two and a temporary one, both files of rows and
    one that is made anew; finished: final weights and metrics, or all of it."""
    rounds, clients = work.config.fed.rounds, work.clients
    rows = rounds * (ROW_BYTES + CLIENT_ROW_BYTES * clients)
    partition = 8 * clients * (work.images + work.tests) + 8 * clients * work.facts.classes
    metrics = FILE_BYTES + rows + partition
    growing = metrics + HEAD_BYTES * rounds / 2
    usual = (
        FILE_BYTES + partition + sizes["weights_bytes"] + 4 * sizes["message_bytes"] + clients * sizes["state_bytes"]
    )
    last = usual + rows + clients * sizes["flat_bytes"] * work.config.run.client_models
    finished = metrics + (usual * (rounds > 1) + last if keep_state else sizes["weights_bytes"] + FILE_BYTES)
    return {
        "usual": usual * HDF5,
        "checkpoint": last * HDF5,
        "running": (2 * growing + metrics + 2 * usual + last) * HDF5,
        "finished": finished * HDF5,
    }
