"""check: every damage is found and named with what to do; what can be saved is saved; the originals stay as they
are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
import toy

from hkd_hpc import check
from hkd_hpc.check.contents import rows_text
from hkd_hpc.check.files import check_leftovers
from hkd_hpc.config import as_values, from_json, resolve
from hkd_hpc.config.words import as_text
from hkd_hpc.jobs.files import write_trials
from hkd_hpc.jobs.sweep import make_trial
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.lock import RunLock
from hkd_hpc.store.tree import load_tree, save_tree


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A complete run of four rounds; rounds 3 and 4 have checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    data = toy.save_data(folder / "data.npz", 120, 40)
    toy.train_ok(
        1, *toy.settings(data, "scheme.name=moon", "fed.rounds=4", "data.val_fraction=.1"), "--out", folder / "run"
    )
    return folder / "run"


@pytest.fixture
def run(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def checked(run, capsys):
    """checked(*arguments) -> (exit code, {file: the line about it}, all that was printed), the run untouched."""

    def look(*arguments):
        before = state_of(run)
        code = check.main([str(run), *map(str, arguments)])
        assert state_of(run) == before
        out, err = capsys.readouterr()
        lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
        return code, lines, out + err

    return look


def state_of(run):
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in run.rglob("*")}


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def change(path, edit):
    """A file that is intact, checksum included, but says something else."""
    with h5py.File(path, "r") as file:
        attributes = {name: file.attrs[name] for name in file.attrs if name not in ("format_version", "complete")}
    tree = load_tree(path)
    edit(tree)
    save_tree(path, tree, attributes)


def test_a_complete_run_is_good(checked, run):
    code, lines, said = checked()
    assert code == 0
    assert said.endswith("good\n")
    assert "WRONG" not in said
    assert lines.keys() == {"config.json", "metrics.h5", "checkpoints/round_0003.h5", "checkpoints/round_0004.h5"}
    assert lines["config.json"].endswith("ok: moon on file, 3 clients, 4 rounds")
    assert lines["metrics.h5"].endswith("ok: 4 rows, complete")
    sha = toy.last_sha(run)
    assert f"ok: weights {sha[:16]}, as in its row" in lines["checkpoints/round_0004.h5"]


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def grow(path):
    """A huge file, without the space for it: a terabyte of nothing behind the true content."""
    with open(path, "r+b") as file:
        file.truncate(1 << 40)


DAMAGE = {
    "huge": (grow, "its bytes do not match its checksum: 1099511627264 are there"),
    "flipped bit": (flip, "damaged: its bytes do not match its checksum"),
    "cut": (cut, "truncated"),
    "empty": (lambda path: path.write_bytes(b""), "not an HDF5 file"),
    "text": (lambda path: path.write_text("hello\n" * 1000), "not an HDF5 file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "no ordinary file"),
    "plain HDF5": (lambda path: h5py.File(path, "w").close(), "not by hkd_hpc"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["metrics.h5", "checkpoints/round_0004.h5", "checkpoints/round_0003.h5"])
def test_damage_is_named_with_what_to_do(checked, run, name, kind):
    damage, text = DAMAGE[kind]
    damage(run / name)
    code, lines, said = checked()
    assert code == 1
    assert said.count("WRONG") == 1
    assert "1 of 4 wrong" in said
    assert "WRONG" in lines[name]
    assert text in lines[name]
    advice = {
        "metrics.h5": "--resume writes it anew",
        "checkpoints/round_0004.h5": "remove it; --resume continues from round_0003.h5",
        "checkpoints/round_0003.h5": "remove it; --resume continues from round_0004.h5",
    }[name]
    assert advice in lines[name]


def test_metrics_that_are_gone_are_missed_unless_no_round_can_have_been_tested(checked, run):
    (run / "metrics.h5").unlink()
    code, lines, _ = checked()
    assert code == 1
    assert "WRONG: it is missing; --resume writes it anew" in lines["metrics.h5"]
    (run / "checkpoints/round_0003.h5").unlink()
    change(run / "checkpoints/round_0004.h5", lambda tree: tree.update(round=1))
    (run / "checkpoints/round_0004.h5").rename(run / "checkpoints/round_0001.h5")
    assert "ok: none yet, no round has been tested" in checked()[1]["metrics.h5"]


def test_metrics_that_are_gone_are_written_anew(run, capsys):
    before = toy.last_sha(run)
    (run / "metrics.h5").unlink()
    toy.train_ok(1, "--resume", "--out", run)
    assert check.main([str(run)]) == 0
    assert toy.last_sha(run) == before


def test_checking_imports_no_torch(run):
    """It is for login nodes too, and for a moment's look."""
    code = "import sys; from tools import check; sys.exit(check.main(sys.argv[1:]) or ('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, cwd=toy.PROJECT)
    assert done.returncode == 0, done.stderr


