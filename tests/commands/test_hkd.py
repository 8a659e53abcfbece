"""`hkd` and its commands: each is its `python -m` form, and what is wrong is said in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import toy

from hkd_hpc import check, compare, export
from hkd_hpc.commands import bundled, data
from hkd_hpc.commands import hkd as cli
from hkd_hpc.common.errors import UsageError
from hkd_hpc.jobs import __main__ as jobs
from hkd_hpc.report import __main__ as report
from tools.forked_ranks import run_ranks


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
    for name in ("train", "data", "sweep", "compare", "check", "export", "report", "doctor", "slurm", "specs"):
        assert text.count(f"\n  {name} ") == 2


def test_an_unknown_command_is_told_once_in_a_job_with_the_nearest_name(capsys, monkeypatch):
    assert cli.main(["trian", "fed.rounds=1"]) == 2
    assert capsys.readouterr().err == "hkd_hpc: 'trian': no such command of hkd; did you mean hkd train?\n"
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("word, meant", [("help", "--help"), ("--vers", "--version"), ("version", "--version")])
def test_a_word_that_is_nearly_an_option_is_told_which(word, meant, capsys):
    assert cli.main([word]) == 2
    assert capsys.readouterr().err == f"hkd_hpc: {word!r}: no such command of hkd; did you mean hkd {meant}?\n"


@pytest.mark.parametrize(
    "main, arguments, told",
    [
        (
            bundled.main,
            ["slurm"],
            "the following arguments are required: list|copy; python -m hkd_hpc.commands.bundled slurm",
        ),
        (check.main, [], "the following arguments are required: run; python -m hkd_hpc.check"),
        (compare.main, ["spec.toml"], "the following arguments are required: --root; python -m hkd_hpc.compare"),
        (data.main, ["prepare"], "the following arguments are required: NAME; python -m hkd_hpc.data"),
        (check.main, ["--nope=3"], "unrecognized arguments: --nope; python -m hkd_hpc.check"),
        (compare.main, ["--nope"], "unrecognized arguments: --nope; python -m hkd_hpc.compare"),
        (jobs.main, ["status", "--nope"], "unrecognized arguments: --nope; python -m hkd_hpc.jobs status"),
        (export.main, ["run", "--client", "x"], "argument --client: invalid int value: 'x'; python -m hkd_hpc.export"),
        (report.main, [], "the following arguments are required: RUN|STUDY; python -m hkd_hpc.report"),
        (jobs.main, ["status"], "the following arguments are required: DIR; python -m hkd_hpc.jobs status"),
    ],
)
def test_wrong_arguments_of_every_command_are_one_line(main, arguments, told, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", f"hkd_hpc: {told} --help lists the options\n")


@pytest.mark.parametrize("words", ["hkd_hpc specs list", "hkd_hpc --version", "hkd_hpc.jobs --help"])
def test_where_nobody_reads_a_command_ends_without_a_word(words):
    assert unread(words.split(), "stdout") == (141, b"")


def test_what_is_wrong_has_its_exit_code_where_nobody_reads_it():
    assert unread(["hkd_hpc", "trian"], "stderr") == (2, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("words", ["hkd_hpc specs list", "hkd_hpc --version", "hkd_hpc docs list"])
def test_where_the_disk_takes_nothing_that_is_printed_a_command_fails_in_one_line(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", *words.split()], cwd=toy.PROJECT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    told = "hkd_hpc: what is printed cannot be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (1, told)


TELL_DESCRIPTORS = """
import os
from pathlib import Path
from hkd_hpc.common.command import exit_code

