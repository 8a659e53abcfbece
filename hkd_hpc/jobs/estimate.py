"""What a forecast finds, as plain values: `forecast` works them out, `verdict` says them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hkd_hpc.jobs.options import Options
from hkd_hpc.jobs.probe import ProbeResult
from hkd_hpc.jobs.sweep import Trial
from hkd_hpc.store.atomic import replace_text

PROBE_FILE = "probe.json"


class StoredProbe(ProbeResult):
    """As ROOT/probe.json keeps it; machine: what it holds for."""

    machine: dict[str, Any]


@dataclass(frozen=True)
class Estimate:
    """Of one trial. memory_bytes: host memory of the node with rank 0; running_bytes, finished_bytes: of its folder, at
    most while it runs, and when it is finished.
    """

    trial: Trial
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
    """Of the trials to start. at_a_time: how many run together; problems: a line for each reason to reject."""

    root: Path
    executor: str
    options: Options
    at_a_time: int
    estimates: list[Estimate] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    probed: StoredProbe | None = None

    @property
    def start_s(self) -> float:
        """Of a process, until it trains."""
        return self.probed["start_s"] if self.probed else 0.0

    @property
    def wall_s(self) -> float:
        """Of all trials: no shorter than the longest, nor than all of them divided evenly."""
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
