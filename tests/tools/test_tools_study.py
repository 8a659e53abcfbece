"""The study: its page is that of the recorded runs, its verdicts are those of planted truths, a run repeats."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hkd_hpc import compare
from hkd_hpc.analysis.statistics import seeds_to_see, verdicts
from hkd_hpc.common.errors import RunError, UsageError
from hkd_hpc.common.words import counted
from hkd_hpc.compare import read_spec
from hkd_hpc.compare.runs import config_of, paper_run
from hkd_hpc.config import is_location
from hkd_hpc.jobs import Sweep
from hkd_hpc.results.differences import differences
from tools.study import answers, coverage, in_short, page, records, rerun, seconds, sections, tables
from tools.study.__main__ import main
from tools.study.records import Record
from tools.synthetic_runs import write_run

pytestmark = pytest.mark.slow

STUDIES = 1000
SPECS = {
    "table1": 40,
    "small": 110,
    "beta02": 30,
    "beta5": 30,
    "constant": 30,
    "why": 55,
    "gradients": 3,
    "gradients_resnet18": 1,
    "tuned": 110,
    "smoke": 33,
}


def planted(scheme: str, seed: int, local: float, whole: float, made: dict | None = None, row: str = "") -> Record:
    """A run that has these accuracies in its only round."""
    summary = {answers.LAST["local"]: local, answers.LAST["global"]: whole}
    own = {
        "weights_sha256": "ab",
        "partition_sha256": "cd",
        "data_sha256": "ef",
        "payload_bytes": {"x": 1},
    }
    rounds = dict(zip(records.ACCURACIES, ([local], [local], [whole])))
    settings = {"scheme.name": scheme, "run.seed": seed, "fed.rounds": 1}
    return Record(row or scheme, settings, rounds, summary, {**own, **(made or {})})


def study(gains: dict[str, list[float]]) -> tables.Results:
    """Schemes that are so much better than FedAvg, one number a seed from seed 0 on, in both columns."""
    seeds = range(len(next(iter(gains.values()))))
    rows = {"fedavg": [0.0] * len(seeds), **gains}
    return tables.Results(
        [planted(s, seed, 0.5 + own[seed], 0.5 + own[seed]) for s, own in rows.items() for seed in seeds]
    )


# ---------------------------------------------------------------------------------------------- the page


def test_every_number_of_the_page_is_that_of_the_recorded_runs(capsys):
    assert main(["verify"]) == 0
    assert capsys.readouterr().out.endswith("every number is that of the recorded runs\n")


@pytest.fixture(scope="module")
def computed():
    """What the recorded runs say, computed when it is first asked for; no test changes them."""
    makers = page.makers_of(page.PAGE, tables.all_results())
    return {name: functools.cache(maker) for name, maker in makers.items()}


@pytest.fixture
def copied(tmp_path, computed, monkeypatch):
    """The page, its figures beside it."""
    monkeypatch.setattr(page, "makers_of", lambda page, results: computed)
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


def test_a_part_that_is_missing_or_there_twice_is_wrong_input(copied, capsys):
    text = copied.read_text()
    found = page.BLOCK.search(text)
    block, name = found[0], found[2]
    for changed, count in ((text.replace(block, "FedHKD is best: +0.100."), 0), (f"{text}\n{block}\n", 2)):
        copied.write_text(changed)
        assert main(["verify", "--page", str(copied)]) == 2
        assert f"<!-- study: {name} -->: is {count} times on the page, must be there once" in capsys.readouterr().err


def test_a_part_that_is_not_marked_as_the_others_is_wrong_input(copied, capsys):
    copied.write_text(copied.read_text() + "\n<!-- study: table-1 -->\n| forged |\n<!-- study end -->\n")
    assert main(["verify", "--page", str(copied)]) == 2
    assert "a part is not marked as the others are" in capsys.readouterr().err


def test_a_table_beside_the_computed_ones_is_named(copied, capsys):
    copied.write_text(copied.read_text() + "\n| FedHKD | +0.100 |\n")
    assert main(["verify", "--page", str(copied)]) == 1
    assert "a table stands outside of the computed parts: | FedHKD | +0.100 |" in capsys.readouterr().err


def test_a_part_that_nobody_computes_is_wrong_input(copied, capsys):
    copied.write_text("<!-- study: nope -->\n<!-- study end -->\n")
    assert main(["verify", "--page", str(copied)]) == 2
    assert "<!-- study: nope -->: is no part of the page" in capsys.readouterr().err


@pytest.mark.parametrize("asked", tables.ASKED, ids=lambda asked: asked.name)
def test_specs_ask_for_as_many_runs_as_they_say(asked):
    head = (tables.SPECS / asked.spec).read_text().split("\n[")[0]
    assert len(asked.required) == SPECS[asked.name]
    assert f"# {counted(SPECS[asked.name], 'run')}" in head


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


def test_runs_of_another_spec_are_not_collected(root, tmp_path, capsys):
    file = tmp_path / "table.jsonl"
    assert main(["collect", str(root), "small", "--out", str(file)]) == 2
    assert "small: fedavg, seed 0: was run with " in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.parametrize(
    "parts, told",
    [
        (
            {"changes_json": '[{"after_round": 1, "train.lr": [0.001, 0.002]}]'},
            "was resumed with changes (after round 1: train.lr 0.001 -> 0.002)",
        ),
        (
            {"changes_json": json.dumps([{"after_round": 1, "code.hkd_hpc": ["ab" * 32, "cd" * 32]}])},
            "was resumed with changes (after round 1: code.hkd_hpc abababab -> cdcdcdcd)",
        ),
    ],
)
def test_a_run_that_was_changed_on_the_way_is_no_evidence(tmp_path, capsys, parts, told):
    folder = tmp_path / "root/fedavg-paper-s0"
    write_run(folder, ["scheme.name=fedavg", "fed.rounds=2"], [0.1, 0.5], [0.2, 0.3], summary={}, **parts)
    assert main(["collect", str(tmp_path / "root"), "table", "--out", str(tmp_path / "t.jsonl")]) == 2
    assert f"{folder}: {told}; the study takes runs of one code" in capsys.readouterr().err


def test_a_run_that_lost_a_client_is_no_evidence():
    columns = {"clients_refused": np.array([0, 1, 1]), "clients_failed": np.array([0, 0, 0])}
    assert records.unfit(SimpleNamespace(changes=[], round_columns=columns)) == "clients rejected: 2"
    none = {name: np.zeros(3, int) for name in columns}
    assert records.unfit(SimpleNamespace(changes=[], round_columns=none)) == ""


def test_more_seeds_are_added_and_another_run_of_one_is_not():
    known, more = [planted("fedavg", 0, 0.5, 0.5)], planted("fedavg", 1, 0.6, 0.6)
    assert records.merged(known, [known[0], more]) == [*known, more]
    with pytest.raises(UsageError, match="fedavg, seed 0: the table has this run with other weights"):
        records.merged(known, [planted("fedavg", 0, 0.5, 0.5, {"weights_sha256": "other"})])


def test_a_damaged_table_is_told_in_one_line(tmp_path):
    (tmp_path / "smoke.jsonl").write_text('{"a": 1}\n{"row": "fedavg"}\n')
    with pytest.raises(UsageError, match=r"smoke\.jsonl: is no table of the study"):
        tables.results_of(SMOKE, tmp_path)


@pytest.mark.parametrize(
    "seeds_of_moon, compared", [((1, 0), [0, 1]), ((2, 0), [0]), ((1, 2), []), ((0, 1, 2, 3), [0, 1, 2])]
)
def test_the_first_seeds_that_all_schemes_have_are_compared(seeds_of_moon, compared):
    found = [planted("fedavg", seed, 0.5, 0.5) for seed in (0, 1, 2)]
    found += [planted("moon", seed, 0.6, 0.6) for seed in seeds_of_moon]
    assert tables.Results(found).seeds == compared


def test_a_row_that_is_under_way_takes_no_seed_from_the_others():
    runs = {"fedavg": 3, "fedhkd": 2, "moon": 1, "fedmd": 2, "central": 3}
    found = tables.Results([planted(row, seed, 0.5, 0.5) for row, count in runs.items() for seed in range(count)])
    assert found.seeds == [0]
    assert (list(found.compared.rows), found.compared.seeds) == (["fedavg", "fedhkd", "fedmd", "central"], [0, 1])
    assert answers.above("fedhkd", "fedavg", "local", "t", found).table == "t (2 seeds)"
    told = sections.state_text(next(asked for asked in tables.ASKED if asked.name == "small"), found)
    assert told.startswith("11 of 110 runs are finished; compared are the seeds that all rows here have: 0, 1.")
    assert told.endswith(
        "Not compared yet: FedProx, MOON (1 seed so far), FedAlign, FedGen, FedProto, FedHKD\\*, local."
    )


def test_a_setting_that_the_spec_does_not_know_is_rejected(smoke, tmp_path):
    fedavg, *others = smoke
    strange = replace(fedavg, settings={**fedavg.settings, "train.secret_boost": 3})
    with pytest.raises(UsageError, match="fedavg, seed 0: has settings that .* does not know: train.secret_boost"):
        of_table([strange, *others], tmp_path)


def test_a_control_takes_no_seed_from_the_schemes():
    found = tables.Results([*(planted("fedavg", seed, 0.5, 0.5) for seed in (0, 1)), planted("local", 0, 0.6, 0.6)])
    assert found.seeds == [0, 1]
    np.testing.assert_array_equal(found.values("local", answers.LAST["local"]), [0.6, np.nan])


SMOKE = next(asked for asked in tables.ASKED if asked.name == "smoke")


@pytest.fixture
def smoke():
    """The recorded runs of the smoke test."""
    return records.read(tables.DATA / "smoke.jsonl")


def of_table(found, folder):
    records.write(folder / "smoke.jsonl", found)
    return tables.results_of(SMOKE, folder)


def changed(record, **settings):
    return replace(record, settings=record.settings | {key.replace("_", ".", 1): v for key, v in settings.items()})


def test_runs_with_other_settings_than_the_spec_are_rejected(smoke, tmp_path):
    assert len(of_table(smoke, tmp_path).records) == len(smoke)
    smoke[3] = changed(smoke[3], train_lr=0.003)
    row, seed = smoke[3].row, smoke[3].seed
    with pytest.raises(UsageError, match=f"smoke: {row}, seed {seed}: was run with train.lr=0.003, cifar10_smoke.toml"):
        of_table(smoke, tmp_path)


@pytest.mark.parametrize(
    "made, told",
    [
        ({"code_sha256": "f" * 64}, "code is ffffffffffff, and "),
        ({"cpu": {"model": "Other"}}, "CPU is Other, and "),
        ({"versions": {"torch": "9", "numpy": "2.4.6"}}, "torch is 9, and "),
        ({"devices": ["NVIDIA H200"]}, "device is NVIDIA H200, and cpu"),
        ({"code_sha256": ""}, "does not say its code"),
        ({"cpu": {"model": "several"}}, "does not say its CPU"),
    ],
)
def test_runs_of_another_code_or_machine_are_rejected(smoke, tmp_path, made, told):
    smoke[-1] = replace(smoke[-1], made={**smoke[-1].made, **made})
    with pytest.raises(UsageError, match=f"smoke: .*: {told}"):
        of_table(smoke, tmp_path)


def test_seeds_that_the_spec_does_not_ask_for_are_left_out(smoke, tmp_path):
    more = [changed(record, run_seed=7) for record in smoke if record.seed == 0]
    assert of_table([*smoke, *more], tmp_path).records == of_table(smoke, tmp_path).records


def test_accuracies_that_are_not_those_of_the_last_round_are_rejected(smoke, tmp_path):
    smoke[0] = replace(smoke[0], summary=smoke[0].summary | {answers.LAST["local"]: 0.9})
    with pytest.raises(UsageError, match="local_test_accuracy_last is 0.9, its rounds say"):
        of_table(smoke, tmp_path)


@pytest.mark.parametrize(
    "summary, rounds, told",
    [
        ({"global_test_accuracy_oracle": 0.9}, {}, "global_test_accuracy_oracle is 0.9, its rounds say"),
        ({"global_test_accuracy_mean_last_5": 0.9}, {}, "global_test_accuracy_mean_last_5 is 0.9"),
        ({}, {"local_test_accuracy": [0.5] * 9}, "local_test_accuracy has 9 rounds, it was trained for 10"),
        ({}, {"local_test_accuracy": [1.7] * 10}, "local_test_accuracy has numbers beyond 0 and 1"),
    ],
)
def test_numbers_that_do_not_fit_together_are_rejected(smoke, tmp_path, summary, rounds, told):
    smoke[4] = replace(smoke[4], summary=smoke[4].summary | summary, rounds=smoke[4].rounds | rounds)
    with pytest.raises(UsageError, match=told):
        of_table(smoke, tmp_path)


def test_a_run_that_is_there_twice_is_rejected(smoke, tmp_path):
    with pytest.raises(UsageError, match=f"{smoke[0].row}, seed {smoke[0].seed}: is there 2 times"):
        of_table([*smoke, smoke[0]], tmp_path)


def test_a_setting_that_a_record_lacks_is_its_default(smoke, tmp_path):
    without = {key: value for key, value in smoke[0].settings.items() if key != "fed.finetune_epochs"}
    smoke[0] = replace(smoke[0], settings=without)
    with pytest.raises(UsageError, match=r"was run with fed\.finetune_epochs=0, cifar10_smoke\.toml asks for 2"):
        of_table(smoke, tmp_path)


@pytest.mark.parametrize(
    "made, part", [({"partition_sha256": "12"}, "has other images"), ({"code_sha256": "12"}, "code")]
)
def test_tables_that_are_compared_are_of_one_code_and_one_partition(tmp_path, made, part):
    """What was changed for FedHKD is compared with the runs of another table."""
    for name, row in (("small", "fedhkd"), ("why", "no noise")):
        asked = next(asked for asked in tables.ASKED if asked.name == name)
        own = {"code_sha256": "ab", "versions": dict.fromkeys(records.KERNELS_OF, "1"), "cpu": {"model": "c"}}
        record = planted("fedhkd", 0, 0.5, 0.5, own | (made if name == "why" else {}), row)
        rounds = {name: [0.5] * 50 for name in records.ACCURACIES}
        ends = {f"{name}_{way}": 0.5 for name in records.ACCURACIES for way in ("last", "mean_last_5", "oracle")}
        settings = {key: value for key, value in asked.settings((row, 0)).items() if not is_location(key)}
        planted_run = replace(record, settings=settings, rounds=rounds, summary=ends)
        records.write(tmp_path / f"{name}.jsonl", [planted_run])
    with pytest.raises(UsageError, match=part):
        tables.all_results(tmp_path)


def test_a_run_that_only_measures_has_the_weights_of_the_run_that_it_repeats():
    plain = {0: planted("fedhkd", 0, 0.5, 0.5, {"weights_sha256": "ab"})}
    measured = [planted("measured", seed, 0.5, 0.5, {"weights_sha256": sha}) for seed, sha in enumerate(("ab", "cd"))]
    tables.Results(measured[:1]).check_same_weights("gradients", plain)
    with pytest.raises(UsageError, match="measured, seed 1: has the weights cd; the run that it repeats has not been"):
        tables.Results(measured).check_same_weights("gradients", plain)
    with pytest.raises(UsageError, match="gradients: measured, seed 1: .* repeats has ab"):
        tables.Results(measured).check_same_weights("gradients", {**plain, 1: plain[0]})


def test_measured_runs_are_checked_with_the_tables(monkeypatch):
    """Of whatever code, but to the bit."""
    empty = dict.fromkeys((asked.name for asked in tables.ASKED), tables.Results([]))
    one = tables.Results([planted("x.MeasuredFedHKD", 0, 0.5, 0.5)])
    found = {**empty, "gradients": one}
    monkeypatch.setattr(tables, "results_of", lambda asked, folder: found[asked.name])
    with pytest.raises(UsageError, match="gradients: x.MeasuredFedHKD, seed 0: .* has not been made"):
        tables.all_results()


def test_runs_of_one_seed_with_other_images_are_no_pair():
    found = [planted("fedavg", 0, 0.5, 0.5), planted("moon", 0, 0.5, 0.5, {"partition_sha256": "other"})]
    with pytest.raises(UsageError, match="moon, seed 0: has other images"):
        tables.Results(found).check_pairs()


# ---------------------------------------------------------------------------------------------- the answers


NOISE = np.array([1, -1, 1, -1, 1, -1, 1, -1, 1, -1]) / 1000  # of 10 seeds; eight schemes need 9
STEADY = {"fedhkd": 0.05 + NOISE, "fedhkd_star": 0.03 - NOISE, "moon": 0.01 + NOISE}
ALL = {**STEADY, **dict.fromkeys(("fedprox", "fedalign", "fedgen", "fedmd", "fedproto"), 0.005 - NOISE)}


def test_what_is_better_than_every_other_scheme_is_the_best():
    found = answers.best("local", "t", study(ALL))
    assert found.verdict == "holds"
    assert found.table == "t (10 seeds)"
    assert found.measured.endswith("rank 1 of 8")
    assert answers.between("local", "t", study(ALL)).verdict == "holds"
    assert answers.above("fedhkd", "fedavg", "local", "t", study(ALL)).verdict == "holds"


def test_before_the_last_seed_all_is_provisional():
    found = study({scheme: own[:9] for scheme, own in ALL.items()})
    assert answers.best("local", "t", found).verdict == "provisionally holds"
    assert answers.between("local", "t", found).verdict == "provisionally holds"
    assert (
        answers.above("fedavg", "fedhkd", "local", "t", found).verdict
        == "provisionally does not hold: worse than FedHKD"
    )


def test_the_page_begins_with_what_has_come_to_its_end():
    worse, few = study({**ALL, "fedhkd": 0.0 - NOISE - 0.01}), study({s: own[:9] for s, own in ALL.items()})
    told = [
        answers.above("fedhkd", "fedavg", "local", "ended", worse),
        answers.above("fedhkd", "fedavg", "local", "under way", few),
        answers.best("local", "lacks schemes", study(STEADY)),
        answers.above("fedhkd_star", "fedproto", "global", "under way", tables.Results([])),
        answers.above("fedhkd_star", "fedproto", "global", "not begun", tables.Results([])),
        answers.little_time("ResNet18", [1.0, 1.02]),
        answers.little_time("ResNet18", []),
    ]
    assert in_short.in_short(told) == (
        "**Does not hold:**\n"
        "\n"
        "- FedHKD has a better local accuracy than FedAvg.\n"
        f"    - ended (10 seeds): {told[0].measured}; worse than FedAvg; a difference of the paper's size is excluded\n"
        "\n"
        "**Cannot be told:**\n"
        "\n"
        "- FedHKD takes little more time than FedAvg.\n"
        "    - ResNet18, a client alone (2 pairs): 1.01 (0.89 to 1.15) of FedAvg's\n"
        "\n"
        "**Not run to the end yet:** under way (9 seeds); lacks schemes (10 seeds); not begun; "
        "ResNet18, a client alone (0 pairs)."
    )


@pytest.mark.parametrize("seeds, told", [(2, "All nine"), (9, "All nine"), (10, "Table 1")])
def test_the_readme_has_the_table_of_the_most_seeds(seeds, told):
    first = study({"fedhkd": ALL["fedhkd"][:seeds]})
    found = sections.summary({"table1": first, "small": study(ALL), "smoke": tables.Results([])})
    assert found.startswith(told)


def test_nothing_is_the_best_before_all_have_run():
    found = answers.best("local", "t", study(STEADY))
    assert found.verdict == ("cannot be told before all runs of FedProx, FedAlign, FedGen, FedMD, FedProto are there")


def test_what_is_worse_than_any_is_not():
    found = answers.best("global", "t", study({**STEADY, "moon": 0.09 + NOISE}))
    assert found.verdict == "does not hold: worse than MOON"
    assert found.measured.endswith("rank 2 of 3")


def test_what_was_not_measured_cannot_be_told():
    found = answers.best("local", "t", study({**ALL, "fedmd": np.full(10, np.nan)}))
    assert found.verdict == "cannot be told: not measured in every run"
    assert found.measured.endswith("no rank: not measured in every run")
    assert found.needed == "–"
    worse = {**ALL, "fedmd": np.full(10, np.nan), "moon": 0.09 + NOISE}
    assert answers.best("local", "t", study(worse)).verdict == "does not hold: worse than MOON"


def test_its_own_variant_is_no_rival():
    assert answers.best("local", "t", study({**ALL, "fedhkd_star": 0.06 + NOISE})).verdict == "holds"


def test_a_step_that_is_called_below_0_is_named():
    found = answers.between("local", "t", study({**STEADY, "fedhkd_star": 0.09 + NOISE}))
    assert found.verdict == "does not hold: below 0: FedHKD – FedHKD\\*"


def test_what_is_not_separated_from_one_cannot_be_told():
    found = answers.best("local", "t", study({**ALL, "fedhkd": 0.03 + 5 * NOISE, "moon": 0.03 - NOISE}))
    better = "FedAvg, FedProx, FedAlign, FedGen, FedMD, FedProto"
    verdict, told = found.verdict.split("; better than ")
    assert verdict == "cannot be told with 10 seeds"
    assert set(told.split(", ")) == set(better.split(", "))


@pytest.mark.parametrize("seeds", [3, 5])
def test_however_clear_it_is_few_seeds_tell_nothing(seeds):
    found = study({scheme: own[:seeds] for scheme, own in ALL.items()})
    assert answers.best("local", "t", found).verdict == f"cannot be told with {seeds} seeds"
    assert answers.between("local", "t", found).verdict == f"cannot be told with {seeds} seeds"


def test_where_the_papers_gain_is():
    assert answers.size_text(0.001 + NOISE, 0.03) == "above the interval"
    assert answers.size_text(0.05 + NOISE, 0.03) == "below the interval"
    assert answers.size_text(0.0301 + NOISE, 0.03) == "within the interval"
    for none in (NOISE[:1], np.full(9, np.nan)):
        assert answers.size_text(none, 0.03) == "–"


@pytest.mark.parametrize(
    "gain, seeds, told",
    [
        (0.004, 10, "excluded"),
        (0.004, 6, "provisionally excluded"),
        (0.004, 5, "cannot be told with 5 seeds"),
        (0.030, 10, "not excluded"),
        (0.06, 10, "it is larger"),
    ],
)
def test_a_gain_too_small_to_be_told_from_none_may_be_told_from_the_papers(gain, seeds, told):
    """Which is +.030 on local accuracy."""
    found = answers.above("fedhkd", "fedavg", "local", "t", study({"fedhkd": (gain + 5 * NOISE)[:seeds]}))
    assert found.as_large == told
    assert found.papers.startswith("+0.030 (ResNet18): ")


def test_each_reading_is_tested_by_itself():
    """Of 3 differences above 0 only two of the eight patterns of signs are as far from it."""
    assert sections.tested_text(np.array([0.01, 0.02, 0.03])) == "+0.0200 ± 0.0248, above 0 in 3 of 3, p .250"
    assert sections.tested_text(np.array([0.01, np.nan])) == "–"


def test_windows_are_means_over_their_rounds_and_seeds():
    def run(row, seed, level):
        values = [level] * 5 + [level + 0.1 * (row == "fedhkd")] * 6
        return replace(planted(row, seed, 0.5, 0.5), rounds=dict.fromkeys(records.ACCURACIES, values))

    found = tables.Results([run(row, seed, 0.2 + 0.2 * seed) for row in ("fedavg", "fedhkd") for seed in (0, 1)])
    first, second = sections.windows_table(found).rows
    assert first == ["1 to 5", "0.300", "+0.0000 ± 0.0000", "0.300", "+0.0000 ± 0.0000"]
    assert second == ["6 to 10", "0.300", "+0.1000 ± 0.0000", "0.300", "+0.1000 ± 0.0000"]


def test_less_affected_is_told_from_both_betas():
    severe, even = study({"fedhkd": 0.05 + NOISE}), study({"fedhkd": 0.01 - NOISE})
    found = answers.less_affected("global", severe, even)
    assert found.verdict == "holds"
    assert found.papers.startswith("+0.140")  # (.4736 - .3251) - (.5573 - .5483) = .1395
    assert answers.less_affected("global", even, severe).verdict == "does not hold: smaller at .2"


@pytest.mark.parametrize("payload, verdict", [(100, "holds"), (101, "holds"), (102, "does not hold")])
def test_bytes_are_counted(payload, verdict):
    sent = lambda scheme, seed, count: planted(scheme, seed, 0.5, 0.5, {"payload_bytes": {"x": count}})
    runs = [sent("fedavg", seed, 100) for seed in range(10)] + [sent("fedhkd", seed, 100) for seed in range(9)]
    assert answers.few_bytes("t", tables.Results([*runs, sent("fedhkd", 9, payload)])).verdict == verdict
    assert answers.few_bytes("t", tables.Results(runs)).verdict == "provisionally holds"


@pytest.mark.parametrize(
    "ratios, verdict",
    [([1.05, 1.06, 1.04], "holds"), ([1.3, 1.31, 1.29], "does not hold"), ([1.0, 1.2, 1.1], "cannot be told")],
)
def test_time_is_that_of_the_benchmark(ratios, verdict):
    found = answers.little_time("Net", ratios)
    assert (found.table, found.verdict) == ("Net, a client alone (3 pairs)", verdict)
    assert answers.little_time("Net", ratios[:1]).verdict == "not run yet"


def test_seconds_are_kept_and_read_back(tmp_path):
    file = tmp_path / "seconds.json"
    assert seconds.read(file) == {}
    seconds.add({"made": ["machine: m", "date: d"], "ratios": {"Net": [1.1, 1.0, 1.25]}}, file)
    assert seconds.read(file) == {"Net": [1.1, 1.0, 1.25]}
    assert "| 1 | Net | 1.10 | 1.00 to 1.25 | 3 |" in seconds.table(file)
    seconds.add({"made": ["machine: m", "date: e"], "ratios": {"Net": [1.3]}}, file)
    assert seconds.read(file) == {"Net": [1.1, 1.0, 1.25, 1.3]}
    assert seconds.table(file).endswith("1. machine: m; date: d.\n2. machine: m; date: e.")
    file.write_text("{")
    with pytest.raises(UsageError, match=r"seconds\.json: is no record of seconds"):
        seconds.read(file)


def test_the_papers_gains_are_those_of_its_table():
    assert answers.gain("fedhkd", "fedavg", "local") == 0.0304
    assert answers.gain("fedhkd", "fedavg", "global") == 0.0472
    assert answers.gain("fedhkd", "fedavg", "local", beta=0.2) == 0.0872


def test_choices_are_paired_with_the_small_table_and_the_authors_code_with_their_own_fedavg():
    small = study({"fedhkd": 0.01 + NOISE})
    seeds = range(10)
    own = [
        *(planted("fedavg", seed, 0.7, 0.7, row=sections.AUTHORS_FEDAVG) for seed in seeds),
        *(planted("fedhkd", seed, 0.72, 0.72, row="the authors' code H") for seed in seeds),
        *(planted("fedhkd", seed, 0.5, 0.5, row="no noise") for seed in seeds),
    ]
    asked = next(asked for asked in tables.ASKED if asked.name == "why")
    table, _ = sections.choices(asked, {"small": small, "why": tables.Results(own)})
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()}
    assert rows["the authors' code H"] == "| the authors' code H" + " | +0.020 ± 0.000 | –" * 2 + " |"
    assert "| +0.000 ± 0.000 | -0.010 ± 0.001 |" in rows["no noise"]
    table, _ = sections.choices(asked, {"small": small, "why": tables.Results(own[10:])})
    assert "| the authors' code H | – | – | – | – |" in table


@pytest.fixture
def tuned_runs():
    """All trials, equally good, so that the papers' settings are chosen, and the runs of these on three seeds."""
    asked = next(asked for asked in tables.ASKED if asked.name == "tuned")
    summary = lambda value: {
        **dict.fromkeys(answers.LAST.values(), value),
        **dict.fromkeys(compare.CHOSEN_BY.values(), 0.5),
    }
    place = lambda row, seed: Record(
        row, {"scheme.name": row.partition("-")[0], "run.seed": seed}, {}, summary(0.5 + 0.01 * seed), {"client_s": 1}
    )
    trials = [place(row, seed) for row, seed in asked.configs if tables.TRIAL in row]
    papers = [place(row, seed) for row, seed in asked.configs if not tables.is_tuning(row) and seed < 3]
    return asked, trials, papers


