"""Scenarios: small jobs, broken at random until time is up (fault_injection --minutes M [--seed S] [--faults N]).

Every scenario has a scheme, settings, and several faults one after the other, each followed by --resume on another
number of ranks; between attempts its files are damaged too. What is drawn is a function of (seed, scenario number), so
that `--seed S --only N` runs scenario N again. A reference run of the same settings in one process says what must come
of it. After every attempt: did it end by itself (comm.timeout_s + 20 s), are all files intact, has no saved round been
trained again, are the rows and weights so far the reference run's, and does one line say what happened?

A fault counts when it struck. hung: the job had to be killed. lost: a round trained again, missing or doubled, a file
that cannot be read, or success of a run that is not complete. wrong: other weights or rows. unreported: not one line of
ours, or a traceback. A verdict on an attempt counts for all faults of that attempt. Ranks are forked, all on this host,
and talk without MPI. `--self-test` runs the mutants, and must notice them.
Exit codes: 0 nothing hung, lost or wrong (or: every mutant was noticed), 1 something was, 2 wrong arguments.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hkd_hpc import schemes
from hkd_hpc.analysis.tables import Table
from hkd_hpc.common.command import Parser, exit_code, program_of
from hkd_hpc.common.errors import UsageError
from hkd_hpc.runtime.machine import header

from ..forked_ranks import watch_ranks
from .check import (
    HUNG,
    LOST,
    UNREPORTED,
    WRONG,
    Attempt,
    Expected,
    Known,
    Verdict,
    judge,
    judge_leftovers,
    judge_nan,
    summary,
)
from .faults import (
    FILE_KINDS,
    FULL,
    KILL_ALL,
    KINDS,
    NAN,
    REMOVED,
    SECOND,
    SLEEP,
    STOP,
    Fault,
    Notes,
    damage_files,
    filler,
    install,
    install_nan,
    note_progress,
)
from .mutants import MUTANTS, Mutant, Mutation
from .scenarios import SMALL, Scenario, Step, draw_scenario, save_data

ALL_KINDS = (*KINDS, *FILE_KINDS, NAN)
NO_FAULT = "no fault at all"
TIMEOUT_S, SHORT_TIMEOUT_S = 30.0, 3.0  # comm.timeout_s; short where a rank will give no sign of life
DEADLINE_S, LONGEST_S = 20.0, 180.0  # beyond comm.timeout_s, from the fault on; of an attempt that nothing strikes
SMALL_DISK = "48m"
FEW_FAULTS = 6  # within which a mutant must be noticed

Say = Callable[[str], None]


@dataclass(frozen=True)
class Site:
    """Where jobs run. `mutation` for the self-test."""

    root: Path
    data: Path
    kinds: tuple[str, ...] = ALL_KINDS
    mutation: Mutation | None = None


@dataclass
class Tally:
    """Outcomes so far: by kind of fault, a list of verdicts for each that struck."""

    verdicts: dict[str, list[list[Verdict]]] = field(default_factory=lambda: defaultdict(list))
    scenarios: int = 0
    schemes: set[str] = field(default_factory=set)

    def of(self, kind: str | None) -> list[list[Verdict]]:
        """The verdicts of each fault of a kind; None: of all."""
        return [found for name, faults in self.verdicts.items() if kind in (None, name) for found in faults]

    def count(self, what: str, kind: str | None = None) -> int:
        """Faults with such a verdict."""
        return sum(any(verdict.what == what for verdict in found) for found in self.of(kind))

    @property
    def faults(self) -> int:
        return len(self.of(None))

    @property
    def failed(self) -> bool:
        return any(self.count(what) for what in (HUNG, LOST, WRONG))

    def row(self, kind: str | None) -> list[str]:
        found, bad = self.of(kind), (HUNG, LOST, WRONG, UNREPORTED)
        survived = sum(all(verdict.what == UNREPORTED for verdict in of_fault) for of_fault in found)
        return [kind or "all", *map(str, (len(found), survived, *(self.count(what, kind) for what in bad)))]

    def table(self) -> str:
        kinds = [kind for kind in ALL_KINDS if self.verdicts.get(kind)]
        kinds += [kind for kind in self.verdicts if kind not in ALL_KINDS]
        return Table(
            ["fault", "struck", "survived", HUNG, LOST, WRONG, UNREPORTED], [self.row(kind) for kind in (*kinds, None)]
        ).markdown()


# ---- one scenario ----


def run_rank(
    rank: int,
    arguments: list[str],
    notes: Notes,
    scenario: Scenario,
    fault: Fault | None,
    folder: Path,
    mutation: Mutation | None,
) -> None:
    """In a forked rank: the program, with what befalls it."""
    import hkd_hpc.train as train

    if mutation:
        mutation(rank)
    note_progress(rank, notes)
    if scenario.nan:
        install_nan(*scenario.nan, notes)
    if fault:
        install(rank, fault, notes, folder)
    sys.exit(train.main(arguments))


def run_attempt(site: Site, scenario: Scenario, folder: Path, ranks: int, fault: Fault | None) -> Attempt:
    """--resume=auto with so many ranks, which starts afresh where there is nothing yet."""
    notes = Notes(Path(tempfile.mkdtemp(dir=site.data.parent)))
    timeout_s = SHORT_TIMEOUT_S if fault and fault.kind in (STOP, SLEEP) else TIMEOUT_S
    arguments = [
        "--resume=auto",
        "--out",
        str(folder),
        *SMALL,
        f"data.path={site.data}",
        *scenario.settings,
        f"comm.timeout_s={timeout_s:g}",
        "comm.start_timeout_s=30",
    ]
    hung: list[int] = []
    unresponsive, results = watch_ranks(
        ranks,
        run_rank,
        arguments,
        notes,
        scenario,
        fault,
        folder,
        site.mutation,
        timeout_s=LONGEST_S,
        watch=watcher(fault, notes, arguments, timeout_s + DEADLINE_S, hung),
    )
    return Attempt(unresponsive or hung, results, notes)


def watcher(
    fault: Fault | None, notes: Notes, arguments: list[str], limit_s: float, hung: list[int]
) -> Callable[[dict[int, int]], None]:
    """What the batch system, or another user, does from outside; after limit_s what still runs is killed and `hung`."""
    struck_s = 0.0

    def watch(running: dict[int, int]) -> None:
        nonlocal struck_s
        if not fault or not notes.has("struck"):
            return
        struck_s = struck_s or time.monotonic()
        if time.monotonic() - struck_s > limit_s and not hung:
            hung.extend(running)
            for pid in running.values():
                os.kill(pid, signal.SIGKILL)
        if fault.kind == KILL_ALL or (fault.kind == STOP and list(running) == [fault.victim]):
            for pid in running.values():
                os.kill(pid, signal.SIGKILL)
        if fault.kind == SECOND and not notes.has("second job ended"):
            _, (second,) = watch_ranks(1, second_rank, arguments, timeout_s=40)
            if second.exit_code != 2 or "in use by another run" not in second.output:
                notes.add("second job admitted")
            notes.add("second job ended")

    return watch


def second_rank(rank: int, arguments: list[str]) -> None:
    """A job that finds the folder in use, and does not wait for long."""
    import hkd_hpc.train as train

    train.HOLDER_WAIT_S = 1.0
    sys.exit(train.main(arguments))


def reference_run(site: Site, scenario: Scenario, folder: Path) -> Expected | Verdict:
    """What one process makes of its settings, or what is wrong although nothing befell it."""
    attempt = run_attempt(site, scenario, folder, 1, None)
    if attempt.unresponsive or not attempt.succeeded:
        return Verdict(HUNG if attempt.unresponsive else LOST, f"its reference run failed\n{attempt.output}")
    return Expected.of(folder)


def run_scenario(site: Site, scenario: Scenario, tally: Tally, say: Say) -> None:
    """All steps of a scenario, until it is complete or something is wrong; what befell it goes into the tally."""
    home = Path(tempfile.mkdtemp(prefix=f"scenario{scenario.number}-", dir=site.root))
    tally.scenarios += 1
    tally.schemes.add(scenario.scheme)
    expected = reference_run(site, scenario, home / "reference")
    if isinstance(expected, Verdict):
        book(tally, [NO_FAULT], [expected], scenario, Step(1, None), say)
        return
    folder, known, nan_struck, blamed = home / "run", Known(), False, [NO_FAULT]
    for step in scenario.steps:
        struck = [step.damage] if step.damage and damaged(step.damage, step.place, folder, known) else []
        attempt = run_attempt(site, scenario, folder, step.ranks, step.fault)
        filler(folder).unlink(missing_ok=True)
        struck += [step.fault.kind] if step.fault and attempt.notes.has("struck") else []
        nan_struck |= attempt.notes.has("nan")
        if REMOVED in struck:
            known.saved = 0
        found = judge(scenario, step.fault, attempt, folder, known, expected)
        found += [Verdict(WRONG, "a second job was admitted to the folder")] * attempt.notes.has("second job admitted")
        complete = attempt.succeeded and bool(summary(folder))  # what is killed after its end may leave a lock behind
        found += judge_leftovers(folder) if complete else []
        blamed = struck or blamed
        book(tally, struck if struck or not found else blamed, found, scenario, step, say)
        if complete or any(verdict.what != UNREPORTED for verdict in found):
            break
    if nan_struck and scenario.nan:
        found = judge_nan(*scenario.nan, folder) if complete else []
        book(tally, [NAN], found, scenario, step, say)
    shutil.rmtree(home)


def damaged(kind: str, place: float, folder: Path, known: Known) -> bool:
    """Damage a run's files; False where there was nothing to damage."""
    try:
        path = damage_files(kind, folder, place)
    except FileNotFoundError:
        return False
    if path:
        known.damage(path, folder)
    return True


