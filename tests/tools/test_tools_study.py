"""The study: its page is that of the recorded runs, its verdicts are those of planted truths, a run repeats."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import toy

from hkd_hpc.analysis.statistics import seeds_to_see, verdicts
from hkd_hpc.compare import read_spec
from hkd_hpc.compare.runs import config_of, paper_run
from hkd_hpc.errors import RunError, UsageError
from hkd_hpc.jobs import Sweep
from hkd_hpc.results.differences import differences
from tools.study import answers, coverage, page, records, rerun, sections, tables
from tools.study.__main__ import main
from tools.study.gradients import gradient_norm
from tools.study.records import Record
from tools.synthetic_runs import write_run

STUDIES = 1000
SPECS = {"table1": 20, "small": 55, "beta02": 15, "beta5": 15, "why": 55, "gradients": 3, "tuned": 55, "smoke": 33}


def planted(scheme: str, seed: int, local: float, whole: float, made: dict | None = None, row: str = "") -> Record:
    """A run that has these accuracies in its only round."""
    summary = {answers.LAST["local"]: local, answers.LAST["global"]: whole}
    own = {
        "weights_sha256": "ab",
        "partition_sha256": "cd",
        "data_sha256": "ef",
        "client_s": 1.0,
        "payload_bytes": {"x": 1},
    }
    rounds = dict(zip(records.ACCURACIES, ([local], [local], [whole])))
    settings = {"scheme.name": scheme, "run.seed": seed}
    return Record(row or scheme, settings, rounds, summary, {**own, **(made or {})})


def study(gains: dict[str, list[float]]) -> tables.Results:
    """Schemes that are so much better than FedAvg, one number a seed, in both columns."""
    seeds = range(len(next(iter(gains.values()))))
    rows = {"fedavg": [0.0] * len(seeds), **gains}
    return tables.Results(
        [planted(s, seed, 0.5 + own[seed], 0.5 + own[seed]) for s, own in rows.items() for seed in seeds]
    )


# ---------------------------------------------------------------------------------------------- the page


def test_every_number_of_the_page_is_that_of_the_recorded_runs(capsys):
    assert main(["verify"]) == 0
    assert capsys.readouterr().out.endswith("every number is that of the recorded runs\n")


@pytest.fixture
def copied(tmp_path):
    """The page, its figures beside it."""
    for path in (page.PAGE, *page.PAGE.parent.glob("study_*.svg")):
        shutil.copy(path, tmp_path)
    return tmp_path / page.PAGE.name


def test_a_number_that_was_changed_is_named(copied, capsys):
    text = copied.read_text()
    number = next(line for line in text.splitlines() if line.startswith("| FedAvg | 0.")).split(" | ")[1]
    copied.write_text(text.replace(f"| FedAvg | {number} |", "| FedAvg | 0.999 ± 0.001 (3) |", 1))
    assert main(["verify", "--page", str(copied)]) == 1
    error = capsys.readouterr().err
    assert f"has “0.999 ± 0.001 (3)”, the runs say “{number}”" in error
    assert len(error.splitlines()) == 1


def test_a_figure_of_other_runs_is_named(copied, capsys):
    figure = copied.parent / "study_smoke.svg"
    figure.write_text(figure.read_text().replace("<dc:description>", "<dc:description>0"))
    assert main(["verify", "--page", str(copied)]) == 0
    figure.write_text("<svg/>")
    assert main(["verify", "--page", str(copied)]) == 1
    assert "study_smoke.svg: does not show the runs that are there now" in capsys.readouterr().err


def test_a_part_that_nobody_computes_is_wrong_input(copied, capsys):
    copied.write_text("<!-- study: nope -->\n<!-- study end -->\n")
    assert main(["verify", "--page", str(copied)]) == 2
    assert "<!-- study: nope -->: is no part of the page" in capsys.readouterr().err


@pytest.mark.parametrize("asked", tables.ASKED, ids=lambda asked: asked.name)
def test_specs_ask_for_as_many_runs_as_they_say(asked):
    head = (tables.SPECS / asked.spec).read_text().split("\n[")[0]
    assert len(asked.places) == SPECS[asked.name]
    assert f"# {SPECS[asked.name]} runs" in head


def test_choices_differ_from_the_small_table_in_the_choice_alone():
    small = read_spec(str(tables.SPECS / "study_small.toml"))
    small.settings["data.path"] = "cifar10.npz"
    config = config_of(paper_run(small, "fedhkd", 0))
    trials, problems = Sweep.from_toml(tables.SPECS / "study_why.toml", [tables.IMAGES]).trials()
    assert not problems
    [noiseless] = [trial for trial in trials if trial.labels == {"seed": "0", "choice": "no noise"}]
    with_noise = {**noiseless.settings, "scheme.sigma": 7.0}
    [papers], _ = Sweep(scheme=["fedhkd"], settings=with_noise).trials()
    assert papers.config().train == config.train
    assert papers.config().scheme == config.scheme
    assert papers.config().fed == config.fed


# ---------------------------------------------------------------------------------------------- the records


@pytest.fixture
def root(tmp_path):
    """Two schemes with two seeds, of which one run is not complete."""
    for scheme, seed, local, is_complete in (("fedavg", 0, 0.5, 1), ("fedhkd", 0, 0.6, 1), ("fedhkd", 1, 0.7, 0)):
        folder = tmp_path / "root" / f"{scheme}-paper-s{seed}"
        overrides = [f"scheme.name={scheme}", f"run.seed={seed}", "fed.rounds=2"]
        write_run(folder, overrides, [0.1, local], [0.2, local / 2], summary={} if is_complete else None)
    return tmp_path / "root"


def test_finished_runs_are_collected_and_read_back(root, tmp_path, capsys):
    file = tmp_path / "table.jsonl"
    assert main(["collect", str(root), "table", "--out", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 2 runs, 2 of them new\n"
    fedavg, fedhkd = records.read(file)
    assert (fedavg.row, fedavg.seed, fedhkd.row, fedhkd.seed) == ("fedavg", 0, "fedhkd", 0)
    assert fedhkd.rounds["local_test_accuracy"] == [0.1, 0.6]
    assert fedhkd.summary["global_test_accuracy_last"] == 0.3
    assert fedhkd.settings["scheme.lam"] == 0.05
    assert "data.path" not in fedhkd.settings
    assert main(["collect", str(root), "table", "--out", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 2 runs, 0 of them new\n"


def test_more_seeds_are_added_and_another_run_of_one_is_not():
    known, more = [planted("fedavg", 0, 0.5, 0.5)], planted("fedavg", 1, 0.6, 0.6)
    assert records.merged(known, [known[0], more]) == [*known, more]
    with pytest.raises(UsageError, match="fedavg, seed 0: the table has this run with other weights"):
        records.merged(known, [planted("fedavg", 0, 0.5, 0.5, {"weights_sha256": "other"})])


def test_a_damaged_table_is_told_in_one_line(tmp_path):
    (tmp_path / "smoke.jsonl").write_text('{"a": 1}\n{"row": "fedavg"}\n')
    with pytest.raises(UsageError, match=r"smoke\.jsonl: is no table of the study"):
        tables.results_of("smoke", tmp_path)


def test_only_seeds_that_all_rows_have_are_compared():
    found = [planted("fedavg", seed, 0.5, 0.5) for seed in (0, 1, 2)] + [
        planted("moon", seed, 0.6, 0.6) for seed in (2, 0)
    ]
    assert tables.Results(found).seeds == [0, 2]


def test_runs_of_one_seed_with_other_images_are_no_pair():
    found = [planted("fedavg", 0, 0.5, 0.5), planted("moon", 0, 0.5, 0.5, {"partition_sha256": "other"})]
    with pytest.raises(UsageError, match="moon, seed 0: has other images"):
        tables.Results(found).check_pairs()


# ---------------------------------------------------------------------------------------------- the answers


NOISE = np.array([1, -1, 1, -1, 1, -1, 1, -1, 1]) / 1000  # of 9 seeds, which eight schemes need
STEADY = {"fedhkd": 0.05 + NOISE, "fedhkd_star": 0.03 - NOISE, "moon": 0.01 + NOISE}


def test_what_is_better_than_every_other_scheme_is_the_best():
    found = answers.best("local", "t", study(STEADY))
    assert found.verdict == "holds"
    assert found.measured.endswith("rank 1 of 4")
    assert answers.between("local", "t", study(STEADY)).verdict == "holds"


def test_nothing_is_the_best_before_all_have_run():
    found = answers.best("local", "t", study(STEADY), ["FedMD"])
    assert found.verdict == "cannot be told before there are runs of FedMD"


def test_what_is_worse_than_any_is_not():
    found = answers.best("global", "t", study({**STEADY, "moon": 0.09 + NOISE}))
    assert found.verdict == "does not hold: worse than MOON"
    assert found.measured.endswith("rank 2 of 4")


def test_a_step_that_is_called_below_0_is_named():
    found = answers.between("local", "t", study({**STEADY, "fedhkd_star": 0.09 + NOISE}))
    assert found.verdict == "does not hold: below 0: FedHKD – FedHKD\\*"


def test_what_is_not_separated_from_one_cannot_be_told():
    found = answers.best("local", "t", study({**STEADY, "fedhkd": 0.03 + 5 * NOISE}))
    assert found.verdict == "cannot be told with 9 seeds; better than FedAvg, MOON"


@pytest.mark.parametrize("seeds", [3, 5])
def test_however_clear_it_is_few_seeds_tell_nothing(seeds):
    found = study({scheme: own[:seeds] for scheme, own in STEADY.items()})
    assert answers.best("local", "t", found).verdict == f"cannot be told with {seeds} seeds"
    assert answers.between("local", "t", found).verdict == f"cannot be told with {seeds} seeds"


def test_whether_the_papers_gain_is_more_than_is_found():
    assert answers.size_text(0.001 + NOISE, 0.03, 8) == "more than is found"
    assert answers.size_text(0.05 + NOISE, 0.03, 8) == "less than is found"
    assert answers.size_text(0.03 + NOISE, 0.03, 8) == "not separated from what is found"
    assert answers.size_text(0.001 + NOISE[:5], 0.03, 8) == "outside the interval"
    assert answers.size_text(0.0301 + NOISE[:5], 0.03, 8) == "within the interval"


def test_less_affected_is_told_from_both_betas():
    severe, even = study({"fedhkd": 0.05 + NOISE}), study({"fedhkd": 0.01 - NOISE})
    found = answers.less_affected("global", severe, even)
    assert found.verdict == "holds"
    assert found.papers.startswith("+0.140")  # (.4736 - .3251) - (.5573 - .5483) = .1395
    assert answers.less_affected("global", even, severe).verdict == "does not hold: worse than FedAvg"


def test_low_cost_counts_seconds_and_bytes():
    cheap = {"client_s": 1.05, "payload_bytes": {"x": 1}}
    runs = [planted("fedavg", seed, 0.5, 0.5) for seed in range(3)]
    found = tables.Results([*runs, *(planted("fedhkd", seed, 0.5, 0.5, cheap) for seed in range(3))])
    assert answers.low_cost("t", found).verdict == "holds"
    dear = {"client_s": 1.05, "payload_bytes": {"x": 2}}
    found = tables.Results([*runs, *(planted("fedhkd", seed, 0.5, 0.5, dear) for seed in range(3))])
    assert answers.low_cost("t", found).verdict == "does not hold"


def test_the_papers_gains_are_those_of_its_table():
    assert answers.gain("fedhkd", "fedavg", "local") == 0.0304
    assert answers.gain("fedhkd", "fedavg", "global") == 0.0472
    assert answers.gain("fedhkd", "fedavg", "local", beta=0.2) == 0.0872


def test_choices_are_paired_with_the_small_table_and_the_authors_code_with_their_own_fedavg():
    small = study({"fedhkd": 0.01 + NOISE})
    seeds = range(9)
    own = [
        *(planted("fedavg", seed, 0.7, 0.7, row=sections.AUTHORS_FEDAVG) for seed in seeds),
        *(planted("fedhkd", seed, 0.72, 0.72, row="the authors' code H") for seed in seeds),
        *(planted("fedhkd", seed, 0.5, 0.5, row="no noise") for seed in seeds),
    ]
    table, _ = sections.choices(tables.Results(own), {"small": small})
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()}
    assert "| +0.020 ± 0.000, better |" in rows["the authors' code H"]
    assert "| +0.000 ± 0.000, not separated | -0.010 ± 0.001, worse |" in rows["no noise"]


def test_tuned_rows_are_what_validation_images_chose():
    val = lambda value: {"local_val_accuracy_last": value, "global_val_accuracy_last": 1 - value}
    trial = lambda place, value: Record(
        f"fedavg-trial{place}", {"scheme.name": "fedavg", "run.seed": 100}, {}, val(value), {}
    )
    found = tables.Results([trial(0, 0.3), trial(1, 0.5), trial(2, 0.1)])
    assert sections.chosen_rows(found, "fedavg") == {"local": "fedavg-tuned1", "global": "fedavg-tuned2"}
    found = tables.Results([trial(0, 0.5), trial(1, 0.5)])
    assert sections.chosen_rows(found, "fedavg") == {"local": "fedavg", "global": "fedavg"}


# ---------------------------------------------------------------------------------------------- the statistics


@pytest.mark.parametrize("true", coverage.DIFFERENCES)
@pytest.mark.parametrize("seeds", coverage.SEEDS)
def test_intervals_cover_and_families_without_a_difference_are_left_alone(seeds, true):
    found = coverage.kept(STUDIES, seeds, true)
    assert 0.93 <= found.covered <= 0.97
    assert true or found.called <= 0.05


def test_a_study_in_files_says_what_its_numbers_say(tmp_path):
    """To the digits that are kept."""
    every = coverage.drawn(3, 0.01, np.random.default_rng(5))
    drawn = {scheme: every[scheme] for scheme in ("fedavg", "moon", "fedhkd")}
    read = coverage.from_files(drawn, tmp_path)
    assert set(read) == set(drawn)
    assert all(read[scheme]["local"] == pytest.approx(drawn[scheme]["local"], abs=1e-6) for scheme in drawn)
    ours, its = (differences(found, "local") for found in (read, drawn))
    assert [str(ours[scheme]) for scheme in its] == [str(cell) for cell in its.values()]
    assert {cell.verdict for cell in ours.values()} == {"cannot be told with 3 seeds"}


def test_the_number_of_seeds_that_is_asked_for_finds_an_effect():
    """By the exact test, in as many studies as were promised, or nearly."""
    assert seeds_to_see(0.01, 0.01) == 10  # of the t test: 1 standard deviation, level .05, power .8
    random = np.random.default_rng(3)
    called = [verdicts({"a": random.normal(0.01, 0.01, 10)})["a"] == "better" for _ in range(STUDIES)]
    assert np.mean(called) == pytest.approx(0.8, abs=0.04)
    assert seeds_to_see(0.03, 0.0, 8) == 9
    assert seeds_to_see(1e-9, 1.0) == 100_000


# ---------------------------------------------------------------------------------------------- a run once more


def test_a_recorded_run_repeats(capfd):
    """With the most general kernels: the same bits on the kind of CPU that recorded it, near them on another."""
    assert main(["run", "cell", "fedhkd", "0"]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith(("the same weights: ", "accuracies within "))


def test_another_run_is_told_apart():
    then = planted("fedhkd", 0, 0.5, 0.5, {"versions": {"torch": "2"}, "cpu": {"model": "a"}})
    same = {"versions": {"torch": "2"}, "weights_sha256": "12"}
    other_cpu = planted("fedhkd", 0, 0.52, 0.5, {**same, "cpu": {"model": "b"}})
    assert rerun.compared(then, other_cpu) == (
        "accuracies within 0.03 (local +0.0200, global +0.0000), other weights, 12, not ab; model was a, is b"
    )
    assert rerun.compared(then, then) == "the same weights: ab"
    with pytest.raises(RunError, match="of the same versions and kind of CPU"):
        rerun.compared(then, planted("fedhkd", 0, 0.5, 0.5, {**same, "cpu": {"model": "a"}}))
    with pytest.raises(RunError, match=r"not within 0\.03"):
        rerun.compared(then, planted("fedhkd", 0, 0.6, 0.5, {**same, "cpu": {"model": "b"}}))
    with pytest.raises(UsageError, match="has other images"):
        rerun.compared(then, planted("fedhkd", 0, 0.5, 0.5, {"data_sha256": "other"}))


@pytest.mark.parametrize(
    "words, part",
    [
        (["nope", "fedhkd", "0"], "nope: no such table has finished runs; tables: cell, "),
        (["cell", "fedhkd", "7"], "cell fedhkd 7: no such run; rows and seeds: {'fedhkd': [0]}"),
        (["cell", "fedhkd", "0", "fed.rounds=1"], "fed.rounds: would make it another run"),
    ],
)
def test_what_cannot_be_run_again_is_wrong_input(words, part, capsys):
    assert main(["run", *words]) == 2
    assert part in capsys.readouterr().err


def test_images_that_are_not_there_are_told(capfd):
    assert main(["run", "smoke", "fedhkd", "0", "data.path=/nowhere.npz"]) == 2
    assert "/nowhere.npz" in capfd.readouterr().err


def test_kernels_are_those_of_the_recorded_run():
    env = rerun.environment({"model": "x", "MKL_CBWR": "COMPATIBLE"}, {"HOME": "/", "ATEN_CPU_CAPABILITY": "default"})
    assert env == {"HOME": "/", "MKL_CBWR": "COMPATIBLE"}


def test_the_norm_of_a_gradient_by_hand():
    x, y = (torch.tensor(value, requires_grad=True) for value in (3.0, 2.0))
    assert gradient_norm(x * y**2, [x, y]) == pytest.approx(160**0.5)  # (4, 12)
    assert gradient_norm(x * 2, [x, y]) == 2
    assert gradient_norm(torch.tensor(1.0), [x, y]) == 0


def test_gradients_are_measured_and_the_weights_are_fedhkds(tmp_path):
    data = toy.save_data(tmp_path / "data.npz")
    for name, scheme in (("plain", "fedhkd"), ("measured", "tools.study.gradients:MeasuredFedHKD")):
        toy.train_ok(1, f"scheme.name={scheme}", *toy.settings(data, "scheme.nu=0"), "--out", tmp_path / name)
    plain, measured = (toy.metrics(tmp_path / name) for name in ("plain", "measured"))
    assert plain["rounds/weights_sha256"].tolist() == measured["rounds/weights_sha256"].tolist()
    assert measured["rounds/loss/soft"].tolist() == plain["rounds/loss/soft"].tolist()
    soft, feature = (measured[f"rounds/loss/gradient_{term}"] for term in ("soft", "feature"))
    assert soft[0] == feature[0] == 0  # nothing is shared in round 1
    assert min(soft[1], feature[1], measured["rounds/loss/gradient_cross_entropy"].min()) > 0
