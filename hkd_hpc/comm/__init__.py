"""The ranks of a job: who they are, how they find each other, how they end, and the only place with collectives."""

from __future__ import annotations

from hkd_hpc.comm.world import World, end_alone

__all__ = ["World", "end_alone"]
