"""The same number of trials for every scheme, and the choice among them, which reads no test accuracy.

Trial 0 is the paper's settings (of a scheme without one: its defaults). Trial i of the grid draws the learning rate
from the same log-uniform stream for all schemes, and the scheme's own hyper-parameters from the grid that its class
names (`about.tunes`): each independently, so that of few trials some points may be missed. The Latin hypercube (McKay
et al. 1979) draws both so that n trials have a learning rate in each n-th of the range, and each point as often as
any other; with another number of trials all of them are others. Optuna's sampler begins with the first half of the
grid's trials, at most FIRST; each further one is what TPE (Bergstra et al. 2011; for two goals Ozaki et al. 2020)
suggests after all before it, within the same range of learning rates and the same grid. A suggestion follows from the
seed, the number of the trial and the finished runs: there is no other state, and what was begun once stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hkd_hpc import schemes
from hkd_hpc.common import rng
from hkd_hpc.common.errors import UsageError
from hkd_hpc.compare.runs import (
    Run,
    Runs,
    Settings,
    Summary,
    chained,
    config_of,
    paper_runs,
    papers_or_own,
    summary_of,
    trial_run,
    tuned_run,
)
from hkd_hpc.compare.spec import LATIN, OPTUNA, Spec, Tuning
from hkd_hpc.config import Config, as_values, from_file
from hkd_hpc.jobs.files import read_trials
from hkd_hpc.results.differences import GOALS
from hkd_hpc.runtime import versions
from hkd_hpc.store.folder import RunFolder

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

CHOSEN_BY = {"local": "local_val_accuracy_last", "global": "global_val_accuracy_last"}
FIRST = 10  # trials of the grid, at most, with which optuna's sampler begins: as many as its own default draws
HYPERCUBES = 100
LR, POINT = "train.lr", "point"  # what is searched: the learning rate, and the place in the scheme's own grid


# ---------------------------------------------------------------------------------------------- the trials


def drawn_trials(tuning: Tuning) -> int:
    """How many trials of a scheme are known before the first has run."""
    return tuning.trials if tuning.sampler != OPTUNA else min(-(-tuning.trials // 2), FIRST)


def tuned_schemes(spec: Spec) -> list[str]:
    """Controls are no schemes: they are not tuned."""
    return [scheme for scheme in spec.schemes if scheme not in schemes.CONTROLS]


def tuning_runs(spec: Spec, tuning: Tuning) -> Runs:
    """By scheme, the trials that are known from the start, in their order."""
    return {
        scheme: [
            trial_run(spec, tuning, scheme, trial, trial_settings(tuning, scheme, trial))
            for trial in range(drawn_trials(tuning))
        ]
        for scheme in tuned_schemes(spec)
    }


def possible_runs(spec: Spec) -> list[Run]:
    """With the paper's settings; the trials that are known from the start; and of each of these what would run if it
    were chosen."""
    found = chained(paper_runs(spec))
    for scheme, trials in tuning_runs(spec, spec.tuning).items() if spec.tuning else ():
        found += trials
        for number, trial in enumerate(trials[1:], 1):
            found += [tuned_run(spec, scheme, number, dict(trial.tried), seed) for seed in spec.seeds]
    return found


def trial_settings(tuning: Tuning, scheme: str, trial: int) -> Settings:
    """What a trial that is known from the start changes; nothing for trial 0. The learning rates are the same for every
    scheme, of the grid trial by trial."""
    if trial == 0:
        return {}
    points = grid_of(scheme)
    share, place = (hypercube if tuning.sampler == LATIN else independent)(tuning, trial, len(points))
    lr = float(np.exp(np.log(tuning.lr_low) + share * (np.log(tuning.lr_high) - np.log(tuning.lr_low))))
    return {LR: rounded(lr)} | (points[place] if points else {})


def independent(tuning: Tuning, trial: int, points: int) -> tuple[float, int]:
    """(share of the way from lr_low to lr_high, place of the point)."""
    random = rng.stream(tuning.seed, "tuning", trial)
    return random.uniform(), int(random.integers(points)) if points else 0


def hypercube(tuning: Tuning, trial: int, points: int) -> tuple[float, int]:
    """The same, spread over all trials; of HYPERCUBES draws the one in which the two go together least, since grids
    are ordered: else strong terms might be tried at high rates alone."""
    count = tuning.trials - 1
    random = rng.stream(tuning.seed, "tuning/latin", count)
    share_in_part = random.uniform(size=count)  # first, so that all schemes have the same rates
    repeated = np.tile(np.arange(max(points, 1)), -(-count // max(points, 1)))[:count]
    drawn = [(random.permutation(count), random.permutation(repeated)) for _ in range(HYPERCUBES)]
    parts, places = min(drawn, key=lambda pair: abs(covariance(*pair)))
    part = int(parts[trial - 1])
    return float((part + share_in_part[part]) / count), int(places[trial - 1])


def covariance(one: np.ndarray, other: np.ndarray) -> float:
    """Rounded, so that no last bit decides between equals."""
    return round(float(np.mean((one - one.mean()) * (other - other.mean()))), 9)


def grid_of(scheme: str) -> list[Settings]:
    """The points of a scheme's own grid."""
    tunes = schemes.get(scheme).about.tunes
    return [{f"scheme.{name}": value for name, value in zip(tunes, values)} for values in zip(*tunes.values())]


def rounded(lr: float) -> float:
    return float(f"{lr:.3g}")


# ---------------------------------------------------------------------------------------------- optuna's trials


