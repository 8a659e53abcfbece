"""From settings to a RankRun: data, partition, model, scheme, clients, server."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hkd_hpc import schemes
from hkd_hpc.aggregate import LIMIT, GlobalStep
from hkd_hpc.client import OWN, Client
from hkd_hpc.cohort import assign_clients
from hkd_hpc.comm.devices import rank_list
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.config import Config, identity
from hkd_hpc.console import messages
from hkd_hpc.data import assigned, content, public, share, sources
from hkd_hpc.data.partition import Partition, pooled
from hkd_hpc.data.skew import FeatureSkew, skew_of
from hkd_hpc.gpu.trainers import trainer_for
from hkd_hpc.models import initial, networks
from hkd_hpc.models.family import members
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.images import Inputs, standardise
from hkd_hpc.models.optimizer import state_vectors
from hkd_hpc.overview.plan import Plan
from hkd_hpc.privacy.settings import RECEIVED, RELEASE, PrivacySettings
from hkd_hpc.protection import spending
from hkd_hpc.protection.masking import secure_sum
from hkd_hpc.protection.spending import Spending
from hkd_hpc.rank_run import RankRun
from hkd_hpc.runtime import versions
from hkd_hpc.schemes import contract
from hkd_hpc.schemes.base import RunInfo, Scheme
from hkd_hpc.server import FLOAT_BYTES, Images, Server, message_type
from hkd_hpc.server_optimizer import ServerOptimizer
from hkd_hpc.state import sessions
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.training import LocalTrainer, min_images
from hkd_hpc.worker import Worker, counter_size, pack_counters, update_privacy

NOISE_STDS = 10  # no draw of a Gaussian is farther out
NOWHERE = RunFolder(Path(os.devnull))  # of a dry run: nothing can be written there


@dataclass(frozen=True)
class Federation:
    """Data and who has which of them, the same on every rank.

    Attributes:
        asked: the settings as they were given.
        config: the same, but one client where the scheme pools all data.
        dataset: both splits of the data.
        assigned: which images each client has, of `asked`.
        partition: the same of `config`.
        rank_of: the rank of each client.
        skew: what is done to the images of each client of `assigned`, if anything.
    """

    asked: Config
    config: Config
    dataset: sources.DataSet
    assigned: Partition
    partition: Partition
    rank_of: list[int]
    skew: FeatureSkew | None

    @property
    def names(self) -> tuple[str, ...]:
        """Of natural clients; empty where these are their numbers."""
        return self.partition.names

    def images(self, split: str, index: np.ndarray) -> np.ndarray:
        """(n,3,H,W) uint8: images of a split as the clients that own them have them."""
        x_NCHW = self.dataset.x_test if split == "test" else self.dataset.x_train
        return self.skew.changed(x_NCHW, split, index) if self.skew else x_NCHW[index]


def set_up_torch(config: Config, device: torch.device) -> None:
    """Threads; fp32, or TF32; and, if asked for, only operations that give the same bits in each run."""
    torch.set_num_threads(config.run.threads)
    allow_tf32 = config.train.precision == "tf32" and device.type == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow_tf32
    if config.run.deterministic != torch.are_deterministic_algorithms_enabled():  # the call imports a compiler, 1 s
        torch.use_deterministic_algorithms(config.run.deterministic)  # its error names the operation


def build(config: Config, comm: Comm, folder: RunFolder | None) -> RankRun:
    """This rank's part of a run, with initial weights that are the same on every rank.

    Args:
        config: the settings.
        comm: the collectives.
        folder: where rank 0 writes; None elsewhere, and for a dry run.

    Returns:
        The part, no round done.

    Raises:
        UsageError: The settings do not go with the data, or with the scheme.
        RunError: The ranks do not hold the same code and data.
    """
    federation = federation_of(config, comm)
    config, partition = federation.config, federation.partition
    flat = FlatModel(agreed_net(comm, config, federation.dataset), comm.device)
    scheme = make_scheme(federation, flat)
    if config.privacy.epsilon:
        federation = with_multiplier(comm, federation, scheme, flat)
        config, scheme = federation.config, make_scheme(federation, flat)
    require_same(comm, federation, scheme, flat)
    trainer = trainer_for(flat, scheme, config, lambda: make_model(config, federation.dataset, comm.device), comm)
    if comm.rank == 0:
        warn_of_precision(config, comm.device)
        warn_of_server_optimizer(config, scheme)
        warn_of_idle_ranks(federation.rank_of, comm.size)
        told = [line for net in members(flat.net) for line in contract.told_of(scheme, net)]
        for line in dict.fromkeys(told):
            messages.warn(line)
    require_trainable(partition, trainer)
    require_private_updates(trainer)
    require_releasable(config, trainer)
    require_received(config, trainer)
    require_validation(config, partition)
    worker = make_worker(federation, comm, trainer)
    server = make_server(federation, comm, folder, trainer) if comm.rank == 0 else None
    message = np.zeros(1, message_type(scheme, counter_size(flat.counters)))
    message[0]["counters"] = pack_counters(flat.counters)
    weights_V, counters = flat.values_V.detach().clone(), [counter.clone() for counter in flat.counters]
    step = global_step(config, scheme, torch.zeros_like(flat.parameters_P))
    rank_of, last, masked = federation.rank_of, config.fed.rounds, secure_sum(worker, federation.rank_of)
    return RankRun(config, comm, trainer, worker, server, rank_of, weights_V, counters, message, last, step, masked)


def with_multiplier(comm: Comm, federation: Federation, scheme: Scheme, flat: FlatModel) -> Federation:
    """The same with the noise multiplier that meets privacy.epsilon. Rank 0 finds it: what it needs takes seconds to
    import. UsageError where there is none."""
    privacy = spending.solved(spending_of(federation, scheme, flat)) if comm.rank == 0 else None
    told = comm.share_text(json.dumps(asdict(privacy)) if privacy else None)
    config = replace(federation.config, privacy=PrivacySettings(**json.loads(told)))
    if comm.rank == 0:
        messages.say(
            f"privacy.epsilon={config.privacy.epsilon:g}: noise multiplier {config.privacy.multiplier:.4g} of all that "
            f"is noisy, for {config.fed.rounds} rounds"
        )
    return replace(federation, config=config)


def spending_of(federation: Federation, scheme: Scheme, flat: FlatModel) -> Spending:
    """What the rounds cost of the clients' privacy."""
    count_MC = federation.partition.train_count_MC(federation.dataset.y_train)
    eligible = np.flatnonzero(count_MC.sum(1) >= min_images(flat.net)).tolist()
    return Spending(federation.config, scheme, count_MC, eligible, has_buffers(flat))


