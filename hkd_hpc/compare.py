"""All schemes on the same data, weights and seeds, and what separates them.

    python -m hkd_hpc.compare SPEC.toml --root DIR

Every run is a plain `python -m hkd_hpc.train --resume=auto` in a folder of its own below DIR, several at a time
(`--jobs`), so a comparison that was killed is resumed when the same command is given again, and finished runs are not
repeated. Runs of one seed share partition, initial weights, cohorts and batches, so schemes are compared pair by pair:
the difference from the reference scheme is given with its 95 % interval (Student's t over the seeds), and called a
difference by an exact test that is corrected for the number of schemes (hkd_hpc/analysis/statistics.py); with too few
seeds for that, nothing is called.

A spec has the tables [study] (schemes, controls, seeds), [settings] (as of hkd_hpc.train, the same for all) and perhaps
[tuning]: every scheme then gets the same number of trials. Trial 0 is the paper's settings (of a scheme without one:
its defaults); trial i draws the learning rate from the same log-uniform stream for all schemes and the scheme's own
hyper-parameters from the grid that its class names (`about.tunes`). Trials run on a seed of their own with
`val_fraction` of the training images held out; for the local column the trial with the best local accuracy on
validation images counts, for the global column the one with the best global accuracy there. No test label is read. The
chosen settings then run on the spec's seeds without validation images, beside the paper's.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hkd_hpc import rng, schemes
from hkd_hpc.analysis import statistics
from hkd_hpc.analysis.tables import COLUMNS, FORMATS, NOTHING, SUFFIXES, Cell, Difference, Table, document, estimate
from hkd_hpc.comm.launchers import outside_of_jobs
from hkd_hpc.command import Parser, exit_code, tell
from hkd_hpc.config import Config, NotOfThisScheme, from_file, identity, parts_of, read_toml, resolve, split_override
from hkd_hpc.config.words import as_text, flat
from hkd_hpc.console import messages
from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.jobs.checks import Problems, tests_of, told
from hkd_hpc.runtime import provenance
from hkd_hpc.runtime.machine import header
from hkd_hpc.runtime.paths import named_path
from hkd_hpc.settings import first_paragraph
from hkd_hpc.store.atomic import replace_text
from hkd_hpc.store.folder import RunFolder

GOALS = ("local", "global")  # what a user wants to be best: her clients' own models, or the one model of all
CHOSEN_BY = {"local": "local_val_accuracy_last", "global": "global_val_accuracy_last"}

Summary = dict[str, Any]  # of a finished run, as in metrics.h5
Accuracies = dict[str, dict[str, list[float]]]  # by scheme and column, one a seed


@dataclass(frozen=True)
class Tuning:
    """The budget of every scheme: `trials` runs of `seed`, learning rates within [lr_low, lr_high]."""

    trials: int
    seed: int
    val_fraction: float
    lr_low: float
    lr_high: float


@dataclass(frozen=True)
class Spec:
    """What is compared. settings: "section.key" to value, of hkd_hpc.train."""

    schemes: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    tuning: Tuning | None


@dataclass(frozen=True)
class Run:
    """One run: its folder's name, and all its settings."""

    name: str
    settings: tuple[tuple[str, object], ...]


# ---------------------------------------------------------------------------------------------- the spec


KEYS = ("study.schemes", "study.controls", "study.seeds", *(f"tuning.{name}" for name in Tuning.__dataclass_fields__))
NUMBERS: dict[str, tuple[type, ...]] = {
    "trials": (int,),
    "seed": (int,),
    "val_fraction": (float,),
    "lr_low": (int, float),
    "lr_high": (int, float),
}


def read_spec(path: str) -> Spec:
    """The spec in a file. UsageError (one line) for what cannot be meant."""
    values = read_toml(path, "spec")
    for key in values:
        if key not in KEYS and not key.startswith("settings."):
            raise UsageError(f"{path}: {key}: not known; known: {', '.join(sorted(KEYS))}, and [settings]")
    seeds = _seeds(path, values.get("study.seeds"))
    settings = flat(_table(values, "settings."))
    return Spec(_schemes(path, values), seeds, settings, _tuning(_table(values, "tuning."), path, seeds))


