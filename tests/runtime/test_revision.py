"""The code's revision: what git says in a clone, a hash of the sources elsewhere, and never an error."""

from __future__ import annotations

import json
import subprocess

from hkd_hpc import train
from hkd_hpc.runtime import provenance, revision, versions


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_of_a_clone_it_is_what_git_describes(tmp_path, monkeypatch):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    commit = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/none")  # as in a hook of another repository
    assert revision.described(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert revision.described(tmp_path) == f"{commit}-dirty"


def test_a_folder_within_a_repository_is_not_that_repository(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "site-packages").mkdir()
    assert revision.described(tmp_path / "site-packages") == ""


def test_without_git_it_is_a_hash_of_the_sources(monkeypatch):
    monkeypatch.setenv("PATH", "/none")
    assert revision.revision() == f"sources-{revision.package_sha256()[:12]}"


def test_tools_in_a_package_do_not_count(tmp_path):
    (tmp_path / "a.py").write_text("x")
    alone = revision.sources_sha256(tmp_path)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/b.py").write_text("y")
    assert revision.sources_sha256(tmp_path, without=("tools",)) == alone
    assert revision.sources_sha256(tmp_path) != alone


def test_every_run_has_it_and_version_prints_it(capsys):
    assert versions.found()["revision"] == revision.revision()
    assert train.main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"hkd_hpc {versions.found()['hkd_hpc']} (revision {revision.revision()}; python ")


def test_another_revision_alone_is_no_change_of_a_run():
    before = {"versions_json": json.dumps({"revision": "one", "torch": "2.4"}), "identity_json": "{}"}
    now = before | {"versions_json": json.dumps({"revision": "two", "torch": "2.4"})}
    assert provenance.changes(provenance.from_record(before), provenance.from_record(now)) == {}
