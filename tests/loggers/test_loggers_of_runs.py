"""Loggers of real runs: the same bits with and without, each round once after a kill, exports, the example."""

from __future__ import annotations

import csv
import json
import re
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import toy

from hkd_hpc import export
from hkd_hpc.store.tree import load_tree, save_tree
from tools.synthetic_runs import write_run

ROOT = toy.PROJECT
EXAMPLE = ROOT / "examples/my_logger.py"
MINE = "examples.my_logger:MyLogger"
ALL = "run.loggers=csv,jsonl,tensorboard,broken:Leaves,"
BROKEN = """
import sys

class Leaves:
    def __init__(self, folder, after_round):
        pass

    def log_round(self, round, values):
        sys.exit("enough")
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture(scope="module", autouse=True)
def importable(tmp_path_factory):
    """A logger that leaves the process, and the example, as when the command is given in the project's folder."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "broken.py").write_text(BROKEN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.syspath_prepend(str(ROOT))
        yield


def arguments(data: Path, *more: str) -> list[str]:
    return toy.settings(data, "fed.rounds=4", *more)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, data):
    """A run without loggers."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    toy.train_ok(1, *arguments(data), "--out", folder)
    return folder


@pytest.fixture(scope="module")
def logged(tmp_path_factory, data):
    """Killed after round 3 was told, resumed from round 2 on two ranks, with all loggers. Its folder, what it said."""
    folder = tmp_path_factory.mktemp("logged") / "run"

    def kill_in_round_4(rank):
        toy.note_pid(folder.parent / "pids", 1)
        toy.on_place(4, "training", lambda: toy.kill_all(folder.parent / "pids"))

    every_two = "run.checkpoint_every=2"
    (killed,) = toy.train(1, *arguments(data, ALL + MINE, every_two), "--out", folder, patch=kill_in_round_4)
    assert killed.signal == signal.SIGKILL
    assert len((folder / "loggers/rounds.jsonl").read_text().splitlines()) == 3
    return folder, toy.train_ok(2, "--resume", "--out", folder)[0]


def test_the_bits_are_those_of_a_run_without_loggers(plain, logged):
    assert toy.rows(logged[0]) == toy.rows(plain)


def test_a_logger_that_leaves_is_told_once(logged):
    told = [line for line in logged[1].splitlines() if "run.loggers" in line]
    assert len(told) == 1
    assert "broken.py:9, in log_round" in told[0]
    assert "failed with SystemExit: enough; the run goes on without it" in told[0]


def test_each_round_is_there_once_with_the_numbers_of_metrics_h5(logged):
    stored = toy.metrics(logged[0])
    lines = [json.loads(line) for line in (logged[0] / "loggers/rounds.jsonl").read_text().splitlines()]
    with open(logged[0] / "loggers/rounds.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [line["round"] for line in lines] == [int(row["round"]) for row in table] == [1, 2, 3, 4]
    rounds = {name[7:]: array for name, array in stored.items() if name.startswith("rounds/")}
    numeric = {name for name, array in rounds.items() if array.dtype.kind in "if" and array.ndim == 1}
    assert set(lines[0]) == set(table[0]) == numeric
    for column in ("global_test_accuracy", "loss/cross_entropy", "wall_s", "train_n"):
        assert [line[column] for line in lines] == stored[f"rounds/{column}"].tolist()
        assert [float(row[column]) for row in table] == stored[f"rounds/{column}"].tolist()


def test_tensorboard_shows_each_round_once(logged):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logged[0] / "loggers")).Reload().Scalars("local_test_accuracy")
    assert [event.step for event in events] == [1, 2, 3, 4]
    assert [event.value for event in events] == pytest.approx(toy.metrics(logged[0])["rounds/local_test_accuracy"])


def test_a_name_that_is_none_ends_before_anything_is_made(data, tmp_path):
    (result,) = toy.train(1, *arguments(data, "run.loggers=csvv"), "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert toy.our_lines([result.output]) == ["hkd_hpc: run.loggers=csvv: no such logger; did you mean csv?"]
    (result,) = toy.train(1, *arguments(data, "run.loggers=broken:Stays"), "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert toy.our_lines([result.output]) == ["hkd_hpc: run.loggers=broken:Stays: module broken has no Stays"]
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_may_have_other_loggers_which_get_all_rounds(data, tmp_path, plain):
    folder = tmp_path / "run"
    toy.train_ok(1, *arguments(data, "fed.rounds=3"), "--out", folder)
    toy.train_ok(1, "--resume", "--allow-change", "fed.rounds=4", "run.loggers=csv", "--out", folder)
    assert toy.last_sha(folder) == toy.last_sha(plain)
    assert len((folder / "loggers/rounds.csv").read_text().splitlines()) == 1 + 4
    assert toy.metrics(folder)["changes_json"] == '[{"after_round": 3, "fed.rounds": [3, 4]}]'


# ---- the example


def test_the_example_is_printed_whole():
    assert f"```python\n{EXAMPLE.read_text()}```" in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_example_notes_the_rounds_that_are_better_than_all_before(logged):
    best, expected = 0.0, []
    for round, accuracy in enumerate(toy.metrics(logged[0])["rounds/global_test_accuracy"], start=1):
        if accuracy > best:
            best = accuracy
            expected.append(f"round {round} global {accuracy:.4f}")
    assert (logged[0] / "loggers/best.txt").read_text().splitlines() == expected


# ---- afterwards


def without_seconds(path: Path) -> list[dict[str, str]]:
    """The rows of a table; a resumed run does not know how long the last test before it took."""
    with open(path, newline="") as file:
        return [{name: text for name, text in row.items() if name[:7] != "seconds"} for row in csv.DictReader(file)]


def test_an_export_is_what_the_loggers_write(logged, tmp_path, capsys):
    assert export.main([str(logged[0]), "--csv", str(tmp_path / "csv"), "--tensorboard", str(tmp_path / "tb")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/csv: 4 rounds\n{tmp_path}/tb: 4 rounds\n"
    exported, own = tmp_path / "csv/rounds.csv", logged[0] / "loggers/rounds.csv"
    assert without_seconds(exported) == without_seconds(own)
    assert exported.read_text().splitlines()[0] == own.read_text().splitlines()[0]
    assert exported.read_text().startswith("round,wall_s,local_test_accuracy,")
    assert len(list((tmp_path / "tb").glob("events.out.tfevents.*"))) == 1


@pytest.mark.parametrize("option, first", [("--csv", "rounds.csv"), ("--tensorboard", "events.out.tfevents.1.other")])
def test_an_export_is_written_over_by_force_alone(logged, tmp_path, capsys, option, first):
    (tmp_path / first).write_text("of another run")
    assert export.main([str(logged[0]), option, str(tmp_path)]) == 2
    told = f"{option} {tmp_path}/{first}: is there already; name another folder, or add --force to write over it"
    assert capsys.readouterr() == ("", f"hkd_hpc: {told}\n")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of another run"]
    assert export.main([str(logged[0]), option, str(tmp_path), "--force"]) == 0
    assert b"of another run" not in [path.read_bytes() for path in tmp_path.iterdir()]


def test_all_that_force_would_write_over_is_counted(logged, tmp_path, capsys):
    for name in ("rounds.csv", "clients.csv"):
        (tmp_path / name).write_text("of another run")
    assert export.main([str(logged[0]), "--csv", str(tmp_path)]) == 2
    told = "is there already, and 1 more; name another folder, or add --force to write over them"
    assert capsys.readouterr().err == f"hkd_hpc: --csv {tmp_path}/rounds.csv: {told}\n"


@pytest.mark.parametrize("option", ["--csv", "--tensorboard"])
def test_an_export_that_finds_the_disk_full_is_one_line_and_leaves_no_file(logged, tmp_path, capsys, option):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        code = export.main([str(logged[0]), option, str(tmp_path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(
        rf"hkd_hpc: cannot write {tmp_path}/\S+: File too large; no file was left behind\n", printed.err
    )
    assert list(tmp_path.iterdir()) == []


def test_the_clients_table_has_a_line_for_each_round_and_client(logged, tmp_path):
    assert export.main([str(logged[0]), "--csv", str(tmp_path)]) == 0
    with open(tmp_path / "clients.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["round"], row["client"]) for row in table] == [
        (str(r), str(c)) for r in (1, 2, 3, 4) for c in range(3)
    ]
    stored = toy.metrics(logged[0])["clients/train_n"].reshape(-1).tolist()
    assert [float(row["train_n"]) for row in table] == stored


def test_the_clients_table_has_infinity_and_names_of_kinds(tmp_path):
    overrides, mu_RMK = ["fed.clients=2", "fed.rounds=1"], np.array([[[0.5, np.inf, *[0] * 5], [np.nan] * 7]])
    run = write_run(tmp_path / "run", overrides, [0.1], [0.1], summary={})
    tree = load_tree(run / "metrics.h5")
    tree["clients"]["privacy_mu_whole"] = mu_RMK
    save_tree(run / "metrics.h5", tree)
    (tmp_path / "csv").mkdir()
    assert export.main([str(run), "--csv", str(tmp_path / "csv")]) == 0
    with open(tmp_path / "csv/clients.csv", newline="") as file:
        one, other = csv.DictReader(file)
    kinds = ("features", "predictions", "counts")
    assert [one[f"privacy_mu_whole/{kind}"] for kind in kinds] == ["0.5", "inf", "0.0"]
    assert other["privacy_mu_whole/features"] == ""


@pytest.mark.parametrize(
    "more, message",
    [
        ([], "nothing to export; say what with --out FILE.pt, --csv DIR or --tensorboard DIR"),
        (
            ["--csv", "x", "--client", "0"],
            "--client and --architecture say which model; name its file with --out FILE.pt",
        ),
        (["--csv", "x"], "/none: cannot be read (No such file or directory)"),
    ],
)
def test_an_export_that_cannot_be_is_one_line(more, message, capsys):
    assert export.main(["/none", *more]) == 2
    assert capsys.readouterr() == ("", f"hkd_hpc: {message}\n")