def _table(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def _schemes(path: str, values: dict[str, Any]) -> tuple[str, ...]:
    given = values.get("study.schemes", "all")
    names = tuple(schemes.REGISTRY) if given == "all" else tuple(given)
    names += tuple(schemes.CONTROLS) if values.get("study.controls", True) else ()
    if not names:
        raise UsageError(f"{path}: study.schemes=[]: name one scheme at least")
    for name in names:
        schemes.get(name)
    return tuple(dict.fromkeys(names))


def _seeds(path: str, seeds: Any) -> tuple[int, ...]:
    are_seeds = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not are_seeds or not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(
            f"{path}: study.seeds={seeds}: must be a list of different whole numbers >= 0, for example [0, 1, 2]"
        )
    return tuple(seeds)


def _tuning(given: dict[str, Any], path: str, seeds: tuple[int, ...]) -> Tuning | None:
    if not given:
        return None
    missing = set(Tuning.__dataclass_fields__) - set(given)
    if missing:
        raise UsageError(f"{path}: [tuning] lacks {', '.join(sorted(missing))}")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, NUMBERS[name]):
            whole = "whole " * (NUMBERS[name] == (int,))
            raise UsageError(f"{path}: tuning.{name}={value}: must be a {whole}number")
    tuning = Tuning(**given)
    for name, holds, allowed in _bounds(tuning, seeds):
        if not holds:
            raise UsageError(f"{path}: tuning.{name}={given[name]}: must be {allowed}")
    return tuning


def _bounds(tuning: Tuning, seeds: tuple[int, ...]) -> list[tuple[str, bool, str]]:
    """(key, whether its value is allowed, what is)."""
    is_free = tuning.seed >= 0 and tuning.seed not in seeds
    return [
        ("trials", tuning.trials >= 1, ">= 1"),
        ("val_fraction", 0 < tuning.val_fraction < 1, "> 0 and < 1"),
        ("lr_low", tuning.lr_low > 0, "> 0"),
        ("lr_high", tuning.lr_high >= tuning.lr_low, ">= tuning.lr_low"),
        ("seed", is_free, ">= 0 and none of study.seeds, whose data it must not see"),
    ]


# ---------------------------------------------------------------------------------------------- the runs


def config_of(run: Run) -> Config:
    return resolve(overrides=[f"{key}={as_text(value)}" for key, value in run.settings])


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


def code_here(runs: list[Run]) -> dict[str, str]:
    """The code that these runs would have, if there are any."""
    return identity.code_of(*map(config_of, runs)) if runs else {}


def paper_runs(spec: Spec) -> dict[str, list[Run]]:
    """By scheme and control: with its paper's settings, one run a seed."""
    return {scheme: [paper_run(spec, scheme, seed) for seed in spec.seeds] for scheme in spec.schemes}


def paper_run(spec: Spec, scheme: str, seed: int) -> Run:
    return run_of(spec, scheme, f"paper-s{seed}", seed, {})


def tuned_run(spec: Spec, tuning: Tuning, scheme: str, trial: int, seed: int) -> Run:
    """The run of a chosen trial on a seed of the spec; that of the paper's settings has been made already."""
    if trial == 0:
        return paper_run(spec, scheme, seed)
    return run_of(spec, scheme, f"tuned{trial}-s{seed}", seed, trial_settings(tuning, scheme, trial))


def run_of(spec: Spec, scheme: str, label: str, seed: int, more: dict[str, Any]) -> Run:
    settings = {**spec.settings, "scheme.name": scheme, "run.seed": seed, **more}
    return Run(f"{scheme.replace(':', '.')}-{label}", tuple(settings.items()))


def trial_settings(tuning: Tuning, scheme: str, trial: int) -> dict[str, Any]:
    """What a trial changes; nothing for trial 0. The learning rate of trial i is the same for every scheme."""
    if trial == 0:
        return {}
    random = rng.stream(tuning.seed, "tuning", trial)
    lr = float(np.exp(random.uniform(np.log(tuning.lr_low), np.log(tuning.lr_high))))
    grid = schemes.get(scheme).about.tunes
    point = random.integers(len(next(iter(grid.values())))) if grid else 0
    return {"train.lr": float(f"{lr:.3g}"), **{f"scheme.{name}": values[point] for name, values in grid.items()}}


