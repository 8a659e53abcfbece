"""What clients release in the rounds of a run, planned and done: what the ledger is made of, where the budget ends, and
which noise multiplier meets privacy.epsilon. No result depends on the ledger but for the last round, where there is a
budget.

Who takes part follows from the seed, which is public: no amplification by sampling is claimed, and each client pays for
the rounds in which it was drawn. Shape letters: M clients of the federation, K kinds (privacy/releases.py), R rounds.
mu: of Gaussian differential privacy (privacy/accounting.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hkd_hpc.cohort import draw_cohort, draw_failures
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import Config
from hkd_hpc.config.updates import one_image_mend, repeats_hole, update_holes
from hkd_hpc.privacy import accounting, releases
from hkd_hpc.privacy.ledger import FIXED, WHOLE, Ledger, Terms, epsilon_text, listed, terms_of
from hkd_hpc.privacy.releases import KINDS, Release, Releases
from hkd_hpc.privacy.settings import RECEIVED, PrivacySettings
from hkd_hpc.quarantine import INVALID, OK
from hkd_hpc.schemes.base import Scheme

# with the rows of r rounds known, r + 1 runs, and r + 2 must learn whether r + 3 is beyond the budget
ROUNDS_AHEAD = 3
SLACK = 1 + 1e-9  # the sum of many squares may be another one in its last bits


@dataclass(frozen=True)
class Spending:
    """What the rounds of a run cost.

    Attributes:
        config: the settings that the rounds use.
        scheme: says what is reported.
        count_MC: training images of each client by class.
        eligible: the clients with images enough to train.
        has_statistics: whether the model has buffers, which travel without noise.
        repeats_images: whether one image of a client is several of its inputs.
    """

    config: Config
    scheme: Scheme
    count_MC: np.ndarray
    eligible: Sequence[int]
    has_statistics: bool
    repeats_images: bool

    @property
    def settings(self) -> PrivacySettings:
        """Section `privacy`."""
        return self.config.privacy

    @cached_property
    def releases(self) -> Releases:
        """Of all clients that can train, in a round in which all deliver."""
        return self._releases_of(self.eligible, len(self.eligible), len(self.eligible))

    @property
    def bounded(self) -> list[str]:
        """The kinds with a figure that is neither 0 nor infinite, for a fixed extractor at least."""
        return [kind for kind, each in self.releases.items() if 0 < each.fixed_M.max(initial=0) < math.inf]

    @property
    def is_told(self) -> bool:
        """Whether there is anything to tell: noise, a clip, or a setting of section `privacy`."""
        return self.settings != PrivacySettings() or releases.has_noise(self.releases)

    @property
    def terms(self) -> Terms:
        """What the figures mean."""
        return terms_of(self.settings, self.releases)

    def with_privacy(self, privacy: PrivacySettings) -> Spending:
        """The same with another section `privacy`."""
        scheme = type(self.scheme)(self.scheme.settings, replace(self.scheme.info, privacy=privacy))
        return replace(self, config=replace(self.config, privacy=privacy), scheme=scheme)

    def _releases_of(self, clients: Sequence[int], delivered: int, cohort: int) -> dict[str, Release]:
        """By kind, of these clients in a round with so many in the sum of so many that were drawn."""
        count = len(clients)
        travels = self.scheme.shares_weights
        weights = releases.weights(self.settings, count, delivered, cohort) if travels else releases.at_home(count)
        found = {releases.WEIGHTS: weights}
        if self.has_statistics:
            found[releases.STATISTICS] = releases.statistics(count)
        known = self.scheme.released(self.count_MC[list(clients)], is_private=not unbounded(found))
        mend = one_image_mend(self.config, self.repeats_images)
        return {**(releases.without_bound(known, mend) if mend else known), **found}

    def row(self, sent: Sequence[int], drawn: Sequence[int], delivered: int) -> dict[str, np.ndarray]:
        """mu of a round by figure (FIXED, WHOLE), (M, K): NaN of clients that were not drawn, 0 of who sent nothing.

        Args:
            sent: the clients that sent something.
            drawn: those of the round.
            delivered: how many weights are in the sum.
        """
        found = self._releases_of(sent, delivered, len(drawn))
        rows = {name: np.full((len(self.count_MC), len(KINDS)), np.nan) for name in (FIXED, WHOLE)}
        for mu_MK in rows.values():
            mu_MK[list(drawn)] = 0.0
        for kind, release in found.items():
            rows[FIXED][list(sent), KINDS.index(kind)] = release.fixed_M
            rows[WHOLE][list(sent), KINDS.index(kind)] = release.whole_M
        return rows

    def planned(self, round: int) -> dict[str, np.ndarray]:
        """The row of a round to come, if nobody is rejected in it: the seed says who is drawn, drops out or is late."""
        fed, seed = self.config.fed, self.config.run.seed
        drawn = draw_cohort(fed.clients, fed.participation, seed, round, self.eligible)
        eligible = sorted({*drawn} & {*self.eligible})
        dropped_out, stragglers = draw_failures(fed, seed, round, eligible)
        sent = sorted({*eligible} - dropped_out - (set() if fed.straggler_epochs else stragglers))
        return self.row(sent, drawn, len(sent))

    def of_reports(self, reports: np.ndarray, times: int = 1) -> dict[str, np.ndarray]:
        """The rows of the clients of a round that is done: (reports, K) by figure.

        Args:
            reports: of its clients (worker.report_type). One that was rejected has sent its report, and counts; that
                it was rejected follows from its data without noise, and shows in the sum: no bound.
            times: how often the round was begun: each time something may have been released.
        """
        ids, status = reports["client"], reports["status"]
        sent = ids[np.isin(status, (OK, *INVALID))].tolist()
        row = self.row(sent, ids.tolist(), int((status == OK).sum()))
        for mu_MK in row.values():
            mu_MK[ids[np.isin(status, INVALID)], KINDS.index(releases.WEIGHTS)] = math.inf
        return {name: mu_MK[ids] * math.sqrt(times) for name, mu_MK in row.items()}

    # --- the budget

    @cached_property
    def largest_mu(self) -> float:
        """Of any client, that privacy.budget allows."""
        return accounting.largest_mu(self.settings.budget or math.inf, self.settings.delta)

    def mu_ahead(
        self, ledger: Ledger | None, done: int, restarts_by_round: Mapping[int, int]
    ) -> Iterator[tuple[int, float]]:
        """(round, mu of the client that paid most, once it is done) of the next rounds.

        Args:
            ledger: of the rounds that are done, and no others; None where nothing was kept of them.
            done: how many they are.
            restarts_by_round: how often each round was begun before by processes that were killed: all of them are
                paid, whether they come again or not.
        """
        cost_M = lambda round: np.nansum(self.planned(round)[WHOLE] ** 2, axis=1)
        spent_M = ledger.mu() ** 2 if ledger else np.full(len(self.count_MC), math.inf if done else 0.0)
        for round, times in restarts_by_round.items():
            if round > done:
                spent_M = spent_M + times * cost_M(round)
        for round in range(done + 1, min(done + ROUNDS_AHEAD, self.config.fed.rounds) + 1):
            spent_M = spent_M + cost_M(round)
            yield round, math.sqrt(spent_M.max())

    def last_round(self, ledger: Ledger | None, done: int, restarts_by_round: Mapping[int, int]) -> int:
        """The last round that the budget allows, as far as it is near; else fed.rounds. Arguments as of mu_ahead."""
        if not self.settings.budget:
            return self.config.fed.rounds
        beyond = (round for round, mu in self.mu_ahead(ledger, done, restarts_by_round) if mu > self.largest_mu * SLACK)
        return next(beyond, self.config.fed.rounds + 1) - 1

    def why_early(self, ledger: Ledger | None, done: int, restarts_by_round: Mapping[int, int]) -> str:
        """privacy.budget=4: round 3 would bring a client's whole release to epsilon 4.31; arguments as of mu_ahead."""
        round, mu = next(
            ahead for ahead in self.mu_ahead(ledger, done, restarts_by_round) if ahead[1] > self.largest_mu * SLACK
        )
        asked, told = f"privacy.budget={self.settings.budget:g}", epsilon_text(mu, self.settings.delta)
        return f"{asked}: round {round} would bring a client's whole release to epsilon {told}"


