"""Accuracy against epsilon: the table and the figure are those of the finished runs, by scheme, epsilon and seed."""

from __future__ import annotations

import numpy as np
import pytest

from hkd_hpc.figures import csv_of
from hkd_hpc.jobs import Sweep
from tools import privacy_curve
from tools.study import drawings, records
from tools.study.records import Record

MADE = {"weights_sha256": "ab", "partition_sha256": "cd", "data_sha256": "ef"}


def finished(scheme: str, epsilon: str, seed: int, local: float, whole: float) -> Record:
    summary = {"local_test_accuracy_last": local, "global_test_accuracy_last": whole}
    return Record(f"{scheme}, {epsilon}", {"scheme.name": scheme.lower(), "run.seed": seed}, {}, summary, MADE)


@pytest.fixture
def runs():
    return [
        finished("FedAvg", "512", 0, 0.50, 0.20),
        finished("FedAvg", "512", 1, 0.54, 0.22),
        finished("FedAvg", "no noise", 0, 0.6, 0.3),
        finished("FedHKD", "no noise", 1, 0.7, 0.4),
    ]


def test_the_spec_has_every_scheme_epsilon_and_seed():
    trials, problems = Sweep.from_toml(privacy_curve.SPEC, ["data.path=cifar10.npz"]).trials()
    assert problems == []
    assert len(trials) == 2 * 5 * 5
    assert [trial.labels["seed"] for trial in trials] == sorted(
        trial.labels["seed"] for trial in trials
    )  # paired first


def test_the_table_is_of_the_seeds_that_are_finished(runs):
    """(.50 + .54) / 2 = .52; half of the interval of two: 12.706 x .0282843 / sqrt(2) = .254."""
    assert privacy_curve.table_of(runs).csv().splitlines() == [
        "scheme,epsilon,local,local ±,local seeds,global,global ±,global seeds",
        "FedAvg,512,0.52,0.25412,2,0.21,0.12706,2",
        "FedAvg,no noise,0.6,,1,0.3,,1",
        "FedHKD,no noise,0.7,,1,0.4,,1",
    ]


def test_a_line_has_a_point_where_a_seed_is_finished(runs):
    figure = privacy_curve.curve(runs)
    assert [(series.name, series.panel) for series in figure.series] == [
        ("FedAvg", "local"),
        ("FedHKD", "local"),
        ("FedAvg", "global"),
        ("FedHKD", "global"),
    ]
    first = figure.series[0]
    assert first.x.tolist() == ["512", "no noise"]
    np.testing.assert_allclose(first.y, [0.52, 0.6])
    assert "0.52" in csv_of(figure)


def test_without_runs_there_is_one_line(tmp_path, capsys):
    assert privacy_curve.main(["--table", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: has no runs yet" in capsys.readouterr().err


def test_the_figure_of_the_docs_is_that_of_the_recorded_runs():
    runs = records.read(privacy_curve.DATA / "privacy_curve.jsonl")
    assert drawings.is_drawn(privacy_curve.curve(runs), privacy_curve.DOCS)


def test_the_table_of_the_docs_is_that_of_the_recorded_runs():
    page = (privacy_curve.DOCS / "privacy.md").read_text()
    runs = records.read(privacy_curve.DATA / "privacy_curve.jsonl")
    assert f"{len(runs)} of 50 runs are finished." in page
    assert privacy_curve.with_table(page, runs) == page
