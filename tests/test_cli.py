"""`hkd` and its commands: each is its `python -m` form, and what is wrong is said in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import toy

from hkd_hpc import bundled, cli
from hkd_hpc.errors import UsageError


def run(*arguments: object, **env: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=toy.PROJECT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_help_has_a_line_for_each_command(capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("train", "data", "sweep", "compare", "check", "export", "slurm", "specs"):
        assert text.count(f"\n  {name} ") == 2


def test_an_unknown_command_is_told_once_in_a_job_with_the_nearest_name(capsys, monkeypatch):
    assert cli.main(["trian", "fed.rounds=1"]) == 2
    assert capsys.readouterr().err == "hkd: 'trian': no such command; did you mean train?\n"
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "command, module, arguments, code",
    [
        ("train", "hkd_hpc.train", ["fed.clients=0"], 2),
        ("train", "hkd_hpc.train", ["--help"], 0),
        ("data", "hkd_hpc.data", ["prepare", "cifar1"], 2),
        ("sweep", "jobs", ["status", "/none"], 2),
        ("check", "tools.check", ["/none"], 2),
        ("compare", "tools.compare", ["/none.toml", "--root", "/none"], 2),
        ("export", "hkd_hpc.export", ["/none", "--out", "x.pt"], 2),
    ],
)
def test_a_command_is_its_module(command, module, arguments, code):
    short, long = run("hkd_hpc", command, *arguments), run(module, *arguments)
    assert short == long
    assert short[0] == code


def test_help_imports_neither_torch_nor_mpi():
    code = "import sys; from hkd_hpc import cli; cli.main([]); print({'torch', 'mpi4py.MPI'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=toy.PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_scripts_and_specs_are_copied_and_never_overwritten(tmp_path, capsys):
    assert bundled.main(["slurm", "copy", str(tmp_path / "slurm")]) == 0
    assert str(tmp_path / "slurm/train.sh") in capsys.readouterr().out.splitlines()
    for name in ("common.sh", "rank.sh", "sites/plain.toml"):
        assert (tmp_path / "slurm" / name).read_bytes() == (toy.PROJECT / "slurm" / name).read_bytes()
    with pytest.raises(UsageError, match=r"README\.md: is there already; name another folder"):
        bundled.copy("slurm", tmp_path / "slurm")
    names = {path.name for path in bundled.copy("specs", tmp_path / "specs")}
    assert {"table1.toml", "table2.toml", "cifar10_smoke.toml"} <= names
    assert bundled.main(["specs", "list"]) == 0
    assert all(Path(line).is_file() for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("arguments", [["slurm", "copy"], ["slurm", "list", "x"], ["nope", "list"]])
def test_wrong_arguments_of_bundled(arguments):
    with pytest.raises(SystemExit) as ended:
        bundled.main(arguments)
    assert ended.value.code == 2


def test_copies_that_cannot_be_written_are_told(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert bundled.main(["specs", "copy", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == (
        f"hkd_hpc: {tmp_path}/file: cannot be written (File exists); name another folder\n"
    )
