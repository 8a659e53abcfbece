"""All schemes on the same data, weights and seeds, and what separates them: `python -m hkd_hpc.compare SPEC.toml --root
DIR`.

Every run is a plain `python -m hkd_hpc.train --resume=auto` in a folder of its own below DIR, several at a time
(`--jobs`), so a study that was killed goes on when the same command is given again, and finished runs are not repeated.
Runs of one
seed share partition, initial weights, cohorts and batches, so schemes are compared pair by pair: the difference from
the reference scheme is given with its 95 % interval (Student's t over the seeds), and called a difference by an exact
test that is corrected for the number of schemes (hkd_hpc/analysis/statistics.py); with too few seeds for that, nothing
is called.

A spec has the tables [study] (schemes, controls, seeds), [settings] (as of hkd_hpc.train, the same for all) and perhaps
[tuning]: every scheme then gets the same number of trials. Trial 0 is the paper's settings (of a scheme without one:
its defaults); trial i draws the learning rate from the same log-uniform stream for all schemes and the scheme's own
hyper-parameters from the grid that its class names (`about.tunes`). Trials run on a seed of their own with
`val_fraction` of the training images held out; for the local column the trial with the best local accuracy on
validation images counts, for the global column the one with the best global accuracy there. No test label is read. The
chosen settings then run on the study's seeds without validation images, beside the paper's.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hkd_hpc import rng, schemes
from hkd_hpc.analysis import statistics
from hkd_hpc.analysis.tables import COLUMNS, markdown, mean_with_interval
from hkd_hpc.comm.launchers import outside_of_jobs
from hkd_hpc.config import Config, NotOfThisScheme, from_file, identity, parts_of, read_toml, resolve, split_override
from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.jobs.checks import Problems, tests_of, told
from hkd_hpc.jobs.sweep import as_text, flat
from hkd_hpc.runtime import provenance
from hkd_hpc.runtime.machine import header
from hkd_hpc.runtime.paths import expanded
from hkd_hpc.settings import first_paragraph
from hkd_hpc.store.atomic import replace_text
from hkd_hpc.store.folder import RunFolder

GOALS = ("local", "global")  # what a user wants to be best: her clients' own models, or the one model of all
CHOSEN_BY = {"local": "local_val_accuracy_last", "global": "global_val_accuracy_last"}


@dataclass(frozen=True)
class Tuning:
    """The budget of every scheme: `trials` runs of `seed`, learning rates within [lr_low, lr_high]."""

    trials: int
    seed: int
    val_fraction: float
    lr_low: float
    lr_high: float


@dataclass(frozen=True)
class Study:
    """What is compared. `settings`: "section.key" to value, of hkd_hpc.train."""

    schemes: tuple[str, ...]
    seeds: tuple[int, ...]
    settings: dict
    tuning: Tuning | None


@dataclass(frozen=True)
class Cell:
    """One run: its folder's name, and all its settings."""

    name: str
    settings: tuple[tuple[str, object], ...]


# ---------------------------------------------------------------------------------------------- the study


def read_study(path: str) -> Study:
    """The study of a spec. UsageError (one line) for what cannot be meant."""
    values = read_toml(path)
    known = {
        "study.schemes",
        "study.controls",
        "study.seeds",
        *(f"tuning.{name}" for name in Tuning.__dataclass_fields__),
    }
    for key in values:
        if key not in known and not key.startswith("settings."):
            raise UsageError(f"{path}: {key}: not known; known: {', '.join(sorted(known))}, and [settings]")
    names = values.get("study.schemes", "all")
    names = tuple(schemes.REGISTRY) if names == "all" else tuple(names)
    names += tuple(schemes.CONTROLS) if values.get("study.controls", True) else ()
    names = tuple(dict.fromkeys(names))
    if not names:
        raise UsageError(f"{path}: study.schemes=[]: name one scheme at least")
    for name in names:
        schemes.get(name)
    seeds = values.get("study.seeds")
    if (
        not isinstance(seeds, list)
        or not seeds
        or not all(type(seed) is int and seed >= 0 for seed in seeds)
        or len(set(seeds)) < len(seeds)
    ):
        raise UsageError(
            f"{path}: study.seeds={seeds}: must be a list of different whole numbers >= 0, for example [0, 1, 2]"
        )
    settings = flat(
        {key.removeprefix("settings."): value for key, value in values.items() if key.startswith("settings.")}
    )
    return Study(names, tuple(seeds), settings, _tuning(path, values, seeds))


