"""What happens around a run's folder and its output: other jobs, signals, a reader that goes away."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy

from hkd_hpc import train
from hkd_hpc.config import command_line
from hkd_hpc.store import folder as folder_module
from hkd_hpc.store.lock import RunLock

COMMAND = [sys.executable, "-m", "hkd_hpc.train"]
HELD = '''
import os, time
from hkd_hpc.schemes.fedavg import FedAvg


class Held(FedAvg):
    """FedAvg; it does not get through a round while the file $HOLD is there."""

    def begin(self, client):
        super().begin(client)
        while os.path.exists(os.environ["HOLD"]):
            time.sleep(0.02)
'''


def start(*arguments, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=options.pop("cwd", toy.PROJECT),
        **options,
    )


def wait_for(path, process: subprocess.Popen) -> None:
    deadline_s = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, f"{path} never came"
        time.sleep(0.02)


def test_rejected_second_job_leaves_the_first_alone_in_its_first_round(tmp_path):
    """The first job has saved nothing yet, so that its checkpoint folder is empty: it must not be tidied away."""
    data, hold = toy.save_data(tmp_path / "data.npz"), tmp_path / "hold"
    env = {**os.environ, **toy.write_module(tmp_path, "held", HELD), "HOLD": str(hold)}
    long_round = toy.settings(data, "scheme.name=held:Held", "fed.rounds=1")
    hold.touch()
    first = start(*long_round, "--out", tmp_path / "run", env=env)
    wait_for(tmp_path / "run/config.json", first)
    second = start(*long_round, "--out", tmp_path / "run", env=env)
    _, told = second.communicate(timeout=300)
    assert second.returncode == 2
    assert "run" in told
    assert (tmp_path / "run/checkpoints").is_dir()
    hold.unlink()
    _out, told = first.communicate(timeout=300)
    assert first.returncode == 0, told
    assert toy.rounds_done(tmp_path / "run") == 1


def test_two_jobs_at_the_same_instant_without_out_get_folders_of_their_own(tmp_path):
    data = toy.save_data(tmp_path / "data.npz")
    env = {**os.environ, "PYTHONPATH": str(toy.PROJECT)}
    jobs = [start(*toy.settings(data), cwd=tmp_path, env=env) for _ in range(3)]
    results = [job.communicate(timeout=300) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], results
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 3
    assert [toy.rounds_done(folder) for folder in folders] == [2, 2, 2]


def test_empty_folder_of_the_user_stays_after_a_rejected_start(tmp_path):
    (tmp_path / "mine").mkdir()
    job = start("data.name=file", f"data.path={tmp_path}/missing.npz", "--out", tmp_path / "mine")
    assert job.communicate(timeout=300)
    assert job.returncode == 2
    assert (tmp_path / "mine").is_dir()


def test_resume_auto_without_a_run_says_so_and_touches_no_foreign_file(tmp_path):
    data = toy.save_data(tmp_path / "data.npz")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/.notes.5.tmp").write_text("mine")
    job = start(*toy.settings(data), "--resume=auto", "--out", tmp_path / "foreign")
    out, told = job.communicate(timeout=300)
    assert job.returncode == 0, told
    assert "no run to resume; a new one starts" in out
    assert (tmp_path / "foreign/.notes.5.tmp").read_text() == "mine"


def test_resume_may_move_to_another_backend_and_data_folder_but_not_to_other_data(tmp_path):
    data = toy.save_data(tmp_path / "data.npz")
    toy.train_ok(1, *toy.settings(data, "fed.rounds=2"), "--out", tmp_path / "run")
    (tmp_path / "run/metrics.h5").unlink()  # as if it had been killed at its very end
    os.rename(tmp_path / "data.npz", tmp_path / "moved.npz")
    toy.train_ok(2, "--resume", "--out", tmp_path / "run", f"data.path={tmp_path}/moved.npz", "comm.backend=gloo")
    assert toy.rounds_done(tmp_path / "run") == 2
    (tmp_path / "run/metrics.h5").unlink()
    other = toy.save_data(tmp_path / "other.npz", train=320)
    results = toy.train(1, "--resume", "--out", tmp_path / "run", f"data.path={other}")
    assert results[0].exit_code == 2
    assert "the content of the data is not what the run was trained on" in results[0].output


def test_sigterm_of_a_single_process_is_told_and_resumed(tmp_path):
    data = toy.save_data(tmp_path / "data.npz")
    job = start(*toy.settings(data, "fed.rounds=400"), "--out", tmp_path / "run")
    wait_for(tmp_path / "run/metrics.h5", job)
    job.send_signal(signal.SIGTERM)
    _, told = job.communicate(timeout=300)
    assert job.returncode == 143
    assert told.count("hkd_hpc:") == 1
    assert "SIGTERM" in told
    assert "--resume" in told
    assert "Traceback" not in told
    assert not (tmp_path / "run/run.lock").exists()


def test_reader_that_goes_away_does_not_end_the_run(tmp_path):
    data = toy.save_data(tmp_path / "data.npz")
    job = start(*toy.settings(data, "fed.rounds=3"), "--out", tmp_path / "run")
    job.stdout.readline()
    job.stdout.close()
    assert job.wait(timeout=300) == 0, job.stderr.read()
    job.stderr.close()
    assert toy.rounds_done(tmp_path / "run") == 3


def test_clients_without_enough_images_are_told_before_the_first_round(tmp_path):
    data = toy.save_data(tmp_path / "data.npz")
    results = toy.train(1, *toy.settings(data, "fed.clients=300"), "--out", tmp_path / "run")
    assert results[0].exit_code == 2
    assert "fed.clients=300: no client gets more than 1 training image(s)" in results[0].output
    assert not (tmp_path / "run").exists()


def test_resume_of_a_mistyped_folder_is_rejected_with_the_likely_one(tmp_path):
    for name in ("fedhkd-s1", "fedhkd-s2"):
        (tmp_path / name).mkdir()
    (tmp_path / "fedhkd-s2/config.json").write_text("{}")
    for more in ([], ["--dry-run"], ["--allow-change", "fed.rounds=3"]):
        [result] = toy.train(1, "--resume", "--out", tmp_path / "fedhkd_s2", *more)
        assert result.exit_code == 2
        assert not (tmp_path / "fedhkd_s2").exists()
        assert toy.our_lines([result.output]) == [
            f"hkd_hpc: --resume {tmp_path}/fedhkd_s2: holds no run; did you mean {tmp_path}/fedhkd-s2?; --resume=auto "
            "begins one there"
        ]


def test_a_dry_run_of_a_resume_shows_the_stored_settings_and_writes_nothing(tmp_path):
    data = toy.save_data(tmp_path / "data.npz")
    toy.train_ok(1, *toy.settings(data, "fed.rounds=2", "train.lr=0.0625"), "--out", tmp_path / "run")
    (tmp_path / "run/metrics.h5").unlink()
    (tmp_path / "run/config.json").unlink()
    before = toy.file_hashes(tmp_path / "run")
    [output] = toy.train_ok(1, "--resume", "--dry-run", "--out", tmp_path / "run")
    assert re.search(r"^train\.lr +0\.0625 +0\.001$", output, re.MULTILINE)
    assert toy.file_hashes(tmp_path / "run") == before


GOES_AWAY = """
import os, sys, time
from pathlib import Path
from hkd_hpc.store.lock import RunLock
folder = Path(sys.argv[1])
(folder / "checkpoints").mkdir(parents=True)
with RunLock(folder):
    print("held", flush=True)
    time.sleep(0.5)
