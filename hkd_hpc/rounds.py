"""The round: the paper's Algorithm 1, whatever scheme runs.

    cohort -> local training, local test -> ONE gather of the reports -> ONE all-reduce of the weights
           -> combine on the server -> ONE broadcast of the message -> save -> test and record beside the next training

Every rank makes the same collective calls in the same order in every round, whatever its clients do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from hkd_hpc import client_state, payload
from hkd_hpc.aggregate import FixedPointSum, GlobalStep, require_weight
from hkd_hpc.checkpoint import RoundState
from hkd_hpc.cohort import draw_cohort
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.config import Config
from hkd_hpc.privacy.settings import RELEASE
from hkd_hpc.quarantine import OK
from hkd_hpc.server import RoundResult, Server, is_due
from hkd_hpc.stop import StopRequest
from hkd_hpc.store.history import PHASES
from hkd_hpc.training import LocalTrainer
from hkd_hpc.worker import Worker, unpack_counters

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


def all_rounds(run: RankRun) -> bool:
    """All that remain; False when a signal stopped the run before the last."""
    if run.server:
        run.server.wire_before = dict(run.comm.wire_bytes)  # what the start moved belongs to no round
        run.server.run_pending_evaluation()  # of a resumed round whose test was lost
    note_next(run, run.done)
    agree_on_keys(run, run.done)
    while run.done < run.last:
        one_round(run, run.done + 1)
        if run.stopping:
            return False
    return True


def one_round(run: RankRun, round: int) -> None:
    """Train, report, average, combine, broadcast; then rank 0 records, saves and tests."""
    start_s, run.seconds = time.perf_counter(), dict.fromkeys(PHASES, 0.0)
    with timed(run, "train"):
        reports = train_cohort(run, round)
    with timed(run, "weights"):
        mask_weights(run)  # while slower ranks still train
    with timed(run, "knowledge"):
        gathered = gather_reports(run, round, reports)
    with timed(run, "weights"):
        average(run, round, gathered)
    with run.comm.uninterrupted():  # a client that fails in the next round must not cost this one
        with timed(run, "knowledge"):
            send_message(run, round, gathered)
        agree_on_end(run, round)
        note_next(run, round)
        with timed(run, "weights"):
            agree_on_keys(run, round)  # before rank 0 is busy with saving
        with timed(run, "state"):
            states = collect_states(run, round) if is_saved(run, round) else {}
        run.done = round
        if run.server and gathered is not None:
            run.comm.at(round, "saving")
            result = result_of(run, gathered, states, time.perf_counter() - start_s)
            run.server.record_round(result)
            run.server.save(result.state, is_saved(run, round))
    if run.server:  # while the other ranks train the next round
        run.comm.at(round, "evaluation")
        run.server.run_pending_evaluation()


def train_cohort(run: RankRun, round: int) -> np.ndarray:
    """Those of the round's cohort that live here train and test; their reports."""
    message = payload.tensors_of(run.message[0], run.weights_V.device)
    keep_models = round == run.last and run.config.run.client_models
    return run.worker.train(round, cohort_of(run, round), run.weights_V, run.counters, message, keep_models)


def cohort_of(run: RankRun, round: int) -> list[int]:
    """The clients that take part in this round, on all ranks."""
    fed = run.config.fed
    return draw_cohort(fed.clients, fed.participation, run.config.run.seed, round, run.worker.eligible)


def agree_on_keys(run: RankRun, done: int) -> None:
    """For masks on the weights of the round after this one, if there is one."""
    if run.secure_sum and done < run.last and not run.stopping:
        able = set(run.worker.eligible)
        run.secure_sum.begin(done, [client for client in cohort_of(run, done + 1) if client in able])


