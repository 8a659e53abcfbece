"""A stop that loses nothing: a signal on any rank ends the job after its round, saved, and --resume goes on to the same
bits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import toy

from hkd_hpc import train
from hkd_hpc.common.stop import STOPPED


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture(scope="module")
def arguments(data):
    """Six rounds, a checkpoint in every fourth: the one at the stop is not due."""
    return toy.settings(data, "fed.rounds=6", "run.checkpoint_every=4")


@pytest.fixture(scope="module")
def straight(arguments, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "run"
    toy.train_ok(1, *arguments, "--out", folder)
    return folder


def send_in_round_three(number: signal.Signals, victim: int):
    def patch(rank):
        if rank == victim:
            toy.on_place(3, "training", lambda: os.kill(os.getpid(), number))

    return patch


@pytest.mark.parametrize(
    "number, ranks, victim", [(signal.SIGUSR1, 1, 0), (signal.SIGUSR1, 3, 2), (signal.SIGUSR2, 3, 1)]
)
def test_the_round_is_finished_saved_and_gone_on_with(arguments, straight, tmp_path, number, ranks, victim):
    results = toy.train(ranks, *arguments, "--out", tmp_path / "run", patch=send_in_round_three(number, victim))
    assert [result.exit_code for result in results] == [STOPPED] * ranks == [75] * ranks, results
    line = f"stopped by {number.name} after round 3 of 6, which is saved; "
    line += f"resume it with --resume --out {tmp_path / 'run'}\n"
    assert results[0].output.endswith(line)
    assert toy.rounds_done(tmp_path / "run") == 3
    assert (tmp_path / "run/checkpoints/round_0003.h5").exists()
    trained = tmp_path / "trained"
    toy.train_ok(ranks, "--resume", "--out", tmp_path / "run", patch=lambda rank: toy.count_training(trained))
    assert {round for round, _ in toy.trained(trained)} == {4, 5, 6}
    assert toy.rows(tmp_path / "run") == toy.rows(straight)


def test_the_signal_may_come_while_the_server_works(arguments, straight, tmp_path):
    """Rank 0 gets it while it tests round 2, beside the training of round 3: the job ends after round 3."""

    def patch(rank):
        if rank == 0:
            toy.on_place(2, "evaluation", lambda: os.kill(os.getpid(), signal.SIGUSR1))

    results = toy.train(2, *arguments, "--out", tmp_path / "run", patch=patch)
    assert [result.exit_code for result in results] == [STOPPED] * 2
    assert toy.rounds_done(tmp_path / "run") == 3
    toy.train_ok(1, "--resume", "--out", tmp_path / "run")
    assert toy.rows(tmp_path / "run") == toy.rows(straight)


def test_in_the_last_round_the_run_simply_ends(arguments, straight, tmp_path):
    def patch(rank):
        if rank == 1:
            toy.on_place(6, "training", lambda: os.kill(os.getpid(), signal.SIGUSR1))

    toy.train_ok(2, *arguments, "--out", tmp_path / "run", patch=patch)
    assert toy.rows(tmp_path / "run") == toy.rows(straight)


def test_before_the_first_round_it_counts_too(arguments, tmp_path):
    results = toy.train(2, *arguments, "--out", tmp_path / "run", patch=_at_the_start)
    assert [result.exit_code for result in results] == [STOPPED] * 2
    assert toy.rounds_done(tmp_path / "run") == 1


def _at_the_start(rank):
    if rank == 1:
        toy.on_place(None, "start", lambda: os.kill(os.getpid(), signal.SIGUSR1))


IGNORED_SIGNALS = """
import ctypes, signal
from hkd_hpc.schemes.fedavg import FedAvg


def take():
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        ctypes.CDLL(None).signal(number, ctypes.c_void_p(1))  # ignored, as by a library in C: Python does not know
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


take()


class IgnoresSignals(FedAvg):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        take()
"""


@pytest.mark.parametrize(
    "number, code, ranks",
    [(signal.SIGUSR1, 75, 2), (signal.SIGUSR2, 75, 1), (signal.SIGTERM, 143, 1), (signal.SIGTERM, 143, 2)],
)
def test_signals_count_whatever_a_library_made_of_them(arguments, tmp_path, monkeypatch, number, code, ranks):
    monkeypatch.syspath_prepend(str(tmp_path))
    toy.write_module(tmp_path, "ignores_signals", IGNORED_SIGNALS)
    results = toy.train(
        ranks,
        *arguments,
        "scheme.name=ignores_signals:IgnoresSignals",
        "--out",
        tmp_path / "run",
        patch=send_in_round_three(number, ranks - 1),
    )
    assert [result.exit_code for result in results] == [code] * ranks, results


@pytest.mark.mpi
def test_mpirun_passes_the_signal_on_and_the_exit_code_back(arguments, straight, tmp_path):
    job = toy.start_mpirun(3, *arguments, "fed.rounds=500", "--out", tmp_path / "run")
    try:
        toy.wait_until(lambda: toy.rounds_done(tmp_path / "run") >= 2)
        job.send_signal(signal.SIGUSR1)
        out, err = job.communicate(timeout=300)
    finally:
        job.kill()
    assert job.returncode == STOPPED, err
    done = toy.rounds_done(tmp_path / "run")
    assert f"stopped by SIGUSR1 after round {done} of 500" in out
    assert 2 <= done < 500
    wanted = toy.rows(straight)["rounds/weights_sha256"][:6]
    assert toy.rows(tmp_path / "run")["rounds/weights_sha256"][: len(wanted)][:done] == wanted[:done]


@pytest.fixture
def signal_in_torch(tmp_path):
    """signal_in_torch(number): a run that gets the signal while it imports torch, whose import then fails."""
    run = [sys.executable, "-m", "hkd_hpc.train", "fed.rounds=1", "--out", tmp_path / "run"]

    def ended(number, **options):
        text = f"import signal\nprint('begins')\nsignal.raise_signal({number})\nprint('goes on')\nraise SystemExit(5)\n"
        env = {**os.environ, **toy.write_module(tmp_path, "torch", text)}
        done = subprocess.run(run, env=env, cwd=toy.PROJECT, capture_output=True, text=True, **options)
        assert not (tmp_path / "run").exists()
        return done

    return ended


@pytest.mark.parametrize(
    "number, code, told",
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, f"ended by signal 15 (SIGTERM). {train.ENDING}")],
)
def test_a_signal_while_torch_is_imported_ends_the_run_at_once(signal_in_torch, number, code, told):
    """Not by an exception: torch's C++ would abort the process."""
    done = signal_in_torch(number)
    assert (done.returncode, done.stdout) == (code, "begins\n")
    assert done.stderr == f"hkd_hpc: phase import of torch: {told}\n"


def test_ctrl_c_is_ignored_while_torch_is_imported_where_it_is_ignored_elsewhere(signal_in_torch):
    """As shells have it for what they start in the background."""
    done = signal_in_torch(signal.SIGINT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert (done.returncode, done.stdout) == (5, "begins\ngoes on\n")
