"""What the numbers of a run come from: stored with it, held where it goes on, told where runs are put side by side."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal

import h5py
import numpy as np
import pytest
import toy

from hkd_hpc import check, config
from hkd_hpc.config import identity
from hkd_hpc.data import content, sources
from hkd_hpc.data.settings import DataSettings
from hkd_hpc.runtime import provenance, revision
from hkd_hpc.store.tree import load_tree, save_tree

SCHEME = """
from hkd_hpc.schemes.fedavg import FedAvg
class Mine(FedAvg): pass
"""


# ---- the code


def test_the_hash_of_sources_is_over_names_and_bytes(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "inner/a.py").write_text("")
    (tmp_path / "notes.txt").write_text("not code")
    (tmp_path / ".#b.py").symlink_to("nowhere")  # as an editor leaves it
    expected = hashlib.sha256(b"b.py 6\nx = 1\ninner/a.py 0\n").hexdigest()
    assert revision.sources_sha256(tmp_path) == expected
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    assert revision.sources_sha256(tmp_path) != expected


def test_an_own_scheme_and_an_own_model_are_code_of_their_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    toy.write_module(tmp_path, "scheme_of_mine", SCHEME)
    toy.write_module(tmp_path, "model_of_mine", "raise SystemError('hashed, not imported')")
    settings = config.resolve(overrides=["scheme.name=scheme_of_mine:Mine", "model.name=model_of_mine:Net"])
    found = identity.code_of(settings)
    assert list(found) == ["code.hkd_hpc", "code.scheme_of_mine", "code.model_of_mine"]
    assert found["code.hkd_hpc"] == identity.code_of(config.resolve())["code.hkd_hpc"]
    (tmp_path / "scheme_of_mine.py").write_text(SCHEME + "\n")
    changed = identity.code_of(settings)
    assert [key for key in found if found[key] != changed[key]] == ["code.scheme_of_mine"]


def test_more_rounds_on_the_way_change_no_round_but_those_of_a_cosine():
    changed = json.dumps([{"after_round": 2, "fed.rounds": [3, 5], "run.evaluate_every": [1, 2]}])
    halve, cosine = (config.resolve(overrides=[f"train.lr_schedule={name}"]) for name in ("halve", "cosine"))
    assert identity.on_the_way(changed, halve) == ""
    assert identity.on_the_way(changed, cosine) == "changed on the way: fed.rounds 3 -> 5"


# ---- the content of the data


def arrays(**more):
    return {
        "x_train": toy.images(np.arange(30) % 3, 1),
        "y_train": np.arange(30) % 3,
        "x_test": toy.images(np.arange(6) % 3, 2),
        "y_test": np.arange(6) % 3,
        **more,
    }


def sha_of(path, **more):
    return content.load(DataSettings(name="file", path=str(path), **more)).sha256


def test_equal_content_has_one_hash_whatever_the_file(tmp_path):
    np.savez(tmp_path / "a.npz", **arrays())
    np.savez_compressed(tmp_path / "b.npz", **arrays(y_train=(np.arange(30) % 3).astype(np.int32)))
    with h5py.File(tmp_path / "c.h5", "w") as file:
        for name, array in arrays().items():
            file[name] = array if array.ndim == 1 else array.transpose(0, 2, 3, 1)
    assert sha_of(tmp_path / "a.npz") == sha_of(tmp_path / "b.npz") == sha_of(tmp_path / "c.h5")
    x = arrays()["x_train"]
    rule = hashlib.sha256()  # README: for each array its name, dtype and shape, then its bytes
    for name, array in arrays().items():
        rule.update(f"{name} {array.dtype.str} {array.shape}\n".encode() + array.tobytes())
    assert x.dtype == np.uint8
    assert sha_of(tmp_path / "a.npz") == rule.hexdigest()


@pytest.mark.parametrize("what", ["x_train", "y_train", "x_test", "y_test", "client_train"])
def test_whatever_is_trained_or_tested_on_counts(tmp_path, what):
    before = arrays(client_train=np.arange(30) % 2)
    np.savez(tmp_path / "a.npz", **before)
    np.savez(tmp_path / "b.npz", **{**before, what: before[what][::-1]})
    assert sha_of(tmp_path / "a.npz") != sha_of(tmp_path / "b.npz")


def test_a_large_file_is_hashed_once_and_again_after_any_change(tmp_path, monkeypatch):
    monkeypatch.setenv("HKD_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr(content, "WORTH_KEEPING_BYTES", 1)
    hashed = []
    monkeypatch.setattr(content, "sha256_of", lambda dataset, rule=content.sha256_of: hashed.append(1) or rule(dataset))
    path = tmp_path / "a.npz"
    np.savez(path, **arrays())
    first = sha_of(path)
    assert sha_of(path) == first
    assert len(hashed) == 1
    at = path.stat()
    np.savez(path, **arrays(x_train=255 - arrays()["x_train"]))  # of one size, under the time of before
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert path.stat().st_size == at.st_size
    assert sha_of(path) != first
    assert len(hashed) == 2
    [kept, *others] = list((tmp_path / "scratch").iterdir())
    for file in (kept, *others):
        file.write_text("damaged")
    assert sha_of(path) != first
    assert len(hashed) == 3


def test_folders_and_bundled_images_have_hashes_too(tmp_path):
    from PIL import Image

    def save(folder, seed):
        for split, label in ((split, label) for split in ("train", "test") for label in ("cat", "dog")):
            (folder / split / label).mkdir(parents=True)
            for i, pixels in enumerate(toy.images(np.arange(2), seed)):
                Image.fromarray(pixels.transpose(1, 2, 0)).save(folder / split / label / f"{i}.png")
        return content.load(DataSettings(name="folder", path=str(folder))).sha256

    one = save(tmp_path / "one", 1)
    assert one == save(tmp_path / "same", 1) != save(tmp_path / "other", 2)
    bundled = content.load(DataSettings()).sha256
    assert len(bundled) == 64
    assert bundled == content.sha256_of(sources.load("fmnist", "", ""))


# ---- going on


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """(its folder, its data): a run of three rounds that was killed in the last."""
    folder = tmp_path_factory.mktemp("killed")
    data = toy.save_data(folder / "data.npz")
    kill = lambda rank: toy.on_place(3, "training", lambda: os.kill(os.getpid(), signal.SIGKILL))
    [result] = toy.train(
        1, *toy.settings(data, "scheme.name=fedavg", "fed.rounds=3"), "--out", folder / "run", patch=kill
    )
    assert result.signal == signal.SIGKILL
    return folder / "run", data


@pytest.fixture
def resume(killed, tmp_path):
    """resume(*arguments, code, patch): a copy of it, resumed; (its folder, the output)."""

    def resumed(*arguments, code=0, patch=None):
        folder = tmp_path / "run"
        if not folder.exists():
            shutil.copytree(killed[0], folder)
            (folder / "run.lock").unlink()
        [result] = toy.train(1, "--resume", "--out", folder, *arguments, patch=patch)
        assert result.exit_code == code, result
        return folder, result.output

    return resumed


def with_other(path, data, **change):
    """A copy of the data with arrays changed by functions."""
    before = dict(np.load(data))
    np.savez(path, **{**before, **{name: edit(before[name]) for name, edit in change.items()}})
    return path


@pytest.mark.parametrize("change", [{"x_train": lambda x: 255 - x}, {"x_test": lambda x: 255 - x}])
def test_other_data_are_rejected_or_recorded(killed, resume, tmp_path, change):
    other = with_other(tmp_path / "other.npz", killed[1], **change)
    before, now = (sha_of(path) for path in (killed[1], other))
    folder, output = resume(f"data.path={other}", code=2)
    [line] = toy.our_lines([output])
    assert line == (
        f"hkd_hpc: --resume: data.path={other}: the content of the data is not what the run was trained on "
        "(data.content "
        f"{before[:8]} -> {now[:8]}); put the data back, or --allow-change resumes with these"
    )
    assert toy.file_hashes(folder / "checkpoints") == toy.file_hashes(killed[0] / "checkpoints")
    assert toy.file_hashes(folder)["metrics.h5"] == toy.file_hashes(killed[0])["metrics.h5"]
    folder, output = resume("--allow-change", f"data.path={other}")
    found = toy.metrics(folder)
    assert json.loads(found["changes_json"]) == [{"after_round": 2, "data.content": [before, now]}]
    assert json.loads(found["identity_json"])["data.content"] == now
    assert f"changed after round 2: data.content {before[:8]} -> {now[:8]}" in output  # in the summary
    assert provenance.from_record(found)["data.content"] == [before, now]


def test_the_same_content_elsewhere_is_the_same_data(killed, resume, tmp_path):
    moved = with_other(tmp_path / "moved.npz", killed[1])
    folder, output = resume(f"data.path={moved}")
    assert toy.metrics(folder)["changes_json"] == "[]"
    assert "warning" not in output


def test_rows_without_a_checkpoint_are_not_made_again_from_other_data(killed, resume, tmp_path):
    folder = shutil.copytree(killed[0], tmp_path / "run")
    (folder / "run.lock").unlink()
    shutil.rmtree(folder / "checkpoints")
    other = with_other(tmp_path / "other.npz", killed[1], x_train=lambda x: 255 - x)
    _, output = resume("--allow-change", f"data.path={other}", code=2)
    assert "the content of the data is not what the run was trained on" in output
    assert toy.rounds_done(folder) == 2


def other_code(rank):
    """As if a file of the package had been edited."""
    revision.package_sha256 = lambda: "ab" * 32


def test_other_code_is_told_recorded_and_rejected_on_request(killed, resume):
    before = json.loads(toy.metrics(killed[0])["identity_json"])["code.hkd_hpc"]
    text = f"code.hkd_hpc {before[:8]} -> abababab"
    folder, output = resume("--strict-code", patch=other_code, code=2)
    [line] = toy.our_lines([output])
    assert line.startswith("hkd_hpc: --strict-code: the code is not that of the rounds before (" + text)
    assert toy.rounds_done(folder) == 2
    folder, output = resume(patch=other_code)
    [warning] = [line for line in output.splitlines() if "warning" in line]
    assert text in warning
    assert warning.endswith("recorded in the run; --strict-code rejects it")
    assert json.loads(toy.metrics(folder)["changes_json"]) == [{"after_round": 2, "code.hkd_hpc": [before, "ab" * 32]}]
    _, output = resume(
        "--strict-code", "--allow-change", "fed.rounds=5", patch=other_code, code=2
    )  # rounds 1 and 2 had other
    assert text in toy.our_lines([output])[0]


def test_the_same_code_is_nothing_to_speak_of(resume):
    _, output = resume("--strict-code")
    assert "code." not in output
    assert "warning" not in output


def test_other_threads_are_told(resume):
    _, output = resume("--allow-change", "run.threads=2")
    [warning] = [line for line in output.splitlines() if "warning" in line]
    assert "run.threads 1 -> 2; recorded in the run" in warning
    assert "the number of threads change the bits" in config.help_text()


def without_hashes(source, folder):
    """A copy of a run as an earlier version left it."""
    shutil.copytree(source, folder)
    (folder / "run.lock").unlink()
    for path in (folder / "metrics.h5", *(folder / "checkpoints").iterdir()):
        tree = load_tree(path)
        del tree["identity_json"]
        save_tree(path, tree)
    return folder


def test_of_a_run_of_an_earlier_version_it_is_told_that_nothing_is_known(killed, resume, tmp_path):
    folder = without_hashes(killed[0], tmp_path / "run")
    _, output = resume("--strict-code", code=2)
    assert "--strict-code: the rounds before were saved by a version that stored no hash of its code" in output
    _, output = resume()
    assert output.count("the rounds before were saved by a version that stored no hash of code and data") == 1
    [change] = json.loads(toy.metrics(folder)["changes_json"])
    assert change == {
        "after_round": 2,
        "code.hkd_hpc": [None, revision.package_sha256()],
        "data.content": [None, sha_of(killed[1])],
    }
    assert "after round 2: code.hkd_hpc unknown -> " in output


def test_code_of_any_round_before_counts_for_strict_code():
    before = {"code.hkd_hpc": ["a", "b"], "code.own": ["c"], "version.torch": ["1", "2"]}
    assert provenance.has_other_code(before, {"code.hkd_hpc": ["b"]})
    assert not provenance.has_other_code(before, {"code.own": ["c"], "version.torch": ["2"], "code.new": ["d"]})


def test_a_complete_metrics_file_of_other_settings_is_not_believed(killed, resume, tmp_path):
    folder, _ = resume()
    resume("fed.rounds=3")
    theirs = tmp_path / "theirs"
    toy.train_ok(1, *toy.settings(killed[1], "scheme.name=fedavg", "fed.rounds=3", "train.lr=0.01"), "--out", theirs)
    shutil.copy(theirs / "metrics.h5", folder / "metrics.h5")
    _, output = resume(code=2)
    assert "metrics.h5 is that of another run (train.lr: stored 0.01, asked 0.001)" in output
    assert check.main([str(folder)]) == 1


def test_ranks_that_read_other_data_are_named(tmp_path, killed):
    """Two nodes of one rank each: rank 1 reads a file of its own."""
    other = with_other(tmp_path / "other.npz", killed[1], x_test=lambda x: 255 - x)

    def patch(rank):
        from hkd_hpc.assembly import federation

        original = federation.node_copy

        def node_copy(settings, comm):
            comm.hosts, comm.local_rank, comm.local_size = ["a", "b"], 0, 1
            where = DataSettings(name="file", path=str(other)) if rank else settings.data
            return original(dataclasses.replace(settings, data=where), comm)

        federation.node_copy = node_copy

    results = toy.train(2, *toy.settings(killed[1], "scheme.name=fedavg"), "--out", tmp_path / "new", patch=patch)
    assert [result.exit_code for result in results] == [1, 1]
    [line] = toy.our_lines(result.output for result in results)
    assert line.endswith("ranks [1] have another data than rank 0; is the same code and data on all nodes?")
