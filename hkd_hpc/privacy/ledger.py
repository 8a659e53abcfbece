"""The ledger: what each client released in which round, and what it adds up to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context
from typing import Any

import numpy as np

from hkd_hpc.analysis.tables import Table, aligned
from hkd_hpc.common import words
from hkd_hpc.common.errors import UsageError
from hkd_hpc.privacy import accounting
from hkd_hpc.privacy.releases import FEATURES, KINDS, NO_NOISE, WEIGHTS, Releases
from hkd_hpc.privacy.settings import SIMULATION

FIXED, WHOLE = COLUMNS = ("privacy_mu_fixed", "privacy_mu_whole")  # of /clients in metrics.h5: round, client, kind
HEAD = ("kind", "rounds", "clip and noise", "fixed extractor", "whole release")
NAMES = {"statistics": "BatchNorm's statistics", "report": "the scheme's report", "presence": "presence of classes"}
NO_BOUND = "no bound"
NOT_COUNTED = (
    "not counted: losses, accuracies, numbers of images, norms and rejections, which rank 0 gets without noise"
)
SIMULATED = "simulation, no privacy"
DIFFER_IN = {"image": "one image", "label": "one image and its label", "client": "all data of one client"}  # adjacency


@dataclass(frozen=True)
class Terms:
    """What the figures of a ledger mean.

    Attributes:
        mode, adjacency, delta: of the settings.
        told: clip and noise of each kind, in words.
        mend: by kind without a bound, the settings that give it one.
    """

    mode: str
    adjacency: str
    delta: float
    told: Mapping[str, str] = field(default_factory=dict)
    mend: Mapping[str, str] = field(default_factory=dict)

    def tree(self) -> dict[str, Any]:
        """For metrics.h5 and checkpoints: group /privacy."""
        return {
            "mode": self.mode,
            "adjacency": self.adjacency,
            "delta": self.delta,
            **{f"{name}_{kind}": text for name in ("told", "mend") for kind, text in getattr(self, name).items()},
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Terms:
        texts = lambda name: {kind: str(tree[f"{name}_{kind}"]) for kind in KINDS if f"{name}_{kind}" in tree}
        return cls(str(tree["mode"]), str(tree["adjacency"]), float(tree["delta"]), texts("told"), texts("mend"))


def terms_of(settings: Any, releases: Releases) -> Terms:
    """Of the settings (PrivacySettings) and what they make clients release."""
    mends = {kind: each.mend for kind, each in releases.items() if each.mend}
    told = {kind: each.told for kind, each in releases.items()}
    return Terms(settings.mode, settings.adjacency, settings.delta, told, mends)


def ledger_of(
    terms: Terms,
    columns: Mapping[str, Any],
    begun: Mapping[int, int] = {},
    counted_R: Sequence[float] | np.ndarray | None = None,
) -> Ledger | None:
    """What is recorded; None where that has no ledger.

    Rounds before there was one have no bound: something was released, and nobody wrote down what.

    Args:
        terms: what the figures mean.
        columns: of /clients, each (rounds, clients, ...).
        begun: as of Ledger.
        counted_R: column `begun` of /rounds; where it is NaN, or there is none, a row counts all times of its round.
    """
    if WHOLE not in columns:
        return None
    fixed_RMK, whole_RMK = (np.array(columns[name], float) for name in COLUMNS)
    unknown_RM = np.isnan(whole_RMK).all(2) & ~np.isnan(np.array(columns["status"], float))
    for mu_RMK in (fixed_RMK, whole_RMK):
        mu_RMK[unknown_RM] = math.inf
    known_R = np.full(len(whole_RMK), math.nan) if counted_R is None else np.array(counted_R, float)
    counted = {n: begun.get(n, 1) if math.isnan(times) else int(times) for n, times in enumerate(known_R, 1)}
    return Ledger(terms, fixed_RMK, whole_RMK, begun, counted)


@dataclass(frozen=True)
class Ledger:
    """What the clients released.

    Not in it: losses, accuracies, numbers of images, norms and rejections, which rank 0 gets without noise.

    Attributes:
        terms: what the figures mean.
        fixed_RMK: mu by round, client and kind (releases.KINDS) for a fixed extractor; NaN of a client that was not
            drawn.
        whole_RMK: the same without that assumption.
        begun: of a release, how often each round was begun, by its number.
        counted: how many of these times the row of a recorded round counts: all until it was done. Each other counts
            for each client as the costliest that is recorded.
    """

    terms: Terms
    fixed_RMK: np.ndarray
    whole_RMK: np.ndarray
    begun: Mapping[int, int] = field(default_factory=dict)
    counted: Mapping[int, int] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """That are recorded."""
        return len(self.whole_RMK)

    @property
    def unfinished(self) -> dict[int, int]:
        """How often each round was begun that no row counts: each time something may have been released."""
        times = {round: times - self.counted.get(round, 0) for round, times in sorted(self.begun.items())}
        return {round: more for round, more in times.items() if more > 0}

    def mu(self, figure: str = "whole", kinds: Iterable[str] = KINDS) -> np.ndarray:
        """(clients,) of all rounds together.

        Args:
            figure: "fixed" or "whole".
            kinds: those that count.
        """
        mu_RMK = self.whole_RMK if figure == "whole" else self.fixed_RMK
        places = [KINDS.index(kind) for kind in kinds]
        squared_RM = np.nansum(mu_RMK[:, :, places] ** 2, axis=2)
        spent_M = squared_RM.sum(0)
        if self.unfinished:
            times_R = np.array([self.counted.get(round, 1) for round in range(1, self.rounds + 1)])
            spent_M = spent_M + sum(self.unfinished.values()) * (squared_RM / times_R[:, None]).max(initial=0)
        return np.sqrt(spent_M)

    def epsilon(self, figure: str = "whole", kinds: Iterable[str] = KINDS) -> np.ndarray:
        """(clients,) at `terms.delta`; inf where there is no bound. UsageError where dp-accounting is not installed."""
        return accounting.epsilons(self.mu(figure, kinds), self.terms.delta)

    @property
    def kinds(self) -> list[str]:
        """Those that were released."""
        return [kind for kind in KINDS if kind in self.terms.told]

    def unbounded(self, figure: str = "whole") -> list[str]:
        """The kinds without a bound at some client, weights first."""
        found = [kind for kind in KINDS if math.isinf(self.mu(figure, [kind]).max(initial=0))]
        return sorted(found, key=lambda kind: kind != WEIGHTS)

    def rows(self) -> list[tuple[str, ...]]:
        """By kind, as HEAD says; epsilon of the client that paid most."""
        return [self._row(kind) for kind in self.kinds]

    def _row(self, kind: str) -> tuple[str, ...]:
        mu_RM = self.whole_RMK[:, :, KINDS.index(kind)]
        told = self.terms.told[kind]
        rounds = int((~np.isnan(mu_RM)).any(1).sum())
        return kind, str(rounds), told, *(self._worst(figure, [kind]) for figure in ("fixed", "whole"))

    def _worst(self, figure: str, kinds: Sequence[str] = KINDS) -> str:
        return epsilon_text(float(self.mu(figure, kinds).max(initial=0)), self.terms.delta)

    def verdict(self) -> str:
        """features alone, for a fixed extractor: epsilon = 4.43; the whole release: no guarantee, since ..."""
        parts = []
        if FEATURES in self.kinds:
            parts.append(f"features alone, for a fixed extractor: {self._features()}")
        parts.append(f"the whole release: {self._whole()}")
        return "; ".join(parts)

    def said(self) -> str:
        """The same in one line that stands by itself."""
        told = f"at delta {self.terms.delta:g}, neighbours differ in {self.differ_in}"
        return "; ".join([f"privacy{self.label()}: {told}", self.verdict(), *self.begun_lines()])

    def _features(self) -> str:
        mu = float(self.mu("fixed", [FEATURES]).max(initial=0))
        if math.isinf(mu):
            mend = self.terms.mend.get(FEATURES, "")
            return f"{NO_BOUND} ({self.terms.told[FEATURES]}" + (f"; {mend} gives one)" if mend else ")")
        return bound_text(mu, self.terms.delta)

    def _whole(self) -> str:
        holes = self.unbounded()
        if not holes:
            return bound_text(float(self.mu("whole", KINDS).max(initial=0)), self.terms.delta)
        bare = [kind for kind in holes if self.terms.told.get(kind, NO_NOISE).startswith(NO_NOISE)]
        noisy = [kind for kind in holes if kind not in bare]
        why = {"travel without noise": bare, "have no bound": noisy}
        return f"no guarantee, since {' and '.join(f'{listed(kinds)} {what}' for what, kinds in why.items() if kinds)}"

    def mended(self) -> str:
        """The settings that would give the whole release a bound; empty where it has one, or none would."""
        mends = [self.terms.mend.get(kind, "") for kind in self.unbounded()]
        return " ".join(dict.fromkeys(word for mend in mends for word in mend.split()))

    @property
    def table(self) -> Table:
        """By kind."""
        return Table(HEAD, self.rows(), self.title())

    def lines(self) -> list[str]:
        """The table and what it comes to, for a terminal."""
        return [self.title(), *(f"  {line}" for line in (*aligned([HEAD, *self.rows()]), *self.conclusions()))]

    def conclusions(self) -> list[str]:
        """What the table comes to, what would mend it, and, of a whole release with a bound, what is not in it."""
        mended = self.mended()
        return [
            self.verdict(),
            *self.begun_lines(),
            *([f"a bound needs {mended}"] if mended else []),
            *([] if self.unbounded() else [NOT_COUNTED]),
        ]

    def begun_lines(self) -> list[str]:
        """The rounds that were begun and are not recorded, in one line, if there are some: counted as round 2 ..."""
        told = [f"round {round} (begun {words.counted(times, 'time')})" for round, times in self.unfinished.items()]
        return [f"not finished, and counted as the costliest of the others: {', '.join(told)}"] if told else []

    def figures(self) -> tuple[str, str, str, str, str]:
        """Where the noise comes from, what neighbours differ in, delta, and both figures, in short."""
        source = SIMULATED if self.terms.mode == SIMULATION else self.terms.mode
        delta = f"{self.terms.delta:g}"
        return source, self.differ_in, delta, self._worst("fixed", [FEATURES]), self._worst("whole")

    def title(self) -> str:
        """privacy (simulation, no privacy): epsilon at delta 1e-05 after 10 rounds, neighbours differ in one image"""
        rounds = words.counted(self.rounds, "round")
        return (
            f"privacy{self.label()}: epsilon at delta {self.terms.delta:g} after {rounds}, of the client that paid "
            f"most; neighbours differ in {self.differ_in}"
        )

    @property
    def differ_in(self) -> str:
        """What neighbouring data differ in."""
        return DIFFER_IN[self.terms.adjacency]

    def label(self) -> str:
        """ " (simulation, no privacy)", or nothing in release mode."""
        return f" ({SIMULATED})" if self.terms.mode == SIMULATION else ""


def epsilon_text(mu: float, delta: float) -> str:
    """4.43, rounded up; no bound; or mu where the package that gives epsilon is not installed."""
    if math.isinf(mu):
        return NO_BOUND
    try:
        return rounded_up(accounting.epsilon(mu, delta))
    except UsageError:
        return f"mu {rounded_up(mu)}"


def bound_text(mu: float, delta: float) -> str:
    """epsilon = 4.43, or what is missing to tell it."""
    told = epsilon_text(mu, delta)
    return f"{told} ({accounting.PIP} for epsilon)" if told.startswith("mu ") else f"epsilon = {told}"


def rounded_up(number: float) -> str:
    """Three digits that are not below the first six of the number: 4.421 is 4.43, 4.0000001 is 4."""
    return f"{Context(prec=3, rounding=ROUND_CEILING).create_decimal(f'{number:.6g}').normalize():f}"


def listed(kinds: Sequence[str]) -> str:
    """weights, predictions and BatchNorm's statistics"""
    return words.listed([NAMES.get(kind, kind) for kind in kinds])
