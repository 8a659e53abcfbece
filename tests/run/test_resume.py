"""Killed and resumed runs: the same bits as never having stopped, on other numbers of ranks, nothing trained twice."""

from __future__ import annotations

import json
import shutil
import signal

import numpy as np
import pytest
import toy

from hkd_hpc.common.errors import UsageError
from hkd_hpc.results import load

pytestmark = pytest.mark.slow

ROUNDS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


def arguments(data, *more):
    return toy.settings(data, f"fed.rounds={ROUNDS}", "data.beta=0.3", *more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    toy.train_ok(1, *arguments(data), "--out", folder)
    return folder


def killed_at(folder, data, size, place, killer, *more):
    """Run until rank `killer` comes to `place` = (round, phase), where all ranks get kill -9."""

    def patch(rank):
        toy.note_pid(folder.parent / "pids", size)
        toy.count_training(folder.parent / "log")
        if rank == killer:
            toy.on_place(*place, lambda: toy.kill_all(folder.parent / "pids"))

    results = toy.train(size, *arguments(data, *more), "--out", folder, patch=patch)
    assert [result.signal for result in results] == [signal.SIGKILL] * size, results


def resume(folder, size, *more):
    return toy.train_ok(
        size, "--resume", "--out", folder, *more, patch=lambda rank: toy.count_training(folder.parent / "log")
    )


def confusion_of(folder):
    return toy.metrics(folder)["summary/global_test_confusion"].tolist()


PLACES = {
    "training": ((3, "training"), 1, 3, 1),
    "weights": ((3, "weights"), 0, 2, 4),
    "message": ((2, "message"), 0, 1, 3),
    "state": ((4, "state"), 2, 3, 2),
    "evaluation": ((3, "evaluation"), 0, 3, 1),
    "final evaluation": ((4, "final evaluation"), 0, 2, 3),
}


@pytest.mark.parametrize("name", PLACES)
def test_killed_anywhere_and_resumed_on_other_ranks(tmp_path, data, whole, name):
    place, killer, before, after = PLACES[name]
    folder = tmp_path / "run"
    killed_at(folder, data, before, place, killer)
    walls = toy.metrics(folder)["rounds/wall_s"].tolist()
    saved = max(int(path.stem[-4:]) for path in (folder / "checkpoints").glob("round_*.h5"))
    assert place[0] - 2 <= saved <= place[0]
    assert len(walls) in (saved, saved - 1)
    resume(folder, after)
    assert toy.rows(folder) == toy.rows(whole)
    assert toy.metrics(folder)["rounds/wall_s"].tolist()[: len(walls)] == walls
    assert confusion_of(folder) == confusion_of(whole)
    log = toy.trained(tmp_path / "log")
    assert all(log.count((round, client)) == 1 for round in range(1, saved + 1) for client in range(3)), log


def test_killed_between_checkpoint_and_metrics(tmp_path, data, whole):
    """The newest checkpoint knows a round that metrics.h5 does not."""
    folder = tmp_path / "run"

    def patch(rank):
        from hkd_hpc.server import Server

        toy.note_pid(tmp_path / "pids", 2)
        original = Server.write_metrics

        def write_metrics(self):
            if len(self.history) == 3:
                toy.kill_all(tmp_path / "pids")
            original(self)

        Server.write_metrics = write_metrics

    toy.train(2, *arguments(data), "--out", folder, patch=patch)
    assert toy.rounds_done(folder) == 2
    assert (folder / "checkpoints/round_0003.h5").exists()
    resume(folder, 3)
    assert toy.rows(folder) == toy.rows(whole)
    assert toy.trained(tmp_path / "log") == [(4, 0), (4, 1), (4, 2)]


def test_a_checkpoint_every_three_rounds(tmp_path, data, whole):
    folder = tmp_path / "run"
    killed_at(folder, data, 2, (4, "weights"), 0, "run.checkpoint_every=3")
    assert [path.name for path in (folder / "checkpoints").glob("*.h5")] == ["round_0003.h5"]
    walls = toy.metrics(folder)["rounds/wall_s"].tolist()
    resume(folder, 4)
    assert toy.rows(folder) == toy.rows(whole)
    assert toy.metrics(folder)["rounds/wall_s"].tolist()[:3] == walls
    assert [pair for pair in toy.trained(tmp_path / "log") if pair[0] <= 3] == [
        (r, c) for r in (1, 2, 3) for c in range(3)
    ]


def test_the_older_checkpoint_stands_in_for_a_cut_one(tmp_path, data, whole):
    folder = tmp_path / "run"
    killed_at(folder, data, 3, (4, "weights"), 0)
    newest = folder / "checkpoints/round_0003.h5"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    outputs = resume(folder, 2)
    warnings = [line for line in outputs[0].splitlines() if line.startswith("hkd_hpc: warning:")]
    assert any("round_0003.h5" in line and "truncated" in line for line in warnings), outputs[0]
    assert "resuming after round 2" in outputs[0]
    assert toy.rows(folder) == toy.rows(whole)


def test_a_checkpoint_under_the_name_of_another_round_is_passed_over(tmp_path, data, whole):
    """As if it were of that round, rounds would be missing."""
    folder = tmp_path / "run"
    killed_at(folder, data, 1, (3, "training"), 0)
    shutil.copy(folder / "checkpoints/round_0002.h5", folder / "checkpoints/round_0003.h5")
    outputs = resume(folder, 2)
    assert "round_0003.h5: it is of round 2, not of 3" in outputs[0]
    assert "resuming after round 2" in outputs[0]
    assert toy.rows(folder) == toy.rows(whole)


def test_without_checkpoints_rows_are_made_again_but_not_with_other_settings(tmp_path, data, whole):
    folder = tmp_path / "run"
    killed_at(folder, data, 1, (3, "training"), 0)
    shutil.rmtree(folder / "checkpoints")
    (folder / "run.lock").unlink()
    before = toy.file_hashes(folder)
    [result] = toy.train(1, "--resume", "--allow-change", "--out", folder, "train.lr=0.1")
    assert result.exit_code == 2
    assert "has 2 rows and no checkpoint after which settings could change" in result.output
    assert toy.file_hashes(folder) == before
    [output] = resume(folder, 1)
    assert "the run begins anew, and its 2 rows are made again" in output
    assert toy.rows(folder) == toy.rows(whole)


def test_without_checkpoints_a_run_whose_settings_changed_cannot_go_on(tmp_path, data):
    folder = tmp_path / "run"
    toy.train_ok(1, *arguments(data, "fed.rounds=1"), "--out", folder)
    toy.train_ok(1, "--resume", "--allow-change", "--out", folder, "fed.rounds=2", "train.lr=0.01")
    shutil.rmtree(folder / "checkpoints")
    [result] = toy.train(1, "--resume", "--allow-change", "--out", folder, "fed.rounds=3")
    assert result.exit_code == 2
    assert "no checkpoint" in result.output
    assert len(toy.rows(folder)["rounds/round"]) == 2


def test_nothing_to_resume_starts_afresh(tmp_path, data, whole):
    toy.train_ok(2, *arguments(data), "--resume=auto", "--out", tmp_path / "run")
    assert toy.rows(tmp_path / "run") == toy.rows(whole)


def test_a_run_is_repeated_from_its_own_config_json_to_the_same_bits(tmp_path, whole):
    [output] = toy.train_ok(1, "--config", whole / "config.json", "--out", tmp_path / "again")
    assert toy.rows(tmp_path / "again") == toy.rows(whole)
    assert "has no effect" not in output


def test_a_complete_run_is_left_alone(tmp_path, data, whole):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = toy.file_hashes(folder)
    for size in (1, 3):
        outputs = toy.train_ok(size, "--resume", "--out", folder)
        assert "already complete" in outputs[0]
        assert toy.file_hashes(folder) == before


def test_resume_takes_equal_settings_and_rejects_others(tmp_path, data, whole):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = toy.file_hashes(folder)
    results = toy.train(2, "--resume", "--out", folder, "fed.rounds=9")
    assert [result.exit_code for result in results] == [2, 2]
    lines = toy.our_lines(result.output for result in results)
    assert len(lines) == 1
    assert "fed.rounds: stored 4, asked 9" in lines[0]
    toy.train_ok(2, "--resume", "--out", folder, *arguments(data))
    (tmp_path / "same.toml").write_text("[fed]\nrounds = 4\n[train]\nlr = 0.001\n")
    toy.train_ok(1, "--resume", "--out", folder, "--config", tmp_path / "same.toml")
    assert toy.file_hashes(folder) == before


def test_changed_settings_are_allowed_on_request_and_recorded(tmp_path, data, whole):
    """Two rounds more are the bits of a run of four from the start; each change is in the metrics and in the
    summary.
    """
    folder = tmp_path / "run"
    toy.train_ok(2, *arguments(data, "fed.rounds=2"), "--out", folder)
    outputs = toy.train_ok(3, "--resume", "--allow-change", "--out", folder, "fed.rounds=4")
    assert "settings changed after round 2: fed.rounds 2 -> 4" in outputs[0]
    assert toy.last_sha(folder) == toy.last_sha(whole)
    change = [{"after_round": 2, "fed.rounds": [2, 4]}]
    assert (
        json.loads(toy.metrics(folder)["changes_json"])
        == change
        == json.loads(toy.checkpoint(folder, 4)["changes_json"])
    )
    assert "already complete (4 rounds)" in toy.train_ok(1, "--resume", "--out", folder)[0]
    toy.train_ok(1, "--resume", "--allow-change", "--out", folder, "fed.rounds=5", "train.lr=0.01")
    assert json.loads(toy.metrics(folder)["changes_json"]) == [
        *change,
        {"after_round": 4, "fed.rounds": [4, 5], "train.lr": [0.001, 0.01]},
    ]


@pytest.mark.parametrize(
    "given, text",
    [
        (["--resume", "--allow-change", "data.beta=9"], "--allow-change: data.beta cannot change within a run"),
        (
            ["--resume", "--allow-change", "model.latent=9", "run.seed=3"],
            "model.latent, run.seed cannot change within a run",
        ),
        (
            ["--resume", "--allow-change", "scheme.name=fedavg", "fed.rounds=9"],
            "--allow-change: scheme.name cannot change",
        ),
        (["--resume", "run.seed=3"], "run.seed: stored 0, asked 3 (--allow-change does not help: some of these cannot"),
        (["--resume", "fed.rounds=9"], "fed.rounds: stored 4, asked 9 (--allow-change resumes with the others)"),
        (["--resume", "--allow-change", "fed.rounds=3"], "--allow-change: fed.rounds=3, but 4 rounds are done"),
        (["--allow-change"], "--allow-change: is for --resume"),
    ],
)
def test_changes_that_cannot_be_are_rejected(tmp_path, data, whole, given, text):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = toy.file_hashes(folder)
    results = toy.train(2, *given, "--out", folder)
    [line] = toy.our_lines(result.output for result in results)
    assert [result.exit_code for result in results] == [2, 2]
    assert text in line
    assert toy.file_hashes(folder) == before


def test_a_change_that_ends_a_column_leaves_it_empty_from_there_on(tmp_path, data):
    folder = tmp_path / "run"
    toy.train_ok(1, *arguments(data, "fed.rounds=1", "privacy.update_clip=1"), "--out", folder)
    more = ["fed.rounds=2", "privacy.update_clip=0", "scheme.noise=off"]
    toy.train_ok(2, "--resume", "--allow-change", "--out", folder, *more)
    toy.train_ok(1, "--resume", "--allow-change", "--out", folder, "fed.rounds=3", "scheme.noise=paper")
    found = toy.metrics(folder)
    assert np.isnan(found["rounds/clients_clipped"]).tolist() == [False, True, True]
    assert np.isnan(found["rounds/noise_std"]).tolist() == [False, True, False]
    assert np.isnan(found["clients/update_norm"]).all(1).tolist() == [False, True, True]


def test_what_has_another_shape_cannot_change(tmp_path, data):
    folder = tmp_path / "run"
    toy.train_ok(1, *arguments(data, "scheme.name=fedgen", "fed.rounds=1", "scheme.hidden=5"), "--out", folder)
    before = toy.file_hashes(folder)
    results = toy.train(2, "--resume", "--allow-change", "--out", folder, "fed.rounds=2", "scheme.hidden=6")
    [line] = toy.our_lines(result.output for result in results)
    assert [result.exit_code for result in results] == [2, 2]
    assert "--allow-change: scheme.hidden cannot change within a run: what scheme fedgen sends or keeps" in line
    assert toy.file_hashes(folder) == before


def test_settings_of_the_scheme_are_those_of_the_stored_one(tmp_path, data):
    folder = tmp_path / "run"
    toy.train_ok(1, *arguments(data, "scheme.name=fedprox", "fed.rounds=1", "scheme.mu=0.5"), "--out", folder)
    assert "already complete" in toy.train_ok(1, "--resume", "--out", folder, "scheme.mu=0.5")[0]
    (other,) = toy.train(1, "--resume", "--out", folder, "scheme.nu=0.5")
    assert "scheme.nu: no such setting of fedprox" in other.output
    toy.train_ok(1, "--resume", "--allow-change", "--out", folder, "fed.rounds=2", "scheme.mu=0.25")
    assert load(folder).settings["scheme.mu"] == 0.25


def test_a_new_run_of_resume_auto_takes_settings_of_its_scheme_alone(tmp_path, data):
    (result,) = toy.train(1, *arguments(data, "scheme.mu=0.5"), "--resume=auto", "--out", tmp_path / "run")
    assert (result.exit_code, "scheme.mu: no such setting of fedhkd" in result.output) == (2, True)
    toy.train_ok(1, *arguments(data, "fed.rounds=1", "scheme.nu=0.5"), "--resume=auto", "--out", tmp_path / "run")
    assert load(tmp_path / "run").settings["scheme.nu"] == 0.5


def test_presets_may_be_repeated(tmp_path, data):
    given = [
        "--preset",
        "cifar10",
        *toy.settings(data, "fed.clients=2", "model.name=small", "fed.rounds=1"),
        "--out",
        tmp_path / "run",
    ]
    toy.train_ok(1, *given)
    outputs = toy.train_ok(1, *given, "--resume")
    assert "already complete" in outputs[0]


def test_a_folder_that_holds_a_run_is_not_touched(tmp_path, data, whole):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = toy.file_hashes(folder)
    results = toy.train(1, *arguments(data), "--out", folder)
    assert results[0].exit_code == 2
    lines = toy.our_lines([results[0].output])
    assert len(lines) == 1
    assert str(folder) in lines[0]
    assert "--resume" in lines[0]
    assert toy.file_hashes(folder) == before


SCHEME = '''
import torch
from hkd_hpc.schemes.base import Scheme


class WithState(Scheme):
    """Clients remember a matrix and a scalar, the server a vector and a scalar; all of them change the training."""
    terms = ("cross_entropy", "pull")

    def message_shapes(self):
        return {"target_D": (3,), "scale": ()}

    report_shapes = message_shapes

    def client_state_shapes(self):
        return {"memory_AB": (2, 3), "visits": ()}

    def begin(self, client):
        client.state.setdefault("memory_AB", torch.zeros(2, 3))
        client.state.setdefault("visits", torch.zeros(()))

    def loss(self, client, batch):
        terms = super().loss(client, batch)
        bias = client.net.classifier.bias[:3]
        wanted = client.state["memory_AB"].sum(0) + client.message["target_D"] * client.message["scale"]
        return terms | {"pull": ((bias - wanted - 0.1 * client.state["visits"]) ** 2).mean()}

    def report(self, client):
        random = torch.from_numpy(client.random("memory").standard_normal((2, 3))).float()
        client.state["memory_AB"] = 0.5 * client.state["memory_AB"] + 0.1 * random
        client.state["visits"] = client.state["visits"] + 1
        return {"target_D": client.net.classifier.bias.detach()[:3], "scale": client.state["visits"]}

    def combine(self, server, reports):
        old = server.state.get("mean_D", torch.zeros(3))
        server.state["mean_D"] = 0.5 * old + reports["target_D"].mean(0)
        server.state["rounds"] = server.state.get("rounds", torch.zeros(())) + 1
        return {"target_D": server.state["mean_D"], "scale": 0.1 * server.state["rounds"]}
'''


def test_state_of_clients_and_server_is_resumed(tmp_path, data, monkeypatch):
    """Sampled clients, so that some carry their state over rounds in which they rest."""
    toy.write_module(tmp_path, "toy_scheme", SCHEME)
    monkeypatch.syspath_prepend(str(tmp_path))
    more = ("scheme.name=toy_scheme:WithState", "fed.participation=.6")
    toy.train_ok(1, *arguments(data, *more), "--out", tmp_path / "whole")
    folder = tmp_path / "run"
    killed_at(folder, data, 3, (4, "training"), 1, *more)
    resume(folder, 4)
    assert toy.rows(folder) == toy.rows(tmp_path / "whole")


def test_the_same_scheme_without_its_state_would_differ(tmp_path, data, monkeypatch):
    """What makes the test above mean something: a state that is thrown away changes the weights."""
    toy.write_module(tmp_path, "toy_scheme", SCHEME)
    monkeypatch.syspath_prepend(str(tmp_path))
    more = ("scheme.name=toy_scheme:WithState",)

    def forget(rank):
        from hkd_hpc.training import LocalTrainer

        original = LocalTrainer.run

        def run(self, given):
            given.client.state.clear()
            return original(self, given)

        LocalTrainer.run = run

    toy.train_ok(1, *arguments(data, *more), "--out", tmp_path / "keeps")
    toy.train_ok(1, *arguments(data, *more), "--out", tmp_path / "forgets", patch=forget)
    assert toy.last_sha(tmp_path / "keeps") != toy.last_sha(tmp_path / "forgets")


def test_models_of_clients_are_those_of_the_new_last_round_alone(tmp_path, data):
    """Of 4 clients 2 take part in a round, and those of round 1 are not those of round 2."""
    asked = arguments(data, "fed.clients=4", "fed.participation=0.5", "run.client_models=true")
    toy.train_ok(1, *asked, "fed.rounds=2", "--out", tmp_path / "straight")
    toy.train_ok(1, *asked, "fed.rounds=1", "--out", tmp_path / "longer")
    held = [client for client in range(4) if has_model(tmp_path / "longer", client)]
    toy.train_ok(2, "--resume", "--allow-change", "fed.rounds=2", "--out", tmp_path / "longer")
    for client in range(4):
        assert has_model(tmp_path / "longer", client) == has_model(tmp_path / "straight", client)
    assert any(not has_model(tmp_path / "longer", client) for client in held)


def has_model(folder, client):
    try:
        load(folder).model(client)
    except UsageError as error:
        assert f"{folder}: no model of client {client}: round " in str(error)
        return False
    return True
