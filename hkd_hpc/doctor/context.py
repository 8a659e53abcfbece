"""What every section looks at: the ranks of this job, their collectives, and the settings of the run to come."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.comm.world import World
from hkd_hpc.config import Config


@dataclass(frozen=True)
class Context:
    """This job, as one of its ranks sees it.

    Attributes:
        world: who the ranks are.
        comm: their collectives.
        config: the settings that a run would have.
        out: the folder in which it would write.
    """

    world: World
    comm: Comm
    config: Config
    out: Path

    @property
    def several_hosts(self) -> bool:
        """Whether the ranks are on more than one machine."""
        return len({member.machine for member in self.world.topology.members}) > 1

    @property
    def device(self) -> str | None:
        """Names the GPU of this rank, the same in all processes of a host; None for the CPU."""
        return self.comm.devices[self.comm.rank] if self.comm.device.type == "cuda" else None

    def gathered(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Gather what each rank knows of itself; every rank calls this.

        Args:
            facts: of this rank, anything that JSON can hold.

        Returns:
            The facts by rank on rank 0, an empty list on the others.
        """
        return [json.loads(text) for text in self.comm.gather_text(json.dumps(facts))]
