"""The round: the paper's Algorithm 1, whatever scheme runs.

    cohort -> local training, local test -> ONE gather of the reports -> ONE all-reduce of the weights
           -> combine on the server -> ONE broadcast of the message -> save -> test and record beside the next training

Every rank makes the same collective calls in the same order in every round, whatever its clients do.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from hkd_hpc import payload
from hkd_hpc.aggregate import FixedPointSum, require_weight
from hkd_hpc.client import OWN_MODEL
from hkd_hpc.cohort import draw_cohort
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.config import Config
from hkd_hpc.models.precision import real_type
from hkd_hpc.server import Server
from hkd_hpc.stop import StopRequest
from hkd_hpc.store.history import PHASES
from hkd_hpc.training import LocalTrainer
from hkd_hpc.worker import Worker, unpack_counters

CHUNK_BYTES = (
    1 << 20
)  # of each rank: larger blocks leave the cache, smaller ones cost meetings (measured, 3 and 11 ranks)


@dataclass
class Job:
    """One rank's part of a run. `server` is None on every rank but 0. `done`: completed rounds."""

    config: Config
    comm: Comm
    trainer: LocalTrainer
    worker: Worker
    server: Server | None
    rank_of: list[int]
    weights_V: torch.Tensor
    counters: list[torch.Tensor]
    message: np.ndarray  # one record
    done: int = 0
    stop: StopRequest = field(default_factory=StopRequest)
    stopping: int = 0  # the signal, once all ranks know that the job ends after this round
    seconds: dict[str, float] = field(default_factory=dict)


def run(job: Job) -> bool:
    """All remaining rounds, then what is measured once at the end; False when a signal stopped it before."""
    if job.server:
        job.server.wire_before = dict(job.comm.wire_bytes)  # what the start moved belongs to no round
        job.server.settle()  # a resumed round whose test was lost
    for round in range(job.done + 1, job.config.fed.rounds + 1):
        one_round(job, round)
        if job.stopping:
            return False
    finale(job)
    return True


def one_round(job: Job, round: int) -> None:
    start_s, job.seconds = time.perf_counter(), dict.fromkeys(PHASES, 0.0)
    fed, last = job.config.fed, round == job.config.fed.rounds
    cohort = draw_cohort(fed.clients, fed.participation, job.config.run.seed, round, job.worker.able)
    message = payload.tensors_of(job.message[0], job.weights_V.device)
    keep = last and job.config.run.client_models
    reports = timed(job, "train", lambda: job.worker.train(round, cohort, job.weights_V, job.counters, message, keep))
    gathered = timed(job, "knowledge", lambda: gather_reports(job, round, reports))
    timed(job, "weights", lambda: average(job, round))
    with job.comm.uninterrupted():  # a client that fails in the next round must not cost this one
        timed(job, "knowledge", lambda: send_message(job, round, gathered))
        job.stopping = 0 if last else job.comm.agree(job.stop.asked)
        states = timed(job, "state", lambda: collect_states(job, round))
        job.done = round
        if job.server:
            job.comm.at(round, "saving")
            job.server.note(round, gathered, states, job, time.perf_counter() - start_s)
            job.server.save(saved(job, round))
    if job.server:  # while the other ranks train the next round
        job.comm.at(round, "evaluation")
        job.server.settle()


def timed(job: Job, phase: str, step):
    """Run a step and book its seconds under `phase`; those spent waiting for other ranks go to "train"."""
    start_s, wait_s = time.perf_counter(), job.comm.wait_s
    result = step()
    waited_s = job.comm.wait_s - wait_s
    job.seconds[phase] += time.perf_counter() - start_s - waited_s
    job.seconds["train"] += waited_s
    return result


def average(job: Job, round: int) -> None:
    """The one all-reduce; afterwards every rank holds the new global weights."""
    job.comm.at(round, "weights")
    mean_into(job, job.weights_V, job.worker.sum, "weights")
    if job.config.train.batchnorm == "reestimate":
        job.weights_V = with_statistics_of(job, job.worker.delivered, "weights")


def mean_into(job: Job, out: torch.Tensor, total: FixedPointSum, kind: str) -> None:
    """The weighted mean of what the workers of all ranks added to `total`, in every rank."""
    total.mean_into(out, job.comm.summed(total.pieces(job.comm.piece), total.length + 1, kind))
    job.comm.relay(total.parts(out), kind)


def with_statistics_of(job: Job, clients: list[int], kind: str) -> torch.Tensor:
    """The global weights (V,), BatchNorm's running statistics measured anew by those of these clients that live
    here.
    """
    job.worker.measure_statistics(clients, job.weights_V, job.counters)
    values_V, parameters = job.weights_V.clone(), len(job.trainer.flat.parameters_P)
    mean_into(job, values_V[parameters:], job.worker.statistics_sum, kind)
    return values_V


def gather_reports(job: Job, round: int, reports: np.ndarray) -> np.ndarray | None:
    """The reports of the cohort in client order on rank 0, None elsewhere."""
    job.comm.at(round, "reports")
    blocks = job.comm.gather(payload.as_bytes(reports), "knowledge_up")
    if not job.server:
        return None
    gathered = in_client_order(blocks, reports.dtype)
    job.server.complain(round, gathered, job.worker.names)
    require_weight(gathered["weight"].sum())
    return gathered