(folder / "checkpoints").rmdir()
folder.rmdir()
"""


def test_a_start_waits_for_a_failed_one_that_goes_away_and_takes_its_folder_along(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(toy.PROJECT)}
    before = subprocess.Popen(
        [sys.executable, "-c", GOES_AWAY, tmp_path / "run"], env=env, stdout=subprocess.PIPE, text=True
    )
    assert before.stdout.readline() == "held\n"
    with train.run_folder(command_line.parse(["--out", str(tmp_path / "run")]), rank=0) as folder:
        assert sorted(os.listdir(folder.path)) == ["checkpoints", "run.lock"]
        before.communicate(timeout=300)
        assert sorted(os.listdir(folder.path)) == ["checkpoints", "run.lock"]


@pytest.mark.parametrize(
    "owner, name, call",
    [(folder_module, "_try_to_write", 0), (folder_module, "_try_to_write", 1), (RunLock, "acquire", 0)],
)
def test_a_folder_that_a_failed_start_takes_away_meanwhile_is_made_again(owner, name, call, tmp_path, monkeypatch):
    """Of what it makes and tries, the other job takes it away before each step: the probes, and the lock."""
    original, run = getattr(owner, name), tmp_path / "run"
    calls = iter(range(10))

    def taken_away_before(*arguments):
        if next(calls) == call:
            for folder in (run / "checkpoints", run):
                folder.rmdir()
        return original(*arguments)

    monkeypatch.setattr(owner, name, taken_away_before)
    with train.run_folder(command_line.parse(["--out", str(run)]), rank=0) as folder:
        assert folder.path == Path(run)
        assert sorted(os.listdir(run)) == ["checkpoints", "run.lock"]