def mask_weights(run: RankRun) -> None:
    """What this rank adds to the sum, before it waits for others."""
    if run.secure_sum:
        statistics = run.worker.statistics_sums if run.config.train.batchnorm == "reestimate" else {}
        sums = [*run.worker.sums.values(), *statistics.values()]
        run.secure_sum.make([total.numbers for total in sums], run.worker.delivered)
        take(run, run.worker.sums)


def take(run: RankRun, sums: Mapping[str, FixedPointSum]) -> None:
    """Have what the clients here added to these sums masked, if that is asked for."""
    if run.secure_sum:
        for total in sums.values():
            run.secure_sum.take(total.pieces(run.comm.piece))


def gather_reports(run: RankRun, round: int, reports: np.ndarray) -> np.ndarray | None:
    """The reports of the cohort in client order on rank 0, None elsewhere."""
    run.comm.at(round, "reports")
    blocks = run.comm.gather(payload.as_bytes(reports), "knowledge_up")
    if run.server is None or blocks is None:
        return None
    gathered = in_client_order(blocks, reports.dtype)
    run.server.report_rejected(round, gathered, run.worker.names)
    require_weight(gathered["weight"].sum())
    return gathered


def in_client_order(blocks: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The used slots of all ranks' blocks, sorted by client id: no result depends on which rank a client lived on."""
    records = np.ascontiguousarray(blocks).reshape(-1).view(dtype)
    records = records[records["client"] >= 0]
    return records[np.argsort(records["client"], kind="stable")]


def average(run: RankRun, round: int, gathered: np.ndarray | None = None) -> None:
    """The one all-reduce, of unequal models one for each architecture; afterwards every rank holds the new global
    weights."""
    if run.secure_sum:
        run.secure_sum.settle(round, [] if gathered is None else gathered["client"][gathered["status"] == OK].tolist())
    run.comm.at(round, "weights")
    weights_P = run.weights_V[: len(run.trainer.flat.parameters_P)]
    received_P = weights_P.clone() if run.server_optimizer else weights_P
    weights = mean_into(run, run.weights_V, run.worker.sums, "weights")
    if run.server_optimizer:
        weights = weights if gathered is None else run.worker.weights_by_member(gathered["client"], gathered["weight"])
        step(run, run.server_optimizer, received_P, weights_P, weights)
    if run.config.train.batchnorm == "reestimate":
        run.weights_V = with_statistics_of(run, run.worker.delivered, "weights")


def step(
    run: RankRun, rule: GlobalStep, received_P: torch.Tensor, weights_P: torch.Tensor, weights: Mapping[str, float]
) -> None:
    """The server's step from the means. Of unequal models those that no client of the cohort has stay as they are, and
    so does what the rule keeps of them. `weights`: in the mean, by member."""
    absent = [name for name, weight in weights.items() if not weight]
    spans = [span for name in absent for span in run.trainer.flat.parameter_spans_of(name)]
    parts = [vector_P[start:stop] for vector_P in (weights_P, *rule.state.values()) for start, stop in spans]
    before = [part.clone() for part in parts]
    rule.step(received_P, weights_P, sum(weights.values()) / run.worker.weight_of_all(run.worker.images_M))
    for part, values in zip(parts, before):
        part.copy_(values)


def mean_into(run: RankRun, out: torch.Tensor, sums: Mapping[str, FixedPointSum], kind: str) -> dict[str, float]:
    """The weighted means of what the workers of all ranks added to these sums, in every rank; the sum of the weights by
    member, but on rank 0 of several 0. Of unequal models those that no client of the cohort has stay as they are."""
    comm, weights = run.comm, {}
    for name, total in sums.items():
        if run.secure_sum:
            summed = run.secure_sum.summed(total.numbers, kind)
        else:
            summed = comm.summed(total.pieces(comm.piece), total.numbers, kind)
        weights[name] = total.mean_into(out, summed, may_be_empty=len(sums) > 1)
        comm.relay(total.parts(out), kind)
    return weights


def with_statistics_of(run: RankRun, clients: list[int], kind: str) -> torch.Tensor:
    """The global weights (V,), BatchNorm's running statistics measured anew by those of these clients that live
    here.
    """
    run.worker.measure_statistics(clients, run.weights_V, run.counters)
    take(run, run.worker.statistics_sums)
    values_V, parameters = run.weights_V.clone(), len(run.trainer.flat.parameters_P)
    mean_into(run, values_V[parameters:], run.worker.statistics_sums, kind)
    return values_V


def with_statistics_of_all(run: RankRun, kind: str) -> torch.Tensor:
    """The same by all clients, once at the end."""
    if run.secure_sum:
        able = run.worker.eligible
        run.secure_sum.begin(run.done, able)
        here = [client for client in able if run.rank_of[client] == run.comm.rank]
        run.secure_sum.make([total.numbers for total in run.worker.statistics_sums.values()], here)
        run.secure_sum.settle(run.done, able)
        run.comm.at(run.done, kind)
    return with_statistics_of(run, list(range(len(run.rank_of))), kind)


def send_message(run: RankRun, round: int, gathered: np.ndarray | None) -> None:
    """What the server makes of the reports, to all."""
    run.comm.at(round, "message")
    if run.server and gathered is not None:
        run.trainer.flat.load(run.weights_V, run.counters)  # what a scheme's server sees as `net`
        run.message = run.server.combine(round, gathered)
    run.comm.broadcast(payload.as_bytes(run.message), "knowledge_down")
    run.counters = unpack_counters(run.message[0]["counters"], run.trainer.flat.counters)


def agree_on_end(run: RankRun, round: int) -> None:
    """Whether a signal stops the run after this round, and which round is the last, as rank 0's tests tell so far."""
    run.stopping = 0 if round == run.last else run.comm.agree(run.stop.asked)
    if may_end_early(run.config) and round < run.last:
        run.last = run.comm.agree(max(round, run.server.last_round()) if run.server else 0)  # a budget may be missed
        if run.server:
            run.server.tell_last(run.last)


def note_next(run: RankRun, done: int) -> None:
    """Of a release, that the round after this one begins, if there is one: on the disk, before any rank trains for
    it."""
    if run.config.privacy.mode == RELEASE and done < run.last and not run.stopping:
        if run.server:
            run.server.begin_round(done + 1)
        run.comm.agree()


def may_end_early(config: Config) -> bool:
    """Whether what the rounds give decides which is the last."""
    return bool(config.run.stop_patience or config.privacy.budget)


def collect_states(run: RankRun, round: int) -> client_state.States:
    """What the clients keep after this round, on rank 0."""
    return client_state.collect(run.worker, run.rank_of, round, is_last=round == run.last)


def is_saved(run: RankRun, round: int) -> bool:
    """Whether this round has a checkpoint."""
    return bool(run.stopping) or is_due(round, run.config.run.checkpoint_every, run.last)


def result_of(run: RankRun, gathered: np.ndarray, states: client_state.States, wall_s: float) -> RoundResult:
    """For the server's record: a copy of what the next round will overwrite."""
    counters = [counter.clone() for counter in run.counters]
    stepped = run.server_optimizer.state if run.server_optimizer and is_saved(run, run.done) else {}
    kept = {name: vector.clone() for name, vector in stepped.items()}
    state = RoundState(run.done, run.weights_V.detach().clone(), counters, run.message.copy(), states, kept)
    return RoundResult(state, gathered, dict(run.comm.wire_bytes), dict(run.seconds), wall_s)


@contextmanager
def timed(run: RankRun, phase: str) -> Iterator[None]:
    """Book the seconds of the body under `phase`; those spent waiting for other ranks go to "train"."""
    start_s, wait_s = time.perf_counter(), run.comm.wait_s
    yield
    waited_s = run.comm.wait_s - wait_s
    run.seconds[phase] += time.perf_counter() - start_s - waited_s
    run.seconds["train"] += waited_s
