"""The metrics of a run, each in one place: computed, described in metrics.h5, printed at the end, tabulated over runs.

A new column is one more Metric in METRICS. Names say model, data and moment; attributes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hkd_hpc.analysis.classification import NAN, images_by_class, mean_of_known

Value = float | int | str | list[int]  # a list: by class
Attributes = dict[str, str]


@dataclass(frozen=True)
class SharedKnowledge:
    """What the accepted clients of a round shared by class (schemes/shared_knowledge.py).

    Attributes:
        classes: (accepted reports, classes) bool, whether it was shared; None where nothing is shared by class.
        noise_std: mean standard deviation of the noise on it; None without noise.
        signal_rms: root mean square of it without the noise, estimated.
    """

    classes: np.ndarray | None = None
    noise_std: float | None = None
    signal_rms: float | None = None


@dataclass(frozen=True)
class RoundNumbers:
    """What the columns of a round are computed from.

    Attributes:
        round: completed rounds.
        wall_s: from the start of the round to the end of its exchange, on rank 0.
        warning: what the scheme says about the message of this round.
        reports: one record for each sampled client, in client order (worker.report_type).
        is_accepted: (reports,) bool, those that entered the average.
        invalid: how many of the sampled clients were rejected.
        failed: how many dropped out or were stragglers.
        terms: of the loss.
        classes: how many.
        pools_data: whether one client has the images of all.
        payload_bytes: what the paper counts, by kind, of each sampled client.
        wire_bytes: what the communicator moved in this round, by kind.
        seconds: of the round, by phase, on rank 0; "save" too.
        knowledge: that clients shared by class.
        privacy_mu: what each sampled client released, (reports, kinds) by column (protection/spending.py); empty
            without a ledger.
        begun: how often the round was begun, of a release; 0: it is none.
    """

    round: int
    wall_s: float
    warning: str
    reports: np.ndarray
    is_accepted: np.ndarray
    invalid: int
    failed: int
    terms: Sequence[str]
    classes: int
    pools_data: bool
    payload_bytes: Mapping[str, np.ndarray]
    wire_bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    knowledge: SharedKnowledge
    privacy_mu: Mapping[str, np.ndarray] = field(default_factory=dict)
    begun: int = 0

    @property
    def accepted(self) -> np.ndarray:
        """The reports that entered the average."""
        return self.reports[self.is_accepted]


class TestResult(Protocol):
    """The global model on n images (evaluate.Tested)."""

    @property
    def n(self) -> int: ...

    @property
    def loss(self) -> float: ...

    @property
    def nonfinite(self) -> int: ...

    @property
    def accuracy(self) -> float: ...

    @property
    def correct_C(self) -> tuple[int, ...]: ...

    @property
    def confusion_CC(self) -> np.ndarray: ...

    @property
    def balanced_accuracy(self) -> float: ...

    @property
    def macro_f1(self) -> float: ...

    @property
    def macro_auc(self) -> float: ...


@dataclass(frozen=True)
class Metric:
    """One column of /rounds, /clients or both.

    Attributes:
        name: of the column.
        attributes: what metrics.h5 says of it.
        of_round: its number in /rounds, or numbers by class; of a metric of a test: what stands there without one.
        of_clients: its numbers in /clients, one (or one by class) for each report, NaN where it has none. Both give
            None for a scheme that has not this column.
        of_test: from the tests on the official split and on the validation images, after the round.
        title: of its line in the table at the end, with {batchnorm} for how the statistics came about; empty: none.
        column: of its last value in tables over runs; empty: none.
        dtype: of its numbers in /rounds, or in /clients if they are only there; all others are float64.
        since: the layout version of metrics.h5 (store/layout.py) from which on it is there.
    """

    name: str
    attributes: Attributes
    of_round: Callable[[RoundNumbers], Value | None] | None = None
    of_clients: Callable[[RoundNumbers], np.ndarray | None] | None = None
    of_test: Callable[[TestResult, TestResult], Value] | None = None
    title: str = ""
    column: str = ""
    dtype: str = "float64"
    since: int = 1


@dataclass(frozen=True)
class MetricGroup:
    """Columns name/part; `of_round` and `of_clients` give a number, or the clients' numbers, of each part.

    Attributes:
        name: of the group.
        attributes: what metrics.h5 says of its columns.
        of_round: numbers in /rounds by part.
        of_clients: numbers in /clients by part.
        parts: attributes of parts that have their own.
        dtype: as of Metric.
    """

    name: str
    attributes: Attributes
    of_round: Callable[[RoundNumbers], Mapping[str, Value]]
    of_clients: Callable[[RoundNumbers], Mapping[str, np.ndarray]] | None = None
    parts: Mapping[str, Attributes] = field(default_factory=dict)
    dtype: str = "float64"


@dataclass(frozen=True)
class FinalMetric:
    """A number measured once, after the last round: its name in the summary, its line and its column as of Metric."""

    name: str
    title: str
    column: str = ""


def ratio(part: float, whole: float) -> float:
    """NaN of nothing."""
    return part / whole if whole else NAN


def accuracies(numbers: RoundNumbers, kind: str) -> np.ndarray:
    """(reports,) each accepted client's accuracy on its own "test" or "val" images, NaN where it has none."""
    n, correct = numbers.reports[f"{kind}_n"], numbers.reports[f"{kind}_correct"]
    return np.where(numbers.is_accepted & (n > 0), correct / np.maximum(n, 1), NAN)


