"""The round: the paper's Algorithm 1, whatever scheme runs.

    cohort -> local training, local test -> ONE gather of the reports -> ONE all-reduce of the weights
           -> combine on the server -> ONE broadcast of the message -> save -> test and record beside the next training

Every rank makes the same collective calls in the same order in every round, whatever its clients do. (Of unequal models
there is one all-reduce for each architecture, and train.batchnorm=reestimate asks for another.)
"""

from __future__ import annotations

import time

import numpy as np

from hkd_hpc import payload
from hkd_hpc.aggregate import require_weight
from hkd_hpc.averaging import agree_on_keys, mask_weights, update_global_weights
from hkd_hpc.config import Config
from hkd_hpc.privacy.settings import RELEASE
from hkd_hpc.rank_run import RankRun, cohort_of, timed
from hkd_hpc.server import RoundResult, is_due
from hkd_hpc.state import client_state
from hkd_hpc.state.checkpoint import RoundState
from hkd_hpc.store.history import PHASES
from hkd_hpc.worker import unpack_counters


def all_rounds(run: RankRun) -> bool:
    """All that remain; False when a signal stopped the run before the last."""
    if run.server:
        run.server.wire_before = dict(run.comm.wire_bytes)  # what the start moved belongs to no round
        run.server.run_pending_evaluation()  # of a resumed round whose test was lost
    announce_next(run, run.done)
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
        update_global_weights(run, round, gathered)
    with run.comm.uninterrupted():  # a client that fails in the next round must not cost this one
        with timed(run, "knowledge"):
            send_message(run, round, gathered)
        agree_on_end(run, round)
        announce_next(run, round)
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


def gather_reports(run: RankRun, round: int, reports: np.ndarray) -> np.ndarray | None:
    """The reports of the cohort in client order on rank 0, None elsewhere."""
    run.comm.at(round, "reports")
    blocks = run.comm.gather(payload.as_bytes(reports), "knowledge_up")
    if run.server is None or blocks is None:
        return None
    gathered = in_client_order(blocks, reports.dtype)
    run.server.report_rejected(round, gathered, run.worker.names)
    require_weight(gathered["train_n"].sum())
    return gathered


def in_client_order(blocks: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The used slots of all ranks' blocks, sorted by client id: no result depends on which rank a client lived on."""
    records = np.ascontiguousarray(blocks).reshape(-1).view(dtype)
    records = records[records["client"] >= 0]
    return records[np.argsort(records["client"], kind="stable")]


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


def announce_next(run: RankRun, done: int) -> None:
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
    weights_V, message = run.weights_V.detach().clone(), run.message.copy()
    state = RoundState(run.done, weights_V, counters, message, states, kept, run.worker.initial)
    return RoundResult(state, gathered, dict(run.comm.wire_bytes), dict(run.seconds), wall_s)
