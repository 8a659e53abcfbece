"""What is installed: a wheel has all that the README and the messages name, and works where there is no clone."""

from __future__ import annotations

import ast
import email
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

pytestmark = pytest.mark.slow

BROUGHT = re.compile(r"\b(?:docs|slurm|examples)/[\w/]+\.\w+")  # files that `hkd docs|slurm|examples copy DIR` copies
TINY = ("fed.clients=2", "fed.rounds=1", "train.epochs=1", "data.fraction=0.01", "run.device=cpu")
COPIED = {"slurm": "doctor.sh", "docs": "data.md", "examples": "my_scheme.py", "specs": "table1.toml"}
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")  # to a file
LEFT_OUT = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: what setuptools leaves behind would be taken for part of the next one; and where Python takes
    texts for ASCII, as where LANG names a locale without UTF-8."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = shutil.copytree(toy.PROJECT, folder / "tree", symlinks=True, ignore=LEFT_OUT)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, tree]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, env={**os.environ, **ascii_only}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Run a module of the wheel, or its script `hkd`, from a folder that has no clone."""
    site, elsewhere = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(command, check=True)

    def run(*arguments: object) -> tuple[int, str]:
        first, *others = map(str, arguments)
        program = [str(site / "bin/hkd")] if first == "hkd" else [sys.executable, "-m", first]
        done = subprocess.run(
            [*program, *others],
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
    links = ("hkd_hpc/slurm", "hkd_hpc/docs", "hkd_hpc/examples")
    beside = re.compile(r"slurm/.*|tools/.*\.py|tools/study/data/.*|docs/(.*\.(md|png|svg)|hooks\.py)|examples/.*")
    wanted = {name for name in tracked.splitlines() if name.startswith("hkd_hpc/") and name not in links}
    wanted |= {f"hkd_hpc/{name}" for name in tracked.splitlines() if beside.fullmatch(name)}
    assert sorted(wanted - names) == []


def test_a_wheel_names_the_pythons_that_were_tried_from_the_oldest_on(wheel):
    file = zipfile.ZipFile(wheel)
    [name] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
    head = email.message_from_bytes(file.read(name))
    tried = [line.rpartition(" ")[2] for line in head.get_all("Classifier")]
    assert tried == ["3.10", "3.11", "3.12", "3.13"]
    assert (head["Version"], head["Requires-Python"]) == ("0.1.0", f">={tried[0]}")
    assert f"Python {', '.join(tried[:-1])} and {tried[-1]}" in (toy.PROJECT / "CONTRIBUTING.md").read_text()


def test_a_wheel_knows_its_revision_without_git(installed):
    code, text = installed("hkd_hpc", "--version")
    assert code == 0
    assert f"(revision sources-{package_sha256()[:12]}; python " in text


def test_files_that_messages_name_are_in_a_wheel_and_messages_say_how_to_get_them(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    texts, places = messages_of(toy.PROJECT / "hkd_hpc")
    assert [text for text in texts if BROUGHT.search(text) or "'.[" in text] == []
    assert len(places) >= 10
    for name, _, heading in (place.partition(", ") for place in places):
        assert f"hkd_hpc/{name}" in names
        assert not heading or f"# {heading}\n" in (toy.PROJECT / name).read_text()


def messages_of(root: Path) -> tuple[list[str], list[str]]:
    """All texts of the code but docstrings and what `obtainable` is given; and that."""
    sources = [path.read_text() for path in sorted(root.rglob("*.py"))]
    nodes = [node for text in sources if BROUGHT.search(text) or "'.[" in text for node in ast.walk(ast.parse(text))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "obtainable"]
    places = [call.args[0] for call in calls]
    texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    others = [node.value for node in texts if id(node) not in docstrings | set(map(id, places))]
    return others, [place.value for place in places]


@pytest.fixture(scope="module")
def run(installed, tmp_path_factory) -> Path:
    """One of the wheel."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    code, text = installed("hkd", "train", "--out", folder, *TINY)
    assert code == 0, text
    return folder


def test_a_run_of_a_wheel_is_trained_checked_exported_and_shown(installed, run, tmp_path):
    model, page = tmp_path / "global.pt", tmp_path / "page.html"
    for command in (["check", run], ["export", run, "--out", model], ["report", run, "--out", page]):
        code, text = installed("hkd", *command)
        assert code == 0, text
    assert model.stat().st_size > 100_000
    assert "docs/report.md (hkd docs copy docs)" in page.read_text()


def test_a_sweep_of_a_wheel_ends_in_a_table(installed, tmp_path):
    spec, root = tmp_path / "spec.toml", tmp_path / "study"
    spec.write_text('[axes]\nscheme = ["fedavg"]\n')
    code, text = installed("hkd", "sweep", "launch", spec, "--executor", "debug", "--root", root, *TINY)
    assert code == 0, text
    assert "\n| fedavg | 0." in text


def test_what_a_wheel_brings_is_copied(installed, tmp_path):
    for kind, name in COPIED.items():
        code, text = installed("hkd", kind, "copy", tmp_path / kind)
        assert code == 0, text
        assert (tmp_path / kind / name).is_file()
    code, text = installed("hkd", "compare", tmp_path / "specs/study_gradients.toml", "--root", tmp_path / "runs")
    assert (code, text.count("\n")) == (2, 1)  # no data.path: one line
    assert "data" in text


def test_pages_that_a_wheel_copies_are_whole_and_lead_to_each_other(installed, tmp_path):
    code, text = installed("hkd", "docs", "copy", tmp_path)
    assert code == 0, text
    pages = {page.name: page.read_text() for page in tmp_path.glob("*.md")}
    assert "\n## Unreleased\n" in pages["changelog.md"]
    assert "# What is defended, and what is not" in pages["security.md"]
    assert "\n## Add your own scheme\n" in pages["extending.md"]
    assert "sbatch" in pages["clusters.md"]
    links = {(name, target) for name, text in pages.items() for target in LINK.findall(text)}
    assert [link for link in sorted(links) if not (tmp_path / link[1]).is_file()] == []


def test_tools_of_a_wheel_start(installed):
    for command in (["hkd_hpc.jobs", "--help"], ["hkd_hpc.tools.bench", "--help"], ["hkd_hpc", "data", "--help"]):
        code, text = installed(*command)
        assert code == 0, text