def has_buffers(flat: FlatModel) -> bool:
    """Whether anything but trainable weights travels: BatchNorm's statistics, or integers."""
    return bool(len(flat.statistics_S) or flat.counters)


def check_spending(spent: Spending) -> None:
    """Rank 0: UsageError for a budget that nothing can keep; a warning for a delta that says nothing."""
    if spent.settings.budget:
        spending.require_bound(f"privacy.budget={spent.settings.budget:g}", spending.holes(spent.releases))
    warning = spending.delta_warning(spent)
    if warning and spent.is_told:
        messages.warn(warning)


def global_step(config: Config, scheme: Scheme, zeros_P: torch.Tensor) -> GlobalStep | None:
    """The scheme's, or that of fed.server_optimizer. UsageError for both."""
    of_scheme, optimizer = scheme.global_step(zeros_P), config.fed.server_optimizer
    if of_scheme and optimizer != "none":
        raise UsageError(
            f"fed.server_optimizer={optimizer}: scheme.name={config.scheme.name} steps the global weights itself; "
            "leave it at none"
        )
    return of_scheme or (ServerOptimizer(config.fed, len(zeros_P), zeros_P.device) if optimizer != "none" else None)


def federation_of(config: Config, comm: Comm) -> Federation:
    """Read the data and partition them."""
    dataset = node_copy(config, comm)
    require_same_data(comm, config, dataset)  # before anything is made that one rank alone could fail at
    require_augmentable(config, dataset)
    if comm.rank == 0 and dataset.remarks:
        messages.say(f"data: {'; '.join(dataset.remarks)}")
    scheme_class = schemes.get(config.scheme.name)
    asked, of_clients = config, partition_of(config, dataset, scheme_class.needs_public)
    if comm.rank == 0 and of_clients.remark:
        messages.say(f"data: {of_clients.remark}")
    skew = skew_of(config.data, config.partition_seed, of_clients, {"train": dataset.x_train, "test": dataset.x_test})
    partition = of_clients
    if scheme_class.pools_data:
        partition = pooled(of_clients)
        config = replace(config, fed=replace(config.fed, clients=1, participation=1.0))
    rank_of = assign_clients([len(index) for index in partition.train], comm.size)
    return Federation(asked, config, dataset, of_clients, partition, rank_of, skew)


