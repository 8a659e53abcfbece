"""What a launch will cost, before it costs anything: seconds, GPU hours, memory and disk of each trial. No torch.

Seconds of a round come, in this order, from
1. rounds that this study has run: the median of the same scheme and data, else of another scheme, by their speeds;
2. the reference, one H200, where GPUs are asked for and this machine has none;
3. a few timed FedAvg steps on this machine (hkd_hpc.jobs.probe), by the scheme's speed.
They are scaled by what the busiest worker trains in a round: clients x images x epochs. What 2 and 3 do not know,
stragglers and the exchange between several ranks, is the cost model's (jobs.cost). Bytes are of the real objects.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.jobs import cost, probe, verdict
from hkd_hpc.jobs.estimate import PROBE_FILE, Estimate, Forecast, StoredProbe
from hkd_hpc.jobs.footprint import disk_bytes, memory_bytes
from hkd_hpc.jobs.options import Options
from hkd_hpc.jobs.probe import Kind, SchemeSizes
from hkd_hpc.jobs.sweep import Trial
from hkd_hpc.jobs.work import Measured, Work, data_key, data_sizes, from_measured, measured, slowdown, workers_of
from hkd_hpc.runtime import revision, versions

# a round that was measured: preset cifar10 (10 clients x 375 images x 5 epochs), one H200, one rank: 3.0 to 4.1 s
REFERENCE_S, REFERENCE_IMAGES, REFERENCE_SCHEME = 3.5, 10 * 375 * 5, "fedhkd"
REFERENCE_MODEL = ("resnet18", "imagenet", (3, 32, 32))  # its name, its stem, the images' shape
REFERENCE_TEXT = "from a measurement on one H200 (FedHKD, preset cifar10, one rank: 3.0 to 4.1 s a round), scaled"
SAVE_BYTES_PER_S = 1e8  # written, flushed, read back and hashed twice


# ---- the probe


def kind_of(trial: Trial) -> str:
    """Trials that differ by their seeds alone are of one kind."""
    counted = {
        key: value
        for key, value in trial.settings.items()
        if key not in ("run.seed", "data.partition_seed", "data.dir")
    }
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:16]


def ask_probe(root: Path, works: dict[str, tuple[Trial, Work]], device: str, timed: bool) -> StoredProbe:
    """The probe's answer for kinds of trials, as far as ROOT/probe.json does not have it."""
    threads = max(work.config.run.threads for _, work in works.values())
    machine = machine_here(threads, device)
    known = read_probed(root, machine)
    kinds = {name: _describe(trial, work) for name, (trial, work) in works.items()}
    if known:
        kinds = {name: kind for name, kind in kinds.items() if _is_new(name, kind, known, timed)}
    if known and not kinds:
        return known
    by_model = dict(sorted(kinds.items(), key=lambda item: item[1]["model"]))
    found = probe.ask({"begun": time.time(), "threads": threads, "device": device, "timed": timed, "kinds": by_model})
    return {
        **found,
        "machine": machine,
        "kinds": (known["kinds"] if known else {}) | found["kinds"],
        "models": (known["models"] if known else {}) | found["models"],
        "rss_bytes": max(found["rss_bytes"], known["rss_bytes"] if known else 0),
    }


def machine_here(threads: int, device: str) -> dict[str, Any]:
    """What the probe's answer holds for."""
    here = {"host": platform.node(), "torch": versions.installed("torch"), "hkd_hpc": revision.package_sha256()}
    return {"threads": threads, "device": device, **here}


