"""What one rank holds of a run, from its start to its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from hkd_hpc.aggregate import GlobalStep
from hkd_hpc.cohort import draw_cohort
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.common.stop import StopRequest
from hkd_hpc.config import Config
from hkd_hpc.server import Server
from hkd_hpc.training import LocalTrainer
from hkd_hpc.worker import Worker

if TYPE_CHECKING:  # needs `cryptography`
    from hkd_hpc.secure_sum.exchange import SecureSum


@dataclass
class RankRun:
    """One rank's part of a run.

    Attributes:
        config: the settings, the same on every rank.
        comm: the collectives.
        trainer: the rank's model and rule of local training.
        worker: the clients that live on this rank.
        server: on rank 0; None on every other.
        rank_of: the rank of each client.
        weights_V: the global weights, (V,), the same on every rank.
        counters: the global model's integer buffers.
        message: the server's last message, one record.
        last: the last round, as far as is known; patience or the budget may make it an earlier one.
        server_optimizer: what makes the new global weights of the mean, alike on every rank; None: they are the mean.
        secure_sum: sums the weights under masks (privacy.secure_sum); None: they are summed as they are.
        done: completed rounds.
        stop: whether a signal asked for the end.
        stopping: that signal, once all ranks know that the run ends after this round.
        seconds: of the present round, by phase.
    """

    config: Config
    comm: Comm
    trainer: LocalTrainer
    worker: Worker
    server: Server | None
    rank_of: list[int]
    weights_V: torch.Tensor
    counters: list[torch.Tensor]
    message: np.ndarray
    last: int
    server_optimizer: GlobalStep | None = None
    secure_sum: SecureSum | None = None
    done: int = 0
    stop: StopRequest = field(default_factory=StopRequest)
    stopping: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def cohort_of(run: RankRun, round: int) -> list[int]:
    """The clients that take part in this round, on all ranks."""
    fed = run.config.fed
    return draw_cohort(fed.clients, fed.participation, run.config.run.seed, round, run.worker.eligible)


@contextmanager
def timed(run: RankRun, phase: str) -> Iterator[None]:
    """Book the seconds of the body under `phase`, without those spent waiting for other ranks: these go to "train",
    since what a rank waits for is, as a rule, a client that trains longer elsewhere."""
    start_s, wait_s = time.perf_counter(), run.comm.wait_s
    yield
    waited_s = run.comm.wait_s - wait_s
    run.seconds[phase] += time.perf_counter() - start_s - waited_s
    run.seconds["train"] += waited_s