@exit_code
def main():
    Path("told").write_text(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
    print("printed")
    return 0

raise SystemExit(main())
"""


def test_no_file_takes_the_place_of_a_stream_that_a_command_was_started_without(tmp_path):
    """What a library prints on stderr would be written into it."""
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, TELL_DESCRIPTORS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(toy.PROJECT)},
    )
    assert (done.returncode, (tmp_path / "told").read_text()) == (0, "/dev/null /dev/null /dev/null")


LONG = "x" * 300  # no file system takes it; as a folder that may not be read, it cannot be looked at


@pytest.mark.parametrize(
    "main, arguments",
    [
        (bundled.main, ["slurm", "copy", LONG]),
        (data.main, ["prepare", "cifar10", "--dir", LONG]),
        (data.main, ["partition", "--out", f"{LONG}.npz"]),
        (data.main, ["partition", "--out", f"{LONG}/part.npz"]),
        (export.main, ["run", "--out", f"{LONG}.pt"]),
        (export.main, ["run", "--csv", LONG]),
        (export.main, [LONG, "--out", "model.pt"]),
        (report.main, ["run", "--out", f"{LONG}.html"]),
    ],
)
def test_a_place_that_cannot_be_looked_at_is_told_in_one_line(main, arguments, capsys):
    assert main(arguments) == 2
    out, line = capsys.readouterr()
    assert (out, line.count("\n")) == ("", 1)
    assert line.startswith(f"hkd_hpc: {LONG}")
    assert line.endswith(": cannot be read or written (File name too long)\n")


def unread(arguments: list[str], stream: str) -> tuple[int, bytes]:
    """The exit code where nobody reads a stream, and what came on the other one."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: writer}
    env = {**os.environ, "PYTHONUNBUFFERED": ""}  # with it argparse passes over what cannot be printed
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=toy.PROJECT, env=env, **streams)
    os.close(writer)
    return done.returncode, done.stdout or done.stderr or b""


CTRL_C_AT_AN_IMPORT = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["CTRL_C_AT"]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def ctrl_c(tmp_path_factory):
    """ctrl_c(words, module): `python -m` where Ctrl-C is pressed as that module is about to be imported."""
    folder = tmp_path_factory.mktemp("ctrl_c")
    (folder / "sitecustomize.py").write_text(CTRL_C_AT_AN_IMPORT)

    def pressed(words: str, module: str, **env: str) -> tuple[int, str, str]:
        return run(*words.split(), PYTHONPATH=str(folder), CTRL_C_AT=module, **env)

    return pressed


@pytest.mark.parametrize(
    "words, module",
    [
        ("hkd_hpc train", "numpy"),
        ("hkd_hpc check", "numpy"),
        ("hkd_hpc", "hkd_hpc.commands.hkd"),
        ("hkd_hpc.train", "hkd_hpc.comm"),
        ("hkd_hpc.check", "numpy"),
        ("hkd_hpc.export", "numpy"),
        ("hkd_hpc.compare --root x", "numpy"),
        ("hkd_hpc.jobs status -m x", "hkd_hpc.jobs"),
        ("hkd_hpc.doctor", "hkd_hpc.doctor"),
        ("hkd_hpc.doctor", "hkd_hpc.comm"),
        ("hkd_hpc.report", "numpy"),
        ("hkd_hpc.commands.bundled", "hkd_hpc.common.settings"),
        ("hkd_hpc.data", "hkd_hpc.data.registry"),
        ("hkd_hpc.tools.bench", "hkd_hpc.tools"),
        ("hkd_hpc.tools.fault_injection", "hkd_hpc.tools"),
        ("jobs", "hkd_hpc.jobs"),
        ("tools.bench", "tools.bench"),
        ("tools.compare", "hkd_hpc.compare"),
        ("tools.fault_injection", "numpy"),
        ("mpi4py -m hkd_hpc.train", "hkd_hpc.comm"),
        ("mpi4py -m hkd_hpc train", "numpy"),
        ("mpi4py -m tools.bench", "tools.bench"),
    ],
)
def test_ctrl_c_during_imports_is_told_in_one_line(ctrl_c, words, module):
    assert ctrl_c(words, module) == (130, "", "hkd_hpc: interrupted\n")


def test_ctrl_c_during_imports_is_told_once_in_a_job(ctrl_c):
    assert ctrl_c("hkd_hpc.train", "numpy", OMPI_COMM_WORLD_RANK="3") == (130, "", "")


