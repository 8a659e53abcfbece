"""Folders and files that break under a run or between two: one line, nothing good is lost, --resume gives the same
rows.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys

import h5py
import numpy as np
import pytest
import toy

from hkd_hpc import check
from hkd_hpc.store import tree as store
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.tree import load_tree, save_tree

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz", 120, 40)


def arguments(data, *more):
    return toy.settings(data, "scheme.name=moon", "fed.rounds=4", "fed.clients=2", *more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("whole") / "run"
    toy.train_ok(1, *arguments(data), "--out", folder)
    return folder


def break_at(round, phase, action):
    return lambda rank: rank == 0 and toy.on_place(round, phase, action)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, data):
    """The same run, killed in round 4: rounds 2 and 3 have checkpoints, metrics.h5 has two or three rows."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    toy.train(
        1, *arguments(data), "--out", folder, patch=break_at(4, "weights", lambda: os.kill(os.getpid(), signal.SIGKILL))
    )
    assert sorted(path.name for path in (folder / "checkpoints").glob("*.h5")) == ["round_0002.h5", "round_0003.h5"]
    return folder


@pytest.fixture
def run(tmp_path, stopped):
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def failed(results, code=1):
    """The one line that the whole job ended with."""
    output = "".join(result.output for result in results)
    assert [result.exit_code for result in results] == [code] * len(results), output
    lines = toy.our_lines([output])
    assert len(lines) == 1, output
    assert "Traceback" not in output, output
    return lines[0]


# ---- while it runs


def reject_large_files():
    """From here on the system takes no more than 20 kB of a file, as a quota does: in the middle of a write."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


@pytest.mark.parametrize(
    "round, what",
    [
        (1, "round_0001.h5: File too large; no file was left behind"),
        (3, "rows.hdf5: File too large; the rows before are untouched"),
    ],
)
def test_a_quota_in_the_middle_of_a_write(tmp_path, data, whole, round, what):
    folder = tmp_path / "run"
    line = failed(toy.train(2, *arguments(data), "--out", folder, patch=break_at(round, "saving", reject_large_files)))
    assert f"cannot write {folder}/checkpoints/{what}" in line
    assert not list(folder.rglob(".*")), "no temporary file is left"
    toy.train_ok(1, "--resume", "--out", folder)
    assert toy.rows(folder) == toy.rows(whole)


@contextlib.contextmanager
def small_disk(place, *options):
    """A disk of its own at `place`, where mounting is allowed."""
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", place], capture_output=True
    ).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def mount_again(place, option):
    subprocess.run(["mount", "-o", f"remount,{option}", place], check=True)


def test_a_disk_that_fills_up(tmp_path, data, whole):
    """Two checkpoints and a third in the making fit, or do not: it ends in one line, and goes on with more space."""
    disk, folder = tmp_path / "disk", tmp_path / "disk/run"
    with small_disk(disk, "size=3500k"):
        line = failed(toy.train(2, *arguments(data), "--out", folder))
        assert "cannot write" in line
        assert "No space left on device" in line
        mount_again(disk, "size=100m")
        toy.train_ok(1, "--resume", "--out", folder)
        assert toy.rows(folder) == toy.rows(whole)


def test_a_disk_that_becomes_read_only(tmp_path, data, whole):
    disk, folder = tmp_path / "disk", tmp_path / "disk/run"
    with small_disk(disk, "size=100m"):
        line = failed(
            toy.train(
                2, *arguments(data), "--out", folder, patch=break_at(3, "saving", lambda: mount_again(disk, "ro"))
            )
        )
        assert "cannot write" in line
        assert "Read-only file system" in line
        line = failed(toy.train(1, "--resume", "--out", folder), code=2)
        assert "Read-only file system" in line
        assert "name a folder" in line
        mount_again(disk, "rw")
        toy.train_ok(1, "--resume", "--out", folder)
        assert toy.rows(folder) == toy.rows(whole)


def test_a_folder_that_vanishes(tmp_path, data):
    """At once: while it is emptied file by file the lock's holder may put the lock back."""
    folder = tmp_path / "run"
    vanish = lambda: folder.rename(tmp_path / "elsewhere")
    line = failed(toy.train(2, *arguments(data), "--out", folder, patch=break_at(3, "saving", vanish)))
    assert f"cannot write {folder}/checkpoints/rows.hdf5: No such file or directory; no file was left behind" in line


