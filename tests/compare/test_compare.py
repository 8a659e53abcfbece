"""compare: the same budget for every scheme, a choice that reads validation only, and the statistics of its
table.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import toy

from hkd_hpc import schemes
from hkd_hpc.analysis.tables import COLUMNS, document, estimate
from hkd_hpc.common.errors import UsageError
from hkd_hpc.compare import main, runs, tables, tuning
from hkd_hpc.compare.spec import Spec, Tuning, read_spec
from hkd_hpc.config import resolve
from hkd_hpc.store.tree import load_tree, save_tree

NAN = float("nan")
SPEC = """
[study]
schemes = {schemes}
seeds = {seeds}
controls = {controls}
[settings]
"data.fraction" = 0.1
"fed.clients" = 3
"fed.rounds" = 1
"train.epochs" = 1
"""
TUNING = """
[tuning]
trials = 4
seed = 100
val_fraction = 0.2
lr_low = 3e-4
lr_high = 3e-3
"""


@pytest.fixture
def spec(tmp_path):
    """make(schemes, seeds, controls, more): the path of a spec."""

    def make(schemes='"all"', seeds="[0, 1]", controls="true", more=""):
        path = tmp_path / "spec.toml"
        path.write_text(SPEC.format(schemes=schemes, seeds=seeds, controls=controls) + more)
        return str(path)

    return make


def test_all_means_nine_schemes_and_the_controls(spec):
    study = read_spec(spec())
    assert study.schemes == (*schemes.PAPER, *schemes.CONTROLS)
    assert len(study.schemes) == 11
    assert study.seeds == (0, 1)
    assert study.tuning is None
    found = runs.chained(runs.paper_runs(study))
    assert len(found) == len({run.name for run in found}) == 22
    assert read_spec(spec(controls="false")).schemes == tuple(schemes.PAPER)


@pytest.mark.parametrize(
    "arguments, part",
    [
        ({"seeds": "[]"}, "study.seeds=[]: must be a list"),
        ({"seeds": "[-1]"}, "study.seeds"),
        ({"seeds": "3"}, "study.seeds=3"),
        ({"schemes": '"fedavg"'}, 'study.schemes=fedavg: must be "all" or a list of names'),
        ({"schemes": "5"}, "study.schemes=5: must be"),
        ({"schemes": "[1]"}, "study.schemes=[1]: must be"),
        ({"controls": '"no"'}, "study.controls=no: must be true or false"),
        ({"schemes": '["nope"]'}, "scheme.name=nope: no such scheme"),
        ({"more": "[tuning]\ntrials = 3\n"}, "[tuning] lacks lr_high"),
        ({"more": "[other]\nx = 3\n"}, "other.x: not known"),
        ({"seeds": "[0, 0]"}, "study.seeds=[0, 0]: must be a list of diff"),
        ({"schemes": "[]", "controls": "false"}, "name one scheme at least"),
        *(
            ({"more": TUNING.replace(old, new)}, part)
            for old, new, part in (
                ("trials = 4", "trials = 0", "tuning.trials=0: must be >= 1"),
                ("trials = 4", "trials = 1.5", "must be a whole number"),
                ("seed = 100", "seed = 1", "tuning.seed=1: must be >= 0 and none of study.seeds"),
                ("0.2", "0.0", "tuning.val_fraction=0.0: must be > 0 and < 1"),
                ("3e-4", '"x"', "tuning.lr_low=x: must be a number"),
                ("3e-4", "-1.0", "tuning.lr_low=-1.0: must be > 0"),
                ("3e-3", "1e-5", "tuning.lr_high=1e-05: must be >= tuning.lr_low"),
                (
                    "trials = 4",
                    'trials = 4\nsampler = "random"',
                    "tuning.sampler=random: must be one of grid, latin, optuna",
                ),
                ("trials = 4", "trials = 4\nsampler = 1", "tuning.sampler=1: must be one of grid, latin, optuna"),
            )
        ),
    ],
)
def test_wrong_specs_are_rejected_in_one_line(spec, capsys, tmp_path, arguments, part):
    path = spec(**arguments)
    with pytest.raises(UsageError, match=part.replace("[", r"\[").replace("]", r"\]")):
        read_spec(path)
    assert main([path, "--root", str(tmp_path / "root")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "root").exists()


def test_every_scheme_gets_the_same_trials_of_the_learning_rate(spec):
    study = read_spec(spec(more=TUNING))
    trials = tuning.tuning_runs(study, study.tuning)
    assert set(trials) == set(schemes.PAPER)  # controls are not tuned
    for own in trials.values():
        assert len(own) == 4
    rates = {scheme: [dict(run.settings).get("train.lr") for run in own] for scheme, own in trials.items()}
    assert len({tuple(found) for found in rates.values()}) == 1
    assert rates["fedavg"][0] is None
    assert all(3e-4 <= lr <= 3e-3 for lr in rates["fedavg"][1:])
    for scheme, own in trials.items():
        assert all(
            dict(run.settings)["data.val_fraction"] == 0.2 and dict(run.settings)["run.seed"] == 100 for run in own
        )
        grid = schemes.get(scheme).about.tunes
        for run in own[1:]:
            points = {values.index(dict(run.settings)[f"scheme.{name}"]) for name, values in grid.items()}
            assert len(points) <= 1


def test_grids_of_all_schemes_have_five_points_and_the_papers_value():
    for name in schemes.PAPER:
        grid, settings = schemes.get(name).about.tunes, schemes.settings_of(name)()
        assert all(len(values) == 5 and getattr(settings, key) in values for key, values in grid.items()), name
        assert grid or name == schemes.REFERENCE


def test_choice_is_on_validation_alone_and_the_papers_settings_win_a_draw():
    summaries = [
        {"local_val_accuracy_last": 0.5, "global_val_accuracy_last": 0.4, "local_test_accuracy_last": 0.1},
        {"local_val_accuracy_last": 0.5, "global_val_accuracy_last": 0.6, "local_test_accuracy_last": 0.9},
        {"local_val_accuracy_last": NAN, "global_val_accuracy_last": 0.6},
        None,
    ]
    assert tuning.choose(summaries, "local") == 0
    assert tuning.choose(summaries, "global") == 1
    for summary in summaries[:3]:
        summary["local_test_accuracy_last"] = 1.0  # nothing that is tested is looked at
    assert tuning.choose(summaries, "local") == 0
    assert (
        tuning.choose([None, summaries[2] | {"local_val_accuracy_last": NAN}], "local") is None
    )  # nothing came to an end


def test_a_trial_without_a_number_never_wins_and_is_named(tmp_path):
    trials = [runs.Run(f"moon-trial{trial}", ()) for trial in range(3)]
    for run, (local, whole) in zip(trials, [(NAN, 0.2), (0.1, NAN)]):
        (tmp_path / run.name).mkdir()
        save_tree(
            tmp_path / run.name / "metrics.h5",
            {"summary": {"local_val_accuracy_last": local, "global_val_accuracy_last": whole}},
        )
    summaries = [runs.summary_of(run, tmp_path) for run in trials]
    assert (tuning.choose(summaries, "local"), tuning.choose(summaries, "global")) == (1, 0)
    assert [line.partition(" on validation")[0] for line in tuning.unmeasured(trials, tmp_path)] == [
        "moon-trial0: has no local accuracy",
        "moon-trial1: has no global accuracy",
    ]
    assert str(estimate([0.5, NAN, 0.7])) == "0.600 ± 1.271 (2)"  # t(.975, 1) = 12.706, times .141 / sqrt(2)


@pytest.mark.parametrize(
    "more, part",
    [
        (["fed.roundz=3"], "fed.roundz: no such setting"),
        (["fed.rounds=0"], "fed.rounds=0: not allowed"),
        (["junk"], "junk"),
        (["run.seed=4"], "run.seed=4: is the study's to choose"),
        (["scheme.name=moon"], "scheme.name=moon: is the study's"),
        (["--jobs", "0"], "--jobs 0: must be 1 or more"),
        (["--jobs", "2", "--executor", "slurm"], "with slurm --array-parallelism says how many run at a time"),
        (["--jobs", "2", "--executor", "debug"], "with debug leave it away"),
        (["--pack"], "--pack: is for SLURM"),
        (["--site", "/nope.toml"], "/nope.toml"),
        (["data.name=file", "data.path=/nope.npz"], "no such file"),
    ],
)
def test_what_cannot_run_is_rejected_before_the_first_run(spec, tmp_path, capsys, more, part):
    assert main([spec(), "--root", str(tmp_path / "root"), *more]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert part in line
    assert not (tmp_path / "root").exists()


def test_a_spec_that_is_not_there_is_told_as_a_spec(tmp_path, capsys):
    assert main([str(tmp_path / "no.toml"), "--root", str(tmp_path)]) == 2
    line = f"hkd_hpc: spec {tmp_path}/no.toml: cannot be read (No such file or directory)\n"
    assert capsys.readouterr().err == line


def test_a_scheme_without_public_images_is_rejected_before_the_first_run(spec, tmp_path, capsys):
    path = spec(schemes='["fedavg", "fedmd"]', controls="false")
    assert main([path, "--root", str(tmp_path / "root"), "data.public_fraction=0"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        "hkd_hpc: scheme.name=fedmd: needs public images, but there are none; data.public_fraction must be "
        "above 0, at most 0.9 fits beside data.fraction"
    )
    assert not (tmp_path / "root").exists()


def test_all_reasons_are_told_at_once_each_once(spec, tmp_path, capsys):
    arguments = ["scheme.mu=0.25", "data.name=file", "data.path=/nope.npz"]
    assert main([spec('["fedavg", "fedprox", "fedhkd"]'), "--root", str(tmp_path / "root"), *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "hkd_hpc: scheme.mu: no such setting of fedavg; fedprox, moon, fedalign have it (fedavg-paper-s0)",
        "hkd_hpc: data.path=/nope.npz: there is no such file",
    ]


def test_a_damaged_config_json_in_a_runs_folder_is_one_line(spec, tmp_path, capsys):
    (tmp_path / "root/fedavg-paper-s0").mkdir(parents=True)
    (tmp_path / "root/fedavg-paper-s0/config.json").write_text('{"fed": ')
    assert main([spec('["fedavg"]', controls="false"), "--root", str(tmp_path / "root")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "fedavg-paper-s0/config.json: is no complete config.json of a run" in line


def test_nested_settings_are_settings(spec):
    assert read_spec(spec(more="data.beta = 0.25\nrun = {threads = 2}\n")).settings["data.beta"] == 0.25


def test_only_a_scheme_with_a_paper_has_the_papers_settings(spec):
    study = read_spec(spec('["fedprox", "examples.my_scheme:MyScheme"]', more=TUNING))
    trials = tuning.tuning_runs(study, study.tuning)
    assert tuning.describe("fedprox", trials["fedprox"][0]) == "(the paper's)"
    own = "examples.my_scheme:MyScheme"
    assert tuning.describe(own, trials[own][0]) == "(its own defaults)"


def test_table_says_how_it_was_told():
    parts = tables.table(
        "title", {name: {column: [0.5] * 3 for column in COLUMNS} for name in ("fedavg", "moon", "local")}
    )
    assert document(parts).endswith(
        "corrected by Holm over the 1 scheme of a column (controls by themselves), level 0.05; that needs 6 seeds."
    )


def test_a_run_that_is_in_no_mean_is_named(tmp_path):
    found = [runs.Run(f"moon-paper-s{seed}", ()) for seed in range(3)]
    for run, (local, whole) in zip(found, [(0.5, 0.4), (NAN, 0.4)]):
        (tmp_path / run.name).mkdir()
        summary = {"local_test_accuracy_last": local, "global_test_accuracy_last": whole}
        save_tree(tmp_path / run.name / "metrics.h5", {"summary": summary})
    assert tables.gaps(found, tmp_path) == [
        "moon-paper-s1 came to its end without a local accuracy, and is in no mean of it"
    ]


def test_table_shows_what_was_measured_only():
    row = {name: [NAN, NAN] for name in COLUMNS} | {"local": [0.5, 0.7], "global": [0.25, 0.25]}
    lines = document(tables.table("title", {"fedavg": row, "other": row | {"local": [0.6, 0.8]}})).splitlines()
    assert lines[2] == "| scheme | local | global | local – fedavg | global – fedavg |"
    # t(.975, 1) = 12.706: 12.706 * .141 / sqrt(2) = 1.271
    assert lines[4] == "| fedavg | 0.600 ± 1.271 (2) | 0.250 ± 0.000 (2) |  |  |"
    assert lines[5].startswith(
        "| other | 0.700 ± 1.271 (2) | 0.250 ± 0.000 (2) | +0.100 ± 0.000, cannot be told with 2 seeds | +0"
    )


BROKEN = """
from hkd_hpc.schemes.fedavg import FedAvg

