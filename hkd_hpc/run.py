"""One run, once torch may be imported: assembled, begun or resumed, its rounds, and its final evaluation."""

from __future__ import annotations

import os
import shlex
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from hkd_hpc import assemble, loggers, payload, resume, rounds
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.common.stop import StopRequest, handlers_kept, name_of
from hkd_hpc.config import Config
from hkd_hpc.config.command_line import ResumeOptions
from hkd_hpc.console import messages, output
from hkd_hpc.console.output import Log
from hkd_hpc.evaluation.final import final_evaluation
from hkd_hpc.overview import plan
from hkd_hpc.overview.progress import Progress
from hkd_hpc.rank_run import RankRun
from hkd_hpc.server import Server
from hkd_hpc.state import client_state
from hkd_hpc.state.checkpoint import RoundState
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.worker import unpack_counters


def execute(config: Config, comm: Comm, folder: RunFolder | None, options: ResumeOptions, stop: StopRequest) -> bool:
    """All ranks: build, start or resume, train.

    Args:
        config: the settings, the same on every rank.
        comm: the collectives.
        folder: the run's, on rank 0; None elsewhere.
        options: whether a stored run is resumed, and what may differ from it.
        stop: set by a signal.

    Returns:
        False when `stop` was asked for before the last round.
    """
    with handlers_kept():
        assemble.set_up_torch(config, comm.device)
        run = assemble.build(config, comm, folder)
        start(run, options)
    run.stop = stop
    if run.server:
        begin_telling(config, run, run.server)
    with progress_shown(run):
        complete = rounds.all_rounds(run)
        if complete:
            final_evaluation(run)
    if run.server:
        end_telling(run, run.server, complete)
    return complete


def begin_telling(config: Config, run: RankRun, server: Server) -> None:
    """Rank 0, before the first round: log, loggers, and what is going to run; `config`: as it was given."""
    output.current().keep(Log(server.folder.log_path))
    server.open_loggers()
    messages.say(plan.headline(assemble.plan_of(config, run, server)))
    if run.secure_sum:
        messages.say(run.secure_sum.text)
    if run.comm.rank_lines:
        messages.detail(lambda: "\n".join(run.comm.rank_lines))


def progress_shown(run: RankRun) -> AbstractContextManager[None]:
    """Within it a terminal of rank 0 shows how far the round is."""
    if run.server is None:
        return nullcontext()
    return output.current().redrawn(Progress(run.config, run.comm, run.rank_of, run.worker.eligible).text)


def end_telling(run: RankRun, server: Server, complete: bool) -> None:
    """Rank 0, after the last round: how to go on, where there is something to go on with."""
    server.loggers.close()
    if not complete:
        messages.answer(
            f"stopped by {name_of(run.stopping)} after round {run.done} of {run.config.fed.rounds}, which is saved; "
            f"resume it with --resume --out {shlex.quote(str(server.folder.path))}"
        )


def start(run: RankRun, options: ResumeOptions) -> None:
    """Fresh, or from the newest good checkpoint; either way rank 0's state is what every rank begins with."""
    states: client_state.States = {}
    if run.server and not run.server.folder.checkpoints():  # before anything is written
        run.server.require_round()
        if run.config.model.init:
            assemble.take_initial(run)
    state = resume.starting_state(run.server, options) if run.server else None
    if run.server and state:
        run.weights_V.copy_(state.weights_V)
        run.message, run.done, states = state.message, state.round, state.client_states
        run.worker.initial |= initial_of(run, state)
        if run.server_optimizer:
            run.server_optimizer.load(state.server_optimizer)
    if run.server:
        run.last = run.server.last_round()
        run.server.tell_last(run.last)
    spread(run, states)


def initial_of(run: RankRun, state: RoundState) -> dict[str, torch.Tensor]:
    """Rank 0: what the run that is resumed began with of all that never travels, where that is not what the seed gives.

    No client has any of what has stayed with them only since other settings hold: that begins as it is in the present
    global weights.
    """
    present = run.trainer.own_parts(state.weights_V)
    held = {name for own in state.client_states.values() for name in own}
    lost = [name for name in present if run.config.model.init and name in held and name not in state.initial]
    if lost:
        messages.warn(
            "the rounds before were saved by a version that kept no initial weights: what stays with a client that "
            "joins from here on begins as it is in the present global weights"
        )
    begun = {name: part for name, part in present.items() if name in lost or name not in held}
    return begun | {name: part.to(run.comm.device) for name, part in state.initial.items() if name in present}


def spread(run: RankRun, states: client_state.States) -> None:
    """Weights, the server optimizer's state, message, rounds and client states from rank 0 to where they are needed."""
    comm = run.comm
    comm.at(None, "start")
    kept = run.server_optimizer.state.values() if run.server_optimizer else ()
    for vector in (run.weights_V, *run.worker.initial.values(), *kept):
        values = vector.cpu().numpy()
        comm.broadcast(values, "start")
        vector.copy_(torch.from_numpy(values))
    rounds_done_and_last = np.array([run.done, run.last], np.int64)
    comm.broadcast(rounds_done_and_last, "start")
    run.done, run.last = rounds_done_and_last.tolist()
    comm.broadcast(payload.as_bytes(run.message), "start")
    run.counters = unpack_counters(run.message[0]["counters"], run.trainer.flat.counters)
    client_state.distribute(run.worker, states)


def show_plan(config: Config, comm: Comm) -> None:
    """Settings, ranks and devices, class histogram, memory and bytes; nothing is written or trained."""
    run = assemble.build(config, comm, None)
    if run.server:
        if os.path.exists(config.model.init):  # a run that is resumed needs it no more
            assemble.take_initial(run)
        loggers.classes_of(loggers.names_of(config.run.loggers))
        messages.answer(plan.text(assemble.plan_of(config, run, run.server)))