def test_of_what_is_tuned_the_first_seeds_are_compared(tuned_runs):
    asked, trials, papers = tuned_runs
    state, *_ = sections.tuned(asked, {"tuned": tables.Results([*trials, *papers])})
    assert state.startswith("Of what was chosen compared are the seeds that all rows here have: 0, 1, 2. **Fewer")
    without = [record for record in papers if (record.row, record.seed) != ("moon", 1)]
    state, *_ = sections.tuned(asked, {"tuned": tables.Results([*trials, *without])})
    assert state.startswith("Of what was chosen compared are the seeds that all rows here have: 0. **Fewer")


def test_nothing_is_chosen_before_all_trials_are_there(tuned_runs):
    asked, trials, papers = tuned_runs
    without = [record for record in trials if record.row != "moon-trial3"]
    [state] = sections.tuned(asked, {"tuned": tables.Results([*without, *papers])})
    assert state == "Not all trials have come to their end; of MOON some are missing."


def test_tuned_rows_are_what_validation_images_chose():
    val = lambda value: {"local_val_accuracy_last": value, "global_val_accuracy_last": 1 - value}
    trial = lambda place, value: Record(
        f"fedavg-trial{place}", {"scheme.name": "fedavg", "run.seed": 100}, {}, val(value), {}
    )
    found = tables.Results([trial(0, 0.3), trial(1, 0.5), trial(2, 0.1)])
    assert sections.chosen_rows(found, "fedavg") == {"local": "fedavg-tuned1", "global": "fedavg-tuned2"}
    found = tables.Results([trial(0, 0.3), trial(10, 0.5), trial(2, 0.1)])  # trial 1 failed
    assert sections.chosen_rows(found, "fedavg") == {"local": "fedavg-tuned10", "global": "fedavg-tuned2"}
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
    """By the exact test, in as many studies as were promised, and one seed less does not."""
    random = np.random.default_rng(3)
    for effect, family, seeds in ((0.01, 1, 11), (0.016, 8, 10), (0.016, 2, 8)):
        assert seeds_to_see(effect, 0.01, family) == seeds
        called = [
            np.mean([verdicts({"a": random.normal(effect, 0.01, n)}, family)["a"] == "better" for _ in range(STUDIES)])
            for n in (seeds - 1, seeds)
        ]
        assert called[0] < 0.82
        assert called[1] > 0.78
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
    other_code = replace(other_cpu, made={**other_cpu.made, "code_sha256": "34"})
    assert rerun.compared(then, other_code).endswith("; model was a, is b; the code is another, 34, not ")
    with pytest.raises(
        RunError, match="the same weights, ab, but not the recorded numbers: local_test_accuracy_last was"
    ):
        rerun.compared(then, planted("fedhkd", 0, 0.4, 0.5, then.made))
    with pytest.raises(RunError, match="of the same versions and kind of CPU"):
        rerun.compared(then, planted("fedhkd", 0, 0.5, 0.5, {**same, "cpu": {"model": "a"}}))
    with pytest.raises(RunError, match="accuracies local \\+0.0000, global \\+0.0000; the code is another, 34, not "):
        rerun.compared(then, planted("fedhkd", 0, 0.5, 0.5, {**then.made, "weights_sha256": "12", "code_sha256": "34"}))
    with pytest.raises(RunError, match=r"not within 0\.03"):
        rerun.compared(then, planted("fedhkd", 0, 0.6, 0.5, {**same, "cpu": {"model": "b"}}))
    with pytest.raises(UsageError, match="has other images"):
        rerun.compared(then, planted("fedhkd", 0, 0.5, 0.5, {"data_sha256": "other"}))