def require_same_data(comm: Comm, config: Config, dataset: sources.DataSet) -> None:
    """RunError unless the arrays of all ranks have the same shapes; of a loader of one's own, UsageError unless they
    are the same."""
    if not sources.source_of(config.data.name).is_loader:
        return require_equal(comm, {"data": dataset.shapes()})
    problem = inequality(comm, {"data": {**dataset.shapes(), "content": dataset.sha256[:16]}})
    if problem:
        raise UsageError(f"data.name={config.data.name}: {problem}; a loader gives the same on every node")


def make_scheme(federation: Federation, flat: FlatModel) -> Scheme:
    config = federation.config
    info = RunInfo(
        federation.dataset.classes,
        config.model.latent,
        config.fed.clients,
        len(flat.parameters_P),
        len(flat.values_V),
        len(federation.partition.public),
        label_smoothing=config.train.label_smoothing,
        augments=config.train.augments,
        privacy=config.privacy,
    )
    scheme = schemes.get(config.scheme.name)(config.scheme, info)
    contract.check_declarations(scheme, OWN)
    for net in members(flat.net):
        scheme.check_net(net)
        contract.check_personal(scheme, net)
    if config.model.names:
        contract.check_unequal(scheme)
    return scheme


def require_same(comm: Comm, federation: Federation, scheme: Scheme, flat: FlatModel) -> None:
    """RunError unless all ranks have made the same of the same settings, code and data."""
    asked = federation.asked
    require_equal(
        comm,
        {
            "scheme": contract.declared_shapes(scheme),
            "model": flat.schema(),
            "data": federation.dataset.sha256,
            "partition": federation.partition.sha256,
            "settings": asked.to_json(),
            "code": json.dumps(identity.code_of(asked)),
        },
    )


def make_worker(federation: Federation, comm: Comm, trainer: LocalTrainer) -> Worker:
    """The clients of this rank, with their images on its device."""
    dataset, partition, rank_of = federation.dataset, federation.partition, federation.rank_of
    needs_public = trainer.scheme.needs_public
    x_public = torch.from_numpy(dataset.x_train[partition.public]).to(comm.device) if needs_public else None
    here = [
        make_client(federation, client, comm.device, x_public)
        for client, rank in enumerate(rank_of)
        if rank == comm.rank
    ]
    worker = Worker(comm, trainer, here, max(np.bincount(rank_of)), [len(index) for index in partition.train])
    comm.watch_steps(lambda: trainer.steps)
    return worker


def make_model(config: Config, dataset: sources.DataSet, device: torch.device) -> FlatModel:
    """With the initial weights of the run."""
    return FlatModel(make_net(config, dataset, device), device)


def make_net(config: Config, dataset: sources.DataSet, device: torch.device) -> torch.nn.Module:
    """The same before its tensors are moved, and rejected where they are not float32."""
    inputs = inputs_of(dataset)
    net = networks.build(config.model, dataset.classes, inputs.shape, config.run.seed, device, inputs.dtype)
    if config.train.precision == "bf16":
        for one in members(net):
            networks.train_in_bf16(one)
    for one in members(net):
        standardise(one, inputs, device)
    return net


def inputs_of(dataset: sources.DataSet) -> Inputs:
    """Of which form a network's inputs are, and how they are normalised."""
    x_train = dataset.x_train
    return Inputs(x_train.shape[1:], x_train.dtype.name, dataset.mean, dataset.std)