@pytest.mark.parametrize("words", [["-c"], ["-m", "hkd_hpc_of_others"], ["-m", "mpi4py", "-m", "hkd_hpc_of_others"]])
def test_a_program_that_imports_the_package_keeps_what_python_does_at_ctrl_c(tmp_path, words):
    code = "import sys, hkd_hpc, tools; print(sys.excepthook is sys.__excepthook__)"
    (tmp_path / "hkd_hpc_of_others").mkdir()
    (tmp_path / "hkd_hpc_of_others/__init__.py").write_text(code)
    (tmp_path / "hkd_hpc_of_others/__main__.py").touch()
    done = subprocess.run(
        [sys.executable, *words, *[code] * (words == ["-c"])],
        cwd=toy.PROJECT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "True\n")


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
    module_of = re.compile(rf"(usage: )?python -m {re.escape(cli.COMMANDS[command].module)}(?(1)| --help)")
    named = [module_of.sub(lambda found: found[0].replace("hkd_hpc.", "hkd_hpc "), text) for text in long[1:]]
    assert short == (code, *named)
    assert long[0] == code


def _hkd(rank, words):
    sys.argv[0] = "/somewhere/bin/hkd"
    sys.exit(cli.main(words))


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_wrong_options_of_a_command_advise_the_help_of_that_command(command):
    [result] = run_ranks(1, _hkd, [command, "--nope"])
    assert result.output == f"hkd_hpc: unrecognized arguments: --nope; hkd {command} --help lists the options\n"
    assert result.exit_code == 2


def test_a_class_of_one_s_own_is_found_in_this_folder_as_by_the_module(tmp_path, monkeypatch):
    toy.write_module(tmp_path, "only_here", "class Nothing: pass\n")
    monkeypatch.chdir(tmp_path)
    [result] = run_ranks(1, _hkd, ["train", "run.loggers=only_here:Nothing"])
    assert result.output.startswith("hkd_hpc: run.loggers=only_here:Nothing: is no logger; it needs a method ")


@pytest.mark.parametrize("words", ["sweep status", "slurm", "data"])
def test_help_of_a_command_says_how_it_was_started(words):
    [result] = run_ranks(1, _hkd, [*words.split(), "--help"])
    assert result.output.startswith(f"usage: hkd {words} ")
    assert "python -m hkd_hpc." not in result.output.split("\n\n")[0]


def test_help_imports_neither_torch_nor_mpi():
    code = (
        "import sys; from hkd_hpc.commands.hkd import main; main([]); print({'torch', 'mpi4py.MPI'} & set(sys.modules))"
    )
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
    bundled.copy("docs", tmp_path / "docs")
    pages = {name: (tmp_path / f"docs/{name}.md").read_text() for name in ("figures", "files", "settings", "doctor")}
    assert "| `accuracy_rounds` | both |" in pages["figures"]
    assert "| `/rounds/wall_s` |" in pages["files"]
    assert "| `fed.rounds` |" in pages["settings"]
    assert not [name for name, text in pages.items() if re.search(r"^<!-- \w+ -->$", text, re.MULTILINE)]
    assert {path.parent for path in (tmp_path / "docs").rglob("*")} == {tmp_path / "docs"}
    assert [page.name for page in (tmp_path / "docs").glob("*.md") if "\nUnbuilt, " in page.read_text()] == ["api.md"]
    assert bundled.main(["specs", "list"]) == 0
    assert all(Path(line).is_file() for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("arguments", [["slurm", "copy"], ["slurm", "list", "x"], ["nope", "list"]])
def test_wrong_arguments_of_bundled(arguments):
    assert bundled.main(arguments) == 2


def test_copies_that_cannot_be_written_are_told(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert bundled.main(["specs", "copy", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == (
        f"hkd_hpc: {tmp_path}/file: cannot be written (File exists); name another folder\n"
    )


def test_copies_that_cannot_all_be_written_are_none(tmp_path, capsys):
    (tmp_path / "sites").touch()  # where a folder of scripts belongs
    assert bundled.main(["slurm", "copy", str(tmp_path)]) == 2
    assert "cannot be written (File exists)" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["sites"]
    (tmp_path / "sites").unlink()
    assert bundled.main(["slurm", "copy", str(tmp_path)]) == 0
