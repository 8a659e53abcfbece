"""Sweeps on a laptop and under a real SLURM: nothing runs twice, nothing is lost, the bits are those of a quiet run."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import slurm_cluster
import toy
from hkd_hpc.store.lock import RunLock
from jobs import Sweep, launch
from jobs.files import JOB_LOCK, Status
from jobs.launcher import resubmit

ROUNDS = 3
SCHEME = '''
import os, time
from hkd_hpc.schemes.fedavg import FedAvg


class Held(FedAvg):
    """FedAvg that does not get through round 2 while the file $HOLD is there."""

    def begin(self, client):
        super().begin(client)
        while client.round == 2 and os.path.exists(os.environ.get("HOLD", "")):
            time.sleep(0.02)
'''


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture
def hold(tmp_path, monkeypatch):
    """The file that holds the scheme held:Held in round 2."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{toy.PROJECT}")
    monkeypatch.syspath_prepend(str(tmp_path))
    toy.write_module(tmp_path, "held", SCHEME)
    path = tmp_path / "hold"
    path.touch()
    monkeypatch.setenv("HOLD", str(path))
    return path


def sweep_of(data, **axes):
    settings = dict(text.split("=", 1) for text in toy.settings(data, f"fed.rounds={ROUNDS}", "model.name=small"))
    return Sweep(settings=settings, **axes)


def quiet(cells, root):
    """The last weights of each cell, run in this process without launcher."""
    for cell in cells:
        toy.train_ok(1, *cell.arguments(), "--out", root / cell.name)
    return {cell.name: toy.last_sha(root / cell.name) for cell in cells}


def hashes(study):
    return {cell.name: toy.last_sha(study.root / cell.name) for cell in study.cells}


def states(study):
    return [state.state for state in study.status()]


def kill(pid):
    os.kill(pid, signal.SIGKILL)


# ---- SLURM


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    slurm_cluster.need(slurm_cluster.why_not())
    with slurm_cluster.running_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def slurm(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    return cluster


def test_slurm_jobs_that_are_signalled_requeued_or_killed_end_with_the_bits_of_a_quiet_run(slurm, data, hold, tmp_path):
    sweep = sweep_of(data, scheme=["held:Held"], seed=[0, 1, 2])
    study = launch(sweep, root=tmp_path / "my study", ranks=2, time_min=10)
    folders = [study.root / cell.name for cell in study.cells]
    toy.wait_until(lambda: all(toy.rounds_done(folder) == 1 for folder in folders), 120)
    assert states(study) == ["running"] * 3
    launch(sweep, root=study.root, ranks=2)  # all are running: nothing is submitted
    assert len(list((study.root / "launches").iterdir())) == 1
    jobs = [state.job for state in study.status()]
    slurm.run("scancel", "--signal=USR2", jobs[0])
    slurm.run("scontrol", "requeue", jobs[1])
    slurm.run("scancel", "--signal=KILL", jobs[2])
    toy.wait_until(lambda: states(study)[2] == "lost", 60)
    hold.unlink()
    launch(sweep, root=study.root, ranks=2)
    assert study.wait(), study.status()
    assert hashes(study) == quiet(study.cells, tmp_path / "quiet")
    assert [Status.read(folder).starts for folder in folders] == [2, 2, 2]
    logs = [(folder / "log.txt").read_text() for folder in folders]
    assert "stopped by SIGUSR2 after round 2" in logs[0] and "resuming after round 2" in logs[0]
    assert all("resuming after round 1" in log for log in logs[1:])
    assert "2 ranks on 1 host" in logs[0]