def agreed_net(comm: Comm, config: Config, dataset: sources.DataSet) -> torch.nn.Module:
    """The network, of the same shapes and dtypes on all ranks. One that only some ranks can make is told with a
    rank.
    """
    try:
        net, problem = make_net(config, dataset, comm.device), None
    except UsageError as error:
        net, problem = torch.nn.Module(), error
    require_equal(comm, {"model": {"its problem": str(problem), **shapes_of(net)}})
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


def take_initial(run: RankRun) -> None:
    """Rank 0: begin with the weights of model.init; all ranks get what rank 0 has. UsageError where they do not fit."""
    flat = run.trainer.flat
    initial.load_into(flat.net, run.config.model)
    run.weights_V.copy_(flat.values_V)
    run.message[0]["counters"] = pack_counters(flat.counters)


def warn_of_precision(config: Config, device: torch.device) -> None:
    """Say what was asked for and cannot be had on this device."""
    if config.train.precision == "tf32" and device.type == "cpu":
        messages.warn("train.precision=tf32 is fp32 here: there is no GPU")


def warn_of_server_optimizer(config: Config, scheme: Scheme) -> None:
    """Say where no client gets what it makes."""
    if config.fed.server_optimizer != "none" and not scheme.shares_weights:
        messages.warn(
            f"fed.server_optimizer={config.fed.server_optimizer} reaches no client: with scheme.name="
            f"{config.scheme.name} each goes on from its own model; only the global model that is tested changes"
        )


def warn_of_idle_ranks(rank_of: list[int], ranks: int) -> None:
    """Say which ranks would wait for the others all the time; `rank_of`: the rank of each client."""
    idle = sorted(set(range(1, ranks)) - set(rank_of))
    if idle:
        has = "has" if len(idle) == 1 else "have"
        messages.warn(f"{rank_list(idle)} {has} no client; start clients + 1 = {len(rank_of) + 1} ranks")


def require_augmentable(config: Config, dataset: sources.DataSet) -> None:
    """UsageError unless train.augment is none, or fits the images."""
    train, shape = config.train, dataset.x_train.shape[1:]
    if train.augment != "none" and len(shape) != 3:
        raise UsageError(f"train.augment={train.augment}: needs images; data.name={config.data.name} has shape {shape}")
    if train.augment.startswith("crop") and train.augment_padding >= min(shape[1:]):
        raise UsageError(
            f"train.augment_padding={train.augment_padding}: must be less than the sides of the images, "
            f"{' x '.join(map(str, shape[1:]))} pixels"
        )


def require_trainable(partition: Partition, trainer: LocalTrainer) -> None:
    largest = max(len(index) for index in partition.train)
    if largest < trainer.min_images:
        raise UsageError(
            f"fed.clients={len(partition.train)}: no client gets more than {largest} training image(s), and "
            f"this model needs {trainer.min_images}; lower fed.clients or raise data.fraction"
        )


def require_private_updates(trainer: LocalTrainer) -> None:
    """UsageError for noise on the updates of a network or a scheme for which it would not hold."""
    updates, flat = update_privacy(trainer), trainer.flat
    if updates is None or not updates.multiplier:
        return
    asked, model = f"privacy.update_multiplier={updates.multiplier:g}", trainer.config.model.title
    buffers = [span.name for span in flat.layout if not span.trainable]
    if buffers:
        raise UsageError(
            f"{asked}: model.name={model} has buffers ({buffers[0]}), which would travel without noise, or with noise "
            "that makes a variance negative; take model.norm=group, or a network without"
        )
    if trainer.own_spans:
        raise UsageError(
            f"{asked}: scheme.name={trainer.config.scheme.name} keeps some weights with each client, and their mean "
            "travels without noise; take a scheme that shares all"
        )
    if NOISE_STDS * updates.share_std > LIMIT:
        raise UsageError(
            f"{asked}: a client's share of the noise has a standard deviation of {updates.share_std:.3g}, and the "
            f"exact sum holds weights up to {LIMIT:,.0f}; lower privacy.update_clip, which is {updates.clip:g}"
        )


