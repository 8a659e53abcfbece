"""The ledger of real runs: rounds, participation, resume, what a budget ends, and what it says."""

from __future__ import annotations

import math
import os
import re
import signal
import sys

import dp_accounting  # noqa: F401  (here, so that no rank has to)
import numpy as np
import pytest
import toy

import hkd_hpc
from hkd_hpc import config
from hkd_hpc.common.errors import UsageError
from hkd_hpc.privacy.accounting import epsilon
from hkd_hpc.privacy.ledger import Ledger, Terms, bound_text, epsilon_text, ledger_of, rounded_up
from hkd_hpc.privacy.releases import KINDS
from hkd_hpc.report.page import page_of
from hkd_hpc.results import Run
from hkd_hpc.resume import check_promise

Z = 4.0
PRIVATE = (  # features, predictions and weights, each with mu = 1 / Z in each round
    "scheme.name=fedhkd",
    "model.norm=group",
    "fed.average=uniform",
    "privacy.mechanism=vector",
    "privacy.predictions=true",
    "privacy.extractor=received",
    "privacy.update_clip=.1",
    f"privacy.multiplier={Z:g}",
    f"privacy.update_multiplier={Z:g}",
    "run.client_models=false",
)
ROUNDS = "fed.rounds=6"
SIMULATED = "(simulation, no privacy)"
DELTA = 1e-5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "toy.npz", 90, 30)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """(run, output) of six rounds with two of three clients each."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, train(folder, data, ROUNDS, "fed.participation=.67")


def train(folder, data, *more, patch=None):
    (output,) = toy.train_ok(1, "--out", folder, *toy.settings(data, *PRIVATE, *more), patch=patch)
    return output


def rejected(folder, data, *more):
    """The one line with which a run ends before it begins; nothing is written."""
    (result,) = toy.train(1, "--out", folder, *toy.settings(data, *more))
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.output.splitlines() if line.startswith("hkd_hpc: privacy.")]
    assert not (folder / "config.json").exists()
    return line.removeprefix("hkd_hpc: ")


def stopped_in(round, phase):
    """Rank 0 dies there, as by kill -9."""
    return lambda rank: toy.on_place(round, phase, lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_each_client_pays_for_the_rounds_in_which_it_was_drawn(whole):
    run = Run(whole[0])
    drawn_M = (~np.isnan(run.client_columns["status"])).sum(0)
    assert drawn_M.sum() == 12
    np.testing.assert_allclose(run.privacy.mu(), np.sqrt(3 * drawn_M) / Z)


def test_a_client_that_missed_rounds_has_the_smaller_epsilon(whole):
    run = Run(whole[0])
    order_M = np.argsort((~np.isnan(run.client_columns["status"])).sum(0), kind="stable")
    assert (np.diff(run.privacy.epsilon()[order_M]) >= 0).all()


def test_rounds_compose_as_one_release_with_less_noise(whole):
    ledger = Run(whole[0]).privacy
    rounds = int((~np.isnan(ledger.whole_RMK[:, :, 0])).sum(0).max())
    assert ledger.epsilon("fixed", ["features"]).max() == epsilon(math.sqrt(rounds) / Z, DELTA)


def test_stdout_has_the_ledger_in_ten_lines_at_most(whole):
    lines = whole[1].splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith("privacy (simulation"))
    table = lines[begin : begin + 8]
    told = [line.split()[0] for line in table[2:7]]
    assert told == ["features", "predictions", "counts", "presence", "weights"]
    assert table[7].startswith("  features alone, for a fixed extractor: epsilon = ")
    assert table[7].endswith("the whole release: epsilon = " + f"{Run(whole[0]).privacy.epsilon().max():.3g}")
    assert lines[begin + 8].startswith("  not counted: losses, accuracies, numbers of images")
    assert len(lines) - begin <= 10


@pytest.mark.parametrize("where", ["stdout", "summary", "table", "report"])
def test_each_place_says_that_a_simulation_protects_nobody(whole, where):
    folder, output = whole
    run = Run(folder)
    said = {
        "stdout": lambda: output,
        "summary": lambda: run.summary["privacy"],
        "table": lambda: run.privacy.table.caption,
        "report": lambda: next(table.table.caption for table in page_of([run]).happened if table.name == "privacy"),
    }
    assert SIMULATED in said[where]()


def test_three_rounds_resume_and_three_are_six(tmp_path, data, whole):
    """Stopped after round 3, the ledger and the weights are those of the run that was not."""
    folder = tmp_path / "run"
    more = (ROUNDS, "fed.participation=.67")
    toy.train(1, "--out", folder, *toy.settings(data, *PRIVATE, *more), patch=stopped_in(4, "reports"))
    assert Run(folder).privacy.rounds == 3
    train(folder, data, *more, "--resume")
    np.testing.assert_array_equal(Run(folder).privacy.whole_RMK, Run(whole[0]).privacy.whole_RMK)
    assert toy.last_sha(folder) == toy.last_sha(whole[0])


def test_check_accepts_it(whole, capfd):
    from hkd_hpc.check import main

    assert main([str(whole[0])]) == 0


def test_a_round_of_a_release_that_was_killed_is_paid_twice_with_the_same_noise(tmp_path, data):
    folder = tmp_path / "run"
    more = ("fed.rounds=2", "privacy.mode=release")
    toy.train(1, "--out", folder, *toy.settings(data, *PRIVATE, *more), patch=stopped_in(2, "weights"))
    (result,) = toy.train(1, "--resume", "--allow-change", "--out", folder, "privacy.multiplier=9")
    assert "privacy.multiplier cannot change in a run with privacy.mode=release" in result.output
    train(folder, data, *more, "--resume")
    mu_R = np.sqrt((Run(folder).privacy.whole_RMK[:, 0] ** 2).sum(1))
    np.testing.assert_allclose(mu_R, [math.sqrt(3) / Z, math.sqrt(6) / Z])
    assert Run(folder).privacy.label() == ""


def paid(folder) -> float:
    """How many rounds of PRIVATE the ledger counts, each with mu^2 = 3 / Z^2."""
    ledger = Run(folder).privacy
    assert ledger.epsilon().tolist() == [epsilon(float(mu), DELTA) for mu in ledger.mu()]
    return float((ledger.mu() ** 2).max() * Z**2 / 3)


def test_a_round_that_was_begun_and_never_finished_is_in_every_figure(tmp_path, data):
    """Killed in round 3 of a budget for 3.5: the run that goes on ends after round 2, of which three were released."""
    folder = tmp_path / "run"
    budget = f"privacy.budget={epsilon(math.sqrt(3 * 3.5) / Z, DELTA):.6g}"
    more = (ROUNDS, "privacy.mode=release", budget)
    toy.train(1, "--out", folder, *toy.settings(data, *PRIVATE, *more), patch=stopped_in(3, "weights"))
    assert paid(folder) == pytest.approx(3)
    output = train(folder, data, *more, "--resume")
    run, line = Run(folder), "not finished, and counted as the costliest of the others: round 3 (begun 1 time)"
    assert (len(run), run.state, paid(folder)) == (2, "complete", pytest.approx(3))
    assert run.summary["privacy"].endswith(f"; {line}")
    assert line in output
    assert line in next(table.notes for table in page_of([run]).happened if table.name == "privacy")


def test_a_round_once_more_is_not_hidden_by_its_row_of_then(tmp_path, data):
    """Killed in round 4 with a checkpoint of round 2, then in round 3: rounds 3, 4 and 3 come to two."""
    folder = tmp_path / "run"
    more = (ROUNDS, "privacy.mode=release", "run.checkpoint_every=2")
    toy.train(1, "--out", folder, *toy.settings(data, *PRIVATE, *more), patch=stopped_in(4, "weights"))
    toy.train(1, "--resume", "--out", folder, patch=stopped_in(3, "weights"))
    assert paid(folder) == pytest.approx(5)
    assert Run(folder).privacy.unfinished == {3: 1, 4: 1}  # beside the row of round 3
    train(folder, data, *more, "--resume")
    assert paid(folder) == pytest.approx(9)
    assert Run(folder).privacy.unfinished == {}


def test_rounds_begun_anew_count_before_one_of_them_is_done(tmp_path, data):
    """Without checkpoints: killed in round 3, then in round 1, then in round 2."""
    folder = tmp_path / "run"
    more = (ROUNDS, "privacy.mode=release", "run.checkpoint_every=9")
    toy.train(1, "--out", folder, *toy.settings(data, *PRIVATE, *more), patch=stopped_in(3, "weights"))
    assert (paid(folder), Run(folder).privacy.unfinished) == (pytest.approx(3), {3: 1})
    toy.train(1, "--resume", "--out", folder, patch=stopped_in(1, "weights"))
    assert (paid(folder), Run(folder).privacy.unfinished) == (pytest.approx(4), {1: 1, 3: 1})
    toy.train(1, "--resume", "--out", folder, patch=stopped_in(2, "weights"))
    assert (paid(folder), Run(folder).privacy.unfinished) == (pytest.approx(6), {2: 2, 3: 1})
    train(folder, data, *more, "--resume")
    assert (paid(folder), Run(folder).privacy.unfinished) == (pytest.approx(6 + 6), {})
    assert Run(folder).round_columns["begun"].tolist() == [4, 3, 2, 1, 1, 1]


def test_a_record_without_the_times_of_its_rows_counts_them_in_the_rows():
    """Column `begun` began with round 2: round 1 is as it was before."""
    mu_RMK = np.ones((2, 1, len(KINDS)))
    columns = {"privacy_mu_fixed": mu_RMK, "privacy_mu_whole": mu_RMK, "status": np.zeros((2, 1))}
    ledger = ledger_of(Terms("release", "image", DELTA, {}), columns, {1: 3, 2: 4}, [np.nan, 2.0])
    assert (ledger.counted, ledger.unfinished) == ({1: 3, 2: 2}, {2: 2})


def test_what_was_begun_counts_as_the_costliest_round_once():
    """Client 0 paid 1 and twice 2, client 1 nothing and twice 3: three more times 3 for both."""
    squared_RM = np.array([[1.0, np.nan], [4.0, 6.0]])
    mu_RMK = np.where(np.arange(len(KINDS)) == 4, np.sqrt(squared_RM)[:, :, None], 0.0)
    ledger = Ledger(
        Terms("release", "image", DELTA, {"weights": ""}), mu_RMK, mu_RMK, {4: 1, 1: 1, 2: 2, 3: 2}, {1: 1, 2: 2}
    )
    assert (ledger.mu() ** 2).tolist() == pytest.approx([5 + 9, 6 + 9])
    assert ledger.mu("whole", ["features"]).tolist() == [0, 0]
    assert ledger.begun_lines() == [
        "not finished, and counted as the costliest of the others: round 3 (begun 2 times), round 4 (begun 1 time)"
    ]


@pytest.mark.parametrize(
    "adjacency, words",
    [("image", "one image"), ("label", "one image and its label"), ("client", "all data of one client")],
)
def test_each_line_says_what_neighbours_differ_in(adjacency, words):
    mu_RMK = np.zeros((2, 3, len(KINDS)))
    ledger = Ledger(Terms("release", adjacency, DELTA, {"weights": ""}), mu_RMK, mu_RMK)
    assert ledger.said() == f"privacy: at delta 1e-05, neighbours differ in {words}; the whole release: epsilon = 0"
    assert ledger.title().endswith(f"; neighbours differ in {words}")
    assert ledger.figures() == ("release", words, "1e-05", "0", "0")


def test_a_report_of_several_runs_says_what_the_neighbours_of_each_differ_in(whole):
    table = next(table.table for table in page_of([Run(whole[0]), Run(whole[0])]).happened if table.name == "privacy")
    assert dict(zip(table.head, table.rows[0]))["neighbours differ in"] == "one image"
    assert table.caption.endswith("; not comparable where neighbours differ in other things")


def test_a_release_that_was_killed_in_its_first_round_keeps_its_noise(tmp_path, data):
    folder = tmp_path / "run"
    more = ("fed.rounds=2", "privacy.mode=release")
    toy.train(1, "--out", folder, *toy.settings(data, *PRIVATE, *more), patch=stopped_in(1, "weights"))
    (result,) = toy.train(1, "--resume", "--allow-change", "--out", folder, "privacy.multiplier=90")
    assert "privacy.multiplier cannot change in a run with privacy.mode=release" in result.output


@pytest.mark.parametrize("key", ["fed.rounds", "privacy.delta", "privacy.epsilon", "privacy.update_clip"])
def test_what_the_noise_of_an_epsilon_was_found_for_stays(key):
    settings = config.resolve(overrides=["privacy.epsilon=8"])
    with pytest.raises(UsageError, match=f"{key} cannot change in a run with privacy.epsilon=8"):
        check_promise({key: [1, 2]}, settings)


@pytest.mark.parametrize("mode", ["simulation", "release"])
def test_a_budget_ends_the_run_before_the_round_that_would_exceed_it(tmp_path, data, mode):
    folder = tmp_path / "run"
    budget = epsilon(math.sqrt(3 * 2.5) / Z, DELTA)  # two rounds, and not three
    more = (ROUNDS, f"privacy.budget={budget:.6g}", f"privacy.mode={mode}")
    output = train(folder, data, *more)
    after = f"{epsilon(math.sqrt(9) / Z, DELTA):.3g}"
    line = f"privacy.budget={budget:g}: round 3 would bring a client's whole release to epsilon {after}"
    assert f"{line}; round 2 is the last" in output
    run = Run(folder)
    assert (run.state, len(run), run.summary["stopped_early"]) == (
        "complete",
        2,
        f"stopped early after round 2 of 6: {line}",
    )
    assert "already complete (2 rounds, stopped early)" in train(folder, data, *more, "--resume")
    (result,) = toy.train(1, "--resume", "--allow-change", "--out", folder, "privacy.budget=1e6")
    assert result.exit_code == 2
    assert "privacy.budget: " in result.output
    assert "already complete (2 rounds, stopped early); it does not go on" in result.output


def test_a_budget_that_allows_no_round_is_rejected(tmp_path, data):
    assert rejected(tmp_path / "run", data, *PRIVATE, "privacy.budget=.1").startswith(
        "privacy.budget=0.1: round 1 would bring a client's whole release to epsilon "
    )


def test_the_noise_is_found_for_an_epsilon(tmp_path, data):
    folder, target = tmp_path / "run", 4.0
    output = train(folder, data, "fed.rounds=2", f"privacy.epsilon={target}")
    [found] = re.findall(r"noise multiplier (\S+) of all that is noisy", output)
    [told] = re.findall(r"changes of the weights: l2 clip 0.1, noise multiplier ([\d.]+)", output)
    assert f"{float(told):.4g}" == found
    assert 0.99 * target <= Run(folder).privacy.epsilon().max() <= target


ALL_HOLES = (
    "features (privacy.mechanism=vector); predictions (privacy.predictions=true); weights (privacy.update_clip=1 "
    "privacy.update_multiplier=1 fed.average=uniform); BatchNorm's statistics (model.norm=group); one image moves all "
    "that a trained extractor makes (privacy.extractor=received)"
)


def test_an_epsilon_of_what_has_no_bound_names_every_hole(tmp_path, data):
    line = rejected(tmp_path / "run", data, "scheme.name=fedhkd", "privacy.epsilon=4")
    assert line == f"privacy.epsilon=4: the whole release has no bound: {ALL_HOLES}"


@pytest.mark.parametrize(
    "without, hole",
    [
        ("privacy.predictions=false", "predictions (privacy.predictions=true)"),
        ("model.norm=batch", "BatchNorm's statistics (model.norm=group)"),
        ("privacy.adjacency=client", "counts (no setting mends it)"),
        ("privacy.adjacency=label", "counts (privacy.counts=1)"),
        ("privacy.extractor=trained", "one image moves all"),
        ("fed.average=images", "give fed.average=uniform"),
        ("scheme.name=fedgen", "the scheme's report (no setting mends it)"),
    ],
)
def test_each_hole(tmp_path, data, without, hole):
    settings = [word for word in PRIVATE if not word.startswith(without.split("=")[0])]
    settings = [word for word in settings if not word.startswith("privacy.update_multiplier")]
    assert hole in rejected(tmp_path / "run", data, *settings, without, "privacy.epsilon=4")


def test_a_budget_of_what_has_no_bound_is_rejected(tmp_path, data):
    line = rejected(tmp_path / "run", data, "scheme.name=fedavg", "privacy.budget=4")
    assert line.startswith("privacy.budget=4: the whole release has no bound: weights (privacy.update_clip=1")


def test_fedavg_without_settings_of_privacy_says_and_stores_nothing(tmp_path, data):
    (output,) = toy.train_ok(1, "--out", tmp_path / "run", *toy.settings(data, "scheme.name=fedavg"))
    assert "privacy" not in output
    assert hkd_hpc.load(tmp_path / "run").privacy is None
    assert not [name for name in toy.metrics(tmp_path / "run") if "privacy_" in name or name.startswith("privacy/")]


def test_fedhkd_says_that_its_default_has_no_guarantee(tmp_path, data):
    train = toy.settings(data, "scheme.name=fedhkd", "scheme.clip=box", "fed.rounds=1")
    (output,) = toy.train_ok(1, "--out", tmp_path / "run", *train)
    told = rounded_up(epsilon(math.sqrt(8) / 7, DELTA))  # latent 8
    assert (
        f"features alone, for a fixed extractor: epsilon = {told}; the whole release: no guarantee, since weights, "
        "predictions and BatchNorm's statistics travel without noise"
    ) in output


def test_without_a_clip_features_have_no_bound_either():
    terms = Terms(
        "simulation", "image", DELTA, {"features": "no clip, noise multiplier 7"}, {"features": "scheme.clip=l2"}
    )
    mu_RMK = np.zeros((2, 3, len(KINDS)))
    mu_RMK[:, :, 0] = math.inf
    assert Ledger(terms, mu_RMK, mu_RMK).verdict() == (
        "features alone, for a fixed extractor: no bound (no clip, noise multiplier 7; scheme.clip=l2 gives one); the "
        "whole release: no guarantee, since features have no bound"
    )


def test_rounds_of_before_there_was_a_ledger_have_no_bound():
    """Client 0 took part in both rounds, client 1 in the second alone."""
    terms = Terms("simulation", "image", DELTA)
    mu_RMK = np.full((2, 2, len(KINDS)), np.nan)
    mu_RMK[1] = 0.5
    columns = {"privacy_mu_fixed": mu_RMK, "privacy_mu_whole": mu_RMK, "status": np.array([[0, np.nan], [0, 0]])}
    assert np.isinf(ledger_of(terms, columns).mu()).tolist() == [True, False]


def test_a_delta_that_says_nothing_is_told(tmp_path, data):
    (output,) = toy.train_ok(1, "--dry-run", *toy.settings(data, *PRIVATE, "privacy.delta=.1"))
    assert "privacy.delta=0.1: is not below 1 / " in output


@pytest.mark.parametrize(
    "number, text",
    [(4.421, "4.43"), (4.0, "4"), (4.0000001, "4"), (50.6, "50.6"), (50.601, "50.7"), (123456.7, "124000"), (0.0, "0")],
)
def test_an_epsilon_is_told_rounded_up(number, text):
    assert rounded_up(number) == text


def test_without_the_package_for_epsilon_mu_is_told_as_mu(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    mu = 1.41421356  # of no other test: what was computed is kept
    assert epsilon_text(mu, 1e-5) == "mu 1.42"
    assert bound_text(mu, 1e-5) == "mu 1.42 (pip install 'hkd_hpc[privacy]' for epsilon)"
    assert bound_text(0.0, 1e-5) == "epsilon = 0"
