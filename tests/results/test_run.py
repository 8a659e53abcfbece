"""Reading runs: what is there, how they stand, and what is wrong with broken ones."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import hkd_hpc
from hkd_hpc import config, results
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.results.frames import clients_table
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.growing import GrowingTree
from hkd_hpc.store.history import LAYOUT
from hkd_hpc.store.lock import LOCK_NAME, RunLock
from hkd_hpc.store.tree import Leaf, save_tree

SETTINGS = config.resolve(overrides=["scheme.name=fedhkd", "fed.rounds=3", "fed.clients=2", "data.beta=0.25"])
NAN = float("nan")
ROUNDS = {
    "round": np.array([1, 2, 3]),
    "local_test_accuracy": Leaf(np.array([0.5, 0.75, 1.0]), {"unit": "1", "model": "personalised"}),
    "loss": {"soft": np.array([3.0, 2.0, 1.0])},
    "right_by_class": np.array([[1, 2], [3, 4], [5, 6]]),
}
CLIENTS = {  # client 1 was not sampled in round 2
    "status": np.array([[0.0, 0.0], [0.0, NAN], [0.0, 7.0]]),
    "loss": {"soft": np.array([[1.0, 2.0], [3.0, NAN], [5.0, 6.0]])},
    "knowledge_classes": np.array([[[1, 0], [0, 1]], [[1, 1], [NAN, NAN]], [[0, 0], [1, 1]]], float),
    "rank": np.array([0, 0]),
    "name": np.array(["ann", "bob"]),
}
REST = {
    "config_json": SETTINGS.to_json(),
    "versions_json": json.dumps({"hkd_hpc": "0.1.0"}),
    "partition": {"train_count": np.array([[3, 1], [0, 4]])},
    "baselines": {"chance": 0.1},
}
SUMMARY = {"local_test_accuracy_last": 1.0}


def write(folder: Path, **more) -> Path:
    """A run's folder with a metrics file of three rounds; complete with `summary=SUMMARY`."""
    folder.mkdir(parents=True, exist_ok=True)
    RunFolder(folder).write_config(SETTINGS.to_json())
    save_tree(folder / "metrics.h5", {**REST, "rounds": ROUNDS, "clients": CLIENTS, **more})
    return folder


# ---- what is there


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return results.load(write(tmp_path_factory.mktemp("one"), summary=SUMMARY))


def test_columns_of_rounds_keep_their_slashes(run):
    assert list(run.round_columns) == ["local_test_accuracy", "loss/soft", "right_by_class", "round"]
    assert run.round_columns["loss/soft"].tolist() == [3.0, 2.0, 1.0]
    assert len(run) == 3


def test_columns_of_clients_are_those_that_a_round_has(run):
    assert {name: column.shape for name, column in run.client_columns.items()} == {
        "knowledge_classes": (3, 2, 2),
        "loss/soft": (3, 2),
        "status": (3, 2),
    }
    assert run.client_names == ["ann", "bob"]
    assert "rank" not in run.client_columns
    with pytest.raises(KeyError):
        run.client_columns["rank"]


def test_a_column_of_clients_is_read_when_it_is_asked_for(tmp_path):
    run = results.load(write(tmp_path))
    assert list(run.client_columns) == ["knowledge_classes", "loss/soft", "status"]
    assert run.client_columns["status"][2].tolist() == [0.0, 7.0]
    (tmp_path / "metrics.h5").unlink()
    assert run.client_columns["status"][2].tolist() == [0.0, 7.0]
    with pytest.raises(RunError, match=r"metrics\.h5: there is no such file"):
        run.client_columns["loss/soft"]


def test_settings_and_what_the_rows_come_from(run):
    assert run.settings["data.beta"] == 0.25
    assert run.config == SETTINGS
    assert run.summary == SUMMARY
    assert run.versions == {"hkd_hpc": "0.1.0"}
    assert run.partition["train_count"].tolist() == [[3, 1], [0, 4]]
    assert run.part("baselines") == {"chance": 0.1}
    assert run.attributes("local_test_accuracy") == {"unit": "1", "model": "personalised"}


def test_what_an_older_version_has_not_recorded_is_empty(run):
    assert (run.sessions, run.changes, run.identity, run.events) == ([], [], {}, {})
    assert run.attributes("noise_std") == {}
    assert run.part("world") == {}