EDITS = {
    "a row is missing": (
        "metrics.h5",
        lambda tree: tree["rounds"].update(round=np.array([1, 2, 4, 5])),
        "the first 2 are complete",
    ),
    "columns of unequal length": (
        "metrics.h5",
        lambda tree: tree["rounds"].update(train_n=tree["rounds"]["train_n"][:3]),
        "the first 3 are complete",
    ),
    "a column of clients is short": (
        "metrics.h5",
        lambda tree: tree["clients"].update(train_n=tree["clients"]["train_n"][:1]),
        "the first 1 are complete",
    ),
    "a hash that is none": (
        "metrics.h5",
        lambda tree: tree["rounds"]["weights_sha256"].__setitem__(0, "x" * 64),
        "the first 0 are complete",
    ),
    "a summary too early": (
        "metrics.h5",
        lambda tree: tree.update(
            rounds={"round": np.array([1]), "weights_sha256": tree["rounds"]["weights_sha256"][:1]}, clients={}
        ),
        "it has a summary, but 1 row of 4",
    ),
    "another partition": (
        "metrics.h5",
        lambda tree: tree["partition"]["train_index"].__setitem__(0, 119),
        "its partition has hash",
    ),
    "other weights": (
        "checkpoints/round_0004.h5",
        lambda tree: tree["global"].update({"classifier.bias": tree["global"]["classifier.bias"] + 1}),
        "its own row says",
    ),
    "a tensor less": (
        "checkpoints/round_0004.h5",
        lambda tree: tree["global"].pop("classifier.bias"),
        "classifier.bias",
    ),
    "another round": ("checkpoints/round_0004.h5", lambda tree: tree.update(round=3), "it is of round 3, not of 4"),
}


@pytest.mark.parametrize("kind", EDITS)
def test_what_is_intact_but_wrong(checked, run, kind):
    name, edit, text = EDITS[kind]
    change(run / name, edit)
    code, lines, said = checked()
    assert code == 1, said
    assert "WRONG" in lines[name], said
    assert text in lines[name], said


def test_a_checkpoint_of_another_run(checked, run, tmp_path):
    other = tmp_path / "other"
    data = toy.save_data(tmp_path / "data.npz", 120, 40)
    toy.train_ok(1, *toy.settings(data, "fed.rounds=1", "run.seed=5"), "--out", other)
    shutil.copy(other / "checkpoints/round_0001.h5", run / "checkpoints/round_0001.h5")
    code, lines, said = checked()
    assert code == 1
    assert said.count("WRONG") == 1
    assert "its partition is another one" in lines["checkpoints/round_0001.h5"]


@pytest.mark.parametrize("seed", [0, 1])
def test_in_a_study_the_run_must_be_that_of_its_trial(whole, tmp_path, capsys, seed):
    stored = as_values(from_json((whole / "config.json").read_text()))
    trial = make_trial(
        {}, resolve(overrides=[f"{key}={as_text(value)}" for key, value in (stored | {"run.seed": seed}).items()])
    )
    write_trials(tmp_path, [trial])
    shutil.copytree(whole, tmp_path / trial.name)
    assert check.main([str(tmp_path / trial.name)]) == seed
    told = "WRONG: this trial of the study has other settings: run.seed: stored 0, asked 1; move the folder away"
    assert (told in capsys.readouterr().out) == bool(seed)


