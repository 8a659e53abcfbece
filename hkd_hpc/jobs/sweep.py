"""A sweep: the grid of settings of a study, and its trials. Trials of one seed share partition, weights and cohorts.

    Sweep(scheme=["fedavg", "fedhkd"], data=["cifar10"], clients=[10, 20], seed=range(5), settings={"fed.rounds": 20})
    Sweep(seed=range(5), loss={"L2": {"scheme.soft_loss": "paper"}, "MSE": {"scheme.soft_loss": "mse"}})

An axis is a list of values of one setting (by its name, or short: scheme, data, clients, seed, beta), or labels with
the settings and presets (`preset`) that each stands for. A data set that is a preset's name stands for the paper's
settings for it. Settings may be nested: {"fed": {"rounds": 20}}. As TOML: the tables [axes], [axes.<name>], [settings],
and [sweep] with presets.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hkd_hpc import schemes
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import (
    SECTIONS,
    Config,
    NotOfThisScheme,
    absolute_paths,
    as_values,
    collect,
    from_values,
    is_location,
    load_toml,
    parts_of,
    resolve,
    split_override,
    with_clients_of_data,
)
from hkd_hpc.config import presets as known_presets
from hkd_hpc.config.words import as_text, flat, words_of
from hkd_hpc.data.registry import OFFICIAL

SHORT = {
    "scheme": "scheme.name",
    "data": "data.name",
    "clients": "fed.clients",
    "seed": "run.seed",
    "beta": "data.beta",
}


@dataclass(frozen=True)
class Trial:
    """One run of a study.

    Attributes:
        labels: Its value on each axis, as text.
        settings: section.key to value, of those that are not the default.
        folder: Its name where the settings do not give it.
    """

    labels: dict[str, str]
    settings: dict[str, Any]
    folder: str = ""

    @cached_property
    def id(self) -> str:
        """Names the result: a hash of the settings that count. A setting added to hkd_hpc later changes no id."""
        counted = {key: value for key, value in self.settings.items() if not is_location(key)}
        if "data.path" in self.settings:  # data may be moved, but other data are another study
            counted["data.path"] = os.path.basename(self.settings["data.path"])
        return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:12]

    @cached_property
    def name(self) -> str:
        """Its folder: fedhkd-cifar10-c10-s0-<id>, or as it was named."""
        if self.folder:
            return self.folder
        names = (self.settings[key] for key in ("scheme.name", "data.name"))
        scheme, data = ("".join(c if c.isalnum() or c in "_-" else "." for c in name) for name in names)
        clients, seed = (self.settings[key] for key in ("fed.clients", "run.seed"))
        return f"{scheme}-{data}-c{clients}-s{seed}-{self.id}"

    def arguments(self) -> list[str]:
        """Its settings as section.key=value, for hkd_hpc.train."""
        return words_of(self.settings)

    def config(self) -> Config:
        return resolve(overrides=self.arguments())


ALWAYS = ("scheme.name", "data.name", "fed.clients", "run.seed")  # stored even where they are the default


def make_trial(labels: dict[str, str], config: Config, folder: str = "") -> Trial:
    """The trial of a checked Config."""
    default = as_values(absolute_paths(resolve(overrides=[f"scheme.name={config.scheme.name}"])))
    values = as_values(absolute_paths(config))  # so that jobs find the data from any folder
    kept = (*ALWAYS, "data.dir") if config.data.name in OFFICIAL else ALWAYS
    stored = {key: value for key, value in sorted(values.items()) if key in kept or value != default[key]}
    return Trial(labels, stored, folder)


class Sweep:
    """The grid of settings of a study.

    Args:
        presets: Names of presets, for all trials.
        settings: section.key to value for all trials, over the presets; may be nested by section.
        overrides: Texts section.key=value, over everything else.
        axes: What is varied: a name, and its values or labels (see above).

    Raises:
        UsageError: An axis without values, or one that is also among the overrides.
    """

    in_toml = False  # how to write what would mend it

    def __init__(
        self,
        *,
        presets: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        overrides: Sequence[str] = (),
        **axes: Any,
    ) -> None:
        self.presets, self.settings, self.overrides = list(presets), flat(settings or {}), list(overrides)
        self.axes = {name: _points(name, values) for name, values in _flat_axes(axes).items()}
        for key in (split_override(text)[0] for text in self.overrides):
            if key in {SHORT.get(name, name) for name in self.axes}:
                raise UsageError(f"{key}: is an axis of this sweep, it cannot be one value for all")

    @classmethod
    def from_toml(cls, path: str | os.PathLike, overrides: Sequence[str] = ()) -> Sweep:
        """The sweep that a spec describes.

        Args:
            path: A TOML file; hkd_hpc/jobs/specs has examples.
            overrides: Texts section.key=value, over the spec's.

        Returns:
            The sweep.

        Raises:
            UsageError: What cannot be meant, with the name of the file.
        """
        parts = _parts(os.fspath(path))
        try:
            sweep = cls(
                presets=parts["sweep"].get("presets", ()),
                settings=parts["settings"],
                overrides=overrides,
                **parts["axes"],
            )
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
        sweep.in_toml = True
        return sweep

    def trials(self) -> tuple[list[Trial], list[str]]:
        """Every combination of the axes.

        Returns:
            The trials, and a line for each combination that is wrong, equal lines once.
        """
        found: dict[str, Trial] = {}
        problems: dict[str, None] = {}
        alien: dict[str, list[tuple[dict[str, str], NotOfThisScheme]]] = {}  # by setting, the trials that have it not
        for point in itertools.product(*self.axes.values()):
            labels = {axis: label for axis, (label, _) in zip(self.axes, point)}
            try:
                trial = make_trial(labels, self._config([settings for _, settings in point]))
            except UsageError as error:
                for part in parts_of(error):
                    if isinstance(part, NotOfThisScheme):
                        alien.setdefault(part.key, []).append((labels, part))
                    else:
                        problems[str(part)] = None
                continue
            if trial.id in found:
                problems[f"{_named(labels)} and {_named(found[trial.id].labels)} are the same run: {trial.id}"] = None
            found[trial.id] = trial
        return list(found.values()), [*problems, *map(self._told, alien.values())]

    def _told(self, trials: list[tuple[dict[str, str], NotOfThisScheme]]) -> str:
        """One line about a setting that not all schemes have: which trials, and how to give it to the others."""
        labels, error = trials[0]
        names = dict.fromkeys(error.scheme for _, error in trials)
        more = f" and {len(trials) - 1} more" if len(trials) > 1 else ""
        problem = NotOfThisScheme(error.key, ", ".join(names), error.owners)
        return f"{problem} (trial {_named(labels)}{more}){self._mend(error)}"

    def _mend(self, error: NotOfThisScheme) -> str:
        """The axis of schemes with the setting where it belongs, as a spec or a program has it."""
        given = {key: [value] for key, value in {**self.settings, **dict(map(split_override, self.overrides))}.items()}
        values = [point[error.key] for _, point in self.axes.get(error.key, ())] or given.get(error.key)
        axis = next(
            (name for name, points in self.axes.items() if all("scheme.name" in point for _, point in points)), ""
        )
        if not values or not any(point["scheme.name"] in error.owners for _, point in self.axes.get(axis, ())):
            return ""
        table: dict[str, dict[str, Any]] = {}
        for label, point in self.axes[axis]:
            own = [{**point, error.key: value} for value in values] if point["scheme.name"] in error.owners else [point]
            table |= {label if len(own) == 1 else f"{label} {as_text(one[error.key])}": one for one in own}
        form = f"{axis} = {json.dumps(table, separators=(', ', ' = '))}" if self.in_toml else f"{axis}={table!r}"
        return f"; in place of {error.key} for all: {form}"

    def _config(self, points: list[dict[str, Any]]) -> Config:
        presets = self.presets + [preset for point in points for preset in _as_list(point.get("preset", []))]
        values = dict(self.settings)
        for point in points:
            values.update({key: value for key, value in point.items() if key != "preset"})
        asked, soft = collect(
            presets, None, [f"{key}={as_text(value)}" for key, value in values.items()] + self.overrides
        )
        return with_clients_of_data(from_values(asked, soft), asked)


def _parts(path: str) -> dict[str, dict[str, Any]]:
    """The tables [sweep], [axes] and [settings] of a spec. UsageError for anything else in it."""
    parts: dict[str, dict[str, Any]] = {"sweep": {}, "axes": {}, "settings": {}}
    for name, table in load_toml(path, "spec").items():
        if name not in parts or not isinstance(table, dict):
            alien = [name]
        else:
            alien = [f"{name}.{key}" for key in table if name == "sweep" and key != "presets"]
        if alien:
            raise UsageError(
                f"{path}: {alien[0]}: not known; a spec has tables [axes], [settings], [axes.<name>], and [sweep] with "
                "presets"
            )
        parts[name] = table
    return parts


def _flat_axes(axes: Mapping[str, Any]) -> dict[str, Any]:
    """As `flat`, of axes, whose labels too are tables: those of tables."""
    found: dict[str, Any] = {}
    for axis, values in axes.items():
        is_section = isinstance(values, Mapping) and axis in ("scheme", *SECTIONS)
        nested = is_section and not any(isinstance(value, Mapping) for value in values.values())
        found |= {f"{axis}.{name}": item for name, item in values.items()} if nested else {axis: values}
    return found


def _points(axis: str, values: Any) -> list[tuple[str, dict[str, Any]]]:
    """(label, settings) of each value of an axis."""
    if isinstance(values, Mapping):
        if not all(isinstance(settings, Mapping) for settings in values.values()):
            raise UsageError(f"axis {axis}: each label needs the settings that it stands for")
        points = [(str(label), flat(settings)) for label, settings in values.items()]
    elif axis == "scheme" and values == "all":
        points = [(name, {"scheme.name": name}) for name in schemes.PAPER]
    elif isinstance(values, str) or not hasattr(values, "__iter__"):
        raise UsageError(
            f"axis {axis}: must be a list of values, not {values!r}; write [{values!r}], or for one value in "
            f"all trials settings={{{SHORT.get(axis, axis)!r}: {values!r}}}, in a spec under [settings]"
        )
    else:
        points = [(as_text(value), _point(axis, value)) for value in values]
    if not points:
        raise UsageError(f"axis {axis}: has no value")
    return points


def _point(axis: str, value: Any) -> dict[str, Any]:
    if axis == "data" and known_presets.PRESETS.get(value, {}).get("data.name") == value:
        return {"preset": value}
    return {SHORT.get(axis, axis): value}


def _as_list(value: Any) -> list:
    return [value] if isinstance(value, str) else list(value)


def _named(labels: dict[str, str]) -> str:
    return " ".join(f"{axis}={label}" for axis, label in labels.items())