def send_message(job: Job, round: int, gathered: np.ndarray | None) -> None:
    """What the server makes of the reports, to all."""
    job.comm.at(round, "message")
    if job.server:
        job.message = job.server.combine(round, gathered)
    job.comm.broadcast(payload.as_bytes(job.message), "knowledge_down")
    job.counters = unpack_counters(job.message[0]["counters"], job.trainer.flat.counters)


def in_client_order(blocks: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The used places of all ranks' blocks, sorted by client id: no result depends on which rank a client lived on."""
    records = np.ascontiguousarray(blocks).reshape(-1).view(dtype)
    records = records[records["client"] >= 0]
    return records[np.argsort(records["client"], kind="stable")]


def collect_states(job: Job, round: int) -> dict[int, dict[str, np.ndarray]]:
    """On rounds that are saved: what the clients keep, on rank 0 by client id, place by place. Elsewhere: nothing."""
    shapes = state_shapes(job, round)
    if not shapes or not saved(job, round):
        return {}
    job.comm.at(round, "state")
    states: dict[int, dict[str, np.ndarray]] = {}
    for place in range(job.worker.places):
        clients = job.worker.clients
        rows = gather_in_chunks(job, pack_state(shapes, clients[place].state if place < len(clients) else {}))
        for rank, client in enumerate(clients_at(job, place)):
            if job.server and client is not None:
                states[client] = unpack_state(shapes, rows[rank])
    return {client: state for client, state in states.items() if state}


def saved(job: Job, round: int) -> bool:
    """Whether this round has a checkpoint."""
    return bool(job.stopping) or job.config.due(round, job.config.run.checkpoint_every)


def state_shapes(job: Job, round: int) -> payload.Shapes:
    """What a client may keep: the scheme's state, and in the last round its own model."""
    shapes = job.trainer.scheme.client_state_shapes() | job.trainer.own_shapes()
    if round == job.config.fed.rounds and job.config.run.client_models:
        shapes[OWN_MODEL] = tuple(job.weights_V.shape)
    return shapes


def pack_state(shapes: payload.Shapes, state: dict) -> np.ndarray:
    """A client's state (tensors or arrays by name) as uint8: float32s, first which it holds, then all, absent ones
    0.
    """
    held = np.array([name in state for name in shapes], real_type())
    parts = [
        torch.as_tensor(state[name]).detach().cpu().numpy().reshape(-1)
        if name in state
        else np.zeros(math.prod(shape), real_type())
        for name, shape in shapes.items()
    ]
    return np.concatenate([held, *parts], dtype=real_type()).view(np.uint8)


def unpack_state(shapes: payload.Shapes, block: np.ndarray) -> dict[str, np.ndarray]:
    """The inverse of `pack_state`: what is held, as float32 arrays of their own."""
    ends = np.cumsum([len(shapes), *map(math.prod, shapes.values())])
    held, *parts = np.split(block.view(real_type()), ends)
    return {name: np.array(part).reshape(shape) for (name, shape), has, part in zip(shapes.items(), held, parts) if has}


def clients_at(job: Job, place: int) -> list[int | None]:
    """By rank: the client at this place there."""
    hosted = [[c for c, rank in enumerate(job.rank_of) if rank == r] for r in range(job.comm.size)]
    return [clients[place] if place < len(clients) else None for clients in hosted]


def gather_in_chunks(job: Job, block: np.ndarray) -> np.ndarray | None:
    """(size, bytes) on rank 0. In pieces, so that no transport needs a second copy of everything."""
    rows = np.empty((job.comm.size, len(block)), np.uint8) if job.server else None
    for start in range(0, len(block), CHUNK_BYTES):
        part = job.comm.gather(block[start : start + CHUNK_BYTES], "state")
        if job.server:
            rows[:, start : start + CHUNK_BYTES] = part
    return rows


def finale(job: Job) -> None:
    """Once, with the final global model: the clients' local tests, fine-tuning, and BatchNorm measured anew by all."""
    job.comm.at(job.done, "finale")
    found = {"global": gather_rows(job, job.worker.examine(job.weights_V, job.counters))}
    reestimated_V = with_statistics_of(job, list(range(len(job.rank_of))), "finale")
    if job.config.fed.finetune_epochs and not job.trainer.scheme.pools_data:  # else there are no clients to tune it on
        found["finetuned"] = gather_rows(job, job.worker.finetune(job.weights_V, job.counters, job.done + 1))
    if job.server:
        job.server.finish(found, reestimated_V)


def gather_rows(job: Job, rows: np.ndarray) -> np.ndarray | None:
    """(clients, 4) int64 in client order on rank 0: id, test_n, correct, nonfinite (Worker.examine); None elsewhere."""
    job.comm.at(job.done, "finale")
    blocks = job.comm.gather(rows.reshape(-1).view(np.uint8), "finale")
    if not job.server:
        return None
    found = np.ascontiguousarray(blocks).reshape(-1).view(np.int64).reshape(-1, 4)
    found = found[found[:, 0] >= 0]
    return found[np.argsort(found[:, 0])]
