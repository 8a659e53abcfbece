"""The runs of a comparison one wave after the other: one wave's settings are known once those before have ended.

First the settings as given on all seeds, and the trials of the tuning that are known from the start; then, with
optuna, trial after trial; last the chosen settings on all seeds. The waves are worked out from what lies in the root,
so a comparison that was killed anywhere continues when the same command is given again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hkd_hpc.compare.runs import Run, Runs, chained, check_runs, paper_runs, run_of, trial_of, trial_run
from hkd_hpc.compare.spec import Spec, Tuning
from hkd_hpc.compare.tuning import begun_run, choices, drawn_trials, next_run, tuned_runs, tuning_runs
from hkd_hpc.console import messages
from hkd_hpc.jobs import watch
from hkd_hpc.jobs.checks import Problems
from hkd_hpc.jobs.executors import Say
from hkd_hpc.jobs.launcher import Preflight, plan_lines, preflight, submit_trials, to_start
from hkd_hpc.jobs.options import Options
from hkd_hpc.jobs.study import Study, wait_or_cancel
from hkd_hpc.results.differences import GOALS
from hkd_hpc.store.folder import RunFolder

ENDED = ("complete", "failed", "lost")  # a wave of such trials is over, whoever failed
UNDECIDED = (*watch.BUSY, "missing")  # missing: outside the queue, as max_queued says


@dataclass(frozen=True)
class Execution:
    """Where the runs of a comparison run. waits: until a wave has ended, and continues."""

    executor: str
    options: Options
    waits: bool


# ---------------------------------------------------------------------------------------------- what runs


def waves(spec: Spec, root: Path) -> Iterator[list[Run]]:
    """Asked for the next wave once all before have ended."""
    papers = paper_runs(spec)
    if spec.tuning is None:
        yield chained(papers)
        return
    trials = tuning_runs(spec, spec.tuning)
    yield [*chained(papers), *chained(trials)]
    for _ in range(drawn_trials(spec.tuning), spec.tuning.trials):
        yield next_trials(spec, spec.tuning, trials, root)
    yield chosen_runs(spec, trials, root)


def next_trials(spec: Spec, tuning: Tuning, trials: Runs, root: Path) -> list[Run]:
    """Add the next trial of each scheme; these."""
    for scheme, own in trials.items():
        own.append(next_run(spec, tuning, scheme, own, root))
    return [own[-1] for own in trials.values()]


def chosen_runs(spec: Spec, trials: Runs, root: Path) -> list[Run]:
    """Those of all schemes, goals and seeds, once each."""
    found = tuned_runs(spec, trials, choices(trials, root)[0])
    return list({run.name: run for goals in found.values() for own in goals.values() for run in own}.values())


def all_trials(spec: Spec, tuning: Tuning, root: Path) -> Runs:
    """By scheme, the trials of the tuning as far as they are known now."""
    trials = tuning_runs(spec, tuning)
    for scheme, own in trials.items():
        while len(own) < tuning.trials and (run := begun_run(spec, tuning, scheme, len(own), root)):
            own.append(run)
    return trials


def planned(spec: Spec, root: Path) -> tuple[list[Run], str]:
    """(all runs, what they are): for those whose settings are not known yet, others that cost as much, at most."""
    papers = chained(paper_runs(spec))
    if spec.tuning is None:
        return papers, f"{len(papers)} runs with the settings as given"
    known = all_trials(spec, spec.tuning, root)
    trials = [run for scheme, own in known.items() for run in filled(spec, spec.tuning, scheme, own)]
    are_all_known = sum(map(len, known.values())) == len(trials)
    ends = are_all_known and all(RunFolder(root / run.name).summary() for run in trials)
    chosen = chosen_runs(spec, known, root) if ends else placeholders(spec, known)
    more = [run for run in chosen if run not in papers]
    what = f"{len(papers)} runs with the settings as given, {len(trials)} trials of the tuning"
    return [*papers, *trials, *more], f"{what}, {'' if ends else 'at most '}{len(more)} of what is chosen"


def filled(spec: Spec, tuning: Tuning, scheme: str, own: list[Run]) -> list[Run]:
    """All trials of a scheme, those that are not known with the paper's settings."""
    return own + [trial_run(spec, tuning, scheme, number, {}) for number in range(len(own), tuning.trials)]


def placeholders(spec: Spec, trials: Runs) -> list[Run]:
    """As many as may be chosen, with the paper's settings."""
    return [
        run_of(spec, scheme, f"chosen.{goal}", seed, {}, {})
        for scheme, goal, seed in itertools.product(trials, GOALS, spec.seeds)
    ]


# ---------------------------------------------------------------------------------------------- running it


def examined(spec: Spec, root: Path, execution: Execution) -> tuple[Preflight, str]:
    """All that can be known before the first run, and what the runs are."""
    runs, what = planned(spec, root)
    return preflight(list(map(trial_of, runs)), execution.executor, root, execution.options, []), what


def plan(spec: Spec, root: Path, execution: Execution) -> str:
    """What would run, what that costs, and what would be rejected. Nothing is written or submitted."""
    found, what = examined(spec, root, execution)
    return plan_lines(what, found, execution.executor, root, execution.options)


def run_all(spec: Spec, root: Path, execution: Execution) -> list[watch.TrialState]:
    """Run what is not finished, wave after wave.

    Args:
        spec: What is compared.
        root: The folder of all runs.
        execution: Where they run.

    Returns:
        The states of the trials of those waves that have begun.

    Raises:
        Problems: Before the first run, with all that can be known then.
        UsageError: A run of a later wave cannot be, or what SLURM said against a submission.
    """
    found, _ = examined(spec, root, execution)
    if found.problems:
        raise Problems(found.problems)
    states: list[watch.TrialState] = []
    for wave in filter(None, waves(spec, root)):
        check_runs(wave, root)
        trials = list(map(trial_of, wave))
        submit_trials(trials, execution.executor, root, execution.options, messages.say, found.outlook)
        if execution.waits:
            wait_or_cancel(Study(root), execution.executor, messages.say, when_ended(messages.say))
        states += to_start(root, trials)[0]
        if any(state.state not in ENDED for state in states):
            break
    return states


def when_ended(say: Say) -> Callable[[list[watch.TrialState]], None]:
    """Takes the states again and again; says each trial as it ends: 3/22 fedavg-paper-s0 done, 1.2 min."""
    begun_s = time.monotonic()
    expected: set[str] = set()
    ended: set[str] = set()

    def tell(states: list[watch.TrialState]) -> None:
        for state in states:
            if state.state in UNDECIDED:
                expected.add(state.name)
            elif state.name in expected - ended:
                ended.add(state.name)
                minutes = (time.monotonic() - begun_s) / 60
                how = {"complete": "done", "failed": "FAILED"}.get(state.state, state.state)
                say(f"{len(ended)}/{len(expected)} {state.name} {how}, {minutes:.1f} min")

    return tell
