"""Who has what, who does well, who shares what, and who was left out: clients and classes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from hkd_hpc.figures import bands, bars
from hkd_hpc.figures.bars import Numbers
from hkd_hpc.figures.figure import Bars, Figure, Lines, Series
from hkd_hpc.figures.groups import Group, column
from hkd_hpc.figures.kind import Kind, Words, adding, lines, named, with_seeds
from hkd_hpc.figures.matrix import AVERAGED, blocks_named, heat_map, rounds_of
from hkd_hpc.figures.run import Run
from hkd_hpc.figures.units import PLAIN

LEFT_OUT = {  # status, as metrics.h5 has it; NaN: not sampled
    "rejected": (1, 3, 4, 7),
    "too few images": (2,),
    "dropped out": (5,),
    "straggler": (6,),
}
ALL_IN = "in each round all clients were sampled and entered the average"
NOT_BY_CLASS = "the scheme shares no knowledge by class"
SHARES = np.linspace(0, 1, 101)


def class_names(run: Run) -> list[str]:
    """Of the data set, else their numbers."""
    classes = np.shape(run.partition["train_count"])[1]
    return [str(name) for name in run.partition.get("class_name", range(classes))]


def partition(words: Words, groups: Sequence[Group]) -> Figure | str:
    """Training images by client and class, of the first run with the most clients."""
    runs = [run for group in groups for run in group.runs]
    run = max(runs, key=lambda run: len(run.partition["train_count"]))
    count_MC = np.asarray(run.partition["train_count"], float)
    words = adding(words, f"Seed {run.settings['run.seed']}.")
    labels = ("class", "client", "training images")
    return heat_map(words, count_MC, labels, (class_names(run), range(len(count_MC))), (0, count_MC.max()))


def client_accuracy(words: Words, groups: Sequence[Group]) -> Figure | str:
    """By client and round."""
    accuracy_RM = groups[0].runs[0].client_columns["local_test_accuracy"]
    labels = ("round", "client", "local accuracy")
    return heat_map(words, accuracy_RM.T, labels, (rounds_of(accuracy_RM), range(accuracy_RM.shape[1])))


def last_accuracy(run: Run) -> np.ndarray:
    """(clients,) that of the last round in which each was tested; NaN where it never was."""
    accuracy_RM = run.client_columns["local_test_accuracy"]
    there_RM = ~np.isnan(accuracy_RM)
    last_M = len(accuracy_RM) - 1 - there_RM[::-1].argmax(0)
    return np.where(there_RM.any(0), accuracy_RM[last_M, np.arange(len(last_M))], np.nan)


def clients_last(words: Words, groups: Sequence[Group]) -> Figure:
    """A bar a client."""
    accuracy_M = last_accuracy(groups[0].runs[0])
    names = np.array(blocks_named(range(len(accuracy_M)), bars.MOST_BARS))
    series = Series("local accuracy", names, bars.blocks(accuracy_M, bars.MOST_BARS))
    return Bars(**words, x_label="client", y_label="local accuracy", series=(series,))


def clients_sorted(words: Words, groups: Sequence[Group]) -> Figure:
    """The clients' accuracies from the lowest to the highest."""
    return Lines(
        **with_seeds(words, groups),
        x_label="share of the clients",
        y_label="local accuracy",
        are_shares=True,
        series=tuple(
            bands.band(named(group, group.seeds), SHARES, np.array([quantiles(run) for run in group.runs]))
            for group in groups
        ),
    )


def quantiles(run: Run) -> np.ndarray:
    """(101,) of the clients' last accuracies, linear between neighbours."""
    tested = np.sort(accuracy_M := last_accuracy(run))[: np.count_nonzero(~np.isnan(accuracy_M))]
    return np.quantile(tested, SHARES) if len(tested) else np.full(len(SHARES), np.nan)


def class_accuracy(words: Words, groups: Sequence[Group]) -> Figure | str:
    """Of the global model of one run, by round."""
    run = groups[0].runs[0]
    accuracy_RC = accuracy_by_class(run)
    labels = ("round", "class", "accuracy")
    return heat_map(words, accuracy_RC.T, labels, (rounds_of(accuracy_RC), class_names(run)))


def class_accuracy_last(words: Words, groups: Sequence[Group]) -> Figure | str:
    """Of the global model of each group when it was last tested, mean over the seeds."""
    mean_GC = np.array([np.mean([last_tested(run) for run in group.runs], axis=0) for group in groups])
    names = class_names(groups[0].runs[0]), [named(group, group.seeds) for group in groups]
    return heat_map(words, mean_GC, ("class", "", "accuracy"), names)


def last_tested(run: Run) -> np.ndarray:
    """(classes,) accuracy in the last round with a test; NaN without any."""
    accuracy_RC = accuracy_by_class(run)
    tested = np.flatnonzero(run.round_columns["global_test_n"] > 0)
    return accuracy_RC[tested[-1]] if len(tested) else np.full(accuracy_RC.shape[1], np.nan)


def accuracy_by_class(run: Run) -> np.ndarray:
    """(rounds, classes) of the global model, of unequal models the mean over the architectures; NaN in rounds without a
    test."""
    count_C = np.asarray(run.partition["global_test_count"])
    passes_R = run.round_columns["global_test_n"] / max(1, count_C.sum())  # one for each architecture
    n_RC = passes_R[:, None] * count_C
    return np.where(n_RC > 0, run.round_columns["global_test_correct_by_class"] / np.where(n_RC > 0, n_RC, 1), np.nan)