def _tuning(path: str, values: dict, seeds: list[int]) -> Tuning | None:
    given = {key.removeprefix("tuning."): value for key, value in values.items() if key.startswith("tuning.")}
    if not given:
        return None
    missing = set(Tuning.__dataclass_fields__) - set(given)
    if missing:
        raise UsageError(f"{path}: [tuning] lacks {', '.join(sorted(missing))}")
    number = {"trials": int, "seed": int, "val_fraction": float, "lr_low": (int, float), "lr_high": (int, float)}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, number[name]):
            raise UsageError(
                f"{path}: tuning.{name}={value}: must be a {'whole ' if number[name] is int else ''}number"
            )
    tuning = Tuning(**given)
    for name, holds, allowed in (
        ("trials", tuning.trials >= 1, ">= 1"),
        ("val_fraction", 0 < tuning.val_fraction < 1, "> 0 and < 1"),
        ("lr_low", tuning.lr_low > 0, "> 0"),
        ("lr_high", tuning.lr_high >= tuning.lr_low, ">= tuning.lr_low"),
        (
            "seed",
            tuning.seed >= 0 and tuning.seed not in seeds,
            ">= 0 and none of study.seeds, whose data it must not see",
        ),
    ):
        if not holds:
            raise UsageError(f"{path}: tuning.{name}={given[name]}: must be {allowed}")
    return tuning


def config_of(cell: Cell) -> Config:
    return resolve(overrides=[f"{key}={as_text(value)}" for key, value in cell.settings])


def check_cells(cells: list[Cell], root: Path) -> None:
    """UsageError for runs that cannot be, with a line for each reason: wrong settings, data, packages; or for a folder
    with a run of other settings."""
    configs, wrong = [], {}
    for cell in cells:
        try:
            configs.append(config_of(cell))
        except UsageError as error:
            for part in parts_of(error):
                if isinstance(part, NotOfThisScheme):
                    wrong.setdefault(part.key, f"{part} ({cell.name})")
                else:
                    wrong.setdefault(str(part), str(part))
    if problems := [*wrong.values(), *told(tests_of(configs))]:
        raise Problems(problems)
    for cell, config in zip(cells, configs):
        folder = RunFolder(root / cell.name)
        if stored := folder.read_config() if folder.path.is_dir() else None:
            from_file(stored, f"--root {root}: {cell.name}/config.json")
        other = identity.other_run(folder, config)
        if other:
            raise UsageError(f"--root {root}: {cell.name} was begun with other settings; {other}; name another folder")


def check_origin(cells: list[Cell], root: Path, strict_code: bool, here: dict[str, str]) -> list[str]:
    """A line for each thing beside the settings in which the runs there are differ: code, versions, threads.

    `here`: the code (identity.code_of) of runs to come. UsageError for different data; with strict_code, different
    code.
    """
    runs = {cell.name: provenance.facts_of(RunFolder(root / cell.name).record()) for cell in cells}
    found = provenance.mixed({**runs, "runs to come": {key: [value] for key, value in here.items()}})
    for key, by_value in found.items():
        if key == provenance.CONTENT or (strict_code and provenance.is_code(key)):
            raise UsageError(f"--root {root}: {provenance.lines({key: by_value})[0]}")
    return provenance.lines(found)


def code_here(cells: list[Cell]) -> dict[str, str]:
    """The code that these runs would have, if there are any."""
    return identity.code_of(*map(config_of, cells)) if cells else {}


def paper_cells(study: Study) -> list[Cell]:
    """Every scheme and control with its paper's settings, on every seed."""
    return [
        cell(study, scheme, f"paper-s{seed}", seed) for seed, scheme in itertools.product(study.seeds, study.schemes)
    ]


def cell(study: Study, scheme: str, label: str, seed: int, **more) -> Cell:
    settings = {**study.settings, "scheme.name": scheme, "run.seed": seed, **more}
    return Cell(f"{scheme.replace(':', '.')}-{label}", tuple(settings.items()))