def require_releasable(config: Config, trainer: LocalTrainer) -> None:
    """UsageError for a release whose clients' states, which have no noise, would go to rank 0's checkpoints."""
    kept = [*trainer.scheme.client_state_shapes(), *trainer.own_shapes()]
    if config.privacy.mode == RELEASE and kept:
        raise UsageError(
            f"privacy.mode=release: with scheme.name={config.scheme.name} and these settings clients keep "
            f"{', '.join(kept)}, which goes to the checkpoints of rank 0 without noise; choose one that keeps nothing"
        )


def require_received(config: Config, trainer: LocalTrainer) -> None:
    """UsageError for features of the received model where clients begin a round with weights of their own."""
    own = trainer.own_spans
    if config.privacy.extractor == RECEIVED and trainer.scheme.protects and own:
        raise UsageError(
            f"privacy.extractor=received: clients go on from their own {', '.join(own)} here, not from what they "
            "received; let all weights travel (scheme.weights=average, train.batchnorm=average)"
        )


def require_validation(config: Config, partition: Partition) -> None:
    """UsageError where run.stop_patience would wait for tests on no image."""
    if config.run.stop_patience and not any(map(len, partition.val)):
        is_file = config.data.partition == "file"
        mend = "make data.partition_file anew with data.val_fraction" if is_file else "raise data.val_fraction"
        raise UsageError(f"run.stop_patience={config.run.stop_patience}: no client has a validation image; {mend}")


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
    if needs_public and data.partition != "file":
        public.check(config.scheme.name, config.data, config.fed.clients, images)
    made = assigned.partition_of(data, config.fed.clients, config.partition_seed, dataset)
    if needs_public and not len(made.public):
        raise UsageError(
            f"scheme.name={config.scheme.name}: needs public images, and data.partition_file={data.partition_file} has "
            "none; make it anew with data.public_fraction"
        )
    return made


def require_equal(comm: Comm, values: dict[str, str | dict[str, str]]) -> None:
    """RunError on all ranks unless all hold the same values (code or data differ between nodes)."""
    problem = inequality(comm, values)
    if problem:
        raise RunError(f"{problem}; is the same code and data on all nodes?")


def inequality(comm: Comm, values: dict[str, str | dict[str, str]]) -> str:
    """Which ranks hold other values than rank 0, for people; empty where none does. On all ranks.

    Of a value that is a dict (shapes by name) the first entry that differs is told, with what it is on both ranks.
    """
    own = {what: hashlib.sha256(json.dumps(value).encode()).hexdigest() for what, value in values.items()}
    told = [json.loads(text) for text in comm.gather_text(json.dumps(own))]
    others = {what: [rank for rank, other in enumerate(told) if other[what] != digest] for what, digest in own.items()}
    different = json.loads(comm.share_text(json.dumps(others) if comm.rank == 0 else None))
    return ", ".join(
        f"ranks {ranks} have another {what} than rank 0{difference(comm, values[what], ranks[0])}"
        for what, ranks in different.items()
        if ranks
    )


def difference(comm: Comm, value: str | dict[str, str], rank: int) -> str:
    """ " (fc.weight is (8, 128) torch.float32 on rank 3, (16, 128) torch.float32 on rank 0)": the first entry
    that is another on this rank than on rank 0. On all ranks."""
    if isinstance(value, str):
        return ""
    told = [json.loads(text) for text in comm.gather_text(json.dumps(value))]
    if comm.rank:
        return comm.share_text()
    own, other = told[0], told[rank]
    names = [name for name in [*own, *other] if own.get(name) != other.get(name)]
    return comm.share_text(
        f" ({names[0]} is {other.get(names[0], 'absent')} on rank {rank}, {own.get(names[0], 'absent')} on rank 0)"
        if names
        else " (in another order)"
    )