def test_settings_that_somebody_edited(checked, run):
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    assert "put back config.json" in checked()[1]["checkpoints/round_0004.h5"]  # not: remove it
    code, lines, _ = checked()
    assert code == 1
    assert "WRONG: it was written with another run.seed than config" in lines["checkpoints/round_0004.h5"]


@pytest.mark.parametrize(
    "text, told",
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"fed": {"cleints": 3}}', "fed.cleints: no such setting"),
        ("[" * 100_000, "damaged"),
    ],
)
def test_settings_that_cannot_be_read(checked, run, text, told):
    (run / "config.json").write_text(text)
    code, lines, _ = checked()
    assert code == 1
    assert "WRONG" in lines["config.json"]
    assert told in lines["config.json"]


def test_a_file_of_another_format(checked, run):
    """An intact file of a later version: named, not taken for damage."""
    path = run / "checkpoints/round_0004.h5"
    from hkd_hpc.store import tree

    before = tree.FORMAT_VERSION
    try:
        tree.FORMAT_VERSION = 2
        tree._write(path, {"round": 4}, {})
    finally:
        tree.FORMAT_VERSION = before
    code, lines, _ = checked()
    assert code == 1
    assert "its format is 2; this version of hkd_hpc reads 1" in lines["checkpoints/round_0004.h5"]


def test_another_version_of_a_package_is_told_but_not_wrong(checked, run):
    change(run / "metrics.h5", lambda tree: tree.update(versions_json=json.dumps({"torch": "9.9.9"})))
    code, lines, _ = checked()
    assert code == 0
    assert "written with torch 9.9.9 (here " in lines["versions"]


def test_a_pruned_run_is_good(checked, run):
    """Global weights alone, as a study keeps them of finished runs."""
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    whole = load_tree(run / "metrics.h5")
    weights = {name: np.zeros(2, np.float32) for name in ("b", "a")}
    sha = toy.sha256_by_rule(weights)
    whole["rounds"]["weights_sha256"] = np.array([*whole["rounds"]["weights_sha256"][:3], sha])
    save_tree(run / "metrics.h5", whole)
    save_tree(run / "checkpoints/round_0004.h5", {"round": 4, "global": weights, "global_names": np.array(["b", "a"])})
    code, lines, said = checked()
    assert code == 0, said
    assert f"ok: weights {sha[:16]}, as in its row" in lines["checkpoints/round_0004.h5"]