def tuning_runs(spec: Spec, tuning: Tuning) -> dict[str, list[Run]]:
    """By scheme, the trials in their order. Controls are no schemes: they are not tuned."""
    held_out = {"data.val_fraction": tuning.val_fraction}
    return {
        scheme: [
            run_of(spec, scheme, f"trial{trial}", tuning.seed, held_out | trial_settings(tuning, scheme, trial))
            for trial in range(tuning.trials)
        ]
        for scheme in spec.schemes
        if scheme not in schemes.CONTROLS
    }


def chained(runs: dict[str, list[Run]]) -> list[Run]:
    """Those of all schemes, by seed or trial first, so that early ones tell something of every scheme."""
    return list(itertools.chain.from_iterable(zip(*runs.values())))


def choose(summaries: Sequence[Summary | None], goal: str) -> int | None:
    """The trial with the best accuracy on validation images; the first of equals, so that the paper's wins a draw.

    None when no trial came to its end with such an accuracy: NaN never wins (`unmeasured` names it).
    """
    values = [-1.0 if summary is None else np.nan_to_num(summary[CHOSEN_BY[goal]], nan=-1.0) for summary in summaries]
    return int(np.argmax(values)) if max(values) >= 0 else None


def unmeasured(trials: list[Run], root: Path) -> list[str]:
    """A line for each accuracy on validation images that a finished trial does not have."""
    return [
        f"{run.name}: has no {goal} accuracy on validation images, so it cannot be chosen for it; see "
        f"{root / run.name}.log"
        for run in trials
        if (summary := summary_of(run, root))
        for goal in GOALS
        if np.isnan(summary[CHOSEN_BY[goal]])
    ]


# ---------------------------------------------------------------------------------------------- running


def train_all(runs: list[Run], root: Path, jobs: int) -> list[str]:
    """Run what is not finished, `jobs` at a time; returns a line for each that failed."""
    start_s, done = time.monotonic(), itertools.count(1)

    def one(run: Run) -> str | None:
        failure = train_one(run, root)
        minutes = (time.monotonic() - start_s) / 60
        messages.say(f"{next(done)}/{len(runs)} {run.name} {'FAILED' if failure else 'done'}, {minutes:.1f} min")
        return failure

    with ThreadPoolExecutor(jobs) as pool:
        return [failure for failure in pool.map(one, runs) if failure]


