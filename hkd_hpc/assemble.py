"""From settings to a RankRun: data, partition, model, scheme, clients, server."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from hkd_hpc import schemes
from hkd_hpc.aggregate import GlobalStep
from hkd_hpc.assembly import checks
from hkd_hpc.assembly.agreement import require_equal
from hkd_hpc.assembly.bounds import PROBED, require_bounded
from hkd_hpc.assembly.federation import Federation, federation_of
from hkd_hpc.assembly.network import agreed_net, make_model
from hkd_hpc.assembly.record import static_record
from hkd_hpc.client import OWN, Client
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import Config, identity
from hkd_hpc.console import messages
from hkd_hpc.gpu.trainers import trainer_for
from hkd_hpc.models import initial
from hkd_hpc.models.family import members
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.optimizer import state_vectors
from hkd_hpc.models.precision import allow_tf32
from hkd_hpc.overview.plan import Plan
from hkd_hpc.privacy.settings import PrivacySettings
from hkd_hpc.protection import spending
from hkd_hpc.protection.masking import secure_sum
from hkd_hpc.protection.spending import Spending
from hkd_hpc.rank_run import RankRun
from hkd_hpc.schemes import contract
from hkd_hpc.schemes.base import RunInfo, Scheme
from hkd_hpc.server import FLOAT_BYTES, Images, Server, message_type
from hkd_hpc.server_optimizer import ServerOptimizer
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.training import LocalTrainer, min_images
from hkd_hpc.worker import Worker, counter_size, pack_counters

NOWHERE = RunFolder(Path(os.devnull))  # of a dry run: nothing can be written there


def set_up_torch(config: Config, device: torch.device) -> None:
    """Threads; fp32, or TF32; and, if asked for, only operations that give the same bits in each run."""
    torch.set_num_threads(config.run.threads)
    allow_tf32(config.train.precision == "tf32" and device.type == "cuda")
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
    config = federation.config
    flat = FlatModel(agreed_net(comm, config, federation.dataset), comm.device)
    scheme = make_scheme(federation, flat)
    if config.privacy.epsilon:
        federation = with_multiplier(comm, federation, scheme, flat)
        config, scheme = federation.config, make_scheme(federation, flat)
    require_same(comm, federation, scheme, flat)
    trainer = trainer_for(flat, scheme, config, lambda: make_model(config, federation.dataset, comm.device), comm)
    if comm.rank == 0:
        checks.warn(federation, trainer, comm.size)
    checks.require(federation, trainer)
    some = torch.from_numpy(np.array(federation.dataset.x_train[:PROBED])).to(comm.device)
    checks.require_state_that_travels(trainer, some)
    require_bounded(trainer, some, spending_of(federation, scheme, flat).bounded)
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
    partition = federation.partition
    count_MC = partition.train_count_MC(federation.dataset.y_train)
    eligible = np.flatnonzero(count_MC.sum(1) >= min_images(flat.net)).tolist()
    repeats = partition.repeats_training_images
    return Spending(federation.config, scheme, count_MC, eligible, has_buffers(flat), repeats)


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
        batch_size=config.train.batch_size,
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


def take_initial(run: RankRun) -> None:
    """Rank 0: begin with the weights of model.init; all ranks get what rank 0 has. UsageError where they do not fit."""
    flat = run.trainer.flat
    initial.load_into(flat.net, run.config.model)
    run.weights_V.copy_(flat.values_V)
    run.worker.initial = run.trainer.own_parts(flat.values_V)
    run.message[0]["counters"] = pack_counters(flat.counters)


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
    kept_floats += sum(map(len, run.worker.initial.values()))
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
