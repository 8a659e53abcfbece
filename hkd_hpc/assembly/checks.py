"""What settings, data and network must have together, and what people must know of it."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hkd_hpc.aggregate import LIMIT
from hkd_hpc.assembly.federation import Federation
from hkd_hpc.comm.devices import rank_list
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import Config
from hkd_hpc.config.updates import repeats_hole
from hkd_hpc.console import messages
from hkd_hpc.data.partition import Partition
from hkd_hpc.models import networks
from hkd_hpc.models.family import members
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.images import normalise
from hkd_hpc.privacy.settings import RECEIVED, RELEASE
from hkd_hpc.schemes import contract
from hkd_hpc.schemes.base import Scheme
from hkd_hpc.training import LocalTrainer
from hkd_hpc.worker import update_privacy

NOISE_STDS = 10  # no draw of a Gaussian is farther out


def require(federation: Federation, trainer: LocalTrainer) -> None:
    """UsageError where these settings, data and network do not go together."""
    config, partition = federation.config, federation.partition
    require_trainable(partition, trainer)
    require_private_updates(partition, trainer)
    require_releasable(config, trainer)
    require_received(config, trainer)
    require_validation(config, partition)


def require_state_that_travels(trainer: LocalTrainer, x_train: torch.Tensor) -> None:
    """UsageError for a network that remembers in a buffer outside of its state dict, which would go from client to
    client of one rank; `x_train`: images as they lie in memory, some of which are tried."""
    for net in members(trainer.flat.net):
        moved = networks.moved_outside_state(net, normalise(x_train))
        if moved:
            raise UsageError(
                f"model.name={trainer.config.model.title}: training changes buffer {moved[0]}, which is not persistent "
                "and stays on its rank, so that the results would depend on the number of ranks; make it persistent, "
                "so that it travels and is averaged, or compute it anew in each forward"
            )


def warn(federation: Federation, trainer: LocalTrainer, ranks: int) -> None:
    """Rank 0: say what is not as somebody may think."""
    config, scheme, flat = federation.config, trainer.scheme, trainer.flat
    warn_of_precision(config, flat.values_V.device)
    warn_of_server_optimizer(config, scheme)
    warn_of_idle_ranks(federation.rank_of, ranks)
    warn_of_batch_norm(config, flat)
    told = [line for net in members(flat.net) for line in contract.told_of(scheme, net)]
    for line in dict.fromkeys(told):
        messages.warn(line)


def require_trainable(partition: Partition, trainer: LocalTrainer) -> None:
    """UsageError for a model without trainable parameters, or with clients that all have too few images for it."""
    model = trainer.config.model
    fixed = [name for name, count in trainer.flat.parameter_counts(model.members).items() if not count]
    if fixed:
        raise UsageError(
            f"model.name={fixed[0] or model.name}: no parameter requires a gradient, so none can be trained"
        )
    largest = max(len(index) for index in partition.train)
    if largest < trainer.min_images:
        raise UsageError(
            f"fed.clients={len(partition.train)}: no client gets more than {largest} training image(s), and "
            f"this model needs {trainer.min_images}; lower fed.clients or raise data.fraction"
        )


def require_private_updates(partition: Partition, trainer: LocalTrainer) -> None:
    """UsageError for noise on the updates of a partition, a network or a scheme for which it would not hold."""
    updates, flat = update_privacy(trainer), trainer.flat
    if updates is None or not updates.multiplier:
        return
    asked, model = f"privacy.update_multiplier={updates.multiplier:g}", trainer.config.model.title
    if partition.repeats_training_images:
        raise UsageError(f"{asked}: {repeats_hole(trainer.config)}")
    buffers = [span.name for span in flat.layout if not span.is_parameter]
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


def warn_of_batch_norm(config: Config, flat: FlatModel) -> None:
    """Say which layers of a network of one's own model.norm=group leaves as they are."""
    for net in members(flat.net):
        left = [name for name, module in net.named_modules() if isinstance(module, _BatchNorm)]
        if config.model.norm == "group" and left and not isinstance(net, networks.Net):
            messages.warn(
                f"model.norm=group replaces BatchNorm2d alone; model.name={config.model.title} keeps BatchNorm in "
                f"{', '.join(left)}"
            )


def warn_of_idle_ranks(rank_of: list[int], ranks: int) -> None:
    """Say which ranks would wait for the others all the time; `rank_of`: the rank of each client."""
    idle = sorted(set(range(1, ranks)) - set(rank_of))
    if idle:
        has = "has" if len(idle) == 1 else "have"
        messages.warn(f"{rank_list(idle)} {has} no client; start clients + 1 = {len(rank_of) + 1} ranks")