def test_settings_of_a_scheme_that_is_not_here_are_told_all_the_same(tmp_path):
    stored = {"scheme": {"name": "gone:Scheme", "tau": 1.5}, "fed": {"rounds": 3}}
    run = results.load(write(tmp_path, config_json=json.dumps(stored), summary=SUMMARY))
    assert (run.state, run.settings["scheme.tau"]) == ("complete", 1.5)
    with pytest.raises(UsageError, match=r"scheme\.name=gone:Scheme"):
        run.config  # noqa: B018


def test_a_metrics_file_by_itself_is_a_run(tmp_path):
    write(tmp_path / "one", summary=SUMMARY)
    bare = tmp_path / "saved.h5"
    (tmp_path / "one/metrics.h5").rename(bare)
    run = results.load(bare)
    assert (run.state, len(run), run.settings["fed.rounds"]) == ("complete", 3, 3)
    assert [found.path for found in results.find_runs(bare)] == [bare]


def test_a_notebook_shows_what_it_is_and_how_it_stands(run, tmp_path):
    shown = run._repr_html_()
    assert '<th scope="row">state</th><td>complete, 3 of 3 rounds</td>' in shown
    assert '<th scope="row">local_test_accuracy</th><td>1.000</td>' in shown
    (tmp_path / "metrics.h5").write_bytes(b"<b>")
    assert f"<td>{tmp_path}/metrics.h5: it is not an HDF5 file</td>" in results.load(tmp_path)._repr_html_()


# ---- tables


def test_rounds_and_clients_are_pandas_frames(run):
    pytest.importorskip("pandas")
    assert list(run.rounds.columns) == [
        "round",
        "local_test_accuracy",
        "loss/soft",
        "right_by_class/0",
        "right_by_class/1",
    ]
    assert run.rounds["right_by_class/1"].tolist() == [2, 4, 6]
    assert run.clients[["round", "client", "name", "loss/soft"]].values.tolist() == [
        [1, 0, "ann", 1.0],
        [1, 1, "bob", 2.0],
        [2, 0, "ann", 3.0],
        [3, 0, "ann", 5.0],
        [3, 1, "bob", 6.0],
    ]
    assert run.clients["knowledge_classes/0"].tolist() == [1, 0, 1, 0, 1]


