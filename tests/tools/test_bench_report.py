"""The report's benchmark makes runs that the report takes, and measures it."""

from __future__ import annotations

from tools.bench import report as bench_report


def test_two_runs_are_made_and_measured(capsys):
    assert bench_report.main(["--runs", "2", "--rounds", "2"]) == 0
    titles = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("report of")]
    name = "report of 2 runs x 2 rounds"
    assert titles == [name, f"{name}: CPU time", f"{name}: peak memory of all its processes", f"{name}: the file"]