class Broken(FedAvg):
    def begin(self, client):
        raise ValueError("out of ideas")
"""


def test_a_comparison_goes_on_where_an_earlier_version_began_repeats_nothing_and_names_what_failed(
    spec, tmp_path, capfd, monkeypatch
):
    """Two seeds: the first seed's FedAvg was made by `hkd_hpc.train`, as comparisons did it before."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{toy.PROJECT}")
    monkeypatch.syspath_prepend(str(tmp_path))
    toy.write_module(tmp_path, "broken", BROKEN)
    path, root = spec(schemes='["fedavg", "broken:Broken"]', controls="false"), tmp_path / "root"
    first, second = runs.paper_runs(read_spec(path))["fedavg"]
    toy.train_ok(1, *(f"{key}={value}" for key, value in first.settings), "--out", root / first.name)
    made = (root / first.name / "metrics.h5").stat().st_mtime_ns
    assert main([path, "--root", str(root), "--jobs", "2"]) == 1
    said = capfd.readouterr()
    assert f"/3 {second.name} done, " in said.out
    assert "/3 broken.Broken-paper-s0 FAILED, " in said.out
    failed = [line for line in said.err.splitlines() if line.startswith("hkd_hpc: broken.Broken-paper-s")]
    names = [f"broken.Broken-paper-s{seed}" for seed in (0, 1)]
    assert [line.split(": ")[1] for line in failed] == names
    assert [line.rpartition("out of ideas")[2] for line in failed] == [f", see {root}/{name}/log.txt" for name in names]
    files = {file: file.stat().st_mtime_ns for file in root.glob("fedavg*/metrics.h5")}
    assert (len(files), files[root / first.name / "metrics.h5"]) == (2, made)
    lines = (root / "table.md").read_text().splitlines()
    assert any(line.startswith("| fedavg | 0.") for line in lines)
    assert any(line.startswith("| broken:Broken | – |") for line in lines)
    assert main([path, "--root", str(root), "fed.rounds=2"]) == 2
    err = capfd.readouterr().err
    assert "fedavg-paper-s0 was begun with other settings; fed.rounds: stored 1, asked 2" in err
    alone = spec(schemes='["fedavg"]', controls="false")
    assert main([alone, "--root", str(root), "--format", "json"]) == 0
    assert files == {file: file.stat().st_mtime_ns for file in root.glob("fedavg*/metrics.h5")}
    [row] = json.loads((root / "table.json").read_text())["tables"][0]["rows"]
    assert row["local"] == pytest.approx(local_mean([first, second], root), abs=1e-5)


