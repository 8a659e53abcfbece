"""What a run costs: seconds by phase and by rank, memory, and what travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from hkd_hpc.figures import bars
from hkd_hpc.figures.bars import Numbers
from hkd_hpc.figures.figure import Bars, Figure, Lines, Series
from hkd_hpc.figures.groups import Group, parts
from hkd_hpc.figures.kind import Kind, Words, in_unit, lines, with_seeds
from hkd_hpc.figures.matrix import AVERAGED, heat_map
from hkd_hpc.figures.run import Run
from hkd_hpc.figures.units import BYTES, COUNT, SECONDS, with_unit
from hkd_hpc.store.history import PHASES

NO_TIME = "no time was measured"
MOVED = "no round has ended since the run was resumed on another number of ranks"
SINCE = "Of a run that was resumed on another number of ranks: the rounds since then."


def losses(words: Words, groups: Sequence[Group]) -> Figure:
    """Each term in a panel of its own."""
    terms = dict.fromkeys(term for group in groups for run in group.runs for term in parts(run, "loss"))
    series = tuple(lines(groups, {term: partial(loss_term, term) for term in terms}, apart=True))
    is_signed = any((row < 0).any() for group in groups for run in group.runs for row in parts(run, "loss").values())
    return Lines(**with_seeds(words, groups), x_label="round", y_label="loss", series=series, is_signed=is_signed)


def loss_term(term: str, run: Run) -> np.ndarray | None:
    """(rounds,) of a term, None of a scheme that has not this one."""
    return parts(run, "loss").get(term)


def phase_s(run: Run) -> Numbers:
    """Seconds of each phase of the rounds; "save" is a part of others."""
    of_phase = parts(run, "seconds")
    return {name: of_phase[name] for name in (phase.replace("_", " ") for phase in PHASES) if name in of_phase}


def rounds_elsewhere(run: Run) -> int:
    """The rounds before a run was resumed on its last number of ranks: its clients lived on other ones then, which
    nothing has recorded. 0 of a run whose sessions are not known."""
    moved = [after for before, after in pairwise(run.sessions) if before.get("ranks") != after.get("ranks")]
    return int(moved[-1].get("after_round", 0)) if moved else 0


def busy_s(run: Run) -> tuple[list[int], np.ndarray]:
    """The ranks that host clients, and (rounds, ranks) seconds that each trained, tested and reported; NaN in rounds
    elsewhere."""
    of_client_RM = np.nan_to_num(run.client_columns["train_s"]) + np.nan_to_num(run.client_columns["report_s"])
    of_client_RM[: rounds_elsewhere(run)] = np.nan
    rank_M = np.asarray(run.client_ranks)
    ranks = np.unique(rank_M)
    return ranks.tolist(), of_client_RM @ (rank_M[:, None] == ranks).astype(float)


def waiting_s(busy_RK: np.ndarray) -> np.ndarray:
    """(rounds, ranks): each until the last one has done."""
    return busy_RK.max(1, keepdims=True) - busy_RK


def rank_bars(words: Words, groups: Sequence[Group]) -> Figure | str:
    """Busy and waiting, the mean of a round: by rank of one run, by group (mean over ranks and seeds) of several."""
    if len(groups) > 1 or groups[0].seeds > 1:
        return bars.of_rounds(mean_busy_and_waiting, "time of a round", SECONDS, NO_TIME, words, groups)
    ranks, busy_RK = busy_s(groups[0].runs[0])
    busy_RK = busy_RK[rounds_elsewhere(groups[0].runs[0]) :]
    if not len(busy_RK):
        return MOVED
    x = np.array(list(map(str, ranks)))
    series = Series("busy", x, busy_RK.mean(0)), Series("waiting", x, waiting_s(busy_RK).mean(0))
    found, unit = in_unit(series, SECONDS, "y")
    return Bars(**words, x_label="rank", y_label=f"time of a round ({unit})", series=found)


def mean_busy_and_waiting(run: Run) -> Numbers:
    """Of a rank, by round."""
    _, busy_RK = busy_s(run)
    return {"busy": busy_RK.mean(1), "waiting": waiting_s(busy_RK).mean(1)}


def waiting_map(words: Words, groups: Sequence[Group]) -> Figure | str:
    """Seconds that each rank waits, by round."""
    ranks, busy_RK = busy_s(groups[0].runs[0])
    if len(ranks) < 2:
        return "one rank hosts all clients, and waits for nobody"
    labels = ("round", "rank", "seconds waiting")
    return heat_map(words, waiting_s(busy_RK).T, labels, (range(1, len(busy_RK) + 1), ranks))


def memory_bars(words: Words, groups: Sequence[Group]) -> Figure | str:
    """Peak memory: by rank of one run, of the largest rank of several."""
    if len(groups) == 1 and groups[0].seeds == 1:
        run = groups[0].runs[0]
        if rounds_elsewhere(run) >= len(run.client_columns["memory_bytes"]):
            return MOVED
        series, x_label = _memory_by_rank(run), "rank"
    else:
        series, x_label = bars.of_groups(groups, "largest rank", lambda run: float(peak_bytes(run).max())), ""
    found, unit = in_unit([series], BYTES, "y")
    return Bars(**words, x_label=x_label, y_label=f"peak memory ({unit})", series=found)


def _memory_by_rank(run: Run) -> Series:
    ranks = np.unique(run.client_ranks)
    largest_M = peak_bytes(run, rounds_elsewhere(run))
    of_rank = [largest_M[np.asarray(run.client_ranks) == rank].max() for rank in ranks]
    return Series("peak memory", ranks.astype(str), np.array(of_rank))


def peak_bytes(run: Run, first: int = 0) -> np.ndarray:
    """(clients,) the most that the rank of each had held, from a row on; 0 where it never trained."""
    return np.nan_to_num(run.client_columns["memory_bytes"][first:]).max(0)


def parameter_bars(words: Words, groups: Sequence[Group]) -> Figure:
    """Of the model, and of all that is held beside it."""
    held = lambda which: lambda run: float(run.part("parameters")[which])
    series = [
        bars.of_groups(groups, "the model", held("model")),
        bars.of_groups(groups, "held while a client trains", held("held")),
    ]
    found, unit = in_unit([replace(one, low=None, high=None) for one in series], COUNT, "y")
    return Bars(**words, x_label="", y_label=with_unit("parameters", unit), series=found, stacked=False)


def wire_bytes(run: Run) -> Numbers:
    """By kind, of each round."""
    return parts(run, "wire_bytes")


KINDS = (
    Kind(
        "loss_terms",
        "Terms of the loss",
        "Each term of the training loss, its weight included: the mean over the images of the last local epoch, "
        "weighted by the images of the clients that entered the average.",
        ("rounds/loss/",),
        losses,
    ),
    Kind(
        "seconds_phases",
        "Seconds by phase",
        "Where the time of rank 0 goes; train: training, or waiting for those who train; evaluate and save: beside the "
        f"training of the next round where other ranks train. {bars.BINNED}",
        ("rounds/seconds/",),
        partial(bars.of_rounds, phase_s, "time of a round", SECONDS, NO_TIME),
    ),
    Kind(
        "seconds_ranks",
        "Who works and who waits",
        "Busy: local training, test and report of a rank's clients, one after the other, mean of a round; waiting: "
        f"until the busiest rank of the round has done. {SINCE}",
        ("clients/train_s", "clients/report_s", "client_ranks"),
        rank_bars,
    ),
    Kind(
        "waiting",
        "Waiting of each rank",
        "Seconds from when a rank's clients have done until the busiest rank of the round has: a light row is waited "
        f"for by the dark ones; hatched or grey: before the run was resumed on another number of ranks. {AVERAGED}",
        ("clients/train_s", "clients/report_s", "client_ranks"),
        waiting_map,
        scope="run",
    ),
    Kind(
        "memory",
        "Peak memory",
        "The most memory (RAM) that a rank had held up to the last report of its clients, a GPU's own memory not "
        "included: that is not recorded; of a study that of the largest rank, mean over the seeds and 95 % interval. "
        f"{SINCE}",
        ("clients/memory_bytes", "client_ranks"),
        memory_bars,
    ),
    Kind(
        "parameters",
        "Parameters held",
        "Trainable parameters of the model, and all that a scheme holds while a client trains: received, previous or "
        "slim copies, generator.",
        ("parameters",),
        parameter_bars,
    ),
    Kind(
        "wire_bytes",
        "Bytes on the wire",
        "Buffers handed to the communicator in a round, by kind, summed over the ranks; nothing travels in one "
        f"process. {bars.BINNED}",
        ("rounds/wire_bytes/",),
        partial(bars.of_rounds, wire_bytes, "wire, a round", BYTES, "nothing travelled: one process did it all"),
    ),
)