def train_one(run: Run, root: Path) -> str | None:
    """Begin or resume one run; its output goes to a log beside its folder. None, or what went wrong."""
    log = root / f"{run.name}.log"
    arguments = [f"{key}={as_text(value)}" for key, value in run.settings]
    with open(log, "a") as file:
        code = subprocess.run(
            [sys.executable, "-m", "hkd_hpc.train", "--resume=auto", "--out", root / run.name, *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=outside_of_jobs(os.environ),
        ).returncode
    return f"{run.name}: exit {code}, see {log}" if code else None


def summary_of(run: Run, root: Path) -> Summary | None:
    """The summary of a finished run, None for one that is missing or not finished."""
    return RunFolder(root / run.name).summary()


# ---------------------------------------------------------------------------------------------- the table


def differences(found: Accuracies, goal: str) -> dict[str, Cell | str]:
    """By scheme but the reference: mean of the paired differences, half of its 95 % interval, and a verdict; – where a
    pair is missing. Schemes are one family of the correction for many tests, controls another."""
    reference = np.array(found[schemes.REFERENCE][goal])
    pairs = {name: np.array(row[goal]) - reference for name, row in found.items() if name != schemes.REFERENCE}
    told = {name: values for name, values in pairs.items() if len(values) > 1 and not np.isnan(values).any()}
    verdicts: dict[str, str] = {}
    for are_controls in (False, True):
        family = {name: values for name, values in told.items() if (name in schemes.CONTROLS) == are_controls}
        verdicts |= statistics.verdicts(family)
    return {
        name: Difference(*statistics.interval(told[name]), verdicts[name]) if name in told else NOTHING
        for name in pairs
    }


def table(title: str, found: Accuracies) -> list[str | Table]:
    """Title, table, and how it was told; found: accuracies by scheme and column, one a seed, in the order of the
    seeds.
    """
    reference = schemes.REFERENCE
    shown = [name for name in COLUMNS if any(value == value for row in found.values() for value in row[name])]
    against = {f"{goal} – {reference}": differences(found, goal) for goal in GOALS} if reference in found else {}
    rows = [
        [
            scheme,
            *(estimate(row[name]) for name in shown),
            *(texts.get(scheme, "") for texts in against.values()),
        ]
        for scheme, row in found.items()
    ]
    told = method_text(found) if against else ""
    return [title, "", Table(["scheme", *shown, *against], rows, title), *(["", told] if told else [])]


def method_text(found: Accuracies) -> str:
    """The test behind better and worse, and the seeds that it needs."""
    family = sum(name != schemes.REFERENCE and name not in schemes.CONTROLS for name in found)
    return (
        "better, worse: exact sign-flip test of the paired differences, two-sided, corrected by Holm over the "
        f"{family} "
        f"schemes of a column (controls by themselves), level {statistics.LEVEL}; that needs "
        f"{statistics.seeds_needed(family)} seeds."
        if family
        else ""
    )


def accuracies(runs: dict[str, list[Run]], root: Path) -> Accuracies:
    """By scheme and column, over the seeds; NaN for a run that is not finished."""
    found = {}
    for scheme, own in runs.items():
        summaries = [summary_of(run, root) or {} for run in own]
        found[scheme] = {
            name: [float(summary.get(key, np.nan)) for summary in summaries] for name, key in COLUMNS.items()
        }
    return found


# ---------------------------------------------------------------------------------------------- the command


def compare(spec: Spec, root: Path, jobs: int, strict_code: bool = False) -> tuple[list[str | Table], list[str]]:
    """Run everything; the report, and a line for each run that failed. Raises UsageError as `check_origin`."""
    by_scheme = paper_runs(spec)
    runs = chained(by_scheme)
    failures = train_all(runs, root, jobs)
    title = (
        "Settings as given, where not those of a scheme's paper or its own defaults, last round, "
        f"{interval_text(spec.seeds)}"
    )
    parts = table(title, accuracies(by_scheme, root))
    if spec.tuning:
        own, more, others = tuned(spec, spec.tuning, root, jobs)
        parts, failures, runs = [*parts, "", *own], failures + more, runs + others
    for line in check_origin(runs, root, strict_code, {}):
        parts += ["", f"Remark: {line}."]
    return [*parts, "", header()], failures


def interval_text(seeds: tuple[int, ...]) -> str:
    count = len(seeds)
    told = f"{count} seed{'s' * (count > 1)}" + ("" if count > 4 else ", so a smoke test, no evidence")
    return f"mean ± half of the 95 % interval over {told} (their number)"


def tuned(spec: Spec, tuning: Tuning, root: Path, jobs: int) -> tuple[list[str | Table], list[str], list[Run]]:
    """Trials, choice on validation images, and the chosen settings on the spec's seeds: report, failures, all runs."""
    trials = tuning_runs(spec, tuning)
    runs = list(itertools.chain.from_iterable(trials.values()))
    failures = train_all(runs, root, jobs) + [line for own in trials.values() for line in unmeasured(own, root)]
    chosen, without = choices(trials, root)
    final = {
        scheme: {goal: [tuned_run(spec, tuning, scheme, best[goal], seed) for seed in spec.seeds] for goal in GOALS}
        for scheme, best in chosen.items()
    }
    unique = list({run.name: run for goals in final.values() for own in goals.values() for run in own}.values())
    check_runs(unique, root)
    failures += without + train_all(unique, root, jobs)
    title = f"Tuned: {tuning.trials} trials a scheme, chosen on validation images, {interval_text(spec.seeds)}"
    notes = [chosen_text(tuning, scheme, best) for scheme, best in chosen.items()]
    rows = {scheme: tuned_row(goals, root, len(spec.seeds)) for scheme, goals in final.items()}
    return [*table(title, rows), "", "Chosen:", "", *notes], failures, [*runs, *unique]


def choices(trials: dict[str, list[Run]], root: Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """({scheme: {goal: the chosen trial}}, a line for each scheme of which none could be chosen)."""
    chosen: dict[str, dict[str, int]] = {}
    without = []
    for scheme, own in trials.items():
        best = {goal: choose([summary_of(run, root) for run in own], goal) for goal in GOALS}
        found = {goal: trial for goal, trial in best.items() if trial is not None}
        if len(found) == len(GOALS):
            chosen[scheme] = found
        else:
            without.append(f"{scheme}: no trial came to its end with an accuracy, so nothing was chosen")
    return chosen, without


def tuned_row(goals: dict[str, list[Run]], root: Path, seeds: int) -> dict[str, list[float]]:
    """The accuracy of each goal, from the runs that were chosen for it; NaN in the other columns."""
    by_goal = accuracies(goals, root)
    return {**{name: [np.nan] * seeds for name in COLUMNS}, **{goal: by_goal[goal][goal] for goal in goals}}


def chosen_text(tuning: Tuning, scheme: str, best: dict[str, int]) -> str:
    told = (f"{goal}: trial {trial} {describe(tuning, scheme, trial)}" for goal, trial in best.items())
    return f"- {scheme}: " + "; ".join(told)


def describe(tuning: Tuning, scheme: str, trial: int) -> str:
    changed = trial_settings(tuning, scheme, trial)
    return "(" + (", ".join(f"{key}={value}" for key, value in changed.items()) or papers_or_own(scheme)) + ")"


def papers_or_own(scheme: str) -> str:
    """What trial 0 and untuned runs have where the spec sets nothing: a scheme of one's own has no paper."""
    return "the paper's" if scheme in schemes.REGISTRY else "its own defaults"


def check(spec: Spec, root: Path, jobs: int, strict_code: bool) -> None:
    """Everything that can be known before the first run. Raises UsageError."""
    for key in ("scheme.name", "run.seed", "data.val_fraction"):
        if key in spec.settings:
            raise UsageError(
                f"{key}={spec.settings[key]}: is the study's to choose ([study] schemes and seeds, [tuning])"
            )
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: must be 1 or more")
    if root.exists() and not root.is_dir():
        raise UsageError(f"--root {root}: is a file; name a folder")
    trials = tuning_runs(spec, spec.tuning) if spec.tuning else {}
    runs = [run for by_scheme in (paper_runs(spec), trials) for own in by_scheme.values() for run in own]
    check_runs(runs, root)
    check_origin(runs, root, strict_code, code_here([run for run in runs if not summary_of(run, root)]))


def make_parser() -> Parser:
    parser = Parser(prog="python -m hkd_hpc.compare", description=first_paragraph(__doc__))
    parser.add_argument("spec", metavar="SPEC.toml", help="what to compare; hkd specs list has some")
    parser.add_argument("--root", required=True, metavar="DIR", help="folder of all runs; give it again to resume")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--strict-code", action="store_true", help="reject runs of different code; else a line says so")
    parser.add_argument("--format", choices=FORMATS, default="markdown", help="of the tables; LaTeX with booktabs")
    parser.add_argument(
        "settings", nargs="*", metavar="section.key=value", help="settings of all runs, over the spec's"
    )
    return parser


@exit_code
def main(arguments: list[str] | None = None) -> int:
    """0 done; 1 a run failed; 2 wrong input: one line for each problem."""
    options = make_parser().parse_intermixed_args(arguments)
    spec, root = prepared(options)
    parts, failures = compare(spec, root, options.jobs, options.strict_code)
    path = root / f"table.{SUFFIXES[options.format]}"
    text = document(parts, options.format)
    messages.say(f"\n{text}\n\n{path}")
    try:
        replace_text(path, text + "\n")
    except RunError as error:
        failures.append(str(error))
    return tell(failures, code=1 if failures else 0)


def prepared(options: argparse.Namespace) -> tuple[Spec, Path]:
    """The spec with the settings of the command line, and its folder, which is made. UsageError."""
    root = named_path(options.root, "--root ")
    spec = read_spec(options.spec)
    spec = replace(spec, settings={**spec.settings, **dict(map(split_override, options.settings))})
    try:
        check(spec, root, options.jobs, options.strict_code)
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--root {root}: cannot be used ({error}); name another folder") from None
    return spec, root


if __name__ == "__main__":
    sys.exit(main())
