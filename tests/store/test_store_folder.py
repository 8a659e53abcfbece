"""The folder of a run: what it holds, which checkpoint counts, what is kept and what is cleared away."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

from hkd_hpc.common.errors import UsageError
from hkd_hpc.store.folder import RunFolder, joined
from hkd_hpc.store.tree import load_tree, open_tree, save_tree


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path, warnings) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "a", warnings.append)
    folder.create()
    return folder


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rounds(folder):
    return [round for round, _ in folder.checkpoints()]


def test_names(folder, tmp_path):
    assert folder.metrics_path == tmp_path / "runs/a/metrics.h5"
    assert folder.config_path == tmp_path / "runs/a/config.json"
    assert folder.checkpoint_path(7) == tmp_path / "runs/a/checkpoints/round_0007.h5"
    assert folder.checkpoint_path(12345).name == "round_12345.h5"
    assert RunFolder(str(tmp_path)).path == tmp_path


def test_a_folder_holds_a_run_from_its_first_file_on(folder, tmp_path):
    assert not RunFolder(tmp_path / "none").holds_run()
    assert RunFolder(tmp_path / "none").checkpoints() == []
    assert not folder.holds_run()
    assert folder.read_config() is None
    folder.create()
    folder.write_config('{"name": "é", "public": null, "beta": 0.5}')
    assert folder.holds_run()
    assert folder.read_config() == '{"name": "é", "public": null, "beta": 0.5}'
    folder.config_path.unlink()
    folder.save_checkpoint(1, {"round": 1})
    assert folder.holds_run()


def test_a_config_that_cannot_be_read_is_one_line(folder):
    folder.config_path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot read .*config.json"):
        folder.read_config()


def test_the_last_two_checkpoints_are_kept(folder, warnings):
    for round in (1, 2, 3, 9_999, 10_000):
        path = folder.save_checkpoint(round, {"round": round}, {"scheme": "fedhkd"})
        assert load_tree(path) == {"round": round}
    assert rounds(folder) == [10_000, 9_999]
    assert folder.newest_good_checkpoint() == (10_000, {"round": 10_000})
    assert warnings == []


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(folder, warnings):
    assert folder.newest_good_checkpoint() is None
    for round in (1, 2):
        folder.save_checkpoint(round, {"round": round})
    damage(folder.checkpoint_path(2))
    assert folder.newest_good_checkpoint() == (1, {"round": 1})
    assert warnings == [
        f"checkpoint skipped: {folder.checkpoint_path(2)}: it is damaged: its bytes do not match its checksum"
    ]
    damage(folder.checkpoint_path(1))
    assert folder.newest_good_checkpoint() is None
    assert folder.newest_good_path() is None


def test_only_good_checkpoints_count_as_kept(folder):
    for round in (1, 2):
        folder.save_checkpoint(round, {"round": round})
    damage(folder.checkpoint_path(2))
    folder.save_checkpoint(3, {"round": 3})
    assert rounds(folder) == [3, 1]
    damage(folder.checkpoint_path(1))
    damage(folder.checkpoint_path(3))
    folder.save_checkpoint(4, {"round": 4})
    assert rounds(folder) == [4, 3, 1]  # one good one: nothing is removed on its account
    folder.save_checkpoint(5, {"round": 5})
    assert rounds(folder) == [5, 4]


def test_what_was_saved_last_is_not_read_again(folder, monkeypatch):
    """It was read back when it was written; what another process may have changed is read."""
    read = []

    def opened(path):
        read.append(path.name)
        return open_tree(path)

    monkeypatch.setattr("hkd_hpc.store.folder.open_tree", opened)
    for round in (1, 2, 3):
        folder.save_checkpoint(round, {"round": round})
    assert (rounds(folder), read) == ([3, 2], [])
    RunFolder(folder.path).save_checkpoint(4, {"round": 4})
    assert (rounds(folder), read) == ([4, 3], ["round_0003.h5"])


def test_rounds_begun_are_counted_beside_a_line_that_was_cut_off(folder):
    for begun, written in (([3, 3], b"3\n3\n"), ([4], b"4\n1"), ([], b"")):  # of 12: a killed process got no farther
        folder.begun_path.write_bytes(written)
        folder.record_begun(1)
        folder.record_begun(2)
        cut_off = [1] * written.endswith(b"1")  # it counts, for it may have been
        assert folder.rounds_begun() == Counter([*begun, *cut_off, 1, 2])


def test_a_checkpoint_that_cannot_be_written_leaves_the_older_ones(folder):
    folder.save_checkpoint(1, {"round": 1})
    with pytest.raises(TypeError, match="scheme/state"):
        folder.save_checkpoint(2, {"scheme": {"state": None}})
    assert rounds(folder) == [1]
    assert os.listdir(folder.checkpoint_folder) == ["round_0001.h5"]


def test_clean_removes_only_temporary_files(folder):
    folder.write_config("{}")
    folder.save_checkpoint(1, {"round": 1})
    ours = [
        folder.path / ".metrics.h5.1234.tmp",
        folder.path / ".config.json.1.tmp",
        folder.path / ".status.json.0f1e2d3c4b5a6978.tmp",
        folder.checkpoint_folder / ".round_0002.h5.99.tmp",
        folder.path / ".run.lock.0123456789abcdef",
    ]
    others = [
        folder.path / "run.lock",
        folder.path / "notes.tmp",
        folder.path / ".hidden",
        folder.checkpoint_folder / "round_x.h5",
    ]
    for path in ours + others:
        path.write_text("x")
    folder.clean()
    assert [path.exists() for path in ours] == [False] * 5
    assert [path.exists() for path in others] == [True] * 4
    assert rounds(folder) == [1]
    assert folder.read_config() == "{}"
    RunFolder(folder.path / "none").clean()


@pytest.mark.parametrize("in_the_way", ["a", "a/b", "a/b/checkpoints"])
def test_a_file_in_the_way_is_a_usage_error(tmp_path, in_the_way):
    (tmp_path / in_the_way).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / in_the_way).write_text("x")
    with pytest.raises(UsageError) as rejected:
        RunFolder(tmp_path / "a" / "b").create()
    assert str(rejected.value) == (
        f"--out {tmp_path}/a/b: a file is in the way ({tmp_path / in_the_way}); name a folder, or one that is new"
    )


def test_a_folder_that_cannot_be_made_is_a_usage_error():
    with pytest.raises(UsageError, match="--out /proc/none/a: .*; name a folder that can be made and written to"):
        RunFolder("/proc/none/a").create()


def test_a_folder_that_cannot_be_written_to_is_a_usage_error(tmp_path):
    """In a child that is an ordinary user, since root may write anywhere."""
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "a").chmod(0o555)
    (tmp_path / "a" / "checkpoints").chmod(0o555)
    tmp_path.chmod(0o755)
    child = os.fork()
    if child == 0:
        os._exit(create_as_ordinary_user(tmp_path))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    (tmp_path / "a").chmod(0o755)
    (tmp_path / "a" / "checkpoints").chmod(0o755)


def create_as_ordinary_user(parent) -> int:
    os.chdir(parent)
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)
    try:
        RunFolder("a").create()
    except UsageError as rejected:
        return 42 if str(rejected).startswith("--out a: Permission denied (a/.probe.") else 43
    return 44


# ---- a finished run keeps its final weights

STATE = {
    "client_states": {"0": {"previous": np.arange(6, dtype=np.float32)}},
    "message": {"counters": np.zeros(1, np.int64)},
    "server": {},
    "partition": {"sha256": "ab"},
    "rounds": {"round": np.array([1, 2])},
}


def test_rows_of_an_earlier_version_lack_new_columns():
    """Two of them, then one of this version: NaN and empty texts."""
    earlier = {"round": np.array([1, 2, 3])}
    later = {"round": np.array([3]), "n": np.array([7]), "why": np.array(["none"], object), "by": np.ones((1, 2))}
    found = joined(earlier, later, 2)
    assert found["round"].tolist() == [1, 2, 3]
    assert found["why"].tolist() == ["", "", "none"]
    np.testing.assert_array_equal(found["n"], [np.nan, np.nan, 7])
    np.testing.assert_array_equal(found["by"], [[np.nan] * 2, [np.nan] * 2, [1, 1]])


def final(round):
    return {
        "config_json": "{}",
        "versions_json": "{}",
        "image_shape": np.array([3, 32, 32]),
        "round": round,
        "global": {"w": np.full(3, round, np.float32)},
        "global_names": np.array(["w"]),
    }


def finished(folder):
    for round in (1, 2):
        folder.save_checkpoint(round, {**final(round), **STATE})
    save_tree(folder.metrics_path, {"rounds": {"round": np.array([1, 2])}, "summary": {"x": 1.0}})


def test_a_finished_run_keeps_the_last_model_alone(folder):
    finished(folder)
    for _ in range(2):  # again: nothing changes
        assert folder.keep_final_weights()
        assert rounds(folder) == [2]
        round, tree = folder.newest_good_checkpoint()
        assert round == tree["round"] == 2
        assert set(tree) == set(final(2))
        assert tree["global"]["w"].tolist() == [2, 2, 2]
    assert os.listdir(folder.checkpoint_folder) == ["round_0002.h5"]


def test_a_run_that_is_not_complete_keeps_everything(folder, warnings):
    finished(folder)
    save_tree(folder.metrics_path, {"rounds": {"round": np.array([1, 2])}})
    assert not folder.keep_final_weights()
    finished(folder)
    damage(folder.checkpoint_path(2))  # the last model is lost; the state of round 1 can still give it
    assert not folder.keep_final_weights()
    assert rounds(folder) == [2, 1]
    assert set(load_tree(folder.checkpoint_path(1))) == {*final(1), *STATE}


@pytest.mark.parametrize(
    "step",
    [
        "hkd_hpc.store.tree._write_checksum",
        "hkd_hpc.store.tree.verify",
        "hkd_hpc.store.atomic.os.replace",
        "hkd_hpc.store.folder.RunFolder._remove",
    ],
)
def test_killed_in_the_middle_the_last_round_is_there_and_the_same_again_ends_it(folder, monkeypatch, step):
    finished(folder)
    with monkeypatch.context() as patch:
        patch.setattr(step, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            folder.keep_final_weights()
    round, tree = folder.newest_good_checkpoint()
    assert round == 2
    assert tree["global"]["w"].tolist() == [2, 2, 2]
    assert ("client_states" in tree) is not step.endswith("_remove")
    folder.clean()
    assert folder.keep_final_weights()
    assert os.listdir(folder.checkpoint_folder) == ["round_0002.h5"]
