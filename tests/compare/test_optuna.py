"""What optuna's sampler tries: the grid's trials first, then what TPE makes of all before, and nothing else counts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import optuna
import pytest

from hkd_hpc import schemes
from hkd_hpc.common import rng
from hkd_hpc.compare import main, runs, tuning, waves
from hkd_hpc.compare.spec import Spec, Tuning
from hkd_hpc.jobs.files import read_trials, write_trials
from hkd_hpc.store.tree import save_tree

TUNING = Tuning(trials=6, seed=100, val_fraction=0.2, lr_low=3e-4, lr_high=3e-2, sampler="optuna")
SPEC = Spec(("fedavg", "fedprox", "local"), (0, 1), {"fed.rounds": 2}, TUNING)
MU = (0.001, 0.01, 0.1, 0.5, 1.0)


def finish(run, root, **values):
    """As if it had been trained: the better the nearer its learning rate is to .003."""
    lr = dict(run.tried).get("train.lr", 1e-3)
    accuracy = 1 - abs(math.log10(lr / 3e-3)) / 2
    summary = {"local_val_accuracy_last": accuracy, "global_val_accuracy_last": accuracy} | values
    (root / run.name).mkdir(exist_ok=True)
    (root / run.name / "config.json").write_text(runs.config_of(run).to_json())
    save_tree(root / run.name / "metrics.h5", {"summary": summary})


def tune(root, until=TUNING.trials):
    """The trials of a tuning whose runs end at once and are recorded as a launch does."""
    trials = tuning.tuning_runs(SPEC, TUNING)
    wave = runs.chained(trials)
    while True:
        record = {trial.name: trial for trial in [*read_trials(root), *map(runs.trial_of, wave)]}
        write_trials(root, record.values())
        for run in wave:
            finish(run, root)
        if len(trials["fedavg"]) == until:
            return trials
        wave = waves.next_trials(SPEC, TUNING, trials, root)


def test_every_scheme_gets_as_many_trials_the_grids_first_and_all_within_the_space(tmp_path):
    trials = tune(tmp_path)
    grid = tuning.tuning_runs(SPEC, Tuning(6, 100, 0.2, 3e-4, 3e-2))
    assert {scheme: len(own) for scheme, own in trials.items()} == {"fedavg": 6, "fedprox": 6}
    for scheme, own in trials.items():
        assert own[:3] == grid[scheme][:3]
        assert own[3:] != grid[scheme][3:]
        assert all(3e-4 <= dict(run.tried)["train.lr"] <= 3e-2 for run in own[1:])
    assert all(dict(run.tried)["scheme.mu"] in MU for run in trials["fedprox"][1:])
    assert schemes.get("fedprox").about.tunes["mu"] == MU
    assert [run.name for run in trials["fedprox"]] == [f"fedprox-trial{i}" for i in range(6)]


def test_a_suggestion_is_that_of_a_plain_study_of_the_same_trials(tmp_path):
    own = tune(tmp_path, until=5)["fedprox"]
    space = {
        "train.lr": optuna.distributions.FloatDistribution(3e-4, 3e-2, log=True),
        "point": optuna.distributions.IntDistribution(0, 4),
    }
    seed = rng.derive(100, "tuning/optuna", 5) % 2**32
    study = optuna.create_study(
        directions=["maximize", "maximize"], sampler=optuna.samplers.TPESampler(n_startup_trials=1, seed=seed)
    )
    for trial, run in enumerate(own):
        tried = dict(run.tried) if trial else {"train.lr": 1e-3, "scheme.mu": 0.5}  # defaults
        accuracy = 1 - abs(math.log10(tried["train.lr"] / 3e-3)) / 2
        params = {"train.lr": tried["train.lr"], "point": MU.index(tried["scheme.mu"])}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=space, values=[accuracy] * 2))
    params = study.ask(space).params
    expected = {"train.lr": float(f"{params['train.lr']:.3g}"), "scheme.mu": MU[params["point"]]}
    assert tuning.suggested(TUNING, "fedprox", own, tmp_path) == expected


def test_a_killed_tuning_goes_on_to_the_same_trials(tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    tune(killed, until=4)
    assert tune(killed) == tune(undisturbed)


def test_what_was_begun_stays_though_a_trial_that_had_failed_then_ends_well(tmp_path):
    before = tune(tmp_path)
    finish(before["fedprox"][1], tmp_path, local_val_accuracy_last=0.0, global_val_accuracy_last=0.0)
    assert tuning.next_run(SPEC, TUNING, "fedprox", before["fedprox"][:4], tmp_path) == before["fedprox"][4]
    assert waves.all_trials(SPEC, TUNING, tmp_path) == before
    (tmp_path / "study.json").unlink()  # then the runs' own folders tell
    assert waves.all_trials(SPEC, TUNING, tmp_path) == before
    narrow = replace(TUNING, lr_low=1e-9, lr_high=1e-8)  # what was begun for another spec is no trial of this one
    assert {len(own) for own in waves.all_trials(SPEC, narrow, tmp_path).values()} == {3}


@pytest.mark.parametrize("value", [np.nan, None])
def test_a_trial_without_a_number_is_not_told(tmp_path, value):
    own = tune(tmp_path, until=4)["fedavg"]
    if value is None:
        (tmp_path / own[1].name / "metrics.h5").unlink()
    else:
        finish(own[1], tmp_path, local_val_accuracy_last=value)
    found = tuning.suggested(TUNING, "fedavg", own, tmp_path)
    assert found == tuning.suggested(TUNING, "fedavg", [own[0], *own[2:], own[1]], tmp_path)
    assert 3e-4 <= found["train.lr"] <= 3e-2


def test_without_the_extra_one_line_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hkd_hpc.runtime.versions.installed", lambda package: None)
    path = tmp_path / "spec.toml"
    path.write_text(
        '[study]\nschemes = ["fedavg"]\nseeds = [0]\n[tuning]\nsampler = "optuna"\ntrials = 2\nseed = 1\n'
        "val_fraction = 0.2\nlr_low = 1e-4\nlr_high = 1e-2\n"
    )
    assert main([str(path), "--root", str(tmp_path / "root")]) == 2
    line = "hkd_hpc: tuning.sampler=optuna: optuna is not installed; pip install 'hkd_hpc[optuna]'\n"
    assert capsys.readouterr().err == line
    assert not (tmp_path / "root").exists()