# ---- between two runs: the newest checkpoint is bad, the older one is used


def write_version_2(path):
    """An intact file of a later format."""
    before = store.FORMAT_VERSION
    store.FORMAT_VERSION = 2
    try:
        store._write(path, {"round": 3}, {})
    finally:
        store.FORMAT_VERSION = before


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def flip_first(path):
    """In the checksum: wherever the rest of a file with space for more has nothing to lose."""
    content = bytearray(path.read_bytes())
    content[100] ^= 4
    path.write_bytes(content)


def grow(path):
    with open(path, "r+b") as file:
        file.truncate(1 << 40)


BAD = {
    "a flipped bit": (flip, "damaged"),
    "text": (lambda path: path.write_text("no file of ours"), "it is not an HDF5 file"),
    "plain HDF5": (lambda path: h5py.File(path, "w").close(), "not by hkd_hpc"),
    "huge": (grow, "damaged"),
    "another version": (write_version_2, "its format is 2; this version of hkd_hpc reads 1"),
    "empty": (lambda path: path.write_bytes(b""), "it is not an HDF5 file"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_checkpoint_is_named_and_the_older_one_used(run, whole, kind):
    damage, words = BAD[kind]
    damage(run / "checkpoints/round_0003.h5")
    output = toy.train_ok(1, "--resume", "--out", run)[0]
    warning = next(line for line in output.splitlines() if "warning: checkpoint skipped" in line)
    assert f"{run}/checkpoints/round_0003.h5: " in warning
    assert words in warning
    assert "resuming after round 2" in output
    assert toy.rows(run) == toy.rows(whole)


def test_no_good_checkpoint_is_no_reason_to_begin_anew(run):
    """What is left may still be saved: nothing is written over."""
    for path in (run / "checkpoints").iterdir():
        flip(path)
    before = toy.file_hashes(run)
    results = toy.train(2, "--resume", "--out", run)
    line = failed(results, code=2)
    assert "no checkpoint is good" in line
    assert "hkd_hpc.check" in line
    before.pop("run.lock", None)
    assert toy.file_hashes(run) == before


@pytest.mark.parametrize("kind", ["a flipped bit", "another version", "empty"])
def test_bad_metrics_are_written_anew(run, whole, kind):
    BAD[kind][0](run / "metrics.h5")
    toy.train_ok(1, "--resume", "--out", run)
    assert toy.rows(run) == toy.rows(whole)


# ---- the rows before a checkpoint's own


def test_a_checkpoint_has_its_own_row_and_those_before_are_in_two_other_files(run):
    tree = load_tree(run / "checkpoints/round_0003.h5")
    assert tree["rounds"]["round"].tolist() == [3]
    assert tree["clients"]["train_n"].shape == (1, 2)
    assert load_tree(run / "checkpoints/rows.hdf5")["rounds"]["round"].tolist() == [1, 2]
    shas = load_tree(run / "metrics.h5")["rounds"]["weights_sha256"]
    assert tree["before"] == {"rounds": 2, "clients": 2, "events": 0, "weights_sha256": shas[1]}
    assert check.main([str(run)]) == 0


@pytest.mark.parametrize("bad", ["metrics.h5", "checkpoints/rows.hdf5"])
@pytest.mark.parametrize("damage", [flip_first, lambda path: path.unlink()])
def test_one_good_file_of_rows_is_enough(run, whole, tmp_path, capsys, bad, damage):
    damage(run / bad)
    check.main([str(run), "--repair", str(tmp_path / "saved.h5")])
    assert "3 rows saved from" in capsys.readouterr().out
    assert (
        load_tree(tmp_path / "saved.h5")["rounds"]["weights_sha256"].tolist()
        == toy.rows(whole)["rounds/weights_sha256"][:3]
    )
    assert "resuming after round 3" in toy.train_ok(1, "--resume", "--out", run)[0]
    assert toy.rows(run) == toy.rows(whole)
    assert not (run / "checkpoints/rows.hdf5").exists()


def test_without_its_rows_a_checkpoint_is_not_good(run, capsys):
    """As if they had never been: nothing is written over."""
    for name in ("metrics.h5", "checkpoints/rows.hdf5"):
        flip_first(run / name)
    assert check.main([str(run)]) == 1
    told = capsys.readouterr().out
    assert told.count("WRONG") == 4, told
    assert told.count("the rows before its own are in no file") == 2, told
    results = toy.train(1, "--resume", "--out", run)
    assert "no checkpoint is good" in failed(results, code=2)
    assert results[0].output.count("the rows before its own are in no file") == 2


def test_a_run_stored_by_an_earlier_version_goes_on(run, whole):
    """All rows in each checkpoint, no other file of them, and no column of what saving took."""
    for path in (run / "checkpoints").glob("round_*.h5"):
        tree = RunFolder(run).with_all_rows(load_tree(path))
        del tree["rounds"]["seconds"]["save"]
        save_tree(path, {name: value for name, value in tree.items() if name != "before"})
    tree = load_tree(run / "metrics.h5")
    del tree["rounds"]["seconds"]["save"]
    save_tree(run / "metrics.h5", tree)
    (run / "checkpoints/rows.hdf5").unlink()
    toy.train_ok(2, "--resume", "--out", run)
    assert toy.rows(run) == toy.rows(whole)
    assert np.isnan(toy.metrics(run)["rounds/seconds/save"]).tolist() == [True, True, True, False]


def test_the_rows_that_a_complete_run_left_because_it_was_killed_go(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/checkpoints/rows.hdf5").write_text("left")
    assert "already complete" in toy.train_ok(1, "--resume", "--out", tmp_path / "run")[0]
    assert not (tmp_path / "run/checkpoints/rows.hdf5").exists()


def test_a_checkpoint_of_weights_alone_cannot_be_gone_on_from(run):
    for path in (run / "checkpoints").iterdir():
        tree = load_tree(path)
        save_tree(path, {name: tree[name] for name in tree if name not in ("client_states", "server")})
    line = failed(toy.train(1, "--resume", "--out", run), code=2)
    assert "the checkpoint of round 3 has no server, client_states" in line


@pytest.mark.parametrize(
    "text, words",
    [("{", "is damaged"), ('{"fed": {"cleints": 2}}', "does not fit hkd_hpc"), ("[" * 100_000, "is damaged")],
)
def test_settings_of_another_version_or_of_nobody(run, text, words):
    (run / "config.json").write_text(text)
    line = failed(toy.train(2, "--resume", "--out", run), code=2)
    assert f"{run}/config.json" in line
    assert words in line


def test_lost_settings_come_from_the_checkpoint(run, whole):
    (run / "config.json").unlink()
    output = toy.train_ok(1, "--resume", "--out", run)[0]
    assert "config.json is missing: the settings are those in round_0003.h5" in output
    assert "resuming after round 3" in output
    assert toy.rows(run) == toy.rows(whole)
    assert (run / "config.json").read_text() == (whole / "config.json").read_text()


def test_lost_settings_and_checkpoints_are_no_reason_to_begin_anew(run):
    (run / "config.json").unlink()
    for path in (run / "checkpoints").iterdir():
        flip(path)
    assert "config.json is missing and no checkpoint is good" in failed(toy.train(2, "--resume", "--out", run), code=2)
    assert not (run / "config.json").exists()


def test_a_pipe_in_place_of_a_file_is_not_waited_for(run, whole):
    for path in (run / "metrics.h5", run / "checkpoints/round_0003.h5"):
        path.unlink()
        os.mkfifo(path)
    output = toy.train_ok(1, "--resume", "--out", run)[0]
    assert "round_0003.h5: it is no ordinary file" in output
    assert toy.rows(run) == toy.rows(whole)


SCHEME = """
import threading, time
from hkd_hpc.schemes.fedavg import FedAvg


class Threaded(FedAvg):
    def begin(self, client):
        threading.Thread(target=time.sleep, args=(300,)).start()
        raise ArithmeticError("a bad number")
"""


def test_a_users_thread_does_not_keep_a_failed_process_alive(tmp_path, data):
    toy.write_module(tmp_path, "threaded", SCHEME)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "hkd_hpc.train",
            *arguments(data, "scheme.name=threaded:Threaded"),
            "--out",
            tmp_path / "run",
        ],
        cwd=toy.PROJECT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{toy.PROJECT}"},
    )
    assert done.returncode == 1
    assert "ArithmeticError: a bad number" in done.stderr