def read_probed(root: Path, machine: dict[str, Any]) -> StoredProbe | None:
    """What is known of this machine; None where nothing is."""
    try:
        known = json.loads((root / PROBE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_of_this_machine = isinstance(known, dict) and known.get("machine") == machine
    return known if is_of_this_machine else None


def _is_new(name: str, kind: Kind, known: StoredProbe, timed: bool) -> bool:
    return name not in known["kinds"] or (timed and kind["model"] not in known["models"])


def _describe(trial: Trial, work: Work) -> Kind:
    sizes, config = work.sizes, work.config
    batch = min(config.train.batch_size, work.images)
    model = [asdict(config.model), sizes.classes, sizes.shape, sizes.dtype, batch, config.train.precision]
    return {
        "arguments": trial.arguments(),
        "classes": sizes.classes,
        "shape": sizes.shape,
        "dtype": sizes.dtype,
        "images": sizes.train,
        "own": work.images,
        "model": json.dumps(model, sort_keys=True),
    }


# ---- the forecast


def forecast(
    root: Path, todo: list[Trial], done: list[int], study: list[Trial], executor: str, options: Options, at_a_time: int
) -> Forecast:
    """`done`: rounds that each trial of `todo` has behind it; `study`: all trials that may have been measured."""
    out = Forecast(root, executor, options, at_a_time)
    works = {trial.name: Work(config, sizes) for trial in todo if (sizes := data_sizes(config := trial.config()))}
    if len(works) < len(todo):
        out.remarks.append(f"{len(todo) - len(works)} trials cannot be estimated before their data are there")
    if not works:
        return out
    known = [(trial, works[trial.name], rounds) for trial, rounds in zip(todo, done) if trial.name in works]
    rounds, gpus = measured(root, study), gpus_of(executor, options)
    try:
        out.probed = probed = _probe_for(known, rounds, gpus, executor, root)
    except UsageError as error:
        out.problems.append(str(error))
        return out
    except RunError as error:
        out.remarks.append(f"nothing can be estimated: {error}")
        return out
    if executor != "slurm":
        gpus = int(probed["device"] != "cpu")  # a GPU that this torch cannot use is none
    out.estimates = [estimate(*each, out, probed, rounds, gpus) for each in known]
    out.problems += verdict.problems(out)
    out.remarks += verdict.remarks(out)
    return out


def _probe_for(
    known: list[tuple[Trial, Work, int]], rounds: list[Measured], gpus: int, executor: str, root: Path
) -> StoredProbe:
    """Steps are timed only where rounds of the study do not tell, and on the device that the trials would have."""
    works = [work for _, work, _ in known]
    cpu_only = all(work.config.run.device == "cpu" for work in works) or (executor == "slurm" and not gpus)
    timed = (has_gpu() or not gpus) and not all(
        from_measured(rounds, work.config.scheme.name, data_key(work.config), gpus > 0) for work in works
    )
    kinds = {kind_of(trial): (trial, work) for trial, work, _ in known}
    return ask_probe(root, kinds, "cpu" if cpu_only else "auto", timed)


def gpus_of(executor: str, options: Options) -> int:
    """GPUs of a job; on this machine: 1 if it shows one."""
    if executor == "slurm":
        return options.nodes * options.gpus_of_node()
    return int(has_gpu())


def has_gpu() -> bool:
    """Whether this machine shows a GPU's device file, NVIDIA's or AMD's."""
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/kfd")


def estimate(
    trial: Trial, work: Work, done: int, out: Forecast, probed: StoredProbe, rounds: list[Measured], gpus: int
) -> Estimate:
    config, options, sizes = work.config, out.options, probed["kinds"][kind_of(trial)]
    ranks = options.ranks_of(trial) if out.executor == "slurm" else 1
    gpus = 0 if config.run.device == "cpu" else gpus
    round_s, basis, is_measured = round_seconds(trial, work, ranks, gpus, probed, rounds)
    disk = disk_bytes(work, sizes, options.keep_state)
    save_s, each_s = disk.last / SAVE_BYTES_PER_S, round_s
    if not is_measured:
        server_s = disk.usual / SAVE_BYTES_PER_S / config.run.checkpoint_every
        found = cost_of(work, sizes, ranks, workers_of(ranks, gpus), round_s, server_s)
        round_s, each_s = found.without_server_s, found.round_s
        basis += f"; between ranks: {cost.CLUSTER_TEXT}" * (ranks > 1)
    wall_s = probed["start_s"] + (config.fed.rounds - done) * each_s + save_s
    return Estimate(
        trial=trial,
        ranks=ranks,
        round_s=round_s,
        save_s=save_s,
        wall_s=wall_s,
        gpu_hours=billed_gpus(options, out.executor, gpus) * wall_s / 3600,
        memory_bytes=memory_bytes(work, sizes, ranks, options.nodes, gpus, probed["rss_bytes"]),
        running_bytes=disk.running,
        finished_bytes=disk.finished,
        basis=basis,
        is_measured=is_measured,
    )


def billed_gpus(options: Options, executor: str, gpus: int) -> float:
    """GPUs that a trial is billed for: those of its job, of which it has a share in a packed one."""
    job = options.nodes * options.gpus_of_node() if executor == "slurm" else gpus
    return job / options.workers if options.pack else job


def round_seconds(
    trial: Trial, work: Work, ranks: int, gpus: int, probed: StoredProbe, rounds: list[Measured]
) -> tuple[float, str, bool]:
    """(seconds of a round, where they come from, whether this study has measured them)."""
    scheme, workers = work.config.scheme.name, workers_of(ranks, gpus)
    trained = work.trained(workers)
    found = from_measured(rounds, scheme, data_key(work.config), gpus > 0)
    if found:
        return found[0] * trained, found[1], True
    times = probed["models"].get(_describe(trial, work)["model"])
    if times is None or (gpus and probed["device"] == "cpu"):
        relative = slowdown(scheme) / slowdown(REFERENCE_SCHEME)
        return REFERENCE_S * trained / REFERENCE_IMAGES * relative, REFERENCE_TEXT + _other_model(work), False
    tested = work.tested(workers, ranks)
    return (
        trained * times["train_s"] * slowdown(scheme) + tested * times["eval_s"],
        f"from FedAvg steps timed on this machine ({probed['device']}), scaled",
        False,
    )


def cost_of(work: Work, sizes: SchemeSizes, ranks: int, workers: int, busiest_s: float, server_s: float) -> cost.Cost:
    """A round by the cost model: `busiest_s` is what the busiest worker's clients take, `server_s` what rank 0 does
    beside.
    """
    load = cost.Load(
        work.cohort,
        work.used,
        sizes["flat_bytes"] // 4,
        sizes["report_bytes"],
        sizes["message_bytes"],
        server_s,
    )
    return cost.round_cost(load, ranks, workers, busiest_s / work.trained(workers), cost.CLUSTER)


def _other_model(work: Work) -> str:
    model = work.config.model
    same = (model.title, model.stem, work.sizes.shape) == REFERENCE_MODEL
    return "" if same else f"; {model.title} taken to be as fast as its ResNet18"
