"""What goes to the terminal and what to the log: levels, stamps, a disk that is full, a line redrawn in place."""

from __future__ import annotations

import io
import os
import sys
import threading

import pytest

from hkd_hpc.console import messages, output
from hkd_hpc.console.output import STAMP, Level, Log, Output, Screen, opened
from hkd_hpc.jobs.logs import last_line, output_to


class Terminal(io.StringIO):
    """A stream that people watch."""

    def isatty(self) -> bool:
        return True


def unstamped(path) -> list[str]:
    """The lines of a log, each of which must have its stamp."""
    lines = path.read_text().splitlines()
    assert [line for line in lines if not STAMP.match(line)] == []
    return [STAMP.sub("", line) for line in lines]


def say_all() -> None:
    messages.say("one\n\ntwo")
    messages.warn("careful")
    messages.detail(lambda: "deep")
    messages.answer("whole table", "essential")


def test_quiet_shows_a_warning_of_what_a_run_does_not_make(tmp_path, capsys):
    with opened(Level.QUIET) as here:
        here.keep(Log(tmp_path / "log.txt"))
        messages.warn_of_loss("no rounds.csv")
    assert capsys.readouterr() == ("", "hkd_hpc: warning: no rounds.csv\n")
    assert unstamped(tmp_path / "log.txt") == ["warning: no rounds.csv"]


@pytest.mark.parametrize(
    "level, out, err, logged",
    [
        (Level.QUIET, "essential\n", "", ["one", "two", "warning: careful", "whole table"]),
        (
            Level.NORMAL,
            "one\n\ntwo\nwhole table\n",
            "hkd_hpc: warning: careful\n",
            ["one", "two", "warning: careful", "whole table"],
        ),
        (
            Level.VERBOSE,
            "one\n\ntwo\ndeep\nwhole table\n",
            "hkd_hpc: warning: careful\n",
            ["one", "two", "warning: careful", "deep", "whole table"],
        ),
    ],
)
def test_levels(tmp_path, capsys, level, out, err, logged):
    with opened(level) as here:
        here.keep(Log(tmp_path / "log.txt"))
        say_all()
    assert capsys.readouterr() == (out, err)
    assert unstamped(tmp_path / "log.txt") == logged


def test_what_is_said_before_the_log_is_there_stands_in_it_first(tmp_path):
    with opened(Level.NORMAL) as here:
        messages.say("before")
        here.keep(Log(tmp_path / "log.txt"))
        messages.say("after")
        here.record("failed elsewhere")
    with opened(Level.NORMAL) as here:
        here.keep(Log(tmp_path / "log.txt"))
        messages.say("resumed")
    assert unstamped(tmp_path / "log.txt") == ["before", "after", "failed elsewhere", "resumed"]


def test_nothing_is_held_where_no_log_will_come(tmp_path):
    here = Output()
    here.say("not for a log")
    here.keep(Log(tmp_path / "log.txt"))
    assert not (tmp_path / "log.txt").read_text()


def test_a_log_that_cannot_be_written_is_told_once(tmp_path, capsys):
    with opened(Level.NORMAL) as here:
        here.keep(Log(tmp_path / "gone/log.txt"))
        messages.say("one")
        messages.say("two")
    assert capsys.readouterr() == (
        "one\ntwo\n",
        f"hkd_hpc: warning: {tmp_path}/gone/log.txt: No such file or directory; the run goes on without a log\n",
    )


def test_a_process_without_stderr_runs_on(monkeypatch, capsys):
    """As a service that a program starts without it."""
    monkeypatch.setattr(sys, "stderr", None)
    with opened(Level.NORMAL) as here, here.redrawn(lambda: "round 1/2"):
        messages.say("one")
        messages.warn("careful")
    assert capsys.readouterr().out == "one\n"


def test_a_full_disk_is_told_once(capsys):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with opened(Level.NORMAL) as here:
        here.keep(Log(os.path.realpath("/dev/full")))
        messages.say("one")
    assert (
        capsys.readouterr().err
        == "hkd_hpc: warning: /dev/full: No space left on device; the run goes on without a log\n"
    )


def test_where_all_that_is_printed_goes_to_the_log_each_line_stands_there_once_with_its_stamp(tmp_path):
    """As in a trial of a study, whose last line is looked for without the stamps."""
    log = tmp_path / "log.txt"
    with output_to(log), opened(Level.NORMAL) as here:
        here.keep(Log(log))
        messages.say("one\n\ntwo")
        messages.warn("careful")
        here.record("printed by another part of the program")
    assert unstamped(log) == ["one", "two", "hkd_hpc: warning: careful"]
    assert last_line(log) == "two"


def test_a_drawn_line_goes_before_the_next_one_is_said(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "12")
    here = Output()
    here.draw("0123456789abcdef")
    here.draw("4 of 10")
    here.say("a round")
    here.say("another")
    assert output.sys.stderr.getvalue() == "\r\x1b[K0123456789a\r\x1b[K4 of 10\r\x1b[K"
    assert capsys.readouterr().out == "a round\nanother\n"


@pytest.mark.parametrize(
    "stream, term, level, is_drawn",
    [
        (Terminal, "xterm", Level.NORMAL, True),
        (Terminal, "dumb", Level.NORMAL, False),
        (Terminal, "xterm", Level.QUIET, False),
        (io.StringIO, "xterm", Level.NORMAL, False),
    ],
)
def test_a_line_is_redrawn_on_a_terminal_alone(monkeypatch, stream, term, level, is_drawn):
    monkeypatch.setattr("sys.stderr", stream())
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(output, "REDRAW_S", 0.001)
    here = Output(level)
    asked = threading.Event()
    with here.redrawn(lambda: asked.set() or "text"):
        asked.wait(30 if is_drawn else 0.01)
    assert asked.is_set() == is_drawn
    assert bool(output.sys.stderr.getvalue()) == is_drawn
    assert output.sys.stderr.getvalue().endswith("\r\x1b[K") == is_drawn


def test_a_screen_shows_a_text_in_the_place_of_the_one_before_and_the_end_of_one_that_is_too_long(monkeypatch):
    monkeypatch.setattr("sys.stdout", Terminal())
    for name, value in {"TERM": "xterm", "COLUMNS": "5", "LINES": "4"}.items():
        monkeypatch.setenv(name, value)
    screen = Screen()
    screen.show("one\ntwo")
    screen.show("1\n2\n3\n4\nfifth")
    screen.show("last")
    assert output.sys.stdout.getvalue() == "one\ntwo\n\x1b[2F\x1b[J3\n4\nfift\n\x1b[3F\x1b[Jlast\n"


def test_a_screen_without_a_terminal_is_one_text_below_the_other(capsys):
    screen = Screen()
    screen.show("one\ntwo")
    screen.show("three")
    assert capsys.readouterr().out == "one\ntwo\nthree\n"
