"""What is installed: a wheel has all that the README and the messages name, and works where there is no clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import toy

from hkd_hpc.runtime.revision import package_sha256

LEFT_OUT = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__")
LINKS = ("hkd_hpc/slurm/", "hkd_hpc/jobs/specs/", "hkd_hpc/specs/", "hkd_hpc/tools/")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: what setuptools leaves behind would be taken for part of the next one."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = shutil.copytree(toy.PROJECT, folder / "tree", symlinks=True, ignore=LEFT_OUT)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, tree]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Run a module of the wheel, from a folder that has no clone."""
    site, elsewhere = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    zipfile.ZipFile(wheel).extractall(site)

    def run(*arguments: object) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", *map(str, arguments)],
            cwd=elsewhere,
            env={**os.environ, "PYTHONPATH": str(site)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    return run


def test_a_wheel_has_one_package_with_all_of_its_files(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"hkd_hpc"}
    tracked = subprocess.run(["git", "ls-files"], cwd=toy.PROJECT, capture_output=True, text=True, check=True).stdout
    wanted = {name for name in tracked.splitlines() if name.startswith("hkd_hpc/") and name != "hkd_hpc/slurm"}
    wanted |= {f"hkd_hpc/{name}" for name in tracked.splitlines() if name.startswith("slurm/")}
    wanted |= {f"hkd_hpc/{name}" for name in tracked.splitlines() if re.fullmatch(r"tools/.*\.py", name)}
    assert sorted(wanted - names) == []


def test_a_wheel_knows_its_revision_without_git(installed):
    code, text = installed("hkd_hpc", "--version")
    assert code == 0
    assert f"(revision sources-{package_sha256()[:12]}; python " in text


def test_a_run_of_a_wheel_is_trained_and_checked(installed, tmp_path):
    run = tmp_path / "run"
    settings = ("fed.clients=2", "fed.rounds=1", "train.epochs=1", "data.fraction=0.01", "run.device=cpu")
    code, text = installed("hkd_hpc", "train", "--out", run, *settings)
    assert code == 0, text
    code, text = installed("hkd_hpc", "check", run)
    assert code == 0, text


def test_commands_and_tools_of_a_wheel_start(installed, tmp_path):
    for command in (["hkd_hpc.jobs", "--help"], ["hkd_hpc.tools.bench", "--help"], ["hkd_hpc", "data", "--help"]):
        code, text = installed(*command)
        assert code == 0, text
    code, text = installed("hkd_hpc", "specs", "copy", tmp_path / "specs")
    assert code == 0, text
    code, text = installed("hkd_hpc", "compare", tmp_path / "specs/cifar10_smoke.toml", "--root", tmp_path / "runs")
    assert (code, text.count("\n")) == (2, 1)  # no data.path: one line
    assert "data" in text
