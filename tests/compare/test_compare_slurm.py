"""A tuned comparison under a real SLURM: killed with its jobs, it resumes to the table of an undisturbed one here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest
import slurm_cluster
import toy

from hkd_hpc.compare import main
from hkd_hpc.jobs.__main__ import main as jobs
from hkd_hpc.jobs.files import Status, read_launches, read_trials

pytestmark = pytest.mark.slow

SCHEME = '''
import os, time
from hkd_hpc.schemes.fedprox import FedProx


class Held(FedProx):
    """FedProx; it does not get through round 2 while the file $HOLD is there."""

    def begin(self, client):
        super().begin(client)
        while client.round == 2 and os.path.exists(os.environ["HOLD"]):
            time.sleep(0.02)
'''
SPEC = """
[study]
schemes = ["fedavg", "pausing:Held"]
controls = false
seeds = [0, 1]
[tuning]
sampler = "optuna"
trials = 2
seed = 100
val_fraction = 0.2
lr_low = 5e-3
lr_high = 3e-2
[settings]
"""
PATIENCE_S = 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    slurm_cluster.need(slurm_cluster.why_not())
    with slurm_cluster.running_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def slurm(cluster, tmp_path, monkeypatch):
    """The cluster, whose jobs find the scheme; the file $HOLD would hold it."""
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    monkeypatch.setenv("TMPDIR", cluster.env["TMPDIR"])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{toy.PROJECT}")
    monkeypatch.setenv("HOLD", str(tmp_path / "hold"))
    monkeypatch.syspath_prepend(str(tmp_path))
    toy.write_module(tmp_path, "pausing", SCHEME)
    return cluster


@pytest.fixture
def spec(tmp_path):
    data = toy.save_data(tmp_path / "data.npz")
    settings = (text.split("=", 1) for text in toy.settings(data, "model.name=small"))
    path = tmp_path / "spec.toml"
    path.write_text(SPEC + "\n".join(f'"{key}" = "{value}"' for key, value in settings))
    return path


def table_of(root):
    """The whole text but for the hour."""
    return (root / "table.md").read_text().rpartition("\ndate: ")[0]


def test_a_tuned_comparison_that_is_killed_with_its_job_resumes_to_the_table_of_an_undisturbed_one(
    slurm, spec, tmp_path, capsys
):
    undisturbed, root = tmp_path / "undisturbed", tmp_path / "my runs"
    assert main([str(spec), "--root", str(undisturbed), "--executor", "debug"]) == 0
    root.mkdir()
    shutil.copy(undisturbed / "probe.json", root)  # what that found of this machine
    words = [str(spec), "--root", str(root), "--executor", "slurm", "--pack", "--slots", "1"]
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    plan = capsys.readouterr().out.splitlines()
    assert plan[0] == (
        "4 runs with the settings as given, 4 trials of the tuning, at most 8 of what is chosen: 16 trials: "
        "16 missing; 16 to start"
    )
    assert plan[1].startswith("array of 1 jobs, 1 at a time: ")
    assert any(line.startswith("in all about ") for line in plan)
    assert os.listdir(root) == ["probe.json"]
    hold = tmp_path / "hold"
    hold.touch()
    submitter = subprocess.Popen(
        [sys.executable, "-m", "hkd_hpc.compare", *words, "--wait"], cwd=toy.PROJECT, stdout=subprocess.DEVNULL
    )
    held = root / "pausing.Held-paper-s0"
    toy.wait_until(lambda: toy.rounds_done(held) == 1, PATIENCE_S)
    submitter.kill()
    assert submitter.wait() == -signal.SIGKILL
    assert main(words) == 0  # its job still runs: nothing is submitted, and nobody waits
    assert "once they have ended, the same command continues" in capsys.readouterr().out
    [launch] = read_launches(root)
    [job] = launch.jobs
    slurm.run("scancel", "--signal=KILL", job)
    slurm.wait_for(job, PATIENCE_S)
    hold.unlink()
    assert main([*words, "--wait"]) == 0
    assert table_of(root) == table_of(undisturbed)
    assert "trial 1 (train.lr=0.0" in table_of(root)
    assert Status.read(held).starts == 2
    assert "resuming after round 1" in (held / "log.txt").read_text()
    assert len(read_launches(root)) == 4  # the killed wave, it again, what optuna suggested, and what was chosen
    names = {trial.name for trial in read_trials(undisturbed)}
    assert {trial.name for trial in read_trials(root)} == names
    assert {name: toy.last_sha(root / name) for name in names} == {
        name: toy.last_sha(undisturbed / name) for name in names
    }
    capsys.readouterr()
    assert jobs(["table", str(root)]) == 0
    told = capsys.readouterr().out
    row = next(line for line in table_of(root).splitlines() if line.startswith("| pausing:Held | "))
    for difference in row.removesuffix(" |").split(" | ")[-2:]:
        assert difference in told
