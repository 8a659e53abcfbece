"""Fault injection: what it draws, what it calls hung, lost, wrong and unreported, and that it notices mutants alone."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from hkd_hpc import schemes
from hkd_hpc.store.tree import save_tree
from tools.fault_injection import runner
from tools.fault_injection.check import Attempt, Expected, Known, judge_end, judge_report, judge_rows, judge_training
from tools.fault_injection.faults import FILE_KINDS, KINDS, NAN, Fault, Notes
from tools.fault_injection.scenarios import draw_scenario
from tools.forked_ranks import Result

pytestmark = pytest.mark.slow

KILL, EXIT = (Fault(kind, 1, "training", 2) for kind in ("SIGKILL, one rank", "os._exit(0)"))
LINE, TRACE = "hkd_hpc: rank 1 (host) ended without an error message", "Traceback (most recent call last):"


def attempt(folder, *ended, output="", trained=""):
    """Of ranks that ended with these exit codes, or signals where they are negative; rank 0 printed the output."""
    (folder / "trained").write_text(trained)
    results = [
        Result(code if code >= 0 else None, -code if code < 0 else None, "" if rank else output)
        for rank, code in enumerate(ended)
    ]
    return Attempt([], results, Notes(folder))


def test_a_few_faults_find_nothing(capsys):
    assert runner.main(["--minutes", "9", "--faults", "15", "--seed", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head, total = next(line for line in lines if line.startswith("| fault |")), lines[-1]
    assert head == "| fault | struck | survived | hung | lost | wrong | unreported |"
    _, name, struck, survived, *bad, _ = (cell.strip() for cell in total.split("|"))
    assert (name, bad) == ("all", ["0", "0", "0", "0"])
    assert int(struck) == int(survived) >= 15
    assert sum(line.startswith("| ") for line in lines) - 3 >= 7  # kinds


def test_mutants_are_noticed(capsys):
    assert runner.main(["--self-test"]) == 0
    output = capsys.readouterr().out
    assert "its reference run failed" not in output  # each runs, but for its faults
    found = [line.split(" (")[0] for line in output.splitlines() if not line.startswith(" ")]
    assert found == [
        "checkpoints written in place, not verified: noticed",
        "a random draw that depends on the rank: noticed",
        "NaN passed by the quarantine: noticed",
        "nothing broken: not noticed",
    ]


def test_a_job_is_a_function_of_seed_and_number():
    scenarios = [draw_scenario(3, number, runner.ALL_KINDS) for number in range(400)]
    assert scenarios[17] == draw_scenario(3, 17, runner.ALL_KINDS) != draw_scenario(4, 17, runner.ALL_KINDS)
    assert {scenario.scheme for scenario in scenarios[:9]} == set(schemes.PAPER)
    steps = [step for scenario in scenarios for step in scenario.steps]
    drawn = {step.damage for step in steps if step.damage} | {step.fault.kind for step in steps if step.fault}
    drawn |= {NAN for scenario in scenarios if scenario.nan}
    assert drawn == {*KINDS, *FILE_KINDS, NAN}
    assert len(drawn) == 30
    for scenario in scenarios:
        assert scenario.steps[-1].fault is None
        assert 3 <= len(scenario.steps) <= 6
        assert all(one.ranks != next.ranks for one, next in zip(scenario.steps, scenario.steps[1:]))
        assert all(step.fault.victim < step.ranks for step in scenario.steps if step.fault)


@pytest.mark.parametrize("arguments", ["--minutes 0", "--faults 0", "--seed -1", "--only -1", "--nope"])
def test_wrong_arguments(arguments):
    assert runner.main(arguments.split()) == 2


def test_a_saved_round_that_is_trained_again_is_lost(tmp_path):
    again = attempt(tmp_path, 0, trained="2 0\n2 1\n3 0\n")
    assert [tuple(verdict) for verdict in judge_training(again, Known(saved=2))] == [
        ("lost", "rounds [2] were saved and trained again")
    ]
    assert judge_training(again, Known(saved=1)) == []


@pytest.mark.parametrize(
    "fault, codes, complete, lost",
    [
        (KILL, (1, -9, 1), False, False),
        (KILL, (1, -9, 0), False, True),
        (KILL, (0, 0, 0), True, False),
        (None, (0, 0), True, False),
        (None, (0, 0), False, True),
        (None, (2, 2), False, True),
        (EXIT, (1, 0), False, False),
        (EXIT, (0, 0), False, True),
    ],
)
def test_exit_codes(tmp_path, fault, codes, complete, lost):
    found = judge_end(fault, attempt(tmp_path, *codes), complete)
    assert [verdict.what for verdict in found] == ["lost"] * lost


@pytest.mark.parametrize(
    "kind, output, unreported",
    [
        ("SIGKILL, one rank", LINE, False),
        ("SIGKILL, one rank", f"{LINE}\n{LINE}", True),
        ("SIGKILL, one rank", "", True),
        ("SIGKILL, one rank", f"hkd_hpc: warning: a\n{LINE}\n{TRACE}", True),
        ("SIGKILL, all ranks", "", False),
        ("exception in a client", f"{LINE}\n{TRACE}\nUserError", False),
        ("SIGUSR1", "stopped by SIGUSR1 after round 2 of 4", True),
    ],
)  # with exit code 1, not 75
def test_report(tmp_path, kind, output, unreported):
    found = judge_report(Fault(kind, 1, "training", 2), attempt(tmp_path, 1, -9, output=output))
    assert [verdict.what for verdict in found] == ["unreported"] * unreported


@pytest.mark.parametrize(
    "rounds, sha, complete, what",
    [
        ([1, 2], ["a", "b"], False, []),
        ([1, 2, 3], ["a", "b", "c"], True, []),
        ([1, 2], ["a", "b"], True, ["lost"]),
        ([1, 1, 2], ["a", "a", "b"], False, ["lost"]),
        ([1, 3], ["a", "c"], False, ["lost"]),
        ([1, 2], ["a", "x"], False, ["wrong"]),
    ],
)
def test_rows(tmp_path, rounds, sha, complete, what):
    def tree(rounds, sha):
        columns = {"round": np.array(rounds), "weights_sha256": np.array(sha), "wall_s": np.array(rounds) * 0.5}
        return {"rounds": columns, "clients": {"status": np.full((len(rounds), 2), np.nan), "rank": np.array([0, 1])}}

    for name in ("reference", "run"):
        (tmp_path / name).mkdir()
    save_tree(tmp_path / "reference/metrics.h5", tree([1, 2, 3], ["a", "b", "c"]))
    save_tree(tmp_path / "run/metrics.h5", tree(rounds, sha))
    expected = Expected.of(tmp_path / "reference")
    assert sorted(expected.columns) == ["clients/status", "rounds/round", "rounds/weights_sha256"]
    assert [verdict.what for verdict in judge_rows(tmp_path / "run", Known(), expected, complete)] == what


def test_a_job_that_hangs_is_killed_and_counted(tmp_path, monkeypatch):
    """A mutant that waits for ever where nobody watches: after the end of the job."""

    def hang_at_the_end(rank):
        from hkd_hpc import train

        main = train.main
        train.main = lambda arguments: main(arguments) or (os.getppid() and rank == 1 and signal.pause())

    monkeypatch.setattr(runner, "TIMEOUT_S", 10.0)
    monkeypatch.setattr(runner, "DEADLINE_S", 5.0)
    monkeypatch.setattr(runner, "LONGEST_S", 60.0)
    told = []
    with runner.working_site(("SIGUSR1",), hang_at_the_end) as site:
        tally = runner.inject(site, 0, iter(range(5)), lambda tally: tally.failed, told.append)
    assert tally.count("hung") == 1
    assert "hung: ranks [1] had to be killed" in told[-1]