def knowledge_map(words: Words, groups: Sequence[Group]) -> Figure | str:
    """Rounds in which a client shared knowledge of a class."""
    run = groups[0].runs[0]
    rounds_MC = np.nansum(run.client_columns["knowledge_classes"], axis=0, dtype=float)  # float16 ends at 65,504
    labels = ("class", "client", "rounds")
    return heat_map(words, rounds_MC, labels, (class_names(run), range(len(rounds_MC))), (0, max(1, rounds_MC.max())))


def knowledge_by_round(words: Words, groups: Sequence[Group]) -> Figure | str:
    """Classes of which a client shared knowledge, by round."""
    classes_RM = groups[0].runs[0].client_columns["knowledge_classes"].sum(2, dtype=float)  # NaN: shared nothing at all
    labels, names = ("round", "client", "classes"), (rounds_of(classes_RM), range(classes_RM.shape[1]))
    return heat_map(words, classes_RM.T, labels, names, (0, max(1, np.nan_to_num(classes_RM).max())))


def shared_pairs(run: Run) -> np.ndarray:
    """(rounds,) pairs of a client and a class of which it shared knowledge."""
    return np.nansum(run.client_columns["knowledge_classes"], axis=(1, 2), dtype=float)


def pairs(words: Words, groups: Sequence[Group]) -> Figure:
    """By round."""
    series = tuple(lines(groups, {"shared": shared_pairs}))
    return Lines(**with_seeds(words, groups), x_label="round", y_label="pairs of client and class", series=series)


def noise(words: Words, groups: Sequence[Group]) -> Figure:
    """Beside the signal that it hides."""
    measures = {"signal": partial(column, name="rounds/signal_rms"), "noise": partial(column, name="rounds/noise_std")}
    series = tuple(lines(groups, measures))
    return Lines(**with_seeds(words, groups), x_label="round", y_label="root mean square", series=series)


def left_out(run: Run) -> Numbers:
    """(rounds,) clients by why they did not enter the average."""
    status_RM = run.client_columns["status"]
    counts = {name: np.isin(status_RM, codes).sum(1) for name, codes in LEFT_OUT.items()}
    return {
        name: count_R.astype(float) for name, count_R in (counts | {"not sampled": np.isnan(status_RM).sum(1)}).items()
    }


KINDS = (
    Kind(
        "partition",
        "Who has what",
        "Training images of each client and class, darker = more, as in the appendix of the FedHKD paper.",
        ("partition",),
        partition,
    ),
    Kind(
        "client_accuracy",
        "Accuracy of each client",
        "Each client's own model on its own test images, before aggregation; hatched or grey: not in this round. "
        f"{AVERAGED}",
        ("clients/local_test_accuracy",),
        client_accuracy,
        scope="run",
    ),
    Kind(
        "client_accuracy_last",
        "Accuracy of each client at the end",
        "Each client's own model on its own test images, in the last round in which it was tested. Beyond "
        f"{bars.MOST_BARS} clients a bar is the mean of neighbours.",
        ("clients/local_test_accuracy",),
        clients_last,
        scope="run",
    ),
    Kind(
        "client_accuracy_sorted",
        "Accuracy of the clients, from the lowest to the highest",
        "Quantiles over the clients of the accuracy that each one's own model had on its own test images when it was "
        "last tested: how many clients stay below an accuracy.",
        ("clients/local_test_accuracy",),
        clients_sorted,
        scope="study",
    ),
    Kind(
        "class_accuracy",
        "Accuracy of each class",
        "The global model on the images of each class of the official test split, after aggregation; hatched or grey: "
        f"not tested. {AVERAGED}",
        ("rounds/global_test_correct_by_class", "rounds/global_test_n", "partition"),
        class_accuracy,
        scope="run",
    ),
    Kind(
        "class_accuracy_last",
        "Accuracy of each class at the end",
        "The global model on the images of each class of the official test split, when it was last tested; mean over "
        "the seeds.",
        ("rounds/global_test_correct_by_class", "rounds/global_test_n", "partition"),
        class_accuracy_last,
        scope="study",
    ),
    Kind(
        "knowledge",
        "Who shared hyper-knowledge of what",
        "In how many rounds each client shared knowledge of each class: those of which it has enough images "
        f"(scheme.nu, scheme.min_count) and whose report entered the average. {AVERAGED}",
        ("clients/knowledge_classes", "partition"),
        knowledge_map,
        scope="run",
        lacking=NOT_BY_CLASS,
    ),
    Kind(
        "knowledge_rounds",
        "Who shared hyper-knowledge when",
        "Of how many classes each client shared knowledge in each round; hatched or grey: not in this round, or its "
        f"report did not enter the average. {AVERAGED}",
        ("clients/knowledge_classes",),
        knowledge_by_round,
        scope="run",
        lacking=NOT_BY_CLASS,
    ),
    Kind(
        "knowledge_pairs",
        "Hyper-knowledge shared in a round",
        "Pairs of a client and a class of which it shared knowledge in a round.",
        ("clients/knowledge_classes",),
        pairs,
        lacking=NOT_BY_CLASS,
    ),
    Kind(
        "noise",
        "Noise against signal",
        "Root mean square of the shared class means without noise, estimated as what was sent less the noise (0 where "
        "that is negative, as where the noise dominates), and the standard deviation of the noise that clients add to "
        "them (paper, 3.4), mean over what was shared in a round.",
        ("rounds/noise_std", "rounds/signal_rms"),
        noise,
        lacking="the scheme adds no noise to what it shares",
    ),
    Kind(
        "left_out",
        "Clients that did not enter the average",
        "Clients of a round by why they did not enter the average: rejected by the quarantine, too few images, dropped "
        f"out, straggler, or not sampled. {bars.BINNED}",
        ("clients/status",),
        partial(bars.of_rounds, left_out, "clients", PLAIN, ALL_IN),
    ),
)
