"""A run that is watched from another process: on a terminal and without one, to its end, and where there is none."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import toy

from hkd_hpc.common.errors import UsageError
from hkd_hpc.report import follow as follow_module
from hkd_hpc.report.__main__ import main
from hkd_hpc.report.follow import follow, look_at, looks, picture, sparkline, warnings_in
from hkd_hpc.results import Run
from hkd_hpc.store.tree import save_tree
from tools.synthetic_runs import write_run

FOLLOW = [sys.executable, "-m", "hkd_hpc.report", "--follow"]
SHOW_CURSOR = "\x1b[?25h"


class Watcher:
    """`--follow` in a process of its own; `text()` waits for its end and gives all that it showed."""

    def __init__(self, *arguments: object, terminal: bool, **env: str) -> None:
        self._master, slave = os.openpty()
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40", **env}
        self.process = subprocess.Popen(
            [*FOLLOW, *map(str, arguments)],
            stdout=slave if terminal else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=toy.PROJECT,
            env=env,
        )
        os.close(slave)
        self._pieces: list[bytes] = []
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    def _read(self, pipe) -> None:
        with contextlib.suppress(OSError):  # of a terminal whose last writer has gone
            while piece := os.read(pipe.fileno() if pipe else self._master, 4096):
                self._pieces.append(piece)

    def shown(self) -> str:
        return b"".join(self._pieces).decode()

    def text(self) -> str:
        self._reader.join()
        self.process.wait()
        os.close(self._master)
        return self.shown()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture(scope="module")
def watched(tmp_path_factory, data):
    """A run of four rounds, and what a terminal and a pipe that waited for it have shown."""
    folder = tmp_path_factory.mktemp("watched") / "run"
    on_terminal, in_pipe = Watcher(folder, "--wait", terminal=True), Watcher(folder, "--wait", terminal=False)
    arguments = toy.settings(data, "fed.rounds=4", "data.partition=iid", "data.beta=.3")
    (printed,) = toy.train_ok(1, *arguments, "--out", folder)
    texts = on_terminal.text(), in_pipe.text()
    assert (on_terminal.process.returncode, in_pipe.process.returncode) == (0, 0), texts
    return folder, printed, *texts


def test_without_a_terminal_each_round_is_the_line_that_training_prints(watched):
    folder, printed, _, text = watched
    strip = lambda line: line.rpartition("  |  ")[0]  # without seconds
    rounds = [strip(line) for line in printed.splitlines() if line.startswith("round ")]
    assert [strip(line) for line in text.splitlines() if line.startswith("round ")] == rounds
    assert len(rounds) == 4
    assert [line for line in text.splitlines() if "warning: data.beta=0.3 has no effect" in line][1:] == []
    assert text.splitlines()[-1] == f"complete: 4 of 4 rounds, {folder}"
    assert "\x1b" not in text


def test_rounds_of_a_run_that_has_ended_have_nothing_left(watched):
    """Nobody had waited for it: all of its rounds are shown at once."""
    folder = watched[0]
    watcher = Watcher(folder, terminal=False)
    rounds = [line for line in watcher.text().splitlines() if line.startswith("round ")]
    assert len(rounds) == 4
    assert [line for line in rounds if not re.search(r"  \|  \d+\.\d s$", line)] == []


def test_a_terminal_shows_curves_terms_seconds_and_warnings(watched):
    folder, _, text, _ = watched
    last = text[text.rindex("fedhkd on file, 3 clients, seed 0") :]
    for word in (
        "local ",
        "global ",
        "loss cross_entropy ",
        "loss soft ",
        "█",
        "seconds of the last round (rank 0): train ",
    ):
        assert word in last, word
    assert "warning: round 4: no class reached scheme.nu=0.25" in last
    assert f"complete: 4 of 4 rounds, {folder}" in last.replace("\r\n", "")
    assert text.rstrip("\r\n").endswith(SHOW_CURSOR)


def test_no_color_and_plain_letters_where_the_terminal_has_no_others(watched):
    shown = Watcher(watched[0], terminal=True, NO_COLOR="1", PYTHONIOENCODING="ascii", LC_ALL="C").text()
    assert "complete: 4 of 4 rounds" in shown
    assert "\x1b[3" not in shown.replace(SHOW_CURSOR, "")
    assert "█" not in shown


@pytest.fixture
def killed(tmp_path, data):
    """A run that was killed in round 3."""

    def patch(rank):
        toy.note_pid(tmp_path / "pids", 1)
        toy.on_place(3, "training", lambda: toy.kill_all(tmp_path / "pids"))

    toy.train(1, *toy.settings(data, "fed.rounds=4"), "--out", tmp_path / "run", patch=patch)
    return tmp_path / "run"


def test_a_killed_run_is_told_and_ctrl_c_ends_the_wait_for_it(killed, capsys):
    assert follow(killed) == 75
    lines = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in lines[:-1]] == ["round 1/4", "round 2/4"]
    assert lines[-1] == (
        "stopped after round 2 of 4: no process has its folder; "
        f"python -m hkd_hpc.train --resume --out {killed} resumes it"
    )
    watcher = Watcher(killed, "--wait", terminal=True)
    toy.wait_until(lambda: "stopped after round 2" in watcher.shown())
    os.kill(watcher.process.pid, signal.SIGINT)
    assert watcher.text().rstrip("\r\n").endswith(SHOW_CURSOR)
    assert watcher.process.returncode == 0


@pytest.mark.parametrize("terminal", [False, True])
def test_a_folder_that_is_removed_while_it_is_watched_is_told(killed, terminal):
    watcher = Watcher(killed, "--wait", terminal=terminal)
    toy.wait_until(lambda: "stopped after round 2" in watcher.shown())
    shutil.rmtree(killed)
    toy.wait_until(lambda: "gone: " in watcher.shown())
    os.kill(watcher.process.pid, signal.SIGINT)
    assert " holds no run any more; waiting for one there " in " ".join(watcher.text().split())  # a terminal wraps it
    assert watcher.process.returncode == 0


def test_a_broken_run_is_told(killed, capsys):
    (killed / "metrics.h5").write_bytes(b"no HDF5")
    assert follow(killed) == 1
    assert capsys.readouterr().out == f"broken: {killed}/metrics.h5: it is not an HDF5 file\n"


def test_where_there_is_no_run_one_line_says_so(tmp_path):
    with pytest.raises(UsageError, match="holds no run"):
        follow(tmp_path)


def test_a_metrics_file_by_itself_is_one_line(tmp_path):
    (tmp_path / "metrics.h5").touch()
    with pytest.raises(UsageError, match=r"metrics\.h5: is a file; --follow .*: name its folder$"):
        follow(tmp_path / "metrics.h5")


# ---- numbers by hand


@pytest.mark.parametrize("option", ["--out", "--figures"])
def test_what_is_written_is_not_asked_for_while_a_run_is_watched(tmp_path, capsys, option):
    assert main([str(tmp_path), "--follow", option, "x.html"]) == 2
    told = f"hkd_hpc: {option}: --follow writes nothing; make the report without it, at any time\n"
    assert capsys.readouterr() == ("", told)


def test_a_full_bar_is_green_also_where_there_are_16_colours(tmp_path):
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    complete = write_run(tmp_path, ["fed.rounds=1"], [0.1], [0.1], summary={})
    console.print(picture(look_at(Run(complete), is_running=False)))
    assert f"\x1b[32m{48 * '━'}" in console.file.getvalue()


def test_sparkline():
    assert sparkline(np.array([0.0, 0.5, 1.0, np.nan])) == "▁▅█ "
    assert sparkline(np.array([2.0, 2.0])) == "▁▁"
    assert sparkline(np.array([0.0, 2.0, 4.0, 6.0]), cells=2) == "▁█"
    assert sparkline(np.array([])) == ""


def stored(folder, ranks: int) -> Run:
    """A run of 2 of 5 rounds, of 10 and 20 s, whose tests took 2 and 4 s."""
    rounds = {
        "round": np.array([1, 2]),
        "wall_s": np.array([10.0, 20.0]),
        "seconds": {"evaluate_and_save": np.array([2.0, 4.0])},
    }
    config = json.dumps({"fed": {"rounds": 5}})
    save_tree(
        folder / "metrics.h5", {"rounds": rounds, "clients": {}, "config_json": config, "world": {"ranks": ranks}}
    )
    return Run(folder)


def test_a_run_of_another_host_is_followed_until_its_lock_is_silent(tmp_path, capsys):
    run = write_run(tmp_path / "run", ["fed.rounds=5"], [0.1, 0.2], [0.1, 0.2])
    lock = run / "run.lock"
    lock.write_text(json.dumps({"host": "elsewhere", "pid_space": "its own", "pid": 1, "pid_start": 1}))
    seen = looks(run, wait=False, every_s=0.0)
    assert next(seen).state == "running"
    silent_s = time.time() - 61
    os.utime(lock, (silent_s, silent_s))
    assert [look.state for look in seen] == ["stopped"]
    assert follow(run) == 75
    assert "stopped after round 2 of 5: no process has its folder" in capsys.readouterr().out


@pytest.mark.parametrize("ranks, left_s", [(1, 3 * 18.0), (3, 3 * 18.0)])
def test_what_remains_is_the_mean_of_the_last_rounds(tmp_path, ranks, left_s):
    assert look_at(stored(tmp_path, ranks), is_running=True).left_s(2) == left_s


def test_the_last_warnings_of_a_log(tmp_path):
    (tmp_path / "log.txt").write_text(
        "".join(f"t rank 0: {word}\n" for word in ("warning: a", "b", *["warning: c"] * 3))
    )
    assert warnings_in(tmp_path / "log.txt") == ("t rank 0: warning: c",) * 3
    assert warnings_in(tmp_path / "none") == ()


def test_rich_is_named_where_it_is_missing(tmp_path, monkeypatch):
    stored(tmp_path, 1)
    monkeypatch.setitem(sys.modules, "rich.live", None)
    monkeypatch.setattr(follow_module.output, "is_terminal", lambda stream: True)
    with pytest.raises(UsageError, match=r"rich is not installed; pip install 'hkd_hpc\[report\]'"):
        follow(tmp_path)