def accuracy_over_images(numbers: RoundNumbers, kind: str) -> float:
    """Of the accepted clients together."""
    return ratio(numbers.accepted[f"{kind}_correct"].sum(), numbers.accepted[f"{kind}_n"].sum())


def of_own_test(numbers: RoundNumbers, name: str) -> np.ndarray:
    """(reports,) what each accepted client reports of its own test images, NaN where it has none."""
    return np.where(numbers.is_accepted & (numbers.reports["test_n"] > 0), numbers.reports[name], NAN)


def classes_tested(test: TestResult) -> int:
    """How many classes the images have, as far as their logits are finite."""
    return int((images_by_class(test.confusion_CC) > 0).sum())


def why_undefined(test: TestResult) -> str:
    """Why a measure of a test is NaN; empty where all are numbers."""
    if not test.n:
        return "no test images"
    if test.nonfinite:
        return f"{test.nonfinite} of {test.n} images without finite logits"
    return "AUC: all test images are of one class" if classes_tested(test) < 2 else ""


def worst_tenth(accuracy_M: np.ndarray) -> float:
    """Mean over the tenth of the clients (one at least) with the lowest accuracy; NaN: no test."""
    tested = np.sort(accuracy_M[~np.isnan(accuracy_M)])
    return float(tested[: -(-len(tested) // 10)].mean()) if len(tested) else NAN


def spread(accuracy_M: np.ndarray) -> float:
    """Standard deviation over the clients that have a test."""
    tested = np.sort(accuracy_M[~np.isnan(accuracy_M)])
    return float(tested.std()) if len(tested) else NAN


def losses(numbers: RoundNumbers) -> dict[str, Value]:
    """Of each term the mean over the images that entered the average."""
    loss, images = numbers.accepted["loss"], numbers.accepted["train_n"]
    return {
        term: float(ratio((loss[:, place] * images).sum(), images.sum())) for place, term in enumerate(numbers.terms)
    }


def client_losses(numbers: RoundNumbers) -> dict[str, np.ndarray]:
    """Of each term the accepted clients' means."""
    loss = np.where(numbers.is_accepted[:, None], numbers.reports["loss"], NAN)
    return {term: loss[:, place] for place, term in enumerate(numbers.terms)}


def knowledge_classes(numbers: RoundNumbers) -> np.ndarray | None:
    """(reports, classes) float16: 1 where an accepted client shared knowledge of the class, 0 where it did not."""
    shared = numbers.knowledge.classes
    if shared is None:
        return None
    values = np.full((len(numbers.reports), shared.shape[1]), NAN, np.float16)
    values[numbers.is_accepted] = shared
    return values


def names_of(reports: np.ndarray) -> tuple[str, ...]:
    """The fields of the records."""
    return reports.dtype.names or ()


def update_norms(numbers: RoundNumbers) -> np.ndarray | None:
    """(reports,) of the accepted clients; None where nothing is clipped."""
    if "update_norm" not in names_of(numbers.reports):
        return None
    return np.where(numbers.is_accepted, numbers.reports["update_norm"], NAN)


_BY_CLASS = "mean over the classes of the test images (global_test_classes of them), each alike"
_BY_CLIENT = "mean over the clients with test images, each alike"
_WHY = "NaN: global_test_undefined says why"
_OWN_CLASSES = "mean over the classes of a client's test images; NaN without any"
_GLOBAL = {"model": "global", "data": "official test split", "moment": "after aggregation", "clients": "none"}
_LOCAL = {
    "model": "personalised (the client's own)",
    "data": "clients' local test sets",
    "moment": "after local training, before aggregation",
    "clients": "sampled",
}
_VAL = "validation images held out of the clients' training images (data.val_fraction)"
_LOSS = "a term of the loss, its weight included; mean over the images of the last local epoch"
_MU = (
    "what the client released: sensitivity / standard deviation of the noise, of features, predictions, counts, "
    "presence of classes, weights, BatchNorm's statistics, and a report of which nothing is known; inf: no noise, 0: "
    "nothing; NaN: not sampled; no column: no noise and no setting of section privacy"
)
_NOISY = "NaN in a round that shared no class; no column: features without noise"

METRICS: tuple[Metric | MetricGroup, ...] = (
    Metric(
        "round",
        {"unit": "1", "meaning": "rounds completed"},
        lambda r: r.round,
        dtype="int64",
    ),
    Metric(
        "wall_s",
        {"unit": "s", "meaning": "from the start of the round to the end of its exchange, on rank 0"},
        lambda r: r.wall_s,
    ),
    Metric(
        "weights_sha256",
        {
            "meaning": "SHA-256 over the global state dict after the round, in its own order: for each tensor "
            "f'{name} {numpy dtype.str} {shape}\\n' in UTF-8, then its bytes (little-endian, C order)"
        },
        lambda r: "",  # the server hashes beside the next round
        dtype="text",
    ),
    Metric(
        "warning",
        {"meaning": "what the scheme said about the message of this round; empty when all was well"},
        lambda r: r.warning,
        dtype="text",
    ),
    Metric(
        "local_test_accuracy",
        {"unit": "1", "weighting": "by images", **_LOCAL},
        lambda r: accuracy_over_images(r, "test"),
        lambda r: accuracies(r, "test"),
        title="local (own model, own test)",
        column="local",
    ),
    Metric(
        "local_test_accuracy_worst_tenth",
        {
            "unit": "1",
            "weighting": "mean over the tenth of the clients (one at least) that have the lowest accuracy",
            **_LOCAL,
        },
        lambda r: NAN if r.pools_data else worst_tenth(accuracies(r, "test")),
        title="  worst tenth of the clients",
        column="worst tenth",
    ),
    Metric(
        "local_test_accuracy_std",
        {"unit": "1", "weighting": "standard deviation over the clients", **_LOCAL},
        lambda r: NAN if r.pools_data else spread(accuracies(r, "test")),
        title="  spread over the clients (std)",
    ),
    Metric(
        "local_test_n",
        {"unit": "images", **_LOCAL},
        lambda r: int(r.accepted["test_n"].sum()),
        lambda r: r.reports["test_n"],
        dtype="int64",
    ),
    Metric(
        "local_test_balanced_accuracy",
        {"unit": "1", "weighting": _BY_CLIENT, "meaning": f"accuracy of a class, {_OWN_CLASSES}", **_LOCAL},
        lambda r: mean_of_known(of_own_test(r, "test_balanced_accuracy")),
        lambda r: of_own_test(r, "test_balanced_accuracy"),
        since=2,
    ),
    Metric(
        "local_test_macro_f1",
        {"unit": "1", "weighting": _BY_CLIENT, "meaning": f"F1 of a class, {_OWN_CLASSES}", **_LOCAL},
        lambda r: mean_of_known(of_own_test(r, "test_macro_f1")),
        lambda r: of_own_test(r, "test_macro_f1"),
        since=2,
    ),
    Metric(
        "local_val_accuracy",
        {"unit": "1", "weighting": "by images", **_LOCAL, "data": _VAL},
        lambda r: accuracy_over_images(r, "val"),
        lambda r: accuracies(r, "val"),
        title="local, on validation images",
    ),
    Metric("local_val_n", {"unit": "images", **_LOCAL, "data": _VAL}, of_clients=lambda r: r.reports["val_n"]),
    Metric(
        "global_test_accuracy",
        {"unit": "1", **_GLOBAL},
        lambda r: NAN,
        of_test=lambda test, val: test.accuracy,
        title="global ({batchnorm} BatchNorm)",
        column="global",
    ),
    Metric(
        "global_test_balanced_accuracy",
        {"unit": "1", "weighting": _BY_CLASS, "meaning": f"accuracy of a class (recall); {_WHY}", **_GLOBAL},
        lambda r: NAN,
        of_test=lambda test, val: test.balanced_accuracy,
        title="  balanced accuracy",
        since=2,
    ),
    Metric(
        "global_test_macro_f1",
        {"unit": "1", "weighting": _BY_CLASS, "meaning": f"F1 of a class; {_WHY}", **_GLOBAL},
        lambda r: NAN,
        of_test=lambda test, val: test.macro_f1,
        title="  macro F1",
        since=2,
    ),
    Metric(
        "global_test_macro_auc",
        {
            "unit": "1",
            "weighting": _BY_CLASS,
            "meaning": f"area under the ROC curve of a class against all others, by its probability; {_WHY}",
            **_GLOBAL,
        },
        lambda r: NAN,
        of_test=lambda test, val: test.macro_auc,
        title="  macro AUC, one against all others",
        since=2,
    ),
    Metric(
        "global_test_classes",
        {
            "unit": "classes",
            "meaning": "that have test images with finite logits; 0 in a round without a test",
            **_GLOBAL,
        },
        lambda r: 0,
        of_test=lambda test, val: classes_tested(test),
        dtype="int64",
        since=2,
    ),
    Metric(
        "global_test_undefined",
        {"meaning": "why a measure of the global test is NaN in this round; empty where all are numbers", **_GLOBAL},
        lambda r: "no test in this round",
        of_test=lambda test, val: why_undefined(test),
        dtype="text",
        since=2,
    ),
    Metric(
        "global_test_loss",
        {"unit": "nat", **_GLOBAL},
        lambda r: NAN,
        of_test=lambda test, val: ratio(test.loss, test.n),
    ),
    Metric(
        "global_test_n",
        {
            "unit": "images",
            "meaning": "0 in a round without a test; of unequal models each image once for each architecture",
            **_GLOBAL,
        },
        lambda r: 0,
        of_test=lambda test, val: test.n,
        dtype="int64",
    ),
    Metric(
        "global_test_correct_by_class",
        {
            "unit": "images",
            "axes": "round, class",
            "meaning": "predicted right, of /partition/global_test_count of the class, of unequal models once for each "
            "architecture; 0 in a round without a test",
            **_GLOBAL,
        },
        lambda r: [0] * r.classes,
        of_test=lambda test, val: list(test.correct_C),
        dtype="int64",
        since=2,
    ),
    Metric(
        "global_test_nonfinite",
        {"unit": "images", "meaning": "without finite logits; where there are any there is no accuracy", **_GLOBAL},
        lambda r: 0,
        of_test=lambda test, val: test.nonfinite,
        dtype="int64",
    ),
    Metric(
        "global_val_accuracy",
        {"unit": "1", **_GLOBAL, "data": f"{_VAL}, all together"},
        lambda r: NAN,
        of_test=lambda test, val: val.accuracy,
        title="global, on validation images",
    ),
    Metric(
        "global_val_nonfinite",
        {"unit": "images", "meaning": "the same of the validation images", **_GLOBAL, "data": _VAL},
        lambda r: 0,
        of_test=lambda test, val: val.nonfinite,
        dtype="int64",
    ),
    Metric(
        "train_n",
        {"unit": "images", "meaning": "training images that entered the average"},
        lambda r: int(r.accepted["train_n"].sum()),
        lambda r: r.reports["train_n"],
        dtype="int64",
    ),
    Metric("train_s", {"unit": "s", "meaning": "local training"}, of_clients=lambda r: r.reports["train_s"]),
    Metric("report_s", {"unit": "s", "meaning": "local test and report"}, of_clients=lambda r: r.reports["report_s"]),
    Metric(
        "memory_bytes",
        {
            "unit": "B",
            "meaning": "the most memory that the client's rank had held, in RAM, when the client reported; NaN for one "
            "that did not train",
        },
        of_clients=lambda r: np.where(r.reports["memory_bytes"] > 0, r.reports["memory_bytes"], NAN),
        since=2,
    ),
    Metric(
        "clients_sampled",
        {"unit": "clients", "meaning": "drawn for the round"},
        lambda r: len(r.reports),
        dtype="int64",
    ),
    Metric(
        "clients_refused",
        {
            "unit": "clients",
            "meaning": "sampled, but weights, report or loss were not finite or too "
            "large, or logits on its own test not finite",
        },
        lambda r: r.invalid,
        dtype="int64",
    ),
    Metric(
        "clients_failed",
        {
            "unit": "clients",
            "meaning": "sampled, but did not answer or came too late (fed.drop_rate, fed.straggler_rate)",
        },
        lambda r: r.failed,
        dtype="int64",
    ),
    Metric(
        "status",
        {
            "unit": "1",
            "meaning": "0 entered the average, 1 weights rejected, 2 too few images, 3 report rejected, 4 loss "
            "rejected, 5 dropped out, 6 straggler, 7 predictions rejected; NaN not sampled",
        },
        of_clients=lambda r: r.reports["status"],
    ),
    Metric(
        "knowledge_classes",
        {
            "unit": "1",
            "axes": "round, client, class",
            "meaning": "1 where the client shared knowledge of the class in this round, 0 where not; NaN for a client "
            "that was not sampled or did not enter the average; no column: a scheme that shares nothing by class",
        },
        of_clients=knowledge_classes,
        dtype="float16",
        since=2,
    ),
    Metric(
        "update_norm",
        {
            "unit": "1",
            "meaning": "L2 norm of the client's change of all weights, before privacy.update_clip; a measure without "
            "noise; no column: nothing is clipped",
        },
        of_clients=update_norms,
        since=2,
    ),
    Metric(
        "clients_clipped",
        {
            "unit": "clients",
            "meaning": "entered the average, their change of the weights clipped (privacy.update_clip)",
        },
        lambda r: int(r.accepted["clipped"].sum()) if "clipped" in names_of(r.reports) else None,
        dtype="int64",
        since=2,
    ),
    Metric(
        "noise_std",
        {
            "unit": "1",
            "meaning": "standard deviation of the noise on shared class means of features, by the scheme's formula; "
            f"mean over the shared classes of all accepted clients; {_NOISY}",
        },
        lambda r: r.knowledge.noise_std,
        since=2,
    ),
    Metric(
        "signal_rms",
        {
            "unit": "1",
            "meaning": "root mean square of the same class means without that noise, estimated from what was sent: "
            f"sqrt(mean(sent^2 - std^2)), 0 where that is negative; {_NOISY}",
        },
        lambda r: r.knowledge.signal_rms,
        since=2,
    ),
    Metric(
        "privacy_mu_fixed",
        {
            "unit": "1",
            "axes": "round, client, kind",
            "meaning": f"{_MU}, if the extractor did not depend on the client's data",
        },
        of_clients=lambda r: r.privacy_mu.get("privacy_mu_fixed"),
        since=2,
    ),
    Metric(
        "privacy_mu_whole",
        {"unit": "1", "axes": "round, client, kind", "meaning": f"{_MU}, in the worst case"},
        of_clients=lambda r: r.privacy_mu.get("privacy_mu_whole"),
        since=2,
    ),
    Metric(
        "begun",
        {
            "unit": "1",
            "meaning": "how often the round was begun, this time with it, as privacy_mu_* of its row count (only with "
            "privacy.mode=release)",
        },
        lambda r: r.begun or None,
        dtype="int64",
        since=2,
    ),
    MetricGroup(
        "loss",
        {"unit": "1", "meaning": _LOSS},
        losses,
        client_losses,
        {"cross_entropy": {"unit": "nat", "meaning": _LOSS}},
    ),
    MetricGroup(
        "seconds",
        {"unit": "s", "meaning": "on rank 0; train: training or waiting for it"},
        lambda r: r.seconds,
        parts={
            "evaluate_and_save": {"unit": "s", "meaning": "on rank 0, beside the training of the next round"},
            "save": {
                "unit": "s",
                "meaning": "on rank 0; writing the checkpoint of this round (part of evaluate_and_save too) and "
                "the row of the round before (which is not)",
            },
        },
    ),
    MetricGroup(
        "payload_bytes",
        {"unit": "B", "meaning": "what the paper counts as traffic; /rounds: summed over the sampled clients"},
        lambda r: {kind: int(count.sum()) for kind, count in r.payload_bytes.items()},
        lambda r: r.payload_bytes,
        dtype="int64",
    ),
    MetricGroup(
        "wire_bytes",
        {"unit": "B", "meaning": "buffers handed to the communicator, summed over the ranks; 0 in one process"},
        lambda r: r.wire_bytes,
        dtype="int64",
    ),
)
FINAL = (
    FinalMetric(
        "global_test_accuracy_batchnorm_reestimated",
        "global, BatchNorm re-estimated by clients",
        "global, BN re-estimated",
    ),
    FinalMetric("global_on_local_test_accuracy", "global model on the clients' own tests"),
    FinalMetric("finetuned_on_local_test_accuracy", "global model fine-tuned by each client", "fine-tuned"),
)
SINGLE = tuple(metric for metric in METRICS if isinstance(metric, Metric))
SUMMARISED = tuple(metric for metric in SINGLE if metric.title)  # what the summary has in each way of SUMMARY_WAYS
SUMMARY_WAYS = {"last": "last round", "mean_last_5": "mean last 5", "oracle": "best"}  # the names in stored summaries
BY_NAME = {metric.name: metric for metric in METRICS}
PLACES = {name: place for place, name in enumerate(("round", *BY_NAME))}


def in_order(columns: Iterable[str]) -> list[str]:
    """Columns of rounds or clients as METRICS has them, parts of a group by name, those of other versions last."""
    return sorted(columns, key=lambda name: (PLACES.get(name.partition("/")[0], len(PLACES)), name))


def row_of(numbers: RoundNumbers) -> dict[str, Value]:
    """The row of a round in /rounds, by column."""
    row: dict[str, Value] = {}
    for metric in METRICS:
        if isinstance(metric, MetricGroup):
            row |= {f"{metric.name}/{part}": value for part, value in metric.of_round(numbers).items()}
        elif metric.of_round and (value := metric.of_round(numbers)) is not None:
            row[metric.name] = value
    return row


def clients_of(numbers: RoundNumbers) -> dict[str, np.ndarray]:
    """The clients' numbers in /clients, by column, one for each report."""
    columns: dict[str, np.ndarray] = {}
    for metric in METRICS:
        if metric.of_clients is None:
            continue
        found = metric.of_clients(numbers)
        if found is None:
            continue
        if isinstance(found, Mapping):
            columns |= {f"{metric.name}/{part}": values for part, values in found.items()}
        else:
            columns[metric.name] = found
    return columns


def of_test(test: TestResult, val: TestResult) -> dict[str, Value]:
    """What a test of the global model puts into the row of its round."""
    return {metric.name: metric.of_test(test, val) for metric in SINGLE if metric.of_test}


def attributes_of(column: str) -> Attributes:
    """What metrics.h5 says of a column; KeyError where no metric has this name."""
    group, _, part = column.partition("/")
    metric = BY_NAME[group]
    return metric.parts.get(part, metric.attributes) if isinstance(metric, MetricGroup) else metric.attributes


def summarise(values: np.ndarray, nonfinite: np.ndarray | bool = False) -> dict[str, float]:
    """The values of a column over the rounds, summarised in three ways.

    Args:
        values: (rounds,), NaN where nothing was tested.
        nonfinite: (rounds,) bool, tested without finite predictions.

    Returns:
        "last", the last round (primary); "mean_last_5", over the last five tested rounds, NaN where one has none;
        "oracle", the best round: selected on the test set, therefore no result.
    """
    finite = values[~np.isnan(values)]
    if not len(finite):
        return dict.fromkeys(SUMMARY_WAYS, NAN)
    tested = values[~np.isnan(values) | nonfinite]
    return {"last": float(values[-1]), "mean_last_5": float(tested[-5:].mean()), "oracle": float(finite.max())}
