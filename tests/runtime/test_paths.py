"""Names of files with ~ and $VARIABLES, wherever one is read: expanded, or rejected before anything is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import toy

from hkd_hpc import check, compare, config
from hkd_hpc.commands.data import main as data_main
from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import command_line
from hkd_hpc.doctor.__main__ import parse as parse_doctor
from hkd_hpc.export import main as export_main
from hkd_hpc.jobs import launcher, load_study
from hkd_hpc.jobs.__main__ import main as jobs_main
from hkd_hpc.jobs.site import Site
from hkd_hpc.report.__main__ import main as report_main
from hkd_hpc.results import load
from hkd_hpc.runtime.paths import expanded
from jobs import Study, Sweep
from tools.synthetic_runs import write_run


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty home folder; the working folder is another one."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PLACE", "a b")
    monkeypatch.delenv("NO_SUCH", raising=False)
    return tmp_path / "home"


def test_what_is_expanded_and_what_is_not(home):
    assert [
        expanded(text, "")
        for text in ("~/x", "$HOME/x", "${HOME}/$PLACE/x", "~", "x/~/y", "./~", "a$", "$(x)", "é $PLACE", "")
    ] == [f"{home}/x", f"{home}/x", f"{home}/a b/x", str(home), "x/~/y", "./~", "a$", "$(x)", "é a b", ""]


@pytest.mark.parametrize(
    "text, part",
    [
        ("$NO_SUCH/x", "--out $NO_SUCH/x: the variable NO_SUCH is not set"),
        ("~/${NO_SUCH}", "the variable NO_SUCH is not set"),
        ("~nobody_of_that_name/x", "no home folder of ~nobody_of_that_name is known"),
    ],
)
def test_what_means_nothing_is_rejected(text, part):
    with pytest.raises(UsageError) as error:
        expanded(text, "--out ")
    assert part in str(error.value)


def test_an_empty_variable_is_not_the_root_folder(monkeypatch):
    monkeypatch.setenv("NO_SUCH", "")
    with pytest.raises(UsageError, match="NO_SUCH is not set"):
        expanded("$NO_SUCH/x", "")


def test_a_dollar_in_the_name_of_a_folder_that_is_there_stays(home):
    (home / "a$b").mkdir()
    assert expanded(f"{home}/a$b/new", "") == f"{home}/a$b/new"
    with pytest.raises(UsageError, match="is not set"):
        expanded(f"{home}/a$b/$c", "")


def test_settings_of_all_sources_and_the_run_folder(home):
    (home / "own.toml").write_text('[data]\nname = "file"\npath = "~/x.npz"\n')
    request = command_line.parse(["--config", "~/own.toml", "--out", "~/run", "data.dir=$HOME/$PLACE"])
    assert request.out == home / "run"
    assert (request.config.data.path, request.config.data.dir) == (f"{home}/x.npz", f"{home}/a b")
    [trial], _ = Sweep(scheme=["fedavg"], settings={"data.name": "file", "data.path": "~/x.npz"}).trials()
    assert trial.settings["data.path"] == f"{home}/x.npz"
    assert config.resolve(overrides=trial.arguments()).data.path == f"{home}/x.npz"


def test_places_of_a_study(home):
    (home / "study.json").write_text('{"cells": [{"labels": {}, "settings": {}}]}')
    (home / "site.toml").write_text('account = "x"\n')
    (home / "spec.toml").write_text('[axes]\nscheme = ["fedavg"]\n')
    assert Study("~").root == launcher.root_at("$HOME") == home
    assert Site.read("~/site.toml").account == "x"
    assert len(Sweep.from_toml("$HOME/spec.toml").trials()[0]) == 1


WRONG = {  # the program, and its arguments
    "data": (data_main, ["prepare", "cifar10", "--dir", "BAD"]),
    "status": (jobs_main, ["status", "BAD"]),
    "site": (jobs_main, ["site", "BAD"]),
    "spec": (jobs_main, ["launch", "BAD", "--root", "r", "--executor", "debug"]),
    "root": (jobs_main, ["launch", "spec.toml", "--root", "BAD", "--executor", "debug"]),
    "root, dry": (jobs_main, ["launch", "spec.toml", "--root", "BAD", "--executor", "debug", "--dry-run"]),
    "launch data.path": (
        jobs_main,
        ["launch", "spec.toml", "--root", "r", "--executor", "debug", "data.name=file", "data.path=BAD"],
    ),
    "compare": (compare.main, ["study.toml", "--root", "BAD"]),
    "compare spec": (compare.main, ["BAD", "--root", "r"]),
    "compare data.dir": (compare.main, ["study.toml", "--root", "r", "data.name=cifar10", "data.dir=BAD"]),
    "check": (check.main, ["BAD"]),
    "repair": (check.main, [".", "--repair", "BAD"]),
    "export": (export_main, [".", "--out", "BAD"]),
    "export run": (export_main, ["BAD", "--out", "x.pt"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_every_program_rejects_in_one_line_and_makes_nothing(home, capsys, name):
    Path("spec.toml").write_text('[axes]\nscheme = ["fedavg"]\n')
    Path("study.toml").write_text('[study]\nschemes = ["fedavg"]\nseeds = [0]\n')
    program, arguments = WRONG[name]
    assert program([word.replace("BAD", "$NO_SUCH/x") for word in arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "$NO_SUCH/x: the variable NO_SUCH is not set" in line
    assert sorted(os.listdir()) == ["spec.toml", "study.toml"]
    assert os.listdir(home) == []


EMPTY = {  # the program, and its arguments, with an option of an unset variable
    "report": (report_main, [""], "a path"),
    "report --out": (report_main, [".", "--out", ""], "--out"),
    "report --figures": (report_main, [".", "--figures", ""], "--figures"),
    "report --follow": (report_main, ["", "--follow"], "a path"),
    "check": (check.main, [""], "argument run"),
    "export": (export_main, ["", "--csv", "x"], "argument run"),
    "export --out": (export_main, [".", "--out", ""], "argument --out"),
    "export --csv": (export_main, [".", "--csv", ""], "argument --csv"),
    "export --tensorboard": (export_main, [".", "--tensorboard", ""], "argument --tensorboard"),
    "compare": (compare.main, ["study.toml", "--root", ""], "--root"),
    "status": (jobs_main, ["status", ""], "a path"),
    "launch": (jobs_main, ["launch", "spec.toml", "--root", "", "--executor", "debug"], "--root"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_path_is_not_the_current_folder(home, capsys, name):
    Path("spec.toml").write_text('[axes]\nscheme = ["fedavg"]\n')
    write_run(Path("run"), [], [0.5], [0.5])
    program, arguments, option = EMPTY[name]
    assert program(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hkd_hpc: {option}: is empty; name a file or a folder")
    assert sorted(os.listdir()) == ["run", "spec.toml"]


@pytest.mark.parametrize("call", [load, load_study, parse_doctor])
def test_an_empty_path_from_python(home, call):
    with pytest.raises(UsageError, match="is empty; name a file or a folder"):
        call(["--out", ""] if call is parse_doctor else "")


@pytest.mark.parametrize(
    "arguments",
    [["--out=$NO_SUCH/x"], ["--config=$NO_SUCH/x"], ["data.dir=$NO_SUCH/x"], ["--resume", "--out", "$NO_SUCH/x"]],
)
def test_training_rejects_before_torch(tmp_path, arguments):
    env = toy.write_module(tmp_path, "torch", 'raise SystemExit("torch was imported")\n')
    paths = os.pathsep.join([env["PYTHONPATH"], str(toy.PROJECT)])
    ran = subprocess.run(
        [sys.executable, "-m", "hkd_hpc.train", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=300,
    )
    assert ran.returncode == 2
    assert "$NO_SUCH/x: the variable NO_SUCH is not set" in ran.stderr
    assert os.listdir() == []
