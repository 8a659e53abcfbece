"""Whether a run's weights may be summed under masks (privacy.secure_sum), and what does it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from hkd_hpc import schemes
from hkd_hpc.cohort import cohort_size
from hkd_hpc.common.errors import LocalUsageError, UsageError
from hkd_hpc.config import Config
from hkd_hpc.secure_sum.rules import SMALLEST
from hkd_hpc.state import client_state
from hkd_hpc.training import LocalTrainer
from hkd_hpc.worker import Worker

if TYPE_CHECKING:  # needs `cryptography`
    from hkd_hpc.secure_sum.exchange import SecureSum


def secure_sum(worker: Worker, rank_of: list[int]) -> SecureSum | None:
    """What sums the weights under masks, if privacy.secure_sum asks for it. UsageError where that would be void."""
    config = worker.trainer.config
    if not config.privacy.secure_sum:
        return None
    if importlib.util.find_spec("cryptography") is None:
        raise LocalUsageError("privacy.secure_sum=true: cryptography is not installed; pip install 'hkd_hpc[privacy]'")
    require_nothing_kept(config, worker.trainer)
    member_of = [config.model.member_of(client) for client in range(config.fed.clients)]
    require_enough_clients(config, worker.eligible, member_of)
    from hkd_hpc.secure_sum.exchange import SecureSum  # imports cryptography

    return SecureSum(worker.comm, rank_of, member_of)


def require_nothing_kept(config: Config, trainer: LocalTrainer) -> None:
    """UsageError where clients keep something that goes to rank 0, for the checkpoints, as it is."""
    kept = client_state.shapes_of(trainer, is_last=True)
    if kept:
        raise UsageError(
            f"privacy.secure_sum=true: with scheme.name={config.scheme.name} and train.batchnorm="
            f"{config.train.batchnorm} a client's {', '.join(kept)} goes to rank 0, for checkpoints, without masks; "
            f"take a scheme whose clients keep nothing ({schemes.REFERENCE}, {schemes.DEFAULT}), and no batchnorm=local"
        )


def require_enough_clients(config: Config, eligible: list[int], member_of: list[str]) -> None:
    """UsageError where the sum could be of fewer than SMALLEST clients, who would see each other's weights in it."""
    fed = config.fed
    sampled = cohort_size(fed.clients, fed.participation)
    found = {f"a round (fed.participation={fed.participation:g})": sampled, "have images enough": len(eligible)}
    if config.model.names:
        found |= {f"with {name}": sum(member_of[c] == name for c in eligible) for name in config.model.members}
    for what, count in found.items():
        if count < SMALLEST:
            raise UsageError(
                f"privacy.secure_sum=true: {count} of fed.clients={fed.clients} clients {what}, and a sum of fewer "
                f"than {SMALLEST} shows each the others' weights; give more clients, or privacy.secure_sum=false"
            )
