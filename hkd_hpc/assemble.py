"""From settings to a Job: data, partition, model, scheme, server; a fresh start or a resume; and the dry run's plan."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace

import numpy as np
import torch

from hkd_hpc import config as config_module
from hkd_hpc import payload, rounds, schemes
from hkd_hpc.client import OWN_MODEL, OWN_STATISTICS, Client
from hkd_hpc.cohort import deal
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.config import Config, identity
from hkd_hpc.console import messages, plan
from hkd_hpc.data import content, public, share, sources
from hkd_hpc.data.partition import Partition, make_partition, pooled
from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.gpu import graphs
from hkd_hpc.gpu.concurrent import open_lanes
from hkd_hpc.models import networks
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.runtime import provenance, versions
from hkd_hpc.schemes import contract
from hkd_hpc.schemes.base import RunInfo
from hkd_hpc.server import Images, Server, message_type
from hkd_hpc.stop import StopRequest, handlers_kept, name_of
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.history import History
from hkd_hpc.training import LocalTrainer
from hkd_hpc.worker import Worker, counter_size, pack_counters, unpack_counters

NEEDED = ("config_json", "partition", "message", "server", "client_states", "global", "rounds", "clients")  # to go on


# --- a run


def run(config: Config, comm: Comm, folder: RunFolder | None, request, stop: StopRequest) -> bool:
    """All ranks: build, start or resume, train. False when `stop` was asked for before the end.

    `request`: what the command line says of going on, `resume`, `allow_change` and `strict_code`.
    """
    with handlers_kept():
        set_up_torch(config, comm.device)
        job = build(config, comm, folder)
        start(job, folder, request)
        widen(job)
    job.stop = stop
    if comm.rank == 0:
        messages.say(plan.headline(config, comm, job))
    complete = rounds.run(job)
    if not complete and comm.rank == 0:
        messages.say(
            f"stopped by {name_of(job.stopping)} after round {job.done} of {config.fed.rounds}, which is saved; "
            f"go on with --resume --out {folder.path}"
        )
    return complete


def set_up_torch(config: Config, device: torch.device) -> None:
    """Threads; fp32, or TF32; and, if asked for, only operations that give the same bits in each run."""
    torch.set_num_threads(config.run.threads)
    allow_tf32 = config.train.precision == "tf32" and device.type == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow_tf32
    if config.run.deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports a compiler, 1 s
        torch.use_deterministic_algorithms(config.run.deterministic)  # its error names the operation


def build(config: Config, comm: Comm, folder: RunFolder | None) -> rounds.Job:
    """This rank's part, with initial weights that are the same on every rank."""
    dataset = node_copy(config, comm)
    agree_on(comm, {"data": dataset.shapes()})  # before anything is made that one rank alone could fail at
    if comm.rank == 0 and dataset.remarks:
        messages.say(f"data: {'; '.join(dataset.remarks)}")
    scheme_class = schemes.get(config.scheme.name)
    partition = partition_of(config, dataset, scheme_class.needs_public)
    asked, dealt = config, partition
    if scheme_class.pools_data:
        partition = pooled(partition)
        config = replace(config, fed=replace(config.fed, clients=1, participation=1.0))
    flat = FlatModel(agreed_net(comm, config, dataset), comm.device)
    scheme = scheme_class(
        config.scheme,
        RunInfo(
            dataset.classes,
            config.model.latent,
            config.fed.clients,
            len(flat.parameters_P),
            len(flat.values_V),
            len(partition.public),
        ),
    )
    contract.check_declarations(scheme, (OWN_MODEL, OWN_STATISTICS))
    agree_on(
        comm,
        {
            "scheme": contract.declared_shapes(scheme),
            "model": flat.schema(),
            "data": dataset.sha256,
            "partition": partition.sha256,
            "settings": asked.to_json(),
            "code": json.dumps(identity.code_of(asked)),
        },
    )
    trainer = LocalTrainer(flat, scheme, config)
    if comm.rank == 0:
        warn_of_idle(config, trainer)
    require_trainable(partition, trainer)
    images = [len(index) for index in partition.train]
    rank_of = deal(images, comm.size)
    x_public = torch.from_numpy(dataset.x_train[partition.public]).to(comm.device) if scheme.needs_public else None
    names = client_names(config, dataset)
    here = [
        make_client(client, dataset, partition, config, comm.device, x_public, names[client] if names else "")
        for client, rank in enumerate(rank_of)
        if rank == comm.rank
    ]
    places = max(np.bincount(rank_of))
    server = (
        make_server(config, asked, comm, folder, dataset, partition, dealt, trainer, rank_of, names)
        if comm.rank == 0
        else None
    )
    message = np.zeros(1, message_type(scheme, counter_size(flat.counters)))
    message[0]["counters"] = pack_counters(flat.counters)
    worker = Worker(comm, trainer, here, places, images)
    comm.watch_steps(lambda: worker.lanes.steps)
    return rounds.Job(
        config,
        comm,
        trainer,
        worker,
        server,
        rank_of,
        flat.values_V.detach().clone(),
        [c.clone() for c in flat.counters],
        message,
    )