def book(tally: Tally, kinds: list[str], found: list[Verdict], scenario: Scenario, step: Step, say: Say) -> None:
    for kind in kinds:
        tally.verdicts[kind].append(found)
    for verdict in found:
        say(
            f"scenario {scenario.number}, {step.ranks} ranks, {' and '.join(kinds)} ({step.fault}): "
            f"{verdict.what}: {verdict.why}\n  {' '.join(scenario.settings)}\n  again: python -m {__package__} "
            f"--seed {scenario.seed} --only {scenario.number}"
        )


# ---- many scenarios ----


@contextlib.contextmanager
def working_site(kinds: tuple[str, ...] = ALL_KINDS, mutation: Mutation | None = None) -> Iterator[Site]:
    """A temporary place with the data. Runs lie on a small disk of their own; without leave to mount none is filled."""
    with tempfile.TemporaryDirectory(prefix="fault-injection-") as name:
        root = Path(name, "runs")
        root.mkdir()
        mount = shutil.which("mount")
        command = [str(mount), "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(root)]
        mounted = bool(mount) and subprocess.run(command, capture_output=True).returncode == 0
        try:
            possible = tuple(kind for kind in kinds if kind != FULL or mounted)
            yield Site(root, save_data(Path(name, "data.npz")), possible, mutation)
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", str(root)], check=True)  # ranks may need a moment to end


def inject(site: Site, seed: int, numbers: Iterator[int], until: Callable[[Tally], bool], say: Say) -> Tally:
    """The scenarios of these numbers, none begun once until(tally)."""
    tally = Tally()
    for number in numbers:
        if until(tally):
            break
        run_scenario(site, draw_scenario(seed, number, site.kinds), tally, say)
    return tally


def self_test(say: Say) -> int:
    """0 if each mutant was noticed, and the intact program had nothing to notice."""
    right = [notices(mutant, say) == bool(mutant.mutation) for mutant in MUTANTS]
    return 0 if all(right) else 1


def notices(mutant: Mutant, say: Say) -> bool:
    """Whether something is found wrong with it, within FEW_FAULTS faults."""
    found: list[str] = []
    with working_site(mutant.kinds, mutant.mutation) as site:
        enough = lambda tally: tally.failed or tally.faults >= FEW_FAULTS
        tally = inject(site, 0, itertools.count(), enough, found.append)
    verdict = "noticed" if tally.failed else "not noticed"
    say(f"{mutant.name}: {verdict} ({tally.faults} faults)" + "".join(f"\n  {text.splitlines()[0]}" for text in found))
    return tally.failed


def load_all() -> None:
    """Once, so that no forked rank has to."""
    import torch

    from hkd_hpc import assemble, train  # noqa: F401

    torch.set_num_threads(1)
    for name in schemes.REGISTRY:
        schemes.get(name)


def parse(arguments: list[str] | None) -> Namespace:
    parser = Parser(
        prog=program_of(__package__),  # in a clone tools.fault_injection, installed hkd_hpc.tools.fault_injection
        allow_abbrev=False,
        description="Small jobs, broken at random, resumed, and compared with reference runs.",
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="start no new scenario after so long (default 5)")
    parser.add_argument(
        "--faults", type=int, default=sys.maxsize, metavar="N", help="start no new scenario after so many faults"
    )
    parser.add_argument("--seed", type=int, default=0, help="what is drawn (default 0)")
    parser.add_argument("--only", type=int, metavar="N", help="scenario N of the seed alone")
    parser.add_argument("--self-test", action="store_true", help="break the program on purpose: is it noticed?")
    options = parser.parse_args(arguments)
    if options.seed < 0 or options.minutes <= 0 or options.faults < 1 or (options.only or 0) < 0:
        raise UsageError("--minutes must be above 0, --faults at least 1, --seed and --only at least 0")
    return options


@exit_code
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    say = lambda text: print(text, flush=True)
    load_all()
    if options.self_test:
        return self_test(say)
    end_s = time.monotonic() + 60 * options.minutes
    until = lambda tally: time.monotonic() > end_s or tally.faults >= options.faults
    numbers = itertools.count() if options.only is None else iter([options.only])
    with working_site() as site:
        tally = inject(site, options.seed, numbers, until, say)
    say(
        f"{header()}\nseed {options.seed}: {tally.scenarios} scenarios, {len(tally.schemes)} schemes, "
        f"{tally.faults} faults of {len(tally.verdicts)} kinds\n\n{tally.table()}"
    )
    return int(tally.failed)


def command() -> int:
    """`main` for a process of its own: also when it is killed, the small disk goes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return main()
