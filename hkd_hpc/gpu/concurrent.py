"""Clients of one rank trained side by side on one GPU. A lane is a local trainer: a model, an optimiser, a stream.

One client's small batches leave most of a GPU idle. The host launches an epoch on every lane before it waits for any.
What a client's training gives does not depend on who trains beside it, and sums of weights are exact: any number of
lanes gives the same result. Not so with dropout, which draws from torch's one generator. The host launches the lanes'
epochs one after the other, so lanes want graphs (run.graphs): without them its launches are what takes the time.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from hkd_hpc.console import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from hkd_hpc.training import LocalTrainer, Trained

SPARE = 0.1  # of the free memory: later rounds may hold more than the first


def side_by_side(trainers: Sequence[LocalTrainer], tasks: Sequence[tuple]) -> list[Trained]:
    """Train one task (the arguments of LocalTrainer.run) on each trainer, as many as there are of both; the results."""
    going = {lane: trainer.training(*task) for lane, (trainer, task) in enumerate(zip(trainers, tasks))}
    results: dict[int, Trained] = {}
    for lane in going:
        wait(trainers[lane].stream, None)  # for what this stream still does to the weights
    while going:
        for lane, training in list(going.items()):
            with on(trainers[lane].stream):
                try:
                    next(training)
                except StopIteration as end:
                    results[lane] = end.value
                    del going[lane]
    for lane in results:
        wait(None, trainers[lane].stream)
    return [results[lane] for lane in sorted(results)]


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager:
    """What is launched here goes to this stream; None: the current one, without asking for a GPU."""
    return torch.cuda.stream(stream) if stream else nullcontext()


def wait(late: torch.cuda.Stream | None, early: torch.cuda.Stream | None) -> None:
    """What is launched on one stream from now on begins when the other has done its work; None: the current one."""
    if late is not early:
        (late or torch.cuda.current_stream()).wait_stream(early or torch.cuda.current_stream())


class Lanes:
    """The local trainers of a rank."""

    def __init__(self, trainers: list[LocalTrainer]):
        self.trainers = trainers

    @property
    def steps(self) -> int:
        """Taken in all."""
        return sum(trainer.steps for trainer in self.trainers)

    def train(self, tasks: Sequence[tuple]) -> list[Trained]:
        """Train the first of these tasks (the arguments of LocalTrainer.run), one on each lane; their results.

        Where memory does not suffice, half of the lanes go, and it begins again.
        """
        if len(self.trainers) == 1:
            return [self.trainers[0].run(*tasks[0])]
        before = [dict(client.state) for client, *_ in tasks]
        try:
            return side_by_side(self.trainers, tasks)
        except torch.cuda.OutOfMemoryError:
            pass  # only after this block is free what the attempt held
        for (client, *_), state in zip(tasks, before):
            client.leave()
            client.state = state
        self._halve()
        return self.train(tasks)

    def _halve(self) -> None:
        lanes = len(self.trainers) // 2
        messages.warn(
            f"{len(self.trainers)} clients side by side need more memory than there is; from now on {lanes} (run.lanes)"
        )
        on_gpu = self.trainers[0].flat.values_V.is_cuda
        if on_gpu:
            torch.cuda.synchronize()
        del self.trainers[lanes:]
        if lanes == 1 and self.trainers[0].graphs:
            self.trainers[0].graphs.alone = True
        gc.collect()  # a network in bf16 is part of a cycle (models.train_in_bf16)
        if on_gpu:
            torch.cuda.empty_cache()


def open_lanes(
    first: LocalTrainer, make: Callable[[], LocalTrainer], asked: int, rehearsal: tuple, clients: int, sharers: int = 1
) -> Lanes:
    """As many lanes as were asked for, have clients, and fit into this rank's part of the GPU's free memory, which one
    training tells.

    `rehearsal`: arguments of LocalTrainer.run; its client is changed by it. `sharers`: ranks on this GPU.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before_bytes, free_before_bytes = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    first.run(*rehearsal)
    taken_bytes = free_before_bytes - torch.cuda.mem_get_info()[0]  # with what torch does not count: libraries, graphs
    kept_bytes = torch.cuda.memory_reserved() - before_bytes
    model_bytes = 4 * len(first.flat.values_V)  # was there before
    lane_bytes = torch.cuda.max_memory_reserved() - before_bytes + max(0, taken_bytes - kept_bytes) + model_bytes
    torch.cuda.empty_cache()
    free_bytes = torch.cuda.mem_get_info()[0] // sharers
    lanes = fitting(asked, clients, free_bytes, lane_bytes)
    if lanes < min(asked, clients):
        messages.warn(
            f"run.lanes={asked}: {lanes} fit, each needs {messages.bytes_text(lane_bytes)}, and "
            f"{messages.bytes_text(free_bytes)} are free beside the first"
        )
    trainers = [first, *(make() for _ in range(lanes - 1))]
    for trainer in trainers if lanes > 1 else ():
        trainer.stream = torch.cuda.Stream()
        if trainer.graphs:
            trainer.graphs.alone = False
    return Lanes(trainers)


def fitting(asked: int, clients: int, free_bytes: int, lane_bytes: int) -> int:
    """How many lanes: one at least, which is there already, and no more than clients. `free_bytes`: beside that one."""
    more = int(free_bytes * (1 - SPARE)) // max(lane_bytes, 1)
    return max(1, min(asked, clients, 1 + more))
