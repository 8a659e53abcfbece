"""What real runs show and keep: log.txt, --quiet, --verbose, the line within a round on a terminal."""

from __future__ import annotations

import os
import re
import sys
import threading

import pytest
import toy

from hkd_hpc.console.output import STAMP


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


def log_lines(folder) -> list[str]:
    """The lines of a run's log without their stamps, which all must have."""
    lines = (folder / "log.txt").read_text().splitlines()
    assert [line for line in lines if not STAMP.match(line)] == []
    return [STAMP.sub("", line) for line in lines]


def said(output: str) -> list[str]:
    """The lines that are not empty, as a log has them."""
    return [line.removeprefix("hkd_hpc: ") for line in output.splitlines() if line.strip()]


def test_the_log_has_what_was_said_and_a_resumed_run_adds_to_it(data, tmp_path):
    folder = tmp_path / "run"
    (first,) = toy.train_ok(1, *toy.settings(data, "data.partition=iid", "data.beta=.3"), "--out", folder)
    warning = "warning: data.beta=0.3 has no effect with data.partition=iid"
    assert f"hkd_hpc: {warning}" in first.splitlines()
    assert log_lines(folder) == said(first)
    (second,) = toy.train_ok(1, "--resume", "--allow-change", "fed.rounds=3", "--out", folder)
    assert log_lines(folder)[len(said(first)) :] == said(second)


@pytest.mark.parametrize("size", [1, 2])
def test_the_log_has_the_error_that_ended_the_job(data, tmp_path, size):
    def fail():
        raise ValueError("on purpose")

    def patch(rank):
        if rank == size - 1:
            toy.on_place(2, "weights", fail)

    toy.train(size, *toy.settings(data), "--out", tmp_path / "run", patch=patch)
    lines = log_lines(tmp_path / "run")
    assert any("round 2, phase weights" in line and "ValueError: on purpose" in line for line in lines)
    assert lines[-1] == "ValueError: on purpose"


def test_quiet_prints_the_accuracies_alone_and_keeps_the_rest_in_the_log(data, tmp_path):
    (output,) = toy.train_ok(1, *toy.settings(data, "data.classes_per_client=3"), "--quiet", "--out", tmp_path / "run")
    lines = said(output)
    assert re.match(r"accuracy +last round +mean last 2 +best$", lines[0])
    assert lines[-1] == f"metrics     {tmp_path}/run/metrics.h5"
    assert [line for line in lines if line.startswith(("round", "warning"))] == []
    kept = log_lines(tmp_path / "run")
    assert [line[:9] for line in kept if line.startswith("round ")] == ["round 1/2", "round 2/2"]
    assert any(line.startswith("warning: data.classes_per_client=3 has no effect") for line in kept)


def test_verbose_tells_of_each_rank(data, tmp_path):
    output = toy.train_ok(3, *toy.settings(data), "--verbose", "--out", tmp_path / "run")[0]
    found = re.findall(r"^round (\d): rank (\d): (\d) clients, training \d+\.\d\d s", output, re.MULTILINE)
    assert found == [("1", "1", "2"), ("1", "2", "1"), ("2", "1", "2"), ("2", "2", "1")]
    assert len(re.findall(r"^round \d: seconds by phase \(rank 0\): train ", output, re.MULTILINE)) == 2


def test_one_of_both(data, tmp_path):
    (result,) = toy.train(1, *toy.settings(data), "--quiet", "--verbose", "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert toy.our_lines([result.output]) == ["hkd_hpc: --quiet --verbose: leave out one of them"]


def test_a_terminal_shows_how_far_the_round_is(data, tmp_path):
    master, slave = os.openpty()
    shown: list[bytes] = []

    def read():
        while piece := os.read(master, 4096):
            shown.append(piece)
            if piece.endswith(b"END"):
                return

    def patch(rank):
        from hkd_hpc.console import output

        output.REDRAW_S = 0.001
        os.environ["TERM"] = "xterm"
        sys.stderr = open(slave, "w")

    reader = threading.Thread(target=read)
    reader.start()
    (output,) = toy.train_ok(1, *toy.settings(data, "train.epochs=3"), "--out", tmp_path / "run", patch=patch)
    os.write(slave, b"END")
    reader.join()
    text = b"".join(shown).decode()
    assert re.search(r"\r\x1b\[Kround 1/2: [012] of 3 clients trained, \d+ s", text)
    assert re.search(r"\r\x1b\[Kround 2/2: [012] of 3 clients trained, \d+ s", text)
    assert text.endswith("\r\x1b[KEND")
    assert "\x1b" not in output
    assert "clients trained" not in (tmp_path / "run/log.txt").read_text()
