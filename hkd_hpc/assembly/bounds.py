"""Whether a network is one of which the ledger's figures hold: what moves an image's features is the image and the
weights that travel, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hkd_hpc.common.errors import UsageError
from hkd_hpc.models import evaluate
from hkd_hpc.models.family import members
from hkd_hpc.privacy.ledger import listed
from hkd_hpc.privacy.releases import FEATURES, PREDICTIONS
from hkd_hpc.training import LocalTrainer

PROBED = 16  # images
TOLERANCE = 0.01  # of the norm; kernels for other batches differ by 1e-3 of it at most, in bf16 too


def require_bounded(trainer: LocalTrainer, x_train: torch.Tensor, bounded: Sequence[str]) -> None:
    """UsageError for a network in which an image moves what other images give.

    Args:
        trainer: of the run, with the initial weights.
        x_train: training images as they lie in memory, some of which are tried.
        bounded: the kinds of release that have a finite figure, of a fixed extractor at least.
    """
    of_knowledge = bool({FEATURES, PREDICTIONS} & {*bounded})
    for net in members(trainer.flat.net) if bounded else ():
        hole = next(kept_apart(net), "") or (of_knowledge and next(moved_by_others(net, x_train), ""))
        if hole:
            raise UsageError(
                f"model.name={trainer.config.model.title}: {hole}, so that one image moves what others give, and no "
                f"bound of {listed(bounded)} holds; take another network, or privacy.* without noise and clip"
            )


def kept_apart(net: torch.nn.Module) -> Iterator[str]:
    """What a network may keep of the images that it trains on, outside of what travels."""
    stored = net.state_dict().keys()
    for name, _ in net.named_buffers():
        if name not in stored:
            yield (
                f"buffer {name} is not persistent, and may carry what one client trains to another (a constant can be "
                "a parameter with requires_grad=False)"
            )


def moved_by_others(net: torch.nn.Module, x_train: torch.Tensor) -> Iterator[str]:
    """What makes the features of an image depend on its batch, in eval mode too."""
    for name, module in net.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            yield f"layer {name} has track_running_stats=False, and normalises by the batch in eval mode too"
    alone, among = (evaluate.predict(net, x_train[:count]) for count in (1, PROBED))
    for what, one, several in zip(("features", "logits"), alone, among):
        if float((one[0] - several[0]).norm()) > TOLERANCE * float(several[0].norm()):
            yield f"an image alone has other {what} in eval mode than among {len(several)}"