def check_sampler(tuning: Tuning | None) -> None:
    """UsageError where optuna is asked for and is not here."""
    if tuning and tuning.sampler == OPTUNA and not versions.installed("optuna"):
        raise UsageError("tuning.sampler=optuna: optuna is not installed; pip install 'hkd_hpc[optuna]'")


def next_run(spec: Spec, tuning: Tuning, scheme: str, own: Sequence[Run], root: Path) -> Run:
    """The trial of a scheme after its `own`, all of which have ended: as it was begun, else as optuna suggests."""
    return begun_run(spec, tuning, scheme, len(own), root) or trial_run(
        spec, tuning, scheme, len(own), suggested(tuning, scheme, own, root)
    )


def begun_run(spec: Spec, tuning: Tuning, scheme: str, number: int, root: Path) -> Run | None:
    """A trial with what was suggested for it before, as the study's record has it, else its folder. None where nothing
    was, or that for another spec."""
    name = trial_run(spec, tuning, scheme, number, {}).name
    config = next((trial.config() for trial in read_trials(root) if trial.name == name), None)
    if config is None and (text := RunFolder(root / name).read_config()):
        config = from_file(text, f"--root {root}: {name}/config.json")
    tried = tried_in(tuning, scheme, config) if config else {}
    return trial_run(spec, tuning, scheme, number, tried) if tried else None


def tried_in(tuning: Tuning, scheme: str, config: Config) -> Settings:
    """What tuning searches, as settings have it; nothing where that lies outside of its range or grid."""
    values, lr, points = as_values(config), config.train.lr, grid_of(scheme)
    own = [point for point in points if all(values[key] == value for key, value in point.items())]
    if not rounded(tuning.lr_low) <= lr <= rounded(tuning.lr_high) or (points and not own):
        return {}
    return {LR: lr} | (own[0] if own else {})


def suggested(tuning: Tuning, scheme: str, own: Sequence[Run], root: Path) -> Settings:
    """What TPE suggests after the trials of a scheme, for both goals at once."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = rng.derive(tuning.seed, "tuning/optuna", len(own)) % 2**32
    sampler = optuna.samplers.TPESampler(n_startup_trials=1, seed=seed)
    study = optuna.create_study(directions=["maximize"] * len(GOALS), sampler=sampler)
    space = space_of(tuning, scheme)
    for run in own:
        params, values = params_of(tuning, scheme, run), values_of(summary_of(run, root))
        if params and values:
            study.add_trial(optuna.trial.create_trial(params=params, distributions=space, values=values))
    found, points = study.ask(space).params, grid_of(scheme)
    return {LR: rounded(found[LR])} | (points[found[POINT]] if points else {})


def space_of(tuning: Tuning, scheme: str) -> dict[str, BaseDistribution]:
    """Learning rates as the grid draws them; points of a scheme's grid by their place, since their values ascend."""
    from optuna.distributions import FloatDistribution, IntDistribution

    points = grid_of(scheme)
    rate = {LR: FloatDistribution(tuning.lr_low, tuning.lr_high, log=True)}
    return rate | ({POINT: IntDistribution(0, len(points) - 1)} if points else {})


def params_of(tuning: Tuning, scheme: str, run: Run) -> dict[str, float]:
    """Where a trial lies in the space; empty for one outside of it, as the paper's settings may be."""
    tried = tried_in(tuning, scheme, config_of(run))
    if not tried:
        return {}
    points = grid_of(scheme)
    place = [point for point, own in enumerate(points) if own.items() <= tried.items()]
    return {LR: min(max(tried[LR], tuning.lr_low), tuning.lr_high)} | ({POINT: place[0]} if points else {})


def values_of(summary: Summary | None) -> list[float]:
    """Of the goals; empty for a trial that failed, or has not both."""
    values = [float(summary[CHOSEN_BY[goal]]) for goal in GOALS] if summary else []
    return values if np.isfinite(values).all() else []


# ---------------------------------------------------------------------------------------------- the choice


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
        f"{RunFolder(root / run.name).log_path}"
        for run in trials
        if (summary := summary_of(run, root))
        for goal in GOALS
        if np.isnan(summary[CHOSEN_BY[goal]])
    ]


Chosen = dict[str, int]  # by goal, the number of a trial


def choices(trials: Runs, root: Path) -> tuple[dict[str, Chosen], list[str]]:
    """({scheme: its chosen trials}, a line for each scheme of which none could be chosen)."""
    chosen: dict[str, Chosen] = {}
    without = []
    for scheme, own in trials.items():
        best = {goal: choose([summary_of(run, root) for run in own], goal) for goal in GOALS}
        found = {goal: trial for goal, trial in best.items() if trial is not None}
        if len(found) == len(GOALS):
            chosen[scheme] = found
        else:
            without.append(f"{scheme}: no trial came to its end with an accuracy, so nothing was chosen")
    return chosen, without


def tuned_runs(spec: Spec, trials: Runs, chosen: dict[str, Chosen]) -> dict[str, Runs]:
    """By scheme and goal, the chosen settings on the spec's seeds."""
    return {
        scheme: {
            goal: [tuned_run(spec, scheme, trial, dict(trials[scheme][trial].tried), seed) for seed in spec.seeds]
            for goal, trial in best.items()
        }
        for scheme, best in chosen.items()
    }


def chosen_text(scheme: str, best: Chosen, trials: list[Run]) -> str:
    told = (f"{goal}: trial {trial} {describe(scheme, trials[trial])}" for goal, trial in best.items())
    return f"- {scheme}: " + "; ".join(told)


def describe(scheme: str, run: Run) -> str:
    return "(" + (", ".join(f"{key}={value}" for key, value in run.tried) or papers_or_own(scheme)) + ")"
