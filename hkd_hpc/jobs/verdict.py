"""A forecast as people read it: the table, and a line for each reason why a launch would be rejected."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hkd_hpc.analysis.tables import aligned
from hkd_hpc.common.groups import grouped
from hkd_hpc.console.messages import bytes_text, seconds_text
from hkd_hpc.jobs.estimate import Estimate, Forecast
from hkd_hpc.runtime.paths import nearest_existing

GUESS_MARGIN = 0.5  # a time that was not measured in this study may be twice too long: no rejection on its account


# ---- what would be rejected


def problems(out: Forecast) -> list[str]:
    """A line for each reason to reject the launch."""
    return [*too_little_disk(out), *too_short(out), *too_little_memory(out), *too_many_nodes(out)]


def too_many_nodes(out: Forecast) -> list[str]:
    """More nodes than ranks: some would be paid for and idle."""
    most = max((e.ranks for e in out.estimates), default=0)
    if out.executor != "slurm" or out.options.pack or out.options.nodes <= max(most, 1):
        return []
    return [f"nodes={out.options.nodes}: a trial has {most} rank(s), one node for each at most; --nodes {most}"]


def too_little_disk(out: Forecast) -> list[str]:
    free = free_bytes(out.root)
    if out.disk_bytes <= free:
        return []
    means = ["name a folder on a larger disk"]
    option = {"slurm": "--array-parallelism", "local": "--parallel"}.get(out.executor)
    means += [f"{option} N for fewer trials at a time"] * (option is not None and out.at_a_time > 1)
    means += ["run.client_models=false"] * any(e.trial.config().run.client_models for e in out.estimates)
    return [
        f"--root {out.root}: {bytes_text(free)} are free there and {bytes_text(out.disk_bytes)} are needed "
        f"({bytes_text(out.finished_bytes)} when all is finished); {', or '.join(means)}"
    ]


def free_bytes(root: Path) -> int:
    """Of the disk on which a folder is or would be made."""
    return shutil.disk_usage(nearest_existing(root)).free


def too_short(out: Forecast) -> list[str]:
    """The time limit against a round and its save, as far as that is known."""
    if out.executor != "slurm" or not out.estimates:
        return []
    needs = lambda e: (out.start_s + e.round_s + e.save_s) * (1 if e.is_measured else GUESS_MARGIN)
    worst = max(out.estimates, key=needs)
    if needs(worst) <= out.options.time_min * 60:
        return []
    return [
        f"time_min={out.options.time_min}: a round of {worst.trial.name} takes about {seconds_text(worst.round_s)} and "
        f"its save {seconds_text(worst.save_s)} ({worst.basis}); --time-min "
        f"{math.ceil((2 * (worst.round_s + worst.save_s) + out.options.signal_delay_s) / 60)} leaves enough"
    ]


def too_little_memory(out: Forecast) -> list[str]:
    if out.options.mem_gb is None or out.executor != "slurm" or not out.estimates:
        return []
    worst = max(out.estimates, key=lambda e: e.memory_bytes)
    if out.options.pack:
        return []  # how much its neighbours on the node need depends on which these are
    if worst.memory_bytes <= out.options.mem_gb * 2**30:
        return []
    return [
        f"mem_gb={out.options.mem_gb:g}: {worst.trial.name} needs about {bytes_text(worst.memory_bytes)} on its first "
        f"node ({worst.ranks} rank(s) in all); --mem-gb {math.ceil(1.2 * worst.memory_bytes / 2**30)}"
    ]


def remarks(out: Forecast) -> list[str]:
    if out.executor != "slurm" or not out.estimates:
        return []
    return [*sharing_remark(out), *notice_remark(out)]


def sharing_remark(out: Forecast) -> list[str]:
    if not (out.options.pack and out.options.slots > 1 and out.options.gpus_of_node()):
        return []
    return [
        f"--slots {out.options.slots}: trials that share a GPU are taken not to slow each other, unmeasured: "
        "time and GPU "
        f"hours may be up to {out.options.slots} times as much"
    ]


def notice_remark(out: Forecast) -> list[str]:
    longest = max(out.estimates, key=lambda e: e.round_s + e.save_s)
    need_s = longest.round_s + longest.save_s
    if need_s <= out.options.signal_delay_s:
        return []
    return [
        f"a round and its save take up to {seconds_text(need_s)}, longer than the notice before the time limit: "
        f"that round is repeated after a requeue; --signal-delay-s {math.ceil(1.5 * need_s)} saves it"
    ]


# ---- as people read it


def lines(out: Forecast, most: int = 40) -> list[str]:
    """A table of the trials, or of scheme, data and clients where they are many; sums; where the numbers come from."""
    if not out.estimates:
        return out.remarks
    gpu_hours = sum(e.gpu_hours for e in out.estimates)
    hours = f"{gpu_hours:.3g} GPU hours, " if gpu_hours else ""
    peak = f"disk {bytes_text(out.disk_bytes)} at most, {bytes_text(out.finished_bytes)} when finished"
    return [
        *rows(out, most),
        f"in all about {hours}{seconds_text(out.wall_s)} with {out.at_a_time} at a time; {peak} "
        f"({bytes_text(free_bytes(out.root))} free there; a quota cannot be seen from here)",
        *(f"seconds of {count} trials: {basis}" for basis, count in Counter(e.basis for e in out.estimates).items()),
        "bytes: of the real model and scheme; memory: host memory of a trial's first node, as a probe here had it"
        + ", without what a GPU's libraries take" * (not (out.probed and out.probed["models"])),
        *out.remarks,
    ]


def rows(out: Forecast, most: int) -> list[str]:
    name: Callable[[Estimate], tuple] = lambda e: (e.trial.name,)
    head: tuple[str, ...] = ("trial",)
    if len(out.estimates) > most:
        name, head = (
            (lambda e: tuple(str(e.trial.settings[key]) for key in ("scheme.name", "data.name", "fed.clients"))),
            ("scheme", "data", "clients"),
        )
    groups = grouped(((*name(each), each.ranks), each) for each in out.estimates)
    table = [(*head, "ranks", "trials", "round", "a trial", "GPU h", "memory", "disk, running", "finished")]
    for key, group in groups.items():
        longest, largest = max(group, key=lambda e: e.wall_s), max(group, key=lambda e: e.running_bytes)
        table.append(
            (
                *map(str, key),
                str(len(group)),
                seconds_text(longest.round_s),
                seconds_text(longest.wall_s),
                f"{sum(e.gpu_hours for e in group):.3g}",
                bytes_text(max(e.memory_bytes for e in group)),
                bytes_text(largest.running_bytes),
                bytes_text(largest.finished_bytes),
            )
        )
    if not any(each.gpu_hours for each in out.estimates):
        table = [row[:-4] + row[-3:] for row in table]
    return aligned(table)
