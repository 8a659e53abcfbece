"""The audit's bounds hold and bite, what is broken is caught, and membership is told from what a run left."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import toy

from hkd_hpc.privacy import accounting, random
from hkd_hpc.privacy.mechanism import Mechanism
from hkd_hpc.schemes import knowledge
from tools.audit import suite
from tools.audit.auc import auc, mean_of
from tools.audit.bound import at_least, at_most, attainable, epsilon_of, lower_bound
from tools.audit.floats import is_reached
from tools.audit.table import FALSE, HOLDS, NONE, Row

pytestmark = pytest.mark.slow

DELTA = 1e-5
FEW = suite.Sizes(trials=200)


# --- numbers


def test_a_rate_is_bounded_as_clopper_and_pearson_do():
    """None of 100: 1 - .025^(1/100); all of 100: .025^(1/100); 1 of 2: the ends of p^2 = .975 and (1 - p)^2 = .975."""
    assert float(at_most(np.array(0), 100)) == pytest.approx(1 - 0.025**0.01)
    assert float(at_least(np.array(100), 100)) == pytest.approx(0.025**0.01)
    assert float(at_most(np.array(1), 2)) == pytest.approx(math.sqrt(0.975))
    assert float(at_least(np.array(1), 2)) == pytest.approx(1 - math.sqrt(0.975))
    assert float(at_least(np.array(0), 100)) == 0
    assert float(at_most(np.array(100), 100)) == 1


@pytest.mark.parametrize(
    "mu, delta, epsilon",
    [(8 / 7, 0.01, 2.775), (8 / 7 * math.sqrt(50), 1e-5, 66.317), (1 / 7, 1e-5, 0.5025), (1.0, 1e-5, 4.377)],
)
def test_the_exact_curve_gives_the_published_figures(mu, delta, epsilon):
    assert epsilon_of(mu, delta) == pytest.approx(epsilon, abs=1e-3)


def gaussian(mu: float, trials: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of a Gaussian mechanism with this mu, and of its neighbour."""
    source = np.random.default_rng(seed)
    return source.standard_normal((trials, 1)), source.standard_normal((trials, 1)) + mu


def test_bounds_come_near_the_epsilon_of_a_gaussian_and_hardly_ever_exceed_it():
    """200 audits of mu 1, epsilon 4.377: at 95 % some 10 may exceed it by chance."""
    bounds = [lower_bound(*gaussian(1.0, 2_000, seed), DELTA) for seed in range(200)]
    assert sum(bound.epsilon > 4.3772 for bound in bounds) <= 12
    assert sum(bound.mu > 1 for bound in bounds) <= 12
    assert np.mean([bound.epsilon for bound in bounds]) > 0.8 * attainable(1.0, 1_000, DELTA)
    assert np.mean([bound.mu for bound in bounds]) > 0.75


def test_without_a_difference_nothing_is_found():
    bounds = [lower_bound(*gaussian(0.0, 500, seed), DELTA) for seed in range(40)]
    assert sum(bound.epsilon > 0 for bound in bounds) <= 3


def test_a_difference_without_noise_shows_all_that_so_many_trials_can():
    """500 of 500 against 0 of 500: log((.025^(1/500) - delta) / (1 - .025^(1/500)))."""
    bound = lower_bound(np.zeros((1_000, 1)), np.ones((1_000, 1)), DELTA)
    rate = 0.025 ** (1 / 500)
    assert bound.epsilon == pytest.approx(math.log((rate - DELTA) / (1 - rate)))
    assert attainable(math.inf, 500, DELTA) == pytest.approx(bound.epsilon)


def test_the_half_that_chooses_does_not_judge():
    """A difference that only the first half has is nothing."""
    score_d, score_e = gaussian(0.0, 1_000, 0)
    score_e[:500] += 10
    assert lower_bound(score_d, score_e, DELTA).epsilon == 0


# --- verdicts


def row(must: str, claimed: float, mu: float) -> Row:
    return Row("r", "f", claimed, lower_bound(*gaussian(mu, 2_000, 3), DELTA), must)