def test_leftovers_and_locks_are_told(checked, run):
    (run / ".metrics.h5.123.tmp").touch()
    (run / "checkpoints/.round_0005.h5.123.tmp").touch()
    with RunLock(run):
        held = check_leftovers(RunFolder(run))
        assert f"in use by another run: host {os.uname().nodename}, process {os.getpid()}" in str(next(held))
    (run / "run.lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "user": "me"}))
    os.utime(run / "run.lock", (1, 1))
    code, lines, _ = checked()
    assert code == 0
    assert "left by another run: host elsewhere" in lines["run.lock"]
    assert "takes it over" in lines["run.lock"]
    assert all(
        "--resume removes it" in lines[name] for name in (".metrics.h5.123.tmp", "checkpoints/.round_0005.h5.123.tmp")
    )


def test_a_killed_run_is_good_and_says_how_far_it_came(tmp_path, capsys):
    data = toy.save_data(tmp_path / "data.npz", 120, 40)
    pids = tmp_path / "pids"

    def patch(rank):
        toy.note_pid(pids, 2)
        if rank == 1:
            toy.on_place(3, "training", lambda: toy.kill_all(pids))

    toy.train(2, *toy.settings(data, "fed.rounds=4", "scheme.name=fedavg"), "--out", tmp_path / "run", patch=patch)
    assert check.main([str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "of 4: not complete, --resume continues" in out
    assert "run.lock" in out
    assert "does not run any more" in out


def test_no_run(tmp_path, capsys):
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "none", tmp_path / "file", tmp_path / ("x" * 300)):
        assert check.main([str(place)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert str(place) in err
    assert check.main([]) == 2
    assert capsys.readouterr().err.startswith("hkd_hpc: the following arguments are required")


def test_the_folder_of_a_study_is_told_with_a_run_in_it(run, capsys):
    assert check.main([str(run.parent)]) == 2
    assert capsys.readouterr().err.endswith(f"; 1 below it hold one each: name one, such as {run}\n")


def test_the_revision_counts_where_the_code_is_another(checked, run):
    other = lambda name: lambda text: json.dumps({**json.loads(text), name: "0" * 64})
    rewrite(run / "metrics.h5", "versions_json", other("revision"))
    assert "versions" not in checked()[1]
    rewrite(run / "metrics.h5", "identity_json", other("code.hkd_hpc"))
    assert f"written with revision {'0' * 64} (here " in checked()[1]["versions"]


def rewrite(path, key, edit):
    change(path, lambda tree: tree.update({key: edit(tree[key])}))


@pytest.mark.parametrize("count, told", [(0, "0 rows"), (1, "1 row"), (2, "2 rows")])
def test_a_number_of_rows(count, told):
    assert rows_text(count) == told


# ---- repair


def columns(path):
    with h5py.File(path, "r") as file:
        return {name: value for name, value in toy.flat_tree(file).items() if name.startswith(("rounds/", "clients/"))}


def test_repair_saves_all_rows_from_the_checkpoint_when_metrics_are_gone(checked, run, tmp_path):
    before = toy.metrics(run)
    flip(run / "metrics.h5")
    code, _, said = checked("--repair", tmp_path / "saved.h5")
    assert code == 1
    assert "4 rows saved from checkpoints/round_0004.h5" in said
    saved = columns(tmp_path / "saved.h5")
    assert saved["rounds/weights_sha256"].tolist() == before["rounds/weights_sha256"].tolist()
    assert saved["rounds/train_n"].tolist() == before["rounds/train_n"].tolist()
    assert saved["rounds/global_test_accuracy"][:3].tolist() == before["rounds/global_test_accuracy"][:3].tolist()
    assert saved["clients/train_n"].shape == (4, 3)
    with h5py.File(tmp_path / "saved.h5", "r") as file:
        assert file["config_json"].asstr()[()] == (run / "config.json").read_text()
        assert file["rounds/train_n"].attrs["unit"] == "images"


def test_repair_takes_complete_rows_alone_and_later_ones_from_the_checkpoint(checked, run, tmp_path):
    before = toy.metrics(run)
    change(run / "metrics.h5", EDITS["columns of unequal length"][1])
    code, _, said = checked("--repair", tmp_path / "saved.h5")
    assert code == 1
    assert "4 rows saved from metrics.h5, checkpoints/round_0004.h5" in said
    assert columns(tmp_path / "saved.h5")["rounds/weights_sha256"].tolist() == before["rounds/weights_sha256"].tolist()


def test_repair_writes_over_nothing_and_says_when_there_is_nothing(checked, run, tmp_path):
    (tmp_path / "mine.h5").write_text("mine")
    code, _, said = checked("--repair", tmp_path / "mine.h5")
    assert code == 2
    assert "nothing is written over" in said
    assert (tmp_path / "mine.h5").read_text() == "mine"
    for path in (run / "metrics.h5", *(run / "checkpoints").iterdir()):
        cut(path)
    code, _, said = checked("--repair", tmp_path / "saved.h5")
    assert code == 1
    assert "neither metrics.h5 nor a checkpoint holds a row" in said
    assert not (tmp_path / "saved.h5").exists()
