"""What is in metrics.h5: every group and data set with its shape, dtype, unit and meaning, for docs/files.md.

A reader copes with what is absent: an older layout has less, and much is there for some runs alone. A file without
`layout_version` is of version 1. What is there keeps name, shape and meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hkd_hpc.analysis.metrics import FINAL, METRICS, SUMMARISED, SUMMARY_WAYS, Metric, MetricGroup


@dataclass(frozen=True)
class Entry:
    """One data set, or equal ones.

    Attributes:
        path: below the root; `<...>` stands for a name.
        shape: of rounds, clients, classes and the like; "" of a single value.
        dtype: NumPy's name, or text (UTF-8).
        unit: "" where there is none.
        meaning: in words.
        since: the layout version.
    """

    path: str
    shape: str
    dtype: str
    unit: str
    meaning: str
    since: int = 1


_INDEX = "into the training split; client i has [offset[i], offset[i + 1])"
_TEST_ROWS = "client, its test images, how many are predicted right, for how many the logits are not finite"

OTHERS = (
    Entry("events/round", "events", "int64", "", "of a client that was rejected; no group where none was"),
    Entry("events/client", "events", "int64", "", "which"),
    Entry("events/what", "events", "text", "", "what of it was rejected"),
    Entry("events/tensor", "events", "text", "", "in which tensor the number is"),
    Entry("events/value", "events", "float64", "", "the number"),
    Entry("clients/rank", "clients", "int64", "", "on which each client lives, in the last process"),
    Entry("clients/name", "clients", "text", "", "of natural clients whose ids are not their numbers"),
    Entry("partition/<train or val or test>_index", "images", "int64", "", f"{_INDEX}; test: into test_split"),
    Entry("partition/<train or val or test>_offset", "clients + 1", "int64", "", "where each client's images begin"),
    Entry("partition/test_split", "", "text", "", "train or test: of which split the local tests are"),
    Entry("partition/public_index", "images", "int64", "", "public images, in the training split"),
    Entry("partition/sha256", "", "text", "", "of the indices"),
    Entry("partition/images", "2", "int64", "images", "in the training and the test split"),
    Entry("partition/train_count", "clients, classes", "int64", "images", "training images"),
    Entry("partition/global_test_count", "classes", "int64", "images", "of the official test split", 2),
    Entry("partition/class_name", "classes", "text", "", "where the data have names"),
    Entry(
        "partition/rotation_deg", "clients", "float64", "degrees", "by which a client's images are turned, if asked", 2
    ),
    Entry("partition/noise_std", "clients", "float64", "1", "of the noise on a client's images, of their range", 2),
    Entry("parameters/model", "", "int64", "1", "trainable numbers of the model"),
    Entry("parameters/held", "", "int64", "1", "in memory while a client trains, as the paper's Table 1 counts"),
    Entry("baselines/chance", "", "float64", "1", "accuracy of a fair die"),
    Entry("baselines/local_majority", "", "float64", "1", "of each client's most common class, on its own test"),
    Entry("baselines/global_majority", "", "float64", "1", "of the most common class, on the official test split"),
    Entry("world/ranks", "", "int64", "1", "of the last process"),
    Entry("world/plan", "", "text", "", "its devices, and what carried the weights, in words"),
    Entry(
        "image_shape", "1 or 3", "int64", "", "of an input: channels, height, width; of a row or sequence its length"
    ),
    Entry("input/dtype", "", "text", "", "of the inputs as they lie in the data: uint8, float32 or int64"),
    Entry("input/<mean or std>", "channels", "float64", "", "by which they are normalised; absent: by none"),
    Entry("config_json", "", "text", "", "the settings"),
    Entry("changes_json", "", "text", "", "[{after_round, key: [before, after]}]: what changed on the way"),
    Entry("versions_json", "", "text", "", "of the code (`git describe`; installed: a hash), Python, packages"),
    Entry("identity_json", "", "text", "", "SHA-256 of code and data"),
    Entry("sessions_json", "", "text", "", "the processes that made the run", 2),
    Entry("privacy/<mode or adjacency>", "", "text", "", "of section privacy; no group: no ledger", 2),
    Entry("privacy/delta", "", "float64", "1", "privacy.delta", 2),
    Entry("privacy/told_<kind>", "", "text", "", "clip and noise of a kind that is released, in words", 2),
    Entry("privacy/mend_<kind>", "", "text", "", "the settings that give a kind without a bound one", 2),
    Entry("repaired_from", "", "text", "", "of a file that `check --repair` wrote: where its rows come from"),
)
SUMMARY = (
    *(Entry(f"summary/{metric.name}", "", "float64", "1", metric.title.strip()) for metric in FINAL),
    Entry(
        "summary/global_test_confusion",
        "classes, classes",
        "int64",
        "images",
        "of the official test split by true and predicted class, the global model of the last round; images without "
        "finite logits are in no cell; of unequal models each image once for each architecture",
        2,
    ),
    Entry("summary/<global or finetuned>_on_local_test", "clients, 4", "int64", "", _TEST_ROWS),
    Entry(
        f"summary/<accuracy>_<{' or '.join(SUMMARY_WAYS)}>",
        "",
        "float64",
        "1",
        f"of {', '.join(metric.name for metric in SUMMARISED)}: last round, mean of the last five tested, best round",
    ),
    Entry("summary/target_accuracy", "", "float64", "1", "run.target_accuracy; 0: none, and no more of these", 2),
    Entry(
        "summary/target_<local or global>_round",
        "",
        "float64",
        "",
        "the first round with a test accuracy not below the target; NaN where none was",
        2,
    ),
    Entry("summary/target_<local or global>_payload_bytes", "", "float64", "B", "payload up to its end", 2),
    Entry("summary/target_<local or global>_wall_s", "", "float64", "s", "sum of wall_s up to its end", 2),
    *(
        Entry(f"summary/architectures/{name}", "architectures", dtype, unit, f"{meaning} (model.names)")
        for name, dtype, unit, meaning in (
            ("name", "text", "", "of unequal models"),
            ("clients", "int64", "1", "of unequal models, by architecture"),
            ("parameters", "int64", "1", "of unequal models, by architecture"),
            ("local_test_accuracy", "float64", "1", "the same of its clients' own models, weighted by images"),
            ("global_test_accuracy", "float64", "1", "the same of their average, on the official test split"),
        )
    ),
    *(
        Entry(f"summary/{name}", "", "text", "", meaning)
        for name, meaning in {
            "stopped_early": "why the last round is earlier than fed.rounds (run.stop_patience); empty where it is not",
            "privacy": "epsilon of the features alone and of the whole release, in words; absent without a ledger",
            "warnings": "of all rounds, in a few words",
            "remark": "what must be known about the scheme's results",
            "batchnorm": "train.batchnorm",
            "reproducible": "empty where another run of these settings gives the same bits",
            "changes": "what changed on the way, in words",
            "finished": "date and time",
        }.items()
    ),
)


def entries() -> Iterator[Entry]:
    """All of metrics.h5, rows first."""
    for table in ("rounds", "clients"):
        for metric in METRICS:
            yield from of_group(table, metric) if isinstance(metric, MetricGroup) else of_metric(table, metric)
    yield from (*OTHERS, *SUMMARY)


def of_metric(table: str, metric: Metric) -> Iterator[Entry]:
    """Its column in a table, if it has one there."""
    in_rounds, in_clients = metric.of_round or metric.of_test, metric.of_clients
    if in_rounds if table == "rounds" else in_clients:
        dtype = metric.dtype if table == "rounds" or not in_rounds else "float64"
        yield column(f"{table}/{metric.name}", metric.attributes, dtype, metric.since)


def of_group(table: str, group: MetricGroup) -> Iterator[Entry]:
    """Its columns in a table: those that have a description of their own, and all others in one entry."""
    if table == "rounds" or group.of_clients:
        dtype = group.dtype if table == "rounds" else "float64"
        for part, attributes in {"<part>": group.attributes, **group.parts}.items():
            yield column(f"{table}/{group.name}/{part}", attributes, dtype)


def column(path: str, attributes: dict[str, str], dtype: str, since: int = 1) -> Entry:
    """As the attributes of the column describe it."""
    axes = attributes.get("axes", "round" if path.startswith("rounds") else "round, client").split(", ")
    told = [attributes[name] for name in ("meaning", "model", "data", "moment", "weighting") if name in attributes]
    shape = ", ".join(
        {"round": "rounds", "client": "clients", "class": "classes", "kind": "kinds"}[axis] for axis in axes
    )
    return Entry(path, shape, dtype, attributes.get("unit", ""), "; ".join(told), since)
