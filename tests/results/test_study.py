"""Runs of a folder together: their table, by hand."""

from __future__ import annotations

import json
import sys

import pytest

import hkd_hpc
from hkd_hpc import config, results
from hkd_hpc.common.errors import UsageError
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.tree import save_tree


def write(folder, local: float, *settings: str, complete: bool = True, content: str = "") -> None:
    """A run with a summary, perhaps the hash of its data, and nothing else."""
    folder.mkdir(parents=True)
    text = config.resolve(overrides=settings).to_json()
    RunFolder(folder).write_config(text)
    summary = {"local_test_accuracy_last": local} if complete else {}
    identity = {"identity_json": json.dumps({"data.content": content})} if content else {}
    tree = {"config_json": text, "rounds": {}, "clients": {}, "summary": summary, **identity}
    save_tree(folder / "metrics.h5", tree)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two schemes, of which one with two values of mu, on three seeds; one run is not complete, one is broken."""
    root = tmp_path_factory.mktemp("study")
    for seed, local in enumerate((0.5, 0.6, 0.7)):
        write(root / f"fedavg-{seed}", local, "scheme.name=fedavg", f"run.seed={seed}")
        write(root / f"prox-a-{seed}", local + 0.1, "scheme.name=fedprox", "scheme.mu=0.5", f"run.seed={seed}")
    write(root / "prox-b-0", 0.9, "scheme.name=fedprox", "scheme.mu=0.25", "run.seed=0")
    write(root / "prox-b-1", 0.0, "scheme.name=fedprox", "scheme.mu=0.25", "run.seed=1", complete=False)
    (root / "damaged").mkdir()
    (root / "damaged/metrics.h5").write_bytes(b"no HDF5")
    return root


# Student's t of 2 degrees of freedom is 4.303 at 97.5 %; the standard deviation of .5 .6 .7 is .1: 4.303 * .1 / 3 ** .5
MARKDOWN = """\
| scheme | scheme.mu | local |
| --- | --- | --- |
| fedavg |  | 0.600 ± 0.248 (3) |
| fedprox | 0.5 | 0.700 ± 0.248 (3) |
| fedprox | 0.25 | 0.900 (1) |"""


def test_the_text_is_markdown_with_a_line_for_each_broken_run(root):
    lines = str(hkd_hpc.load_study(root)).splitlines()
    assert lines[:2] == ["7 of 9 runs are complete", ""]
    assert "\n".join(lines[2:7]) == MARKDOWN
    assert lines[7:] == [f"not in the table: {root}/damaged/metrics.h5: it is not an HDF5 file"]


def test_the_table_is_a_pandas_frame_of_numbers(root):
    pytest.importorskip("pandas")
    frame = hkd_hpc.load_study(root).table()
    assert list(frame.columns) == ["scheme", "scheme.mu", "seeds", "local", "local ±"]
    assert frame["local"].tolist() == [0.6, 0.7, 0.9]
    assert frame["local ±"].round(3).fillna(-1).tolist() == [0.248, 0.248, -1]
    assert frame["seeds"].tolist() == [3, 3, 1]


def test_a_setting_that_is_empty_is_text_in_the_frame(tmp_path):
    pytest.importorskip("pandas")
    write(tmp_path / "a", 0.5, "model.names=")
    write(tmp_path / "b", float("nan"), "model.names=small,resnet18")
    frame = hkd_hpc.load_study(tmp_path).table()
    assert frame["model.names"].tolist() == ["", "small,resnet18"]
    assert frame["local"].fillna(-1).tolist() == [0.5, -1]
    assert frame["seeds"].tolist() == [1, 0]


def test_without_pandas_it_is_a_table_whose_text_is_markdown(root, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert str(hkd_hpc.load_study(root).table()) == MARKDOWN


def test_what_differs_between_schemes_is_told(tmp_path):
    write(tmp_path / "a", 0.5, "scheme.name=fedavg", "data.beta=0.5")
    write(tmp_path / "b", 0.7, "scheme.name=fedprox", "scheme.mu=0.5", "data.beta=0.2")
    assert str(hkd_hpc.load_study(tmp_path)).splitlines()[2:] == [
        "| scheme | data.beta | local |",
        "| --- | --- | --- |",
        "| fedavg | 0.5 | 0.500 (1) |",
        "| fedprox | 0.2 | 0.700 (1) |",
    ]


def test_two_runs_of_one_seed_are_one_seed(tmp_path):
    """t(.975, 1) = 12.706, times the standard deviation of .2 and .3, .0707, by sqrt(2)."""
    for name, local, seed in (("a", 0.2, 0), ("b", 0.25, 0), ("c", 0.3, 1)):
        write(tmp_path / name, local, f"run.seed={seed}", f"run.checkpoint_every={ord(name)}")
    lines = str(hkd_hpc.load_study(tmp_path)).splitlines()
    assert lines[2:5] == ["| scheme | local |", "| --- | --- |", "| fedhkd | 0.250 ± 0.635 (2) |"]
    assert lines[5:] == [
        f"not in the table: {tmp_path}/b: has the settings and the seed 0 of {tmp_path}/a, which is counted"
    ]


def test_no_mean_is_over_runs_of_different_data(tmp_path):
    """Of one name: seed 1 of fedavg had other images; a copy that does not count is asked for nothing."""
    for name, scheme, seed, content in (
        ("a", "fedavg", 0, "ab"),
        ("b", "fedavg", 1, "cd"),
        ("c", "fedprox", 0, "ab"),
        ("d", "fedprox", 1, "ab"),
        ("e", "fedprox", 1, "cd"),
    ):
        write(tmp_path / name, 0.5, f"scheme.name={scheme}", f"run.seed={seed}", content=content * 32)
    lines = str(hkd_hpc.load_study(tmp_path)).splitlines()
    assert lines[4:6] == ["| fedavg | – |", "| fedprox | 0.500 ± 0.000 (2) |"]
    assert lines[6:] == [
        f"not in the table: {tmp_path}/e: has the settings and the seed 1 of {tmp_path}/d, which is counted",
        f"not in the table: runs differ in data.content: abababab in {tmp_path}/a, cdcdcdcd in {tmp_path}/b; they "
        "cannot be compared; put the data back, remove the folders of one kind and run them again",
    ]


def test_a_notebook_shows_it_as_html(root):
    shown = hkd_hpc.load_study(root)._repr_html_()
    assert "<p>7 of 9 runs are complete</p>" in shown
    assert shown.count("<tr>") == 4
    assert "0.600 ± 0.248 (3)" in shown


def test_its_runs(root):
    found = {run.path.name: run.state for run in hkd_hpc.load_study(root).runs}
    assert (found["fedavg-0"], found["prox-b-1"], found["damaged"]) == ("complete", "stopped", "broken")


def test_a_folder_of_studies_is_a_study_of_all_their_runs(tmp_path):
    for study in "ab":
        write(tmp_path / study / "one", 0.5)
    assert [run.path.parent.name for run in hkd_hpc.load_study(tmp_path).runs] == ["a", "b"]


def test_a_file_that_is_none_of_metrics_is_one_line(root, tmp_path):
    (tmp_path / "x.txt").write_text("no run")
    with pytest.raises(UsageError, match=r"x\.txt: it is not an HDF5 file$"):
        hkd_hpc.load_study(tmp_path / "x.txt")
    assert len(hkd_hpc.load_study(root / "fedavg-0/metrics.h5").runs) == 1


def test_a_folder_without_runs_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="holds no run, nor does any folder below it"):
        hkd_hpc.load_study(tmp_path)
    assert results.find_runs(tmp_path) == []


def test_a_run_behind_a_link_counts_once(tmp_path):
    write(tmp_path / "elsewhere/one", 0.5)
    write(tmp_path / "study/two", 0.6)
    (tmp_path / "study/linked").symlink_to(tmp_path / "elsewhere/one")
    (tmp_path / "study/again").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "study/loop").symlink_to(tmp_path / "study")
    assert [run.path.name for run in results.find_runs(tmp_path / "study")] == ["one", "two"]
