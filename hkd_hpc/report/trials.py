"""Runs that differ in the seed alone, and the settings that tell such trials apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.analysis.tables import COLUMNS
from hkd_hpc.common.groups import grouped
from hkd_hpc.figures.groups import DATA, fewest, settings_of
from hkd_hpc.results import Run
from hkd_hpc.results.seeds import by_seed, copies
from hkd_hpc.runtime import provenance

SCHEME = "scheme.name"
FIRST = (SCHEME, DATA, "fed.clients", "data.beta")  # axes that others which vary with them are no axes beside


@dataclass(frozen=True)
class Trial:
    """Runs of the same settings but for the seed.

    Attributes:
        settings: "section.key" to value, with "data set" for what it is trained on, without the seed and places.
        runs: all of them; several of one seed (copies) are told, and one counts.
    """

    settings: Mapping[str, Any]
    runs: tuple[Run, ...]

    @property
    def scheme(self) -> str:
        return str(self.settings[SCHEME])

    @property
    def complete(self) -> dict[int, Run]:
        """The complete runs by seed."""
        return {seed: run for seed, run in by_seed(self.runs).items() if run.state == "complete"}

    @property
    def copies(self) -> list[str]:
        """A line for each complete run that does not count."""
        return list(copies([run for run in self.runs if run.state == "complete"]).values())

    def has_one_data(self) -> bool:
        """Whether all complete runs were trained on the same images."""
        return len({run.identity.get(provenance.CONTENT) for run in self.complete.values()} - {None}) < 2

    def data_of(self, seed: int) -> str:
        """What tells the images of a complete run from others; empty where it is not known."""
        return str(self.complete[seed].identity.get(provenance.CONTENT, "")) if seed in self.complete else ""

    def accuracies(self, column: str, seeds: Iterable[int | None] | None = None) -> list[float]:
        """Of the complete runs what stands in a column (tables.COLUMNS), one for each of the seeds; NaN where there is
        none.
        """
        complete = self.complete
        own = sorted(complete) if seeds is None else seeds
        return [
            float(complete[seed].summary.get(COLUMNS[column], np.nan)) if seed in complete else np.nan for seed in own
        ]


def trials_of(runs: Iterable[Run]) -> list[Trial]:
    """The trials among runs whose settings can be read, schemes in the order of their registry."""
    told = ((settings_of(run), run) for run in runs if SCHEME in run.settings)
    key = lambda settings: tuple(sorted((name, str(value)) for name, value in settings.items()))
    found = grouped((key(settings), (settings, run)) for settings, run in told)
    trials = [Trial(own[-1][0], tuple(run for _, run in own)) for own in found.values()]
    return sorted(trials, key=lambda trial: order_of(trial.scheme))


def order_of(scheme: str) -> int:
    """As in the registry; one's own come after these, controls last."""
    known = [*schemes.REGISTRY, None, *schemes.CONTROLS]
    return known.index(scheme) if scheme in known else len(schemes.REGISTRY)


def order_of_run(run: Run) -> int:
    """That of its scheme."""
    return order_of(str(run.settings.get(SCHEME, "")))


def axes_of(trials: Sequence[Trial]) -> list[str]:
    """The scheme, and the settings that tell trials apart, the fewest, in the order of FIRST (`fewest`).

    What differs beside the schemes' own settings is told also where it goes with the scheme: no scheme is compared
    with one that had other data or rates. What an older version did not know counts only where it tells trials apart.
    """
    settings = [trial.settings for trial in trials]
    keys = dict.fromkeys([*FIRST, *sorted({key for own in settings for key in own})])
    shared = fewest(settings, [key for key in keys if is_shared(key) and all(key in own for own in settings)])
    return list(dict.fromkeys([SCHEME, *shared, *fewest(settings, [SCHEME, *shared, *keys])]))


def is_shared(key: str) -> bool:
    """Whether a setting is one that all schemes have."""
    return not key.startswith("scheme.")


def label_of(trial: Trial, axes: Sequence[str]) -> tuple[str, ...]:
    """The values of a trial on axes."""
    return tuple(text_of(trial.settings.get(axis)) for axis in axes)


def text_of(value: Any) -> str:
    """A setting for people: – for one that a trial has not."""
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
