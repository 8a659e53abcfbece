"""What a study leaves on the disk, and a disk that fills up."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
import toy

from hkd_hpc import export
from hkd_hpc.jobs.__main__ import main
from hkd_hpc.jobs.files import JOB_LOCK, STATUS_BYTES, Status
from hkd_hpc.jobs.logs import error_in
from hkd_hpc.jobs.pool import Pool
from hkd_hpc.results.models import read_model
from hkd_hpc.store.folder import FINAL_PARTS, RunFolder
from hkd_hpc.store.lock import RunLock
from hkd_hpc.store.tree import load_tree
from jobs import Study, Sweep, launch

ROUNDS = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


def sweep_of(data, **axes):
    settings = dict(text.split("=", 1) for text in toy.settings(data, f"fed.rounds={ROUNDS}", "model.name=small"))
    return Sweep(settings=settings, **axes)


# ---- finished trials


def test_a_finished_trial_keeps_its_final_weights_unless_asked(data, tmp_path):
    sweep = sweep_of(data, scheme=["moon"])
    kept = launch(sweep, "debug", root=tmp_path / "a", keep_state=True)
    small = launch(sweep, "debug", root=tmp_path / "b")
    [trial] = small.trials
    before, after = RunFolder(kept.root / trial.name), RunFolder(small.root / trial.name)
    assert [round for round, _ in before.checkpoints()] == [2, 1]
    assert [round for round, _ in after.checkpoints()] == [2]
    whole, final = (load_tree(folder.checkpoint_path(2)) for folder in (before, after))
    assert sorted(whole["client_states"]["0"]) == ["model", "previous"]
    assert sorted(final) == sorted(FINAL_PARTS)
    # 32 * 3 * 9 + 64 * 32 * 9 + 128 * 64 * 9, BatchNorm 4 a channel, 129 * 8 and 9 * 10: about .38 MB of floats; MOON's
    # clients hold two such models each
    assert final["global"]["classifier.weight"].shape == (10, 8)
    sizes = [folder.checkpoint_path(2).stat().st_size for folder in (before, after)]
    assert sizes[0] > 7 * 375_000
    assert 375_000 < sizes[1] < 500_000
    assert {name: array.tobytes() for name, array in read_model(before.path, None).items()} == {
        name: array.tobytes() for name, array in read_model(after.path, None).items()
    }
    [output] = toy.train_ok(1, "--resume", "--out", after.path, *trial.arguments())
    assert "already complete" in output
    after.metrics_path.unlink()
    [result] = toy.train(1, "--resume", "--out", after.path, *trial.arguments())
    assert result.exit_code == 2
    assert "holds the final weights of a complete run and nothing to resume from" in result.output


def test_a_job_that_died_before_it_had_tidied_up_is_tidied_up_after_at_the_next_launch(data, tmp_path):
    sweep = sweep_of(data, scheme=["fedavg"])
    study = launch(sweep, "debug", root=tmp_path / "root", keep_state=True)
    folder = RunFolder(study.root / study.trials[0].name)
    replace(Status.read(folder.path), state="running").write(folder.path)
    launch(sweep, "debug", root=study.root)
    assert [round for round, _ in folder.checkpoints()] == [2]
    assert Status.read(folder.path).state == "complete"
    assert len(list((study.root / "launches").iterdir())) == 1  # nothing was started for it


@pytest.mark.parametrize(
    "keep_state, after, error",
    [
        (True, "complete", ""),
        (False, "failed", "nothing to resume from: a study keeps no more without --keep-state. Remove the folder"),
    ],
)
def test_a_finished_trial_whose_file_is_damaged_is_named_and_not_counted(
    data, tmp_path, capsys, keep_state, after, error
):
    sweep, root = sweep_of(data, scheme=["fedavg"], seed=[0, 1]), tmp_path / "root"
    study = launch(sweep, "debug", root=root, keep_state=keep_state)
    metrics = root / study.trials[0].name / "metrics.h5"
    os.truncate(metrics, metrics.stat().st_size // 2)
    damaged, good = study.status()
    assert (damaged.state, good.state) == ("lost", "complete")
    assert f"{metrics}: it is truncated: " in damaged.error
    assert main(["table", str(root)]) == 1
    told = capsys.readouterr().out
    assert "1 of 2 runs are complete" in told
    assert f"\nnot in the table: {metrics}: it is truncated: " in told
    launch(sweep, "debug", root=root, keep_state=keep_state)
    again, _ = study.status()
    assert again.state == after
    assert error in again.error
    assert main(["table", str(root)]) == (after != "complete")


@pytest.fixture(scope="module")
def launched(data, tmp_path_factory):
    return launch(sweep_of(data, scheme=["fedavg"]), "debug", root=tmp_path_factory.mktemp("launched") / "root").root


@pytest.mark.parametrize("name", ["study.json", "launches/0001.json"])
@pytest.mark.parametrize("content", ['{"name": "00', "", "[1, 2]", '{"later": 1}'])
def test_a_record_that_is_damaged_is_one_line(launched, tmp_path, capsys, name, content):
    root = shutil.copytree(launched, tmp_path / "root")
    (root / name).write_text(content)
    for command in ("status", "resubmit", "cancel"):
        assert main([command, str(root)]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"hkd_hpc: {root / name}: is damaged (")
        assert told.count("\n") == 1


def test_records_of_launches_keep_their_numbers_when_an_older_one_is_removed(launched, tmp_path, data):
    root = shutil.copytree(launched, tmp_path / "root")
    (root / "launches/0007.json").write_text((root / "launches/0001.json").read_text().replace('"0001"', '"0007"'))
    (root / "launches/0001.json").unlink()
    launch(sweep_of(data, scheme=["fedavg"], seed=[1]), "debug", root=root)
    assert sorted(path.name for path in (root / "launches").iterdir()) == ["0007.json", "0008.json"]


# ---- a full disk

FILLING = '''
import os
from hkd_hpc.schemes.fedavg import FedAvg


class Filling(FedAvg):
    """FedAvg that fills the disk in round 2, to the last byte, where $FILL says so."""

    def begin(self, client):
        super().begin(client)
        if client.round == 2 and os.environ.get("FILL"):
            with open(os.environ["FILL"], "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
'''


def fill(path):
    """To the last byte of its disk."""
    with open(path, "wb", buffering=0) as file, pytest.raises(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.fixture
def disk(tmp_path):
    """A real disk of 4 MB."""
    with toy.small_disk(tmp_path / "disk", "4m") as place:
        yield place


def test_a_model_does_not_leave_half_of_it_on_a_full_disk(data, disk, tmp_path, capsys):
    toy.train_ok(1, *toy.settings(data, "fed.rounds=1", "scheme.name=fedavg"), "--out", tmp_path / "run")
    fill(disk / "filled")
    assert export.main([str(tmp_path / "run"), "--out", str(disk / "global.pt")]) == 2
    line = f"hkd_hpc: cannot write {disk}/global.pt: No space left on device; no file was left behind\n"
    assert capsys.readouterr().err == line
    assert os.listdir(disk) == ["filled"]


def test_a_study_on_a_disk_that_fills_up_loses_nothing_and_goes_on_later(data, disk, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{toy.PROJECT}")
    toy.write_module(tmp_path, "filling", FILLING)
    sweep = sweep_of(data, scheme=["fedavg", "filling:Filling"], seed=[0])
    monkeypatch.setenv("FILL", str(disk / "filled"))
    study = launch(sweep, "debug", root=disk / "root")
    first, second = study.status()
    assert (first.state, second.state, second.round) == ("complete", "failed", 1), second
    folder = study.root / study.trials[1].name
    assert second.error.startswith("hkd_hpc: round 2, phase saving: cannot write ")
    assert "No space left" in second.error
    assert (folder / "status.json").stat().st_size == STATUS_BYTES
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["round_0001.h5"]
    assert not [name for _, _, names in os.walk(study.root) for name in names if name.endswith(".tmp")]
    assert "1 of 2 runs are complete" in study.text()
    capsys.readouterr()
    assert main(["status", str(study.root)]) == 0
    assert second.error in capsys.readouterr().out

    (disk / "filled").unlink()
    monkeypatch.delenv("FILL")
    assert launch(sweep, "debug", root=disk / "root").wait()
    for trial in study.trials:
        toy.train_ok(1, *trial.arguments(), "--out", tmp_path / trial.name)
        assert toy.last_sha(study.root / trial.name) == toy.last_sha(tmp_path / trial.name)


def test_where_not_even_a_status_can_be_written_the_disk_is_blamed(disk, data, tmp_path):
    sweep = sweep_of(data, scheme=["fedavg"])
    study = launch(sweep, "debug", root=disk / "root")
    [trial] = study.trials
    folder = RunFolder(study.root / trial.name)
    folder.metrics_path.unlink()
    replace(Status.read(folder.path), state="running").write(folder.path)  # as left by a job that was killed
    lock = RunLock(folder.path, name=JOB_LOCK)
    with lock:
        fill(disk / "filled")
    assert not lock.path.exists()
    assert not list(folder.path.glob(".job.lock*"))
    replace(Status.read(folder.path), starts=7).write(folder.path)  # in place: nothing new fits
    assert Status.read(folder.path).starts == 7
    log = folder.path / "log.txt"
    assert error_in(log, log.stat().st_size, 1) == f"no space is left in {folder.path}; free some, then launch again"
    [state] = Study(study.root).status()
    assert (state.state, state.error) == ("lost", f"no space is left in {folder.path}; free some, then launch again")


def test_a_worker_on_a_full_disk_tries_each_trial_once_and_ends(disk, data):
    trials, _ = sweep_of(data, scheme=["fedavg"], seed=[0, 1]).trials()
    for trial in trials:
        RunFolder(disk / trial.name).create()
    fill(disk / "filled")
    Pool(disk, trials, "0001", place=0)()
    assert [RunFolder(disk / trial.name).holds_run() for trial in trials] == [False, False]
    (disk / "filled").unlink()
    Pool(disk, trials, "0001", place=0)()
    assert [toy.rounds_done(disk / trial.name) for trial in trials] == [ROUNDS, ROUNDS]


# ---- status, again and again


def test_status_is_shown_until_nothing_is_running_any_more(data, tmp_path, capsys):
    study = launch(sweep_of(data, scheme=["fedavg"]), "debug", root=tmp_path / "root")
    capsys.readouterr()
    assert main(["status", str(study.root), "--watch", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == "1 trials: 1 complete"
    assert "\x1b" not in shown