def unbounded(found: Releases) -> list[str]:
    """The kinds without a bound."""
    return [kind for kind, each in found.items() if math.isinf(each.whole_M.max(initial=0))]


def require_bound(asked: str, holes: Sequence[str]) -> None:
    """UsageError with every hole and what mends it, if there is one; `asked`: the setting that cannot be kept."""
    if holes:
        raise UsageError(f"{asked}: the whole release has no bound: {'; '.join(holes)}")


def holes(found: Releases) -> list[str]:
    """The kinds without a bound, each with its mend: BatchNorm's statistics (model.norm=group)"""
    return [f"{listed([kind])} ({found[kind].mend or 'no setting mends it'})" for kind in unbounded(found)]


def holes_of_epsilon(unit: Spending) -> list[str]:
    """What keeps the noise multipliers from deciding epsilon; `unit`: with multipliers that are not 0."""
    settings, found = unit.settings, dict(unit.releases)
    if releases.FEATURES in found and settings.mechanism == "scheme":  # which reads no privacy.multiplier
        found[releases.FEATURES] = releases.unnoised(len(unit.eligible), "privacy.mechanism=vector")
    open_ones = holes(found)
    if settings.extractor != RECEIVED and {releases.FEATURES, releases.PREDICTIONS} & set(found):
        open_ones.append("one image moves all that a trained extractor makes (privacy.extractor=received)")
    return open_ones or [*update_holes(unit.config), *([repeats_hole(unit.config)] if unit.repeats_images else [])]


def delta_warning(spending: Spending) -> str:
    """A line where delta is not small against the images of a client; empty where it is."""
    delta, images = spending.settings.delta, int(spending.count_MC[list(spending.eligible)].sum(1).min())
    if delta * images < 1:
        return ""
    return (
        f"privacy.delta={delta:g}: is not below 1 / {images}, of the client with the fewest images: what publishes one "
        "of them by chance may have it"
    )


def solved(spending: Spending) -> PrivacySettings:
    """The settings with the noise multiplier, one for all that is noisy, with which the planned rounds meet epsilon.

    Each release then has the same mu; the client that pays most has privacy.epsilon at privacy.delta, all others less.

    Raises:
        UsageError: The whole release has no bound, or one that the multipliers do not decide.
    """
    settings = spending.settings
    unit = spending.with_privacy(scaled(settings, 1.0))
    require_bound(f"privacy.epsilon={settings.epsilon:g}", holes_of_epsilon(unit))
    rounds = range(1, spending.config.fed.rounds + 1)
    spent_M = sum(np.nansum(unit.planned(round)[WHOLE] ** 2, axis=1) for round in rounds)
    target = accounting.largest_mu(settings.epsilon or math.inf, settings.delta)
    return scaled(settings, math.sqrt(np.max(spent_M)) / target)


def scaled(settings: PrivacySettings, multiplier: float) -> PrivacySettings:
    """The same multiplier for all that may be noisy; counts only where they are."""
    return replace(
        settings,
        multiplier=multiplier,
        update_multiplier=multiplier if settings.update_clip else 0.0,
        counts=multiplier if settings.counts else 0.0,
    )
