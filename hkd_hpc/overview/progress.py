"""How far the running round is, from what rank 0 has heard of the ranks anyway: no collective is added for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hkd_hpc.cohort import draw_cohort
from hkd_hpc.comm.control.base import Place
from hkd_hpc.comm.transports.base import Comm
from hkd_hpc.config import Config

TRAINING = "training"


class Progress:
    """The line that is redrawn within a round.

    Args:
        config: the settings that the rounds use.
        comm: knows where the ranks are.
        rank_of: the rank of each client.
        eligible: clients with images enough to train.
        clock: seconds.
    """

    def __init__(
        self,
        config: Config,
        comm: Comm,
        rank_of: Sequence[int],
        eligible: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.comm, self.rank_of, self.eligible, self.clock = config, comm, rank_of, eligible, clock
        self._round, self._since_s = 0, clock()

    def text(self) -> str:
        """ "round 3/10: 4 of 10 clients trained, 12 s"; "round 3/10: weights, 14 s" where none trains."""
        places = self.comm.places()
        round = max(place[0] or 0 for place in places.values())
        if round != self._round:
            self._round, self._since_s = round, self.clock()
        seconds = f"{self.clock() - self._since_s:.0f} s"
        return f"round {round}/{self.config.fed.rounds}: {self._doing(round, places)}, {seconds}"

    def _doing(self, round: int, places: Mapping[int, Place]) -> str:
        training = {rank: place for rank, place in places.items() if place[:2] == (round, TRAINING)}
        if not training:
            return places[0][1]
        if any(client is None for _, _, client in training.values()):  # trained side by side
            return TRAINING
        cohort = self._cohort(round)
        return f"{trained(round, cohort, self.rank_of, places)} of {len(cohort)} clients trained"

    def _cohort(self, round: int) -> list[int]:
        fed = self.config.fed
        return draw_cohort(fed.clients, fed.participation, self.config.run.seed, round, self.eligible)


def trained(round: int, cohort: Sequence[int], rank_of: Sequence[int], places: Mapping[int, Place]) -> int:
    """How many of the cohort have trained, or do not train in this round: a rank takes its clients by their numbers.

    Args:
        round: the one that is trained.
        cohort: its clients.
        rank_of: the rank of each client.
        places: where each rank was last seen.
    """
    return sum(is_past(round, client, places[rank_of[client]]) for client in cohort)


def is_past(round: int, client: int, place: Place) -> bool:
    """Whether a rank at this place has left its client behind it."""
    at_round, phase, at_client = place
    return at_round == round and (phase != TRAINING or (at_client is not None and client < at_client))