def trial_settings(tuning: Tuning, scheme: str, trial: int) -> dict:
    """What a trial changes; nothing for trial 0. The learning rate of trial i is the same for every scheme."""
    if trial == 0:
        return {}
    random = rng.stream(tuning.seed, "tuning", trial)
    lr = float(np.exp(random.uniform(np.log(tuning.lr_low), np.log(tuning.lr_high))))
    grid = schemes.get(scheme).about.tunes
    point = random.integers(len(next(iter(grid.values())))) if grid else 0
    return {"train.lr": float(f"{lr:.3g}"), **{f"scheme.{name}": values[point] for name, values in grid.items()}}


def tuning_cells(study: Study) -> dict[str, list[Cell]]:
    """By scheme, the trials in their order. Controls are no schemes: they are not tuned."""
    tuning = study.tuning
    return {
        scheme: [
            cell(
                study,
                scheme,
                f"trial{trial}",
                tuning.seed,
                **{"data.val_fraction": tuning.val_fraction},
                **trial_settings(tuning, scheme, trial),
            )
            for trial in range(tuning.trials)
        ]
        for scheme in study.schemes
        if scheme not in schemes.CONTROLS
    }


def choose(summaries: list[dict | None], goal: str) -> int | None:
    """The trial with the best accuracy on validation images; the first of equals, so that the paper's wins a draw.

    None when no trial came to its end with such an accuracy: NaN never wins (`unmeasured` names it).
    """
    values = [-1.0 if summary is None else np.nan_to_num(summary[CHOSEN_BY[goal]], nan=-1.0) for summary in summaries]
    return int(np.argmax(values)) if max(values) >= 0 else None


def unmeasured(trials: list[Cell], root: Path) -> list[str]:
    """A line for each accuracy on validation images that a finished trial does not have."""
    return [
        f"{cell.name}: has no {goal} accuracy on validation images, so it cannot be chosen for it; see "
        f"{root / cell.name}.log"
        for cell in trials
        if (summary := summary_of(cell, root))
        for goal in GOALS
        if np.isnan(summary[CHOSEN_BY[goal]])
    ]


# ---------------------------------------------------------------------------------------------- running


def run_cells(cells: list[Cell], root: Path, jobs: int) -> list[str]:
    """Run what is not finished, `jobs` at a time; returns a line for each that failed."""
    start_s, done = time.monotonic(), itertools.count(1)

    def one(cell: Cell) -> str | None:
        failure = run_cell(cell, root)
        minutes = (time.monotonic() - start_s) / 60
        print(f"{next(done)}/{len(cells)} {cell.name} {'FAILED' if failure else 'done'}, {minutes:.1f} min", flush=True)
        return failure

    with ThreadPoolExecutor(jobs) as pool:
        return [failure for failure in pool.map(one, cells) if failure]


