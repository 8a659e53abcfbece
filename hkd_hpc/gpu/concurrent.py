"""Concurrent clients: those of one rank trained at the same time on one GPU, each on a model and a stream of its own.

One client's small batches leave most of a GPU idle. The host launches an epoch of every client before it waits for any.
What a client's training gives does not depend on who trains beside it, and sums of weights are exact: any number of
concurrent clients gives the same result. Not so with dropout, which draws from torch's one generator. The host launches
the epochs one after the other, so concurrent clients want graphs (run.graphs): without them its launches are what takes
the time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from hkd_hpc.config import Config
from hkd_hpc.console import messages
from hkd_hpc.gpu.graphs import RecordingTrainer
from hkd_hpc.schemes.base import Scheme
from hkd_hpc.training import ClientRound, LocalTrainer, Trained, is_finite

SPARE = 0.1  # of the free memory: later rounds may hold more than the first


class ConcurrentTrainer(LocalTrainer):
    """Trains several clients of a rank at the same time, one on each of its local trainers.

    Args:
        trainers: the first one's model is the rank's.
        memory: where more of them come from; without it there are no more.
    """

    def __init__(self, trainers: list[LocalTrainer], memory: Memory | None = None):
        first = trainers[0]
        super().__init__(first.flat, first.scheme, first.config)
        self.trainers, self.memory = trainers, memory
        self.at_once = memory.most if memory else len(trainers)
        self.streams = [self._stream() for _ in trainers]
        self._tell_graphs()

    @property
    def steps(self) -> int:
        """Optimizer steps taken so far by all trainers."""
        return sum(trainer.steps for trainer in self.trainers)

    def with_scheme(self, scheme: Scheme, config: Config) -> LocalTrainer:
        """For one client after the other."""
        return self.trainers[0].with_scheme(scheme, config)

    def run(self, given: ClientRound) -> Trained:
        """Train one client, on the first trainer."""
        return self.trainers[0].run(given)

    def train(self, given: Sequence[ClientRound]) -> list[Trained]:
        """Train the first of these clients, one on each trainer; where memory does not suffice, on half of them."""
        if self.memory:
            self._open(self.memory, given)
        if len(self.trainers) == 1:
            return self.trainers[0].train(given)
        before = [dict(client.state) for client, *_ in given]
        try:
            return side_by_side(self.trainers, self.streams, given)
        except torch.cuda.OutOfMemoryError:
            pass  # only after this block is free what the attempt held
        for (client, *_), state in zip(given, before):
            client.drop_model()
            client.state = state
        self._halve()
        return self.train(given)

    def _open(self, memory: Memory, given: Sequence[ClientRound]) -> None:
        """As many trainers as there are clients, if they fit."""
        more = memory.more(self.trainers, given)
        if more:
            self.trainers += more
            self.streams += [self._stream() for _ in more]
            self._tell_graphs()

    def _halve(self) -> None:
        kept = len(self.trainers) // 2
        messages.warn(
            f"{len(self.trainers)} concurrent clients need more memory than there is; from now on {kept} (run.lanes)"
        )
        on_gpu = self.flat.values_V.is_cuda
        if on_gpu:
            torch.cuda.synchronize()
        del self.trainers[kept:], self.streams[kept:]
        self.memory, self.at_once = None, kept
        self._tell_graphs()
        gc.collect()  # a network in bf16 is part of a cycle (models.train_in_bf16)
        if on_gpu:
            torch.cuda.empty_cache()

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream() if self.flat.values_V.is_cuda else None

    def _tell_graphs(self) -> None:
        """Whether a recording that finds no memory may blame others."""
        for trainer in self.trainers:
            if isinstance(trainer, RecordingTrainer):
                trainer.graphs.alone = len(self.trainers) == 1


class Memory:
    """Makes further trainers, as many as fit into this rank's part of the GPU's free memory.

    Args:
        most: trainers in all.
        make: makes one.
        sharers: ranks on this GPU.
    """

    def __init__(self, most: int, make: Callable[[], LocalTrainer], sharers: int = 1):
        self.most, self.make, self.sharers = most, make, sharers
        self.each_bytes = 0  # measured when first needed

    def more(self, trainers: list[LocalTrainer], given: Sequence[ClientRound]) -> list[LocalTrainer]:
        """As many beside these as were asked for, have clients and fit; the first time the largest one is rehearsed."""
        there, wanted = len(trainers), min(self.most, len(given))
        if wanted <= there:
            return []
        if not self.each_bytes:
            self.each_bytes = rehearse(trainers[0], max(given, key=lambda one: len(one.client.y_train)))
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info()[0] // self.sharers
        fit = fitting(self.most, len(given), free_bytes, self.each_bytes, there)
        if fit < wanted:
            messages.warn(
                f"run.lanes={self.most}: {fit} concurrent clients fit, each needs "
                f"{messages.bytes_text(self.each_bytes)}, and {messages.bytes_text(free_bytes)} are free beside {there}"
            )
            self.most = fit
        return [self.make() for _ in range(fit - there)]


def rehearse(trainer: LocalTrainer, given: ClientRound) -> int:
    """Bytes of GPU memory that a trainer needs: two epochs of a client, which leave it as it was."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before_bytes, free_before_bytes = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    state = dict(given.client.state)
    trainer.run(given._replace(epochs=2))  # the second is recorded (run.graphs)
    given.client.drop_model()
    given.client.state = state
    taken_bytes = free_before_bytes - torch.cuda.mem_get_info()[0]  # with what torch does not count: libraries, graphs
    kept_bytes = torch.cuda.memory_reserved() - before_bytes
    model_bytes = 4 * len(trainer.flat.values_V)  # was there before
    return torch.cuda.max_memory_reserved() - before_bytes + max(0, taken_bytes - kept_bytes) + model_bytes


