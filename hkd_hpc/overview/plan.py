"""What a run is going to do, in words: the headline of every run and the text of --dry-run. Rank 0 only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hkd_hpc.analysis.tables import aligned
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.common.words import counted
from hkd_hpc.config import Config, absolute_paths, as_values, resolve
from hkd_hpc.config.protection import told
from hkd_hpc.config.words import as_text
from hkd_hpc.console.messages import bytes_text
from hkd_hpc.data.settings import DataSettings

SHOWN_CLASSES = 20


@dataclass(frozen=True)
class Plan:
    """What is told of a run before its first round.

    Attributes:
        config: the settings that the rounds use.
        comm: the ranks, their devices and cores.
        rank_of: the rank of each client.
        client_names: of natural clients; empty where they have none.
        partition: which images each client has, as metrics.h5 stores it.
        parameters: trainable numbers of the model; of unequal models by architecture.
        weights_bytes: weights that one client sends, and gets, in a round, as the paper counts; of unequal models the
            largest one's.
        memory_bytes: what the busiest client rank holds beside torch and images.
        all_reduce_bytes: of one rank in a round.
        report_bytes: of one client in a round.
        message_bytes: to one rank in a round.
    """

    config: Config
    comm: Comm
    rank_of: Sequence[int]
    client_names: Sequence[str]
    partition: Mapping[str, Any]
    parameters: Sequence[int]
    weights_bytes: int
    memory_bytes: int
    all_reduce_bytes: int
    report_bytes: int
    message_bytes: int


def headline(plan: Plan) -> str:
    """Three lines: what runs, on which ranks and devices, and on which cores; one more where privacy is asked for."""
    config, fed, train = plan.config, plan.config.fed, plan.config.train
    clients, rounds, epochs = map(counted, (fed.clients, fed.rounds, train.epochs), ("client", "round", "epoch"))
    cohort = "" if fed.participation == 1 else f" ({fed.participation:g} sampled)"
    return (
        f"{config.scheme.name} on {config.data.name}: {clients}{cohort}, {partition_text(config.data)}, "
        f"{rounds} x {epochs}, {model_text(plan)}, "
        f"seed {config.run.seed}\n{plan.comm.plan_line}\n{plan.comm.cores_line}"
    ) + f"\n{told(config)}".rstrip("\n")


def model_text(plan: Plan) -> str:
    """'small with 102,378 parameters', 'small + resnet18 with 102,378 + 11,209,994 parameters'."""
    return f"{plan.config.model.title} with {' + '.join(f'{count:,}' for count in plan.parameters)} parameters"


def partition_text(data: DataSettings) -> str:
    """How the images are partitioned: 'dirichlet beta 0.5', '2 shards each', 'iid'."""
    of_beta = data.partition in ("dirichlet", "quantity", "heuristic")
    with_beta = data.partition + f" beta {data.beta:g}" * of_beta
    return (f"{data.classes_per_client} shards each" if data.partition == "shards" else with_beta) + _skew_text(data)


def _skew_text(data: DataSettings) -> str:
    turned = f", turned by up to {data.client_rotation:g} degrees" * bool(data.client_rotation)
    return turned + f", noise up to {data.client_noise:g}" * bool(data.client_noise)


def text(plan: Plan) -> str:
    """Everything --dry-run shows."""
    return "\n".join(
        [
            headline(plan),
            *plan.comm.rank_lines,
            "",
            *clients_lines(plan),
            "",
            *memory_lines(plan),
            *bytes_lines(plan),
            "",
            *settings_lines(plan.config),
        ]
    )


def settings_lines(config: Config) -> list[str]:
    """The settings that differ from the defaults, beside these."""
    values = as_values(config)
    defaults = as_values(absolute_paths(resolve(overrides=[f"scheme.name={config.scheme.name}"])))
    different = {key: value for key, value in values.items() if value != defaults[key]}
    rows = [(key, as_text(value) or "-", as_text(defaults[key]) or "-") for key, value in different.items()]
    if not rows:
        return [f"all {len(values)} settings are the defaults, which --help lists"]
    last = f"the other {len(values) - len(rows)} settings are the defaults, which --help lists"
    return [*aligned([("setting", "value", "default"), *rows]), last]


def clients_lines(plan: Plan) -> list[str]:
    """Class histogram per client."""
    partition, names = plan.partition, plan.client_names
    classes = range(min(partition["train_count"].shape[1], SHOWN_CLASSES))
    lines = [
        data_line(partition),
        *class_lines(partition),
        f"partition {partition['sha256'][:16]}: training images per client and class, rank, other images",
        f"client  rank  train   val  test  {' '.join(f'{c:>4d}' for c in classes)}",
    ]
    vals, tests = np.diff(partition["val_offset"]), np.diff(partition["test_offset"])
    for client, counts in enumerate(partition["train_count"]):
        row = " ".join(f"{count:4d}" for count in counts[:SHOWN_CLASSES])
        lines.append(
            f"{client:6d}{plan.rank_of[client]:6d}{counts.sum():7d}{vals[client]:6d}{tests[client]:6d}  {row}"
            + (" ..." if len(counts) > SHOWN_CLASSES else "")
            + (f"  {names[client]}" if len(names) else "")
        )
    return lines


def data_line(partition: Mapping[str, Any]) -> str:
    """How many images there are in each split, and where they go."""
    train, test = partition["images"]
    parts = {"training": "train", "validation": "val", "local tests": "test", "public": "public"}
    sizes = {what: len(partition[f"{part}_index"]) for what, part in parts.items()}
    return (
        f"images: {train:,} in the training split, {test:,} in the test split, {partition['train_count'].shape[1]} "
        "classes; "
        "assigned: " + ", ".join(f"{size:,} {what}" for what, size in sizes.items() if size)
    )


def class_lines(partition: Mapping[str, Any]) -> list[str]:
    """The names of the classes, where the data have them, cut like the columns below."""
    names = partition.get("class_name", ())
    told = ", ".join(f"{number} {name}" for number, name in enumerate(names[:SHOWN_CLASSES]))
    return [f"classes: {told}{' ...' if len(names) > SHOWN_CLASSES else ''}"] if len(names) else []


def memory_lines(plan: Plan) -> list[str]:
    """What a client rank holds: global weights, model, gradient, optimizer, the exact sum; and its images."""
    busiest = max(Counter(plan.rank_of).values())
    return [
        f"memory of a client rank: {bytes_text(plan.memory_bytes)} for model, gradient, optimiser and sum, beside "
        f"torch itself and the images of at most {busiest} client(s)"
    ]


def bytes_lines(plan: Plan) -> list[str]:
    """Bytes a round: weights as the paper counts them, and the blocks that really travel."""
    return [
        f"payload of a client and round: {bytes_text(plan.weights_bytes)} of weights each way",
        f"on the wire: {bytes_text(plan.all_reduce_bytes)} a rank in the all-reduce, "
        f"{bytes_text(plan.report_bytes)} a client up, {bytes_text(plan.message_bytes)} a rank down",
    ]
