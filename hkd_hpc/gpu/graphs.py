"""A local epoch as one CUDA or HIP graph, recorded once and replayed for every client that looks the same.

A GPU computes the steps of a small network faster than Python launches their kernels; a graph launches those of a whole
epoch at once. It repeats them on fixed addresses, so a client's tensors are copied onto a `Stage` first; and nothing in
an epoch may hang on what the host draws or reads from the device on the way. That a scheme and a model declare with
`cuda_graph_safe = True`. The recorded graphs of a local trainer share their memory: one is replayed after the other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from hkd_hpc.client import Client
from hkd_hpc.config import Config
from hkd_hpc.console import messages
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.schemes.base import Scheme
from hkd_hpc.schemes.contract import says_captures
from hkd_hpc.training import Bounds, LocalTrainer

Epoch = Callable[[Client, torch.Tensor, Bounds, "float | torch.Tensor"], torch.Tensor]
Work = Callable[[], torch.Tensor]
Record = Callable[[Work], Work]

KEPT = 8  # signatures of a local trainer; then the oldest goes
MOST_STEPS = 200  # of an epoch: a graph has hundreds of kernels a step, and takes memory and time to make for each
PLAIN = (bool, int, float, str, type(None))


class RecordingTrainer(LocalTrainer):
    """A LocalTrainer whose epochs are recorded and replayed; `record`: see `Graphs`."""

    def __init__(self, flat: FlatModel, scheme: Scheme, config: Config, record: Record | None = None):
        super().__init__(flat, scheme, config)
        self.graphs = Graphs(record or recorder())

    def take_steps(
        self, client: Client, order_N: torch.Tensor, bounds: Bounds, lr: float | torch.Tensor
    ) -> torch.Tensor:
        """As LocalTrainer does, or the same from a graph."""
        taken = self._steps
        sums_K = self.graphs.run(super().take_steps, client, order_N, bounds, float(lr))
        self._steps = taken + len(bounds)  # a graph that is replayed does not count
        return sums_K


def declares(thing: object) -> bool:
    """Whether its class says `cuda_graph_safe = True` itself: one that is derived from it may do otherwise."""
    return vars(type(thing)).get("cuda_graph_safe") is True or says_captures(thing)


def why_not(scheme: Scheme, net: torch.nn.Module, device: torch.device) -> str:
    """Why epochs cannot be graphs here, empty where they can."""
    if device.type != "cuda":
        return "there is no GPU"
    unsure = [type(thing).__name__ for thing in (scheme, net) if not declares(thing)]
    return f"{unsure[0]} does not say `cuda_graph_safe = True`" if unsure else ""


class Stage:
    """What an epoch reads beside model and optimiser, at fixed addresses: `client`, made of copies, `order_N`, `lr`.

    Only clients of one `signature` can be put on it. `client.state` is empty there: what a loss needs of it, `begin`
    puts into the cache. `received_V`: where the received weights go; stages that are used in turns share it.
    """

    def __init__(self, client: Client, received_V: torch.Tensor):
        copies = lambda values: {
            name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()
        }
        self.client = replace(
            client,
            state={},
            message=copies(client.message),
            cache=copies(client.cache),
            x_train=client.x_train.clone(),
            y_train=client.y_train.clone(),
            drawn_N3=None if client.drawn_N3 is None else client.drawn_N3.clone(),
        )
        self.client.net, self.client.flat, self.client.received_V = client.net, client.flat, received_V
        device = client.y_train.device
        self.order_N = torch.zeros(len(client.y_train), dtype=torch.int64, device=device)
        # as torch's fused optimizers read it: on a GPU only in float32
        self.lr = torch.zeros((), dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)

    def put(self, client: Client, order_N: torch.Tensor, lr: float) -> None:
        """This client's tensors instead of another's."""
        for own, given in zip(tensors_of(self.client).values(), tensors_of(client).values()):
            own.copy_(given)
        self.order_N.copy_(order_N)
        self.lr.fill_(lr)


def tensors_of(client: Client) -> dict[str, torch.Tensor]:
    """What an epoch reads of a client and differs from one to the next, by name."""
    named = {"x_train": client.x_train, "y_train": client.y_train, "received_V": client.received_V}
    if client.drawn_N3 is not None:
        named["drawn_N3"] = client.drawn_N3
    for part, values in (("message", client.message), ("cache", client.cache)):
        named |= {f"{part} {name}": value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return named


def signature(client: Client) -> tuple:
    """What clients have in common that can be put on one stage. TypeError for what no stage can hold."""
    plain = {name: value for name, value in client.cache.items() if not isinstance(value, torch.Tensor)}
    odd = [name for name, value in plain.items() if not isinstance(value, PLAIN)]
    if odd:
        raise TypeError(f"client.cache[{odd[0]!r}] is a {type(plain[odd[0]]).__name__}, no tensor and no plain value")
    tensors = tensors_of(client).items()
    return client.phase, tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors), tuple(plain.items())


class Graphs:
    """The epochs of one local trainer. The first of a signature is trained as usual, which also wakes the libraries;
    the second is recorded, and replayed from then on.

    `record(work)` gives a function that repeats this work and returns what it returned; by itself it computes nothing.
    `alone`: no other local trainer trains at the same time. Otherwise a recording that finds no memory raises
    OutOfMemoryError, so that there are fewer of them; alone it does without graphs.
    """

    def __init__(self, record: Record):
        self.record = record
        self.recorded: dict[tuple, tuple[Stage, Work] | None] = {}
        self.failed, self.alone, self.is_long_told = False, True, False
        self.received_V: torch.Tensor | None = None

    def run(self, epoch: Epoch, client: Client, order_N: torch.Tensor, bounds: Bounds, lr: float) -> torch.Tensor:
        """What `epoch` of these arguments returns. Where it cannot be recorded: one warning, and on as usual."""
        found = None if self.failed or self._is_long(bounds) else self._find(epoch, client, bounds)
        if found is None:
            return epoch(client, order_N, bounds, lr)
        stage, replay = found
        stage.put(client, order_N, lr)
        return replay()

    def _find(self, epoch: Epoch, client: Client, bounds: Bounds) -> tuple[Stage, Work] | None:
        try:
            key = signature(client)
            if key in self.recorded and self.recorded[key] is None:
                stage = Stage(client, self._shared(client))
                self.recorded[key] = stage, self.record(lambda: epoch(stage.client, stage.order_N, bounds, stage.lr))
            elif key not in self.recorded:
                if len(self.recorded) == KEPT:
                    self._drop_one()
                self.recorded[key] = None
            return self.recorded[key]
        except Exception as error:
            cause = cause_of(error)
            if isinstance(cause, torch.cuda.OutOfMemoryError) and not self.alone:
                raise cause from None
            self.failed, self.recorded = True, {}
            messages.warn(
                f"run.graphs=on: an epoch could not be recorded ({type(cause).__name__}: {first_line(cause)}); "
                "training goes on without graphs"
            )
            return None

    def _is_long(self, bounds: Bounds) -> bool:
        """Whether an epoch has too many steps for a graph; says so once."""
        if len(bounds) > MOST_STEPS and not self.is_long_told:
            self.is_long_told = True
            messages.warn(
                f"run.graphs=on: an epoch of {len(bounds)} steps is not recorded, only those of up to {MOST_STEPS}"
            )
        return len(bounds) > MOST_STEPS

    def _shared(self, client: Client) -> torch.Tensor:
        if self.received_V is None:
            self.received_V = client.received_V.clone()
        return self.received_V

    def _drop_one(self) -> None:
        """The oldest signature that was not recorded, else the oldest."""
        del self.recorded[
            next((key for key, entry in self.recorded.items() if entry is None), next(iter(self.recorded)))
        ]


def cause_of(error: BaseException) -> BaseException:
    """The first of the errors that led to each other: the end of a broken recording only says that there was one."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no reason"])[0]


def recorder() -> Record:
    """`record` of `Graphs` on this process's GPU.

    It records on a stream of its own, on which nothing else runs: cuBLAS's scratch memory belongs to the stream of the
    recording, not to the pool. On torch's one stream for it, graphs that are replayed at the same time would share that
    memory, and lose it when any of them goes (pytorch issue 193402). Concurrent clients' streams have another priority.
    """
    pool, own = torch.cuda.graph_pool_handle(), torch.cuda.Stream(priority=-1)

    def record(work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.current_stream()):  # where it is again, even when a recording breaks off
            # other threads (NCCL's watchdog) may ask the device something meanwhile
            with torch.cuda.graph(graph, pool=pool, stream=own, capture_error_mode="thread_local"), no_collection():
                result = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    return record


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's collector pauses: an old graph that it destroys may wait for the device, which no recording survives."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