def make_client(federation: Federation, client: int, device: torch.device, x_public: torch.Tensor | None) -> Client:
    """One client with its images resident on this rank's device."""
    dataset, partition, names = federation.dataset, federation.partition, federation.names
    y_test = dataset.y_test if partition.test_split == "test" else dataset.y_train
    labels = lambda y_N, index: torch.from_numpy(y_N[index]).to(device)
    images = lambda split, index: torch.from_numpy(federation.images(split, index)).to(device)
    train, test, val = partition.train[client], partition.test[client], partition.val[client]
    return Client(
        client,
        images("train", train),
        labels(dataset.y_train, train),
        images(partition.test_split, test),
        labels(y_test, test),
        dataset.classes,
        federation.config.run.seed,
        x_public,
        images("train", val),
        labels(dataset.y_train, val),
        name=names[client] if names else "",
        member=federation.config.model.member_of(client),
        noise_from=federation.config.privacy.mode,
    )


def make_server(federation: Federation, comm: Comm, folder: RunFolder | None, trainer: LocalTrainer) -> Server:
    """Rank 0's, with the images of the global test on its device."""
    dataset = federation.dataset
    resident = lambda array: torch.from_numpy(np.array(array)).to(comm.device)
    held_out = np.concatenate(federation.partition.val)
    test = Images(resident(dataset.x_test), resident(dataset.y_test))
    val = Images(resident(federation.images("train", held_out)), resident(dataset.y_train[held_out]))
    spent = spending_of(federation, trainer.scheme, trainer.flat)
    check_spending(spent)
    static = static_record(federation, comm, trainer) | ({"privacy": spent.terms.tree()} if spent.is_told else {})
    return Server(federation.config, trainer, folder or NOWHERE, test, val, static, comm.uninterrupted, spent)


def static_record(federation: Federation, comm: Comm, trainer: LocalTrainer) -> dict[str, Any]:
    """What metrics.h5 and every checkpoint carry beside the rows."""
    asked, dataset, names = federation.asked, federation.dataset, federation.names
    parameters = max(trainer.flat.parameter_counts(asked.model.members).values())
    return {
        "config_json": asked.to_json(),
        "changes_json": "[]",
        "versions_json": json.dumps(versions.found()),
        "identity_json": identity.to_json(asked, dataset.sha256),
        "sessions_json": sessions.begun(comm),
        "partition": assigned.as_tree(federation.partition, dataset) | skew_tree(federation.skew),
        "clients": {"rank": np.array(federation.rank_of, np.int64)} | ({"name": np.array(names)} if names else {}),
        **inputs_of(dataset).record(),
        "parameters": {"model": parameters, "held": trainer.scheme.about.parameters_held(parameters)},
        "baselines": baselines(dataset, federation.assigned),
        "world": {"ranks": comm.size, "plan": comm.plan_line},
    }


def skew_tree(skew: FeatureSkew | None) -> dict[str, np.ndarray]:
    return {"rotation_deg": skew.angle_deg_M, "noise_std": skew.noise_std_M} if skew else {}


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


def plan_of(config: Config, run: RankRun, server: Server) -> Plan:
    """What rank 0 tells of the run before its first round; `config`: as it was given."""
    flat, sums = run.trainer.flat, run.worker.sums.values()
    busiest = max(map(run.rank_of.count, run.rank_of))
    summed = sum(total.length for total in sums)
    held_bytes = 8 * summed * (busiest > 1)  # a sum of one client is made piece by piece
    held_bytes += 8 * summed * config.privacy.secure_sum  # masks
    kept = state_vectors(config.train.optimizer, config.train.momentum)
    kept_floats = kept * sum(stop - start for start, stop in flat.active_spans)
    kept_floats += config.fed.server_vectors * len(flat.parameters_P)
    return Plan(
        replace(config, privacy=run.config.privacy),  # with the noise that meets privacy.epsilon
        run.comm,
        run.rank_of,
        server.client_names.tolist(),
        server.static["partition"],
        list(flat.parameter_counts(config.model.members).values()),
        weights_bytes=max(map(run.trainer.payload_floats_of, config.model.members)) * FLOAT_BYTES,
        memory_bytes=FLOAT_BYTES * (2 * len(flat.values_V) + len(flat.parameters_P) + kept_floats) + held_bytes,
        all_reduce_bytes=(summed + len(sums)) * 8,
        report_bytes=run.worker.report_type.itemsize,
        message_bytes=run.message.nbytes,
    )
