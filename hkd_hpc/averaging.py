"""The weights of a round: what the ranks' clients added up -> all-reduce -> the new global weights, on every rank.

With privacy.secure_sum the ranks mask what they add: keys are agreed on before a round trains, masks are made while
slower ranks still train, and are taken off the sum once it is known who delivered.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from hkd_hpc.aggregate import FixedPointSum, GlobalStep
from hkd_hpc.quarantine import OK
from hkd_hpc.rank_run import RankRun, cohort_of
from hkd_hpc.worker import STATISTICS


def update_global_weights(run: RankRun, round: int, gathered: np.ndarray | None) -> None:
    """All-reduce, the server's step, BatchNorm's statistics; afterwards every rank holds the new global weights.

    Args:
        gathered: on rank 0 the reports of the cohort; None elsewhere.
    """
    if run.secure_sum:
        run.secure_sum.unmask(round, [] if gathered is None else gathered["client"][gathered["status"] == OK].tolist())
    run.comm.at(round, "weights")
    weights_P = run.weights_V[: len(run.trainer.flat.parameters_P)]
    received_P = weights_P.clone() if run.server_optimizer else weights_P
    total_by_member = mean_into(run, run.weights_V, run.worker.sums, "weights")
    if run.server_optimizer:
        if gathered is not None:
            total_by_member = run.worker.weights_by_member(gathered["client"], gathered["train_n"])
        step(run, run.server_optimizer, received_P, weights_P, total_by_member)
    if run.config.train.batchnorm == "reestimate":
        run.weights_V = with_statistics_of(run, run.worker.delivered, "weights")


def step(
    run: RankRun,
    rule: GlobalStep,
    received_P: torch.Tensor,
    weights_P: torch.Tensor,
    total_by_member: Mapping[str, float],
) -> None:
    """The server's step from the means. Of unequal models those that no client of the cohort has stay as they are, and
    so does what the rule keeps of them. `total_by_member`: what the clients count in the mean, together."""
    left_out = [name for name, total in total_by_member.items() if not total]
    spans = [span for name in left_out for span in run.trainer.flat.parameter_spans_of(name)]
    parts = [vector_P[start:stop] for vector_P in (weights_P, *rule.state.values()) for start, stop in spans]
    before = [part.clone() for part in parts]
    rule.step(received_P, weights_P, sum(total_by_member.values()) / run.worker.weight_of_all(run.worker.images_M))
    for part, values in zip(parts, before):
        part.copy_(values)


def mean_into(run: RankRun, out: torch.Tensor, sums: Mapping[str, FixedPointSum], kind: str) -> dict[str, float]:
    """The weighted means of what the workers of all ranks added to these sums, in every rank. Of unequal models those
    that no client of the cohort has stay as they are.

    Args:
        out: takes the means.
        sums: by member.
        kind: as what the bytes are counted.

    Returns:
        What the clients count in the mean, together, by member; on rank 0 of several 0.
    """
    comm, total_by_member = run.comm, {}
    for name, total in sums.items():
        if run.secure_sum:
            summed = run.secure_sum.summed(total.numbers, kind)
        else:
            summed = comm.summed(total.pieces(comm.piece), total.numbers, kind)
        total_by_member[name] = total.mean_into(out, summed, may_be_empty=len(sums) > 1)
        comm.relay(total.parts(out), kind)
    return total_by_member


def with_statistics_of(run: RankRun, clients: list[int], kind: str) -> torch.Tensor:
    """The global weights (V,), BatchNorm's running statistics measured anew by those of these clients that live here.

    Raises:
        RunError: too few of them are within the limit of the sum, of any clients at all or for masks.
    """
    added = run.worker.measure_statistics(clients, run.weights_V, run.counters)
    if run.secure_sum:
        run.secure_sum.require_enough(added, STATISTICS)
    mask(run, run.worker.statistics_sums)
    values_V, parameters = run.weights_V.clone(), len(run.trainer.flat.parameters_P)
    mean_into(run, values_V[parameters:], run.worker.statistics_sums, kind)
    return values_V


def with_statistics_of_all(run: RankRun, kind: str) -> torch.Tensor:
    """The same by all clients, once at the end."""
    if run.secure_sum:
        eligible = run.worker.eligible
        run.secure_sum.agree_on_keys(run.done, eligible)
        here = [client for client in eligible if run.rank_of[client] == run.comm.rank]
        run.secure_sum.make_masks([total.numbers for total in run.worker.statistics_sums.values()], here)
        run.secure_sum.unmask(run.done, eligible)
        run.comm.at(run.done, kind)
    return with_statistics_of(run, list(range(len(run.rank_of))), kind)


def agree_on_keys(run: RankRun, done: int) -> None:
    """For masks on the weights of the round after this one, if there is one."""
    if run.secure_sum and done < run.last and not run.stopping:
        eligible = set(run.worker.eligible)
        run.secure_sum.agree_on_keys(done, [client for client in cohort_of(run, done + 1) if client in eligible])


def mask_weights(run: RankRun) -> None:
    """What this rank adds to the sum, before it waits for others."""
    if run.secure_sum:
        statistics = run.worker.statistics_sums if run.config.train.batchnorm == "reestimate" else {}
        sums = [*run.worker.sums.values(), *statistics.values()]
        run.secure_sum.make_masks([total.numbers for total in sums], run.worker.delivered)
        mask(run, run.worker.sums)


def mask(run: RankRun, sums: Mapping[str, FixedPointSum]) -> None:
    """Mask what the clients here added to these sums, if that is asked for."""
    if run.secure_sum:
        for total in sums.values():
            run.secure_sum.add_masked(total.pieces(run.comm.piece))