@pytest.mark.parametrize(
    "must, claimed, mu, is_right",
    [
        (HOLDS, 4.38, 1.0, True),
        (HOLDS, 1.99, 1.0, False),  # the noise of mu .5 was claimed, half of it is there
        (FALSE, 0.5, 2.0, True),
        (FALSE, 6.0, 1.0, False),
        (NONE, math.inf, 50.0, True),
        (NONE, math.inf, 2.0, False),
    ],
)
def test_a_row_is_right_where_its_bound_lies_on_the_side_where_it_must(must, claimed, mu, is_right):
    assert row(must, claimed, mu).is_right is is_right


# --- the real code


@pytest.fixture
def known_entropy(monkeypatch):
    """The system's entropy, but the same in each test: what holds with 95 % is then never a failure by chance."""
    source = np.random.default_rng(0)
    monkeypatch.setattr(random.os, "urandom", source.bytes)


def test_every_row_of_the_audit_is_on_the_right_side(known_entropy, capsys):
    assert suite.main(["--quick"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("privacy.epsilon=4: noise")]
    assert lines[0].startswith("machine: ")
    assert "commit: " in lines[1]
    verdicts = [line.rsplit("  ", 1)[1].strip() for line in lines[3:]]
    assert verdicts.count("holds") == 7
    assert verdicts.count("exceeded, as it must be") == 2
    assert verdicts.count("caught") == 2


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_noise_that_is_halved_or_forgotten_is_caught(share, known_entropy, monkeypatch):
    drawn = random.of_entropy
    monkeypatch.setattr(random, "of_entropy", lambda shape: share * drawn(shape))
    assert [row.verdict for row in suite.entropy(FEW)] == ["BROKEN: the ledger promises too much"]


def test_noise_in_float32_is_caught_by_what_it_cannot_reach(known_entropy, monkeypatch):
    """At mu 1 / 7, epsilon .51: however large the noise is, a report tells two means apart."""

    def noisy(client, quantity, mean_CX, std_C, one_draw=False):
        unit_CX = torch.from_numpy(client.normal(quantity, mean_CX.shape).astype(np.float32))
        return mean_CX + unit_CX * std_C[:, None]

    (row,) = suite.floats(FEW)
    assert row.bound.epsilon == 0
    monkeypatch.setattr(knowledge, "noisy", noisy)
    (row,) = suite.floats(FEW)
    assert row.verdict == "BROKEN: the ledger promises too much"
    assert row.bound.epsilon > 4


def test_what_float32_noise_reaches():
    """3 (1 + k 2^-23) is 3 + 1.5 k steps, rounded to even: 0, 2, 3, 4, 6 of them; 1 and 5 are missed. From a mean
    of 3, where steps are twice as long, none is."""
    step = 2.0**-22  # from 2 to 4
    reached = lambda sent, mean: is_reached(np.array(sent), np.full(len(sent), mean), 3.0).tolist()
    assert reached([3 + place * step for place in range(6)], 0.0) == [True, False, True, True, True, False]
    assert reached([6 + place * 2 * step for place in range(4)], 3.0) == [True, True, True, True]


def test_features_that_are_not_clipped_before_the_mean_are_caught(known_entropy, monkeypatch):
    monkeypatch.setattr(Mechanism, "clipped", lambda self, feature_ND: feature_ND)
    assert [row.is_right for row in suite.entropy(FEW)] == [False]


# --- membership


def test_the_auc_and_its_error_are_delongs():
    """Of 6 pairs 4 are won and 2 tied: 5/6. Components 1, 3/4, 3/4 and 1, 2/3: variance 1/48 / 3 + 1/18 / 2."""
    found = auc(np.array([3.0, 2.0, 2.0]), np.array([1.0, 2.0]))
    assert found.value == pytest.approx(5 / 6)
    assert found.error == pytest.approx(math.sqrt(1 / 144 + 1 / 36))
    assert (found.members, found.others) == (3, 2)
    assert found.interval == (pytest.approx(5 / 6 - 1.959964 * found.error), 1.0)


def test_the_mean_of_attacks_has_the_error_of_a_mean():
    each = [auc(np.array([3.0, 2.0, 2.0]), np.array([1.0, 2.0]))] * 4
    assert mean_of(each).value == pytest.approx(5 / 6)
    assert mean_of(each).error == pytest.approx(each[0].error / 2)


def test_the_interval_of_the_auc_covers_it():
    """Scores of two Gaussians 1 apart: the AUC is Phi(1 / sqrt(2)) = .7602."""
    source = np.random.default_rng(0)
    found = [auc(source.standard_normal(80) + 1, source.standard_normal(60)).interval for _ in range(300)]
    assert 0.92 <= np.mean([low <= 0.7602 <= high for low, high in found]) <= 0.98


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that fits noise: its labels are random, so that what it knows of its images it has by heart."""
    folder = tmp_path_factory.mktemp("membership")
    source = np.random.default_rng(5)
    labels = {"y_train": source.integers(0, 10, 60), "y_test": source.integers(0, 10, 60)}
    data = toy.save_data(folder / "data.npz", train=60, test=60, **labels)
    more = ("train.epochs=15", "scheme.name=fedhkd", "scheme.nu=0", "run.client_models=true", "data.partition=iid")
    toy.train_ok(1, *toy.settings(data, *more), "--out", folder / "run")
    return folder / "run"


def test_members_of_a_run_that_learned_by_heart_are_told(run, capsys):
    assert suite.main(["--membership", str(run)]) == 0
    mean = {attack: auc for attack, auc in aucs(capsys.readouterr().out) if "mean of 3 clients" in attack}
    assert len(mean) == 4
    assert min(auc for attack, auc in mean.items() if attack.startswith("loss")) > 0.7
    assert max(abs(auc - 0.5) for attack, auc in mean.items() if attack.startswith("distance")) < 0.4


def aucs(text: str) -> list[tuple[str, float]]:
    """(attack and what it is on, AUC) of the lines of a table."""
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    return [(f"{row[0]}, {row[1]}", float(row[4])) for row in rows if len(row) == 6 and re.match(r"[01]\.\d", row[4])]


def test_of_a_run_without_the_clients_models_only_the_rest_is_attacked(run, tmp_path, capsys):
    """And the tool says what is missing."""
    data = run.parent / "data.npz"
    toy.train_ok(1, *toy.settings(data, "scheme.name=fedavg", "run.client_models=false"), "--out", tmp_path / "run")
    assert suite.main(["--membership", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert [attack for attack, _ in aucs(out) if "mean" in attack] == ["loss, global model, mean of 3 clients"]
    assert "no attack on knowledge: scheme.name=fedavg sends no class means" in out
    assert "kept in runs with run.client_models=true alone" in out


def test_a_folder_without_a_run_is_wrong_input(tmp_path, capsys):
    assert suite.main(["--membership", str(tmp_path / "nothing")]) == 2


# --- the page


def sigma_rows() -> list[list[str]]:
    """The cells of the table of sigma against epsilon in docs/privacy.md."""
    page = (Path(__file__).resolve().parents[2] / "docs/privacy.md").read_text()
    section = page.split("## Sigma against epsilon")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if re.match(r"\| \d", line)]


@pytest.mark.parametrize(
    "column, size, delta", [(1, 64, 0.01), (2, 64, 1e-5), (3, 32, 0.01), (4, 32, 1e-5), (5, 1, 0.01), (6, 1, 1e-5)]
)
def test_the_pages_table_of_sigma_is_that_of_the_accounting(column, size, delta):
    """50 rounds: mu = sqrt(50 d) / sigma; `vector` as one coordinate."""
    mu = {row[0]: math.sqrt(50 * size) / float(row[0]) for row in sigma_rows()}
    told = {row[0]: row[column] for row in sigma_rows()}
    assert list(told) == ["7", "15", "30", "60", "120", "240"]
    for sigma, value in mu.items():  # rounded up in the last digit that is told
        last = 10.0 ** -len(told[sigma].partition(".")[2])
        for exact in (epsilon_of(value, delta), accounting.epsilon(value, delta)):
            assert exact - 1e-6 < float(told[sigma]) < exact + last, sigma