def local_mean(found, root):
    return np.mean([runs.summary_of(run, root)["local_test_accuracy_last"] for run in found])


def store(root, spec, **identities):
    """A complete run of one round for each run of the spec, whose numbers come from what `identities` say by seed."""
    for run in runs.chained(runs.paper_runs(read_spec(spec))):
        text = resolve(overrides=[f"{key}={value}" for key, value in run.settings]).to_json()
        (root / run.name).mkdir(parents=True)
        (root / run.name / "config.json").write_text(text)
        save_tree(
            root / run.name / "metrics.h5",
            {
                "config_json": text,
                "identity_json": json.dumps(identities[run.name[-2:]]),
                "rounds": {"round": np.array([1])},
                "summary": {"local_test_accuracy_last": 0.5, "global_test_accuracy_last": 0.25},
            },
        )


def test_runs_on_different_data_are_not_compared(spec, tmp_path, capsys):
    path, root = spec(schemes='["fedavg"]', controls="false"), tmp_path / "root"
    store(root, path, s0={"data.content": "ab" * 32}, s1={"data.content": "cd" * 32})
    assert main([path, "--root", str(root)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"hkd_hpc: --root {root}: runs differ in data.content: abababab in fedavg-paper-s0, cdcdcdcd in "
        "fedavg-paper-s1; they cannot be compared"
    )
    assert not (root / "table.md").exists()


def test_runs_of_different_code_are_told_and_rejected_on_request(spec, tmp_path, capsys):
    path, root = spec(schemes='["fedavg"]', controls="false"), tmp_path / "root"
    store(root, path, s0={"code.hkd_hpc": "ab" * 32}, s1={"code.hkd_hpc": "cd" * 32})
    told = "runs differ in code.hkd_hpc: abababab in fedavg-paper-s0, cdcdcdcd in fedavg-paper-s1"
    assert main([path, "--root", str(root), "--strict-code"]) == 2
    assert told in capsys.readouterr().err
    assert main([path, "--root", str(root)]) == 0
    assert f"Remark: {told}" in (root / "table.md").read_text()


def test_the_table_is_written_as_latex_and_csv_where_asked_for(spec, tmp_path):
    path, root = spec(schemes='["fedavg"]', controls="false"), tmp_path / "root"
    store(root, path, s0={}, s1={})
    for format in ("latex", "csv"):
        assert main([path, "--root", str(root), "--format", format]) == 0
    assert r"fedavg & 0.500 $\pm$ 0.000 (2) & 0.250 $\pm$ 0.000 (2)" in (root / "table.tex").read_text()
    assert "fedavg,0.5,0,2,0.25,0,2" in (root / "table.csv").read_text()


def test_a_run_whose_defaults_were_changed_is_of_other_settings(spec, tmp_path, capsys):
    path, root = spec(schemes='["fedavg"]', seeds="[0]", controls="false"), tmp_path / "root"
    store(root, path, s0={})
    metrics = root / "fedavg-paper-s0/metrics.h5"
    tree = load_tree(metrics)
    save_tree(metrics, tree | {"config_json": tree["config_json"].replace('"lr": 0.001', '"lr": 0.1')})
    assert main([path, "--root", str(root)]) == 2
    assert "fedavg-paper-s0 was begun with other settings; train.lr: stored 0.1, asked 0.001" in capsys.readouterr().err


# ---- a Latin hypercube of trials


@pytest.mark.parametrize("trials", [2, 6, 11])
@pytest.mark.parametrize("scheme", ["fedavg", "moon", "fedhkd"])
def test_a_hypercube_has_a_rate_in_each_part_of_the_range_and_each_point_as_often(scheme, trials):
    latin = Tuning(trials, 100, 0.2, 1e-4, 1e-1, "latin")
    tried = [tuning.trial_settings(latin, scheme, trial) for trial in range(trials)]
    assert tried[0] == {}
    parts = [int((np.log10(one["train.lr"]) + 4) / 3 * (trials - 1)) for one in tried[1:]]
    assert sorted(parts) == list(range(trials - 1))
    points = tuning.grid_of(scheme)
    own = [{key: value for key, value in one.items() if key != "train.lr"} for one in tried[1:]]
    if points:
        assert {own.count(point) for point in points} <= {(trials - 1) // len(points), -(-(trials - 1) // len(points))}
    assert tried == [tuning.trial_settings(latin, scheme, trial) for trial in range(trials)]


def test_the_grid_draws_what_it_always_drew():
    grid = Tuning(6, 100, 0.2, 3e-4, 3e-3)
    assert [tuning.trial_settings(grid, "moon", trial) for trial in (1, 5)] == [
        {"train.lr": 0.000647, "scheme.mu": 5.0},
        {"train.lr": 0.00172, "scheme.mu": 10.0},
    ]


def test_all_that_a_tuned_comparison_may_run():
    spec = Spec(("fedavg", "local"), (0, 1), {"fed.rounds": 1}, Tuning(2, 100, 0.2, 3e-4, 3e-3))
    assert [run.name for run in tuning.possible_runs(spec)] == [
        "fedavg-paper-s0",
        "local-paper-s0",
        "fedavg-paper-s1",
        "local-paper-s1",
        "fedavg-trial0",
        "fedavg-trial1",
        "fedavg-tuned1-s0",
        "fedavg-tuned1-s1",
    ]