def fitting(asked: int, clients: int, free_bytes: int, each_bytes: int, there: int = 1) -> int:
    """How many trainers, no more than clients. `free_bytes`: beside those that are `there` already, and stay."""
    more = int(free_bytes * (1 - SPARE)) // max(each_bytes, 1)
    return max(there, min(asked, clients, there + more))


def side_by_side(
    trainers: Sequence[LocalTrainer], streams: Sequence[torch.cuda.Stream | None], given: Sequence[ClientRound]
) -> list[Trained]:
    """Train one client on each trainer, as many as there are of both; what they gave, in order."""
    going = {number: training(trainer, one) for number, (trainer, one) in enumerate(zip(trainers, given))}
    results: dict[int, Trained] = {}
    for number in going:
        wait(streams[number], None)  # for what this stream still does to the weights
    while going:
        for number, steps in list(going.items()):
            with on(streams[number]):
                try:
                    next(steps)
                except StopIteration as end:
                    results[number] = end.value
                    del going[number]
    for number in results:
        wait(None, streams[number])
    return [results[number] for number in sorted(results)]


def training(trainer: LocalTrainer, given: ClientRound) -> Generator[None, None, Trained]:
    """`LocalTrainer.run` with a pause after each epoch that was launched and is not waited for yet."""
    start_s = time.perf_counter()
    trainer.begin(given)
    for loss_K in trainer.epochs(given):
        yield
        if not is_finite(loss_K):
            break
    return trainer.end(given.client, loss_K.tolist(), time.perf_counter() - start_s)


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager:
    """What is launched here goes to this stream; None: the current one, without asking for a GPU."""
    return torch.cuda.stream(stream) if stream else nullcontext()


def wait(late: torch.cuda.Stream | None, early: torch.cuda.Stream | None) -> None:
    """What is launched on one stream from now on begins when the other has done its work; None: the current one."""
    if late is not early:
        (late or torch.cuda.current_stream()).wait_stream(early or torch.cuda.current_stream())
