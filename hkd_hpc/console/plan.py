"""What a run is going to do, in words: the headline of every run and the text of --dry-run. Rank 0 only."""

from __future__ import annotations

from collections import Counter

import numpy as np

from hkd_hpc.console.messages import bytes_text


def headline(config, comm, job) -> str:
    """Three lines: what runs, on which ranks and devices, and on which cores."""
    fed, train = config.fed, config.train
    cohort = "" if fed.participation == 1 else f" ({fed.participation:g} sampled)"
    return (
        f"{config.scheme.name} on {config.data.name}: {fed.clients} clients{cohort}, {dealt_text(config.data)}, "
        f"{fed.rounds} rounds x {train.epochs} epochs, {config.model.name} with "
        f"{job.trainer.flat.parameter_count:,} parameters, seed {config.run.seed}\n{comm.plan_line}\n{comm.cores_line}"
    )


def dealt_text(data) -> str:
    """How the images are dealt: 'dirichlet beta 0.5', '2 shards each', 'iid'."""
    if data.partition == "shards":
        return f"{data.classes_per_client} shards each"
    return data.partition + (f" beta {data.beta:g}" if data.partition in ("dirichlet", "heuristic") else "")


def text(config, comm, job) -> str:
    """Everything --dry-run shows."""
    return "\n".join(
        [
            headline(config, comm, job),
            *comm.rank_lines,
            "",
            "settings:",
            config.to_json(),
            "",
            *clients_lines(job),
            "",
            *memory_lines(job),
            *bytes_lines(config, job),
        ]
    )


def clients_lines(job) -> list[str]:
    """Class histogram per client."""
    partition = job.server.static["partition"]
    classes = range(min(partition["train_count"].shape[1], 20))
    names = job.server.client_names
    lines = [
        data_line(partition),
        *class_lines(partition),
        f"partition {partition['sha256'][:16]}: training images per client and class, rank, other images",
        f"client  rank  train   val  test  {' '.join(f'{c:>4d}' for c in classes)}",
    ]
    vals, tests = np.diff(partition["val_offset"]), np.diff(partition["test_offset"])
    for client, counts in enumerate(partition["train_count"]):
        row = " ".join(f"{count:4d}" for count in counts[:20])
        lines.append(
            f"{client:6d}{job.rank_of[client]:6d}{counts.sum():7d}{vals[client]:6d}{tests[client]:6d}  {row}"
            + (" ..." if len(counts) > 20 else "")
            + (f"  {names[client]}" if len(names) else "")
        )
    return lines


def data_line(partition: dict) -> str:
    """How many images there are in each split, and where they go."""
    train, test = partition["images"]
    parts = {"training": "train", "validation": "val", "local tests": "test", "public": "public"}
    sizes = {what: len(partition[f"{part}_index"]) for what, part in parts.items()}
    return (
        f"images: {train:,} in the training split, {test:,} in the test split, {partition['train_count'].shape[1]} "
        "classes; "
        "dealt: " + ", ".join(f"{size:,} {what}" for what, size in sizes.items() if size)
    )


def class_lines(partition: dict) -> list[str]:
    """The names of the classes, where the data have them, cut like the columns below."""
    names = partition.get("class_name", ())
    told = ", ".join(f"{number} {name}" for number, name in enumerate(names[:20]))
    return [f"classes: {told}{' ...' if len(names) > 20 else ''}"] if len(names) else []


def memory_lines(job) -> list[str]:
    """Bytes a client rank holds: global weights, model, gradient, two moments, the exact sum; and its images."""
    flat = job.trainer.flat
    busiest = Counter(job.rank_of).most_common(1)[0]
    banked_bytes = 8 * job.worker.sum.length if busiest[1] > 1 else 0  # a sum of one client is made piece by piece
    moments = sum(stop - start for start, stop in flat.live_spans)
    model_bytes = 4 * (2 * len(flat.values_V) + len(flat.parameters_P) + 2 * moments) + banked_bytes
    return [
        f"memory of a client rank: {bytes_text(model_bytes)} for model, gradient, optimiser and sum, beside torch "
        f"itself and the images of at most {busiest[1]} client(s)"
    ]


def bytes_lines(config, job) -> list[str]:
    """Bytes a round: weights as the paper counts them, and the blocks that really travel."""
    weights = job.trainer.payload_floats * 4
    return [
        f"payload of a client and round: {bytes_text(weights)} of weights each way",
        f"on the wire: {bytes_text((job.worker.sum.length + 1) * 8)} a rank in the all-reduce, "
        f"{bytes_text(job.worker.report_type.itemsize)} a client up, {bytes_text(job.message.nbytes)} a rank down",
    ]