def make_model(config: Config, classes: int, image_shape: tuple[int, int, int], device: torch.device) -> FlatModel:
    """With the initial weights of the run."""
    return FlatModel(make_net(config, classes, image_shape, device), device)


def make_net(config: Config, classes: int, image_shape: tuple[int, int, int], device: torch.device) -> torch.nn.Module:
    """The same before its tensors are moved, and refused where they are not float32."""
    net = networks.build(config.model, classes, image_shape, config.run.seed, device)
    if config.train.precision == "bf16":
        networks.train_in_bf16(net)
    return net


def agreed_net(comm: Comm, config: Config, dataset: sources.DataSet) -> torch.nn.Module:
    """The network, of the same shapes and dtypes on all ranks. One that only some ranks can make is told with a
    rank.
    """
    try:
        net, problem = make_net(config, dataset.classes, dataset.x_train.shape[1:], comm.device), None
    except UsageError as error:
        net, problem = torch.nn.Module(), error
    agree_on(comm, {"model": {"its problem": str(problem), **shapes_of(net)}})
    if problem:
        raise problem
    return net


def shapes_of(net: torch.nn.Module) -> dict[str, str]:
    """Shape and dtype of each tensor of the state dict."""
    return {
        name: f"{tuple(value.shape)} {value.dtype}"
        for name, value in net.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def warn_of_idle(config: Config, trainer: LocalTrainer) -> None:
    """Say what was asked for and cannot be had on this device, with this scheme and model."""
    device = trainer.flat.values_V.device
    no_graphs, no_lanes = graphs.why_not(trainer.scheme, trainer.flat.net, device), one_lane(trainer)
    if config.run.graphs == "on" and no_graphs:
        messages.warn(f"run.graphs=on has no effect: {no_graphs}")
    if config.run.lanes > 1 and no_lanes:
        messages.warn(f"run.lanes={config.run.lanes} has no effect: {no_lanes}")
    if config.train.precision == "tf32" and device.type == "cpu":
        messages.warn("train.precision=tf32 is fp32 here: there is no GPU")


def one_lane(trainer: LocalTrainer) -> str:
    """Why clients cannot be trained side by side, empty where they can."""
    if trainer.flat.values_V.device.type == "cpu":
        return "there is no GPU; on CPUs, more ranks train clients side by side"
    if not graphs.promises(trainer.flat.net):
        name = type(trainer.flat.net).__name__
        return f"{name} does not say `cuda_graph_safe = True`: it may draw from torch's one generator"
    return ""


def require_trainable(partition: Partition, trainer: LocalTrainer) -> None:
    largest = max(len(index) for index in partition.train)
    if largest < trainer.fewest:
        raise UsageError(
            f"fed.clients={len(partition.train)}: no client gets more than {largest} training image(s), and "
            f"this model needs {trainer.fewest}; lower fed.clients or raise data.fraction"
        )


def node_copy(config: Config, comm: Comm) -> sources.DataSet:
    """The data, read once per node and mapped by its other ranks; the file has no name any more when this returns."""
    data = config.data
    if comm.size == 1:
        return content.load(data)
    path = share.publish(content.load(data)) if comm.local_rank == 0 else ""
    try:
        told = comm.gather_text(json.dumps([comm.hosts[comm.rank], path]))
        paths = comm.share_text(json.dumps({h: p for h, p in map(json.loads, told) if p}) if comm.rank == 0 else None)
        dataset = share.attach(json.loads(paths)[comm.hosts[comm.rank]])
        comm.agree()
    finally:
        if path:
            os.unlink(path)
    return dataset


def partition_of(config: Config, dataset: sources.DataSet, needs_public: bool = False) -> Partition:
    """The public set depends on settings alone, so that partitions are the same for all schemes."""
    data, images = config.data, len(dataset.y_train)
    if needs_public:
        public.check(config, images)
    public_fraction = public.fraction(config, images)
    return make_partition(
        dataset.y_train,
        dataset.classes,
        clients=config.fed.clients,
        kind=data.partition,
        beta=data.beta,
        fraction=data.fraction,
        public_fraction=public_fraction,
        val_fraction=data.val_fraction,
        seed=config.partition_seed,
        client_train=dataset.client_train,
        client_test=dataset.client_test,
        classes_per_client=data.classes_per_client,
        test_labels=dataset.y_test,
    )


def agree_on(comm: Comm, facts: dict[str, str | dict[str, str]]) -> None:
    """RunError on all ranks when they do not hold the same facts, by what they are of (code or data differ between
    nodes).

    Of facts by name (shapes) the first that differs is told, with what it is on both ranks.
    """
    own = {what: hashlib.sha256(json.dumps(fact).encode()).hexdigest() for what, fact in facts.items()}
    told = [json.loads(text) for text in comm.gather_text(json.dumps(own))]
    others = {what: [rank for rank, other in enumerate(told) if other[what] != digest] for what, digest in own.items()}
    different = json.loads(comm.share_text(json.dumps(others) if comm.rank == 0 else None))
    found = [
        f"ranks {ranks} have another {what} than rank 0{difference(comm, facts[what], ranks[0])}"
        for what, ranks in different.items()
        if ranks
    ]
    if found:
        raise RunError(f"{', '.join(found)}; is the same code and data on all nodes?")


def difference(comm: Comm, fact: str | dict[str, str], rank: int) -> str:
    """ " (fc.weight is (8, 128) torch.float32 on rank 3, (16, 128) torch.float32 on rank 0)": the first of the facts by
    name that is another on this rank than on rank 0. On all ranks."""
    if isinstance(fact, str):
        return ""
    told = [json.loads(text) for text in comm.gather_text(json.dumps(fact))]
    if comm.rank:
        return comm.share_text()
    own, other = told[0], told[rank]
    names = [name for name in [*own, *other] if own.get(name) != other.get(name)]
    return comm.share_text(
        f" ({names[0]} is {other.get(names[0], 'absent')} on rank {rank}, {own.get(names[0], 'absent')} on rank 0)"
        if names
        else " (in another order)"
    )


def make_client(
    client: int,
    dataset: sources.DataSet,
    partition: Partition,
    config: Config,
    device,
    x_public: torch.Tensor | None = None,
    name: str = "",
) -> Client:
    """One client with its images resident on this rank's device."""
    x_test, y_test = (
        (dataset.x_test, dataset.y_test) if partition.test_split == "test" else (dataset.x_train, dataset.y_train)
    )
    resident = lambda array, index: torch.from_numpy(array[index]).to(device)
    train, test, val = partition.train[client], partition.test[client], partition.val[client]
    return Client(
        client,
        resident(dataset.x_train, train),
        resident(dataset.y_train, train),
        resident(x_test, test),
        resident(y_test, test),
        dataset.classes,
        config.run.seed,
        x_public,
        resident(dataset.x_train, val),
        resident(dataset.y_train, val),
        name=name,
    )


def client_names(config: Config, dataset: sources.DataSet) -> list[str]:
    """The names or ids in the data of natural clients, by their numbers; empty where these are the numbers
    themselves.
    """
    if config.data.partition != "natural" or config.fed.clients == 1:  # of a scheme that pools all data
        return []
    ids = np.unique(dataset.client_train)
    if dataset.client_names:
        return list(dataset.client_names)
    return [] if np.array_equal(ids, np.arange(len(ids))) else [str(number) for number in ids]


def make_server(config, asked, comm, folder, dataset, partition, dealt, trainer, rank_of, names) -> Server:
    """`asked`, `dealt`: settings and partition before a scheme that pools all data made one client of them."""
    resident = lambda array: torch.from_numpy(np.array(array)).to(comm.device)
    held_out = np.concatenate(partition.val)
    test = Images(resident(dataset.x_test), resident(dataset.y_test))
    val = Images(resident(dataset.x_train[held_out]), resident(dataset.y_train[held_out]))
    static = {
        "config_json": asked.to_json(),
        "changes_json": "[]",
        "versions_json": json.dumps(versions.found()),
        "identity_json": identity.to_json(asked, dataset.sha256),
        "partition": partition_tree(partition, dataset),
        "clients": {"rank": np.array(rank_of, np.int64)} | ({"name": np.array(names)} if names else {}),
        "image_shape": np.array(dataset.x_train.shape[1:], np.int64),
        "parameters": {
            "model": trainer.flat.parameter_count,
            "held": trainer.scheme.parameters_held(trainer.flat.parameter_count),
        },
        "baselines": baselines(dataset, dealt),
        "world": {"ranks": comm.size, "plan": comm.plan_line},
    }
    return Server(config, trainer, folder, test, val, History(config.fed.clients), static, comm.uninterrupted)


def partition_tree(partition: Partition, dataset: sources.DataSet) -> dict:
    """Client i's images are train_index[train_offset[i]:train_offset[i + 1]], counting into the official split."""
    offsets = lambda parts: np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    return {
        "train_index": np.concatenate(partition.train),
        "train_offset": offsets(partition.train),
        "val_index": np.concatenate(partition.val),
        "val_offset": offsets(partition.val),
        "test_index": np.concatenate(partition.test),
        "test_offset": offsets(partition.test),
        "test_split": partition.test_split,
        "public_index": partition.public,
        "sha256": partition.sha256,
        "images": np.array([len(dataset.y_train), len(dataset.y_test)], np.int64),
        "train_count": partition.train_count_MC(dataset.y_train),
    } | ({"class_name": np.array(dataset.class_names)} if dataset.class_names else {})


def baselines(dataset: sources.DataSet, partition: Partition) -> dict[str, float]:
    """Accuracy without learning: each client's (or the whole) most common training class, and a fair die."""
    train_MC = partition.train_count_MC(dataset.y_train)
    test_MC = partition.test_count_MC(dataset.y_test if partition.test_split == "test" else dataset.y_train)
    hits = test_MC[np.arange(len(train_MC)), train_MC.argmax(1)].sum()
    return {
        "local_majority": float(hits / max(test_MC.sum(), 1)),
        "chance": 1 / dataset.classes,
        "global_majority": float((dataset.y_test == train_MC.sum(0).argmax()).mean()),
    }


# --- where it starts


def start(job: rounds.Job, folder: RunFolder | None, request) -> None:
    """Fresh, or from the newest good checkpoint; either way rank 0's state is what every rank begins with."""
    states: dict = {}
    if job.server:
        checkpoint = folder.newest_good_checkpoint() if request.resume else None
        if checkpoint:
            states = restore(job, *checkpoint, request)
        elif folder.checkpoints():  # to begin anew would write over what may still be saved
            raise UsageError(
                f"--resume {folder.path}: no checkpoint is good, the warnings say why; `python -m tools.check "
                "RUN --repair OUT.h5` saves the rows; without the folder checkpoints/ the run begins anew"
            )
        else:
            begin_anew(job, folder, request)
    spread(job, states)


def begin_anew(job: rounds.Job, folder: RunFolder, request) -> None:
    """Rank 0, no checkpoint is there. Rows that a run without checkpoints has left are made again, to the same bits;
    with other settings they would be lost, and the record of the changes with them."""
    text, rows = job.server.static["config_json"], len(folder.rounds().get("round", ())) if request.resume else 0
    stored = folder.read_config() if rows else None
    if stored and config_module.changes(*map(config_module.from_json, (stored, text))):
        raise UsageError(
            f"--allow-change: {folder.path} has {rows} rows and no checkpoint after which settings could change; "
            "start another run"
        )
    record = folder.record() if rows else {}
    if record.get("changes_json", "[]") != "[]":
        raise UsageError(
            f"--resume {folder.path}: no checkpoint is left, and its {rows} rows were made with settings that changed "
            "on the way: they cannot be made again; start another run"
        )
    if rows:
        changed_origin(record, job.server.static, request, allow_data=False)
        messages.warn(
            f"no checkpoint is left in {folder.checkpoint_folder}: the run begins anew, and its {rows} rows are made "
            "again"
        )
    folder.write_config(text)


def restore(job: rounds.Job, round: int, tree: dict, request) -> dict:
    """Take over the state after `round`, and the record of what has changed since; returns the clients' states."""
    check_can_go_on(round, tree)
    static = job.server.static
    static["changes_json"] = tree.get("changes_json", "[]")
    settings = changed_settings(round, tree, static, request.allow_change)
    changes = changed_origin(tree, static, request, request.allow_change) | settings
    if tree["partition"]["sha256"] != static["partition"]["sha256"]:
        raise UsageError("--resume: the data are not those that the run began with (another partition comes of them)")
    if changes:
        entry = {"after_round": round, **changes}
        static["changes_json"] = json.dumps([*json.loads(static["changes_json"]), entry])
    if settings:
        messages.say(f"settings changed {messages.changes_text(json.dumps([{'after_round': round, **settings}]))}")
    kept = job.server.restore(round, tree)
    if settings:
        job.server.folder.write_config(static["config_json"])
    job.weights_V.copy_(kept["weights_V"])
    job.message, job.done = kept["message"], round
    messages.say(f"resuming after round {round}")
    return kept["states"]


def check_can_go_on(round: int, tree: dict) -> None:
    if "message" not in tree:
        raise UsageError(
            f"--resume: the checkpoint of round {round} holds the final weights of a complete run and nothing to "
            "go on with: a study keeps no more without --keep-state. Remove the folder to have it computed anew"
        )
    absent = [name for name in NEEDED if name not in tree]
    if absent:
        raise UsageError(
            f"--resume: the checkpoint of round {round} has no {', '.join(absent)}: the weights can be exported, but "
            "the run cannot go on from it"
        )


def changed_settings(round: int, tree: dict, static: dict, allow_change: bool) -> dict[str, list]:
    changes = config_module.changes(*map(config_module.from_json, (tree["config_json"], static["config_json"])))
    if changes and not allow_change:
        fixed = any(key.startswith(config_module.FIXED) for key in changes)
        raise UsageError(
            f"--resume: the checkpoint of round {round} was written with other settings than config.json has "
            f"({', '.join(changes)}); "
            + (
                "put back config.json: config_json in the checkpoint is the text"
                if fixed
                else "--allow-change goes on with these"
            )
        )
    return changes


def changed_origin(before: dict, static: dict, request, allow_data: bool) -> dict[str, list]:
    """What else than settings has changed since a record was written, or is not known of it; a line tells it.

    UsageError for other data unless they are allowed, for other or unknown code with --strict-code.
    """
    had, now = provenance.facts_of(before), provenance.facts_of(static)
    changes, unknown = provenance.changes(had, now), provenance.unknown(before, now)
    text = provenance.text_of(changes)
    if provenance.CONTENT in changes and not allow_data:
        data = config_module.from_json(static["config_json"]).data
        advice = "" if request.allow_change else ", or --allow-change goes on with these"
        raise UsageError(
            f"--resume: {sources.place_of(data.name, data.dir, data.path)}: the content of the data is not what the "
            f"run was trained on ({text}); put the data back{advice}"
        )
    if request.resume and request.strict_code:
        refuse_other_code(had, now, unknown)
    if changes:
        messages.warn(
            f"the rounds from here on come from something else than those before: {text}; recorded in the run"
            + "; --strict-code refuses" * any(map(provenance.is_code, changes))
        )
    if unknown:
        messages.warn(
            "the rounds before were saved by a version that stored no hash of code and data: that they come from these "
            "cannot be checked; recorded in the run; --strict-code refuses"
        )
    return {key: pair for key, pair in (changes | unknown).items() if key != provenance.THREADS}  # which is a setting


def refuse_other_code(had: provenance.Provenance, now: provenance.Provenance, unknown: dict) -> None:
    """UsageError (--strict-code) unless all rounds before are known to have had the code that there is now."""
    if unknown:
        raise UsageError(
            "--strict-code: the rounds before were saved by a version that stored no hash of its code; go on without "
            "--strict-code"
        )
    if provenance.has_other_code(had, now):
        codes = {
            key: list(dict.fromkeys([*had[key], *now[key]])) for key in filter(provenance.is_code, now) if key in had
        }
        text = ", ".join(
            f"{key} {' -> '.join(map(provenance.short, values))}" for key, values in codes.items() if values[1:]
        )
        raise UsageError(
            f"--strict-code: the code is not that of the rounds before ({text}); put it back, or go on without "
            "--strict-code"
        )


def spread(job: rounds.Job, states: dict[int, dict[str, np.ndarray]]) -> None:
    """Weights, message, round and client states from rank 0 to where they are needed."""
    comm = job.comm
    comm.at(None, "start")
    weights = job.weights_V.cpu().numpy()
    comm.broadcast(weights, "start")
    job.weights_V.copy_(torch.from_numpy(weights))
    done = np.array([job.done], np.int64)
    comm.broadcast(done, "start")
    job.done = int(done[0])
    comm.broadcast(payload.as_bytes(job.message), "start")
    job.counters = unpack_counters(job.message[0]["counters"], job.trainer.flat.counters)
    spread_states(job, states)


def spread_states(job: rounds.Job, states: dict[int, dict[str, np.ndarray]]) -> None:
    """Each client's kept tensors to the rank where it lives now, which may be another one than before."""
    told = job.comm.share_text(json.dumps(sorted(states)) if job.server else None)
    own, shapes = {client.id: client for client in job.worker.clients}, rounds.state_shapes(job, job.config.fed.rounds)
    for client in json.loads(told):
        block = rounds.pack_state(shapes, states[client] if job.server else {})
        job.comm.broadcast(block, "start")
        if client in own:
            state = rounds.unpack_state(shapes, block)
            own[client].state = {name: torch.from_numpy(array).to(job.comm.device) for name, array in state.items()}


def widen(job: rounds.Job) -> None:
    """Open the lanes on which this rank trains clients side by side (run.lanes), once the next round is known."""
    config, trainer, device = job.config, job.trainer, job.comm.device
    clients = [client for client in job.worker.clients if trainer.can_train(client)]
    if min(config.run.lanes, len(clients)) < 2 or one_lane(trainer) or job.done == config.fed.rounds:
        return
    largest = max(clients, key=lambda client: len(client.y_train))
    rehearsal = (
        replace(largest, state=dict(largest.state)),
        job.weights_V,
        job.counters,
        payload.tensors_of(job.message[0], device),
        job.done + 1,
        2,
    )
    what = config, trainer.scheme.facts.classes, tuple(largest.x_train.shape[1:]), device
    make = lambda: LocalTrainer(make_model(*what), trainer.scheme, config)
    job.worker.lanes = open_lanes(trainer, make, config.run.lanes, rehearsal, len(clients), job.comm.sharers)


# --- the dry run


def show_plan(config: Config, comm: Comm) -> None:
    """Settings, ranks and devices, class histogram, memory and bytes; nothing is written or trained."""
    job = build(config, comm, None)
    if comm.rank == 0:
        messages.say(plan.text(config, comm, job))
