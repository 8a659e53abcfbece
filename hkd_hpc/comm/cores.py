"""Which cores a rank may use, and near which memory (NUMA): for the plan that people read."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Mapping, Sequence

from hkd_hpc.comm.devices import Plan, rank_list, runs_of
from hkd_hpc.common.groups import grouped

NUMA_FILES = "/sys/devices/system/node/node*/cpulist"


def parse_cpulist(text: str) -> set[int]:
    """The kernel's lists: `0-2,8` gives 0, 1, 2, 8; an empty one nothing."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def format_cpulist(cores: Collection[int]) -> str:
    """The other way round: `0-2,8`."""
    return ",".join(runs_of(sorted(cores)))


def numa_nodes(files: str = NUMA_FILES) -> dict[int, set[int]]:
    """{NUMA node: its cores}; empty where the kernel does not say."""
    found = {}
    for path in glob.glob(files):
        try:
            with open(path) as file:
                found[int(re.findall(r"\d+", path)[-1])] = parse_cpulist(file.read())
        except (OSError, ValueError):
            continue
    return found


def cores_text(cores: Collection[int], nodes: Mapping[int, Collection[int]]) -> str:
    """`14-20 (NUMA 1)`; the nodes are left out where none is known."""
    near = [node for node, own in nodes.items() if not set(own).isdisjoint(cores)]
    return format_cpulist(cores) + (f" (NUMA {format_cpulist(near)})" if near else "")


def own_cores() -> str:
    """The text for this process."""
    return cores_text(os.sched_getaffinity(0), numa_nodes())


def describe_cores(texts: Sequence[str]) -> str:
    """One line, equal ones together on whatever host: `cores: ranks 0, 2 0-3; ranks 1, 3 4-7`."""
    groups = grouped((text, rank) for rank, text in enumerate(texts))
    return "cores: " + "; ".join(f"{rank_list(ranks)} {text}" for text, ranks in groups.items())


def describe_ranks(plan: Plan, texts: Sequence[str]) -> list[str]:
    """A line for each rank: `rank 3 on nid001: cores 14-20 (NUMA 1), GPU-8a`."""
    return [
        f"rank {rank} on {host}: cores {text}, {device or 'cpu'}"
        for rank, ((host, device), text) in enumerate(zip(plan.device_by_rank, texts))
    ]