@pytest.mark.parametrize(
    "words, part",
    [
        (["nope", "fedhkd", "0"], "nope: no such table has finished runs; tables: "),
        (["cell", "fedhkd", "7"], "cell fedhkd 7: no such run; rows and seeds: {'fedhkd': [0]}"),
        (["cell", "fedhkd", "0", "fed.rounds=1"], "fed.rounds: would make it another run"),
    ],
)
def test_what_cannot_be_run_again_is_wrong_input(words, part, capsys):
    assert main(["run", *words]) == 2
    assert part in capsys.readouterr().err


def test_tables_that_can_be_run_again_are_named(tmp_path):
    for table in ("small", "beta02"):
        (tmp_path / f"{table}.jsonl").touch()
    with pytest.raises(UsageError) as told:
        rerun.recorded(tmp_path, "cell", "fedhkd", 0)
    assert str(told.value) == "cell: no such table has finished runs; tables: beta02, small"


def test_images_that_are_not_there_are_told(capfd):
    assert main(["run", "smoke", "fedhkd", "0", "data.path=/nowhere.npz"]) == 2
    assert "/nowhere.npz" in capfd.readouterr().err


AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.mark.parametrize(
    ("recorded", "here", "kernels"),
    [
        ({"vectors": "avx2", "MKL_CBWR": "COMPATIBLE"}, "avx512f", {"MKL_CBWR": "COMPATIBLE"}),
        ({"vectors": "avx2"}, "avx512f", AVX2),
        ({"vectors": "avx512f", **AVX2}, "avx2", AVX2),
        ({"vectors": "avx2"}, "avx2", {}),
        ({"vectors": "avx2"}, "sse4_1", {}),  # torch would take instructions that this machine does not have
        ({"vectors": "avx512f"}, "avx2", {}),
        ({"vectors": "avx"}, "avx2", {}),
        ({"model": "of an older version"}, "avx2", {}),
    ],
)
def test_kernels_are_those_of_the_recorded_run(recorded, here, kernels):
    env = rerun.environment(recorded, {"HOME": "/", "ATEN_CPU_CAPABILITY": "default"}, {"vectors": here})
    assert env == {"HOME": "/", **kernels}


def test_a_cpu_that_was_told_to_take_narrower_vectors_is_of_their_kind():
    narrowed = planted("fedhkd", 0, 0.5, 0.5, {"cpu": {"model": "c", "vectors": "avx512f", **AVX2}})
    plain = planted("fedavg", 0, 0.5, 0.5, {"cpu": {"model": "c", "vectors": "avx2"}})
    assert tables.origin_of(narrowed) == tables.origin_of(plain)
    assert tables.origin_of(plain)["CPU"] == "c avx2"
    assert [sections.cpu_text(run.made["cpu"]) for run in (plain, narrowed)] == ["c avx2", "c avx512f as avx2"]
