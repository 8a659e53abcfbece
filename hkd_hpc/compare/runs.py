"""The runs of a comparison: their names and settings, and whether they can be."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hkd_hpc import schemes
from hkd_hpc.common.errors import UsageError
from hkd_hpc.compare.spec import Spec, Tuning
from hkd_hpc.config import Config, NotOfThisScheme, from_file, identity, parts_of, resolve
from hkd_hpc.config.words import as_text
from hkd_hpc.jobs.checks import Problems, tests_of, told
from hkd_hpc.jobs.sweep import Trial, make_trial
from hkd_hpc.runtime import provenance
from hkd_hpc.store.folder import RunFolder

Summary = dict[str, Any]  # of a finished run, as in metrics.h5
Settings = dict[str, Any]  # "section.key" to value


@dataclass(frozen=True)
class Run:
    """One run of a comparison.

    Attributes:
        name: Of its folder.
        settings: All that are not the default.
        kind: paper, trial3 or tuned3.
        tried: Of these settings, those that tuning chose.
    """

    name: str
    settings: tuple[tuple[str, object], ...]
    kind: str = ""
    tried: tuple[tuple[str, object], ...] = ()


Runs = dict[str, list[Run]]  # by scheme; one a seed, or one a trial of its tuning


def run_of(spec: Spec, scheme: str, kind: str, seed: int, held_out: Settings, tried: Settings) -> Run:
    """A trial of the tuning is named by its number alone: all have one seed."""
    settings = {**spec.settings, "scheme.name": scheme, "run.seed": seed, **held_out, **tried}
    name = "-".join([scheme.replace(":", "."), kind, *[f"s{seed}"] * (not held_out)])
    return Run(name, tuple(settings.items()), kind, tuple(tried.items()))


def paper_run(spec: Spec, scheme: str, seed: int) -> Run:
    return run_of(spec, scheme, "paper", seed, {}, {})


def paper_runs(spec: Spec) -> Runs:
    """By scheme and control: with its paper's settings, one run a seed."""
    return {scheme: [paper_run(spec, scheme, seed) for seed in spec.seeds] for scheme in spec.schemes}


def trial_run(spec: Spec, tuning: Tuning, scheme: str, trial: int, tried: Settings) -> Run:
    """One trial of a scheme's tuning."""
    return run_of(spec, scheme, f"trial{trial}", tuning.seed, {"data.val_fraction": tuning.val_fraction}, tried)


def tuned_run(spec: Spec, scheme: str, trial: int, tried: Settings, seed: int) -> Run:
    """The run of a chosen trial on a seed of the spec; that of the paper's settings has been made already."""
    return run_of(spec, scheme, f"tuned{trial}", seed, {}, tried) if trial else paper_run(spec, scheme, seed)


def chained(runs: Runs) -> list[Run]:
    """Those of all schemes, by seed or trial first, so that early ones tell something of every scheme."""
    return list(itertools.chain.from_iterable(zip(*runs.values())))


def config_of(run: Run) -> Config:
    return resolve(overrides=[f"{key}={as_text(value)}" for key, value in run.settings])


def trial_of(run: Run) -> Trial:
    """As a sweep has it. UsageError for wrong settings."""
    config = config_of(run)
    labels = {"scheme": config.scheme.name, "settings": run.kind, "seed": str(config.run.seed)}
    return make_trial(labels, config, run.name)


def summary_of(run: Run, root: Path) -> Summary | None:
    """The summary of a finished run, None for one that is missing or not finished."""
    return RunFolder(root / run.name).summary()


# ---------------------------------------------------------------------------------------------- can they be?


def check_settings(spec: Spec) -> None:
    """UsageError for settings that are not the spec's to give."""
    for key in ("scheme.name", "run.seed", "data.val_fraction"):
        if key in spec.settings:
            raise UsageError(
                f"{key}={spec.settings[key]}: is the study's to choose ([study] schemes and seeds, [tuning])"
            )


def check_runs(runs: list[Run], root: Path) -> None:
    """UsageError for runs that cannot be, with a line for each reason: wrong settings, data, packages; or for a folder
    with a run of other settings."""
    configs: list[Config] = []
    wrong: dict[str, str] = {}
    for run in runs:
        try:
            configs.append(config_of(run))
        except UsageError as error:
            for part in parts_of(error):
                if isinstance(part, NotOfThisScheme):
                    wrong.setdefault(part.key, f"{part} ({run.name})")
                else:
                    wrong.setdefault(str(part), str(part))
    if problems := [*wrong.values(), *told(tests_of(configs))]:
        raise Problems(problems)
    for run, config in zip(runs, configs):
        folder = RunFolder(root / run.name)
        if stored := folder.read_config() if folder.path.is_dir() else None:
            from_file(stored, f"--root {root}: {run.name}/config.json")
        other = identity.other_run(folder, config)
        if other:
            raise UsageError(f"--root {root}: {run.name} was begun with other settings; {other}; name another folder")


def check_origin(runs: list[Run], root: Path, strict_code: bool, here: dict[str, str]) -> list[str]:
    """A line for each thing beside the settings in which the runs there are differ: code, versions, threads.

    `here`: the code (identity.code_of) of runs to come. UsageError for different data; with strict_code, different
    code.
    """
    provenances = {run.name: provenance.from_record(RunFolder(root / run.name).record()) for run in runs}
    found = provenance.mixed({**provenances, "runs to come": {key: [value] for key, value in here.items()}})
    for key, by_value in found.items():
        if key == provenance.CONTENT or (strict_code and provenance.is_code(key)):
            raise UsageError(f"--root {root}: {provenance.lines({key: by_value})[0]}")
    return provenance.lines(found)


def code_to_come(runs: list[Run], root: Path) -> dict[str, str]:
    """The code that the runs which are not finished would have, if there are any."""
    configs = [config_of(run) for run in runs if not summary_of(run, root)]
    return identity.code_of(*configs) if configs else {}


def papers_or_own(scheme: str) -> str:
    """What untuned runs have where the spec sets nothing: a scheme that is not in the FedHKD paper has its own."""
    return "the paper's" if scheme in schemes.PAPER else "its own defaults"