def test_a_frame_of_float16_prints_without_a_warning():
    """As the record has the classes that clients share."""
    pytest.importorskip("pandas")
    shared_RMC = np.array([[[1, 0, np.nan], [0, 1, 0]]], np.float16)
    frame = clients_table(np.array([1]), {"knowledge_classes": shared_RMC}, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "knowledge_classes/2" in str(frame)
    assert frame["knowledge_classes/0"].dtype == np.float32


def test_without_pandas_they_are_structured_arrays_with_the_same_columns(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = results.load(write(tmp_path))
    assert run.rounds.dtype.names[:3] == ("round", "local_test_accuracy", "loss/soft")
    assert run.rounds["round"].tolist() == [1, 2, 3]
    assert run.clients[["round", "client"]].tolist() == [(1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]


def test_tables_of_a_run_that_has_no_round_yet_are_empty(tmp_path):
    RunFolder(tmp_path).write_config(SETTINGS.to_json())
    run = results.load(tmp_path)
    assert (len(run.rounds), len(run.clients)) == (0, 0)


# ---- how it stands


def test_states(tmp_path):
    assert results.load(write(tmp_path / "complete", summary=SUMMARY)).state == "complete"
    assert results.load(write(tmp_path / "stopped", summary={})).state == "stopped"
    folder = write(tmp_path / "running")
    with RunLock(folder):
        assert results.load(folder).state == "running"
    assert results.load(folder).state == "stopped"


def test_a_run_on_another_host_runs_while_its_lock_is_touched(tmp_path):
    lock = write(tmp_path) / LOCK_NAME
    lock.write_text(json.dumps({"host": "elsewhere", "pid": 1, "pid_start": 1, "pid_space": "x", "token": "t"}))
    assert results.load(tmp_path).state == "running"
    os.utime(lock, (0, 0))
    assert results.load(tmp_path).state == "stopped"


def test_a_run_is_looked_at_while_its_rows_grow(tmp_path):
    RunFolder(tmp_path).write_config(SETTINGS.to_json())
    file = GrowingTree(tmp_path / "metrics.h5")
    table = lambda rows: {"rounds": {"round": np.arange(1, rows + 1)}, "clients": {"status": np.zeros((rows, 2))}}
    file.save(REST, lambda since: table(1))
    run = results.load(tmp_path)
    assert len(run) == 1
    file.save(REST, lambda since: {t: {k: v[since.get(t, 0) :] for k, v in c.items()} for t, c in table(2).items()})
    assert run.client_columns["status"].shape == (1, 2)  # of the same moment as the rounds
    assert len(results.load(tmp_path)) == 2


def test_half_a_file_is_a_broken_run_with_one_line(tmp_path):
    file = write(tmp_path) / "metrics.h5"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    run = results.load(tmp_path)
    assert run.state == "broken"
    assert run.problem.startswith(f"{file}: it is truncated: ")
    assert (len(run), dict(run.client_columns), run.summary, run.partition) == (0, {}, {}, {})
    assert run.settings["fed.rounds"] == 3  # of config.json
    with pytest.raises(RunError, match="it is truncated"):
        run.rounds  # noqa: B018


def test_a_layout_of_the_future_is_told(tmp_path):
    save_tree(write(tmp_path) / "metrics.h5", REST, {"layout_version": 99})
    run = results.load(tmp_path)
    assert run.problem == (
        f"{tmp_path}/metrics.h5: it was made by a newer version of hkd_hpc (layout 99; this one reads up to "
        f"{LAYOUT['layout_version']}); update hkd_hpc"
    )


@pytest.mark.parametrize("text", ["{", "[1]", '"text"', '{"fed": 3}', "\xff"])
def test_damaged_settings_are_a_problem(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    run = results.load(tmp_path)
    assert run.state == "broken"
    assert str(tmp_path) in run.problem
    assert "\n" not in run.problem


# ---- where they are


def test_runs_below_a_folder_in_the_order_of_their_names_broken_ones_too(tmp_path):
    for name in ("study/b", "study/a", "other/deep/c", ".hidden/d"):
        write(tmp_path / name)
    (tmp_path / "study/b/metrics.h5").write_bytes(b"no HDF5")
    (tmp_path / "study/log.txt").touch()
    found = results.find_runs(tmp_path)
    assert [str(run.path.relative_to(tmp_path)) for run in found] == ["other/deep/c", "study/a", "study/b"]
    assert [run.state for run in found] == ["stopped", "stopped", "broken"]


def test_what_holds_no_run_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"absent: cannot be read \(No such file or directory\)"):
        results.load(tmp_path / "absent")
    with pytest.raises(UsageError, match="holds no run"):
        results.load(tmp_path)
    write(tmp_path / "one")
    with pytest.raises(UsageError, match=r"holds 1 runs in its folders, the first is .*/one; name one"):
        results.load(tmp_path)
    assert results.find_runs(tmp_path / "one")[0].path == tmp_path / "one"


@pytest.mark.parametrize("path", [None, 3, b"x", ["x"]])
def test_what_is_no_path_is_one_line(path):
    for call in (hkd_hpc.load, hkd_hpc.load_study, results.find_runs, hkd_hpc.Study):
        with pytest.raises(UsageError) as raised:
            call(path)
        assert str(raised.value) == f"{path!r}: is no path; write it as text or as a pathlib.Path"
    with pytest.raises(UsageError, match="the sweep .*: is no path"):
        hkd_hpc.launch(path, root="x")
    with pytest.raises(UsageError, match="--root .*: is no path"):
        hkd_hpc.launch(hkd_hpc.Sweep(scheme=["fedavg"]), root=path)


# ---- figures


def test_a_figure_is_drawn_by_its_name_or_how_it_begins(tmp_path):
    pytest.importorskip("matplotlib")
    names = ("global_test_accuracy", "local_test_accuracy_worst_tenth")
    more = {name: np.array([0.25, 0.5, 0.75]) for name in names}
    run = results.load(write(tmp_path, rounds={**ROUNDS, **more}))
    plot = run.plot("accuracy_rounds")
    assert [0.5, 0.75, 1.0] in [series.y.tolist() for series in plot.figure.series]
    assert run.plot("accuracy").figure.name == "accuracy_rounds"
    assert plot._repr_png_().startswith(b"\x89PNG")


def test_a_figure_that_is_not_there_is_one_line(run, tmp_path):
    with pytest.raises(UsageError, match="acuracy: no such figure; there are accuracy_rounds, "):
        run.plot("acuracy")
    with pytest.raises(UsageError, match=r"not recorded .*rounds/global_test_accuracy"):
        run.plot("accuracy")
    RunFolder(tmp_path).write_config(SETTINGS.to_json())
    with pytest.raises(UsageError, match="no round is recorded yet"):
        results.load(tmp_path).plot()