def run_cell(cell: Cell, root: Path) -> str | None:
    """Run or go on with one cell; its output goes to a log beside its folder. None, or what went wrong."""
    log = root / f"{cell.name}.log"
    arguments = [f"{key}={as_text(value)}" for key, value in cell.settings]
    with open(log, "a") as file:
        code = subprocess.run(
            [sys.executable, "-m", "hkd_hpc.train", "--resume=auto", "--out", root / cell.name, *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=outside_of_jobs(os.environ),
        ).returncode
    return f"{cell.name}: exit {code}, see {log}" if code else None


def summary_of(cell: Cell, root: Path) -> dict | None:
    """The summary of a finished run, None for one that is missing or not finished."""
    return RunFolder(root / cell.name).summary()


# ---------------------------------------------------------------------------------------------- the table


def differences(found: dict[str, dict[str, list[float]]], goal: str) -> dict[str, str]:
    """By scheme but the reference: mean of the paired differences, half of its 95 % interval, and a verdict; – where a
    pair is missing. Schemes are one family of the correction for many tests, controls another."""
    reference = np.array(found[schemes.REFERENCE][goal])
    pairs = {name: np.array(row[goal]) - reference for name, row in found.items() if name != schemes.REFERENCE}
    told = {name: values for name, values in pairs.items() if len(values) > 1 and not np.isnan(values).any()}
    verdicts = {}
    for are_controls in (False, True):
        family = {name: values for name, values in told.items() if (name in schemes.CONTROLS) == are_controls}
        verdicts |= statistics.verdicts(family)
    return {name: difference(told[name], verdicts[name]) if name in told else "–" for name in pairs}


def difference(pairs_S: np.ndarray, verdict: str) -> str:
    mean, half = statistics.interval(pairs_S)
    return f"{mean:+.3f} ± {half:.3f}, {verdict}"


def table(title: str, found: dict[str, dict[str, list[float]]]) -> str:
    """Markdown; found: accuracies by scheme and column, one a seed, in the order of the seeds."""
    reference = schemes.REFERENCE
    shown = [name for name in COLUMNS if any(value == value for row in found.values() for value in row[name])]
    against = {f"{goal} – {reference}": differences(found, goal) for goal in GOALS} if reference in found else {}
    rows = [
        [
            scheme,
            *(mean_with_interval(row[name]) for name in shown),
            *(texts.get(scheme, "") for texts in against.values()),
        ]
        for scheme, row in found.items()
    ]
    return f"{title}\n\n{markdown(['scheme', *shown, *against], rows)}{how_it_was_told(found) if against else ''}"


def how_it_was_told(found: dict[str, dict]) -> str:
    """The test behind better and worse, and the seeds that it needs."""
    family = sum(name != schemes.REFERENCE and name not in schemes.CONTROLS for name in found)
    return (
        "\n\nbetter, worse: exact sign-flip test of the paired differences, two-sided, corrected by Holm over the "
        f"{family} "
        f"schemes of a column (controls by themselves), level {statistics.LEVEL}; that needs "
        f"{statistics.seeds_needed(family)} seeds."
        if family
        else ""
    )


def accuracies(cells: dict[str, list[Cell]], root: Path) -> dict[str, dict[str, list[float]]]:
    """By scheme and column, over the seeds; NaN for a run that is not finished."""
    found = {}
    for scheme, own in cells.items():
        summaries = [summary_of(cell, root) or {} for cell in own]
        found[scheme] = {
            name: [float(summary.get(key, np.nan)) for summary in summaries] for name, key in COLUMNS.items()
        }
    return found


# ---------------------------------------------------------------------------------------------- the command


def compare(study: Study, root: Path, jobs: int, strict_code: bool = False) -> tuple[str, list[str]]:
    """Run everything; the report, and a line for each run that failed. Raises UsageError as `check_origin`."""
    count = len(study.seeds)
    seeds = f"{count} seed{'s' * (count > 1)}" + ("" if count > 4 else ", so a smoke test, no evidence")
    cells = paper_cells(study)
    failures = run_cells(cells, root, jobs)
    by_scheme = {
        scheme: [cell(study, scheme, f"paper-s{seed}", seed) for seed in study.seeds] for scheme in study.schemes
    }
    title = (
        "Settings as given, where not those of a scheme's paper or its own defaults, last round, mean ± half of the 95 "
        "% "
        f"interval over {seeds} (their number)"
    )
    parts = [table(title, accuracies(by_scheme, root))]
    if study.tuning:
        text, more, others = tuned(study, root, jobs, seeds)
        parts, failures, cells = [*parts, text], failures + more, cells + others
    parts += [f"Remark: {line}." for line in check_origin(cells, root, strict_code, {})]
    return "\n\n".join([*parts, header()]), failures


def tuned(study: Study, root: Path, jobs: int, seeds: str) -> tuple[str, list[str], list[Cell]]:
    """Trials, choice on validation images, and the chosen settings on the study's seeds: report, failures, all runs."""
    trials = tuning_cells(study)
    cells = list(itertools.chain.from_iterable(trials.values()))
    failures = run_cells(cells, root, jobs)
    chosen = {
        scheme: {goal: choose([summary_of(cell, root) for cell in own], goal) for goal in GOALS}
        for scheme, own in trials.items()
    }
    failures += [line for own in trials.values() for line in unmeasured(own, root)]
    failures += [
        f"{scheme}: no trial came to its end with an accuracy, so nothing was chosen"
        for scheme in trials
        if None in chosen[scheme].values()
    ]
    chosen = {scheme: best for scheme, best in chosen.items() if None not in best.values()}
    final = {
        scheme: {goal: [tuned_cell(study, scheme, best[goal], seed) for seed in study.seeds] for goal in GOALS}
        for scheme, best in chosen.items()
    }
    unique = {cell.name: cell for goals in final.values() for own in goals.values() for cell in own}
    check_cells(list(unique.values()), root)
    failures += run_cells(list(unique.values()), root, jobs)
    found = {scheme: accuracies(goals, root) for scheme, goals in final.items()}
    rows = {
        scheme: {
            **{name: [np.nan] * len(study.seeds) for name in COLUMNS},
            **{goal: by_goal[goal][goal] for goal in GOALS},
        }
        for scheme, by_goal in found.items()
    }
    notes = [
        f"- {scheme}: "
        + "; ".join(f"{goal}: trial {trial} {describe(study, scheme, trial)}" for goal, trial in best.items())
        for scheme, best in chosen.items()
    ]
    title = (
        f"Tuned: {study.tuning.trials} trials a scheme, chosen on validation images, mean ± half of the 95 % interval "
        f"over {seeds} (their number)"
    )
    return "\n".join([table(title, rows), "", "Chosen:", "", *notes]), failures, [*cells, *unique.values()]


def tuned_cell(study: Study, scheme: str, trial: int, seed: int) -> Cell:
    """The run of a chosen trial on a seed of the study; that of the paper's settings has been made already."""
    if trial == 0:
        return cell(study, scheme, f"paper-s{seed}", seed)
    return cell(study, scheme, f"tuned{trial}-s{seed}", seed, **trial_settings(study.tuning, scheme, trial))


def describe(study: Study, scheme: str, trial: int) -> str:
    changed = trial_settings(study.tuning, scheme, trial)
    return "(" + (", ".join(f"{key}={value}" for key, value in changed.items()) or papers_or_own(scheme)) + ")"


def papers_or_own(scheme: str) -> str:
    """What trial 0 and untuned runs have where the study sets nothing: a scheme of one's own has no paper."""
    return "the paper's" if scheme in schemes.REGISTRY else "its own defaults"


def check(study: Study, root: Path, jobs: int, strict_code: bool) -> None:
    """Everything that can be known before the first run. Raises UsageError."""
    for key in ("scheme.name", "run.seed", "data.val_fraction"):
        if key in study.settings:
            raise UsageError(
                f"{key}={study.settings[key]}: is the study's to choose ([study] schemes and seeds, [tuning])"
            )
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: must be 1 or more")
    if root.exists() and not root.is_dir():
        raise UsageError(f"--root {root}: is a file; name a folder")
    trials = itertools.chain.from_iterable(tuning_cells(study).values()) if study.tuning else ()
    cells = [*paper_cells(study), *trials]
    check_cells(cells, root)
    check_origin(cells, root, strict_code, code_here([cell for cell in cells if not summary_of(cell, root)]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hkd_hpc.compare", description=first_paragraph(__doc__))
    parser.add_argument("spec", metavar="SPEC.toml", help="what to compare; hkd specs list has some")
    parser.add_argument(
        "--root", type=Path, required=True, metavar="DIR", help="folder of all runs; give it again to go on"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time")
    parser.add_argument("--strict-code", action="store_true", help="refuse runs of different code; else a line says so")
    parser.add_argument(
        "settings", nargs="*", metavar="section.key=value", help="settings of all runs, over the spec's"
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        options.root = Path(expanded(options.root, "--root "))
        study = read_study(options.spec)
        study = replace(study, settings={**study.settings, **dict(map(split_override, options.settings))})
        check(study, options.root, options.jobs, options.strict_code)
        options.root.mkdir(parents=True, exist_ok=True)
    except (UsageError, OSError) as error:
        for line in error.lines if isinstance(error, Problems) else [str(error)]:
            print(f"compare: {line}", file=sys.stderr)
        return 2
    try:
        text, failures = compare(study, options.root, options.jobs, options.strict_code)
    except UsageError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    print(f"\n{text}\n\n{options.root / 'table.md'}")
    try:
        replace_text(options.root / "table.md", text + "\n")
    except RunError as error:
        failures.append(str(error))
    for failure in failures:
        print(f"compare: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
