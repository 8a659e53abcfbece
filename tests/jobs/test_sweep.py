"""The grid of a study: trials, their ids, specs, what is rejected, and the table of results."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import toy

from hkd_hpc.common.errors import UsageError
from hkd_hpc.config import collect
from hkd_hpc.config.effects import without_effect
from hkd_hpc.jobs import results
from hkd_hpc.jobs.__main__ import main
from hkd_hpc.jobs.checks import check
from hkd_hpc.jobs.options import Options
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.tree import save_tree
from jobs import Sweep

SPECS = {
    "table1": 405,
    "table2": 180,
    "ablation_nu": 30,
    "ablation_noise": 20,
    "ablation_loss": 25,
    "ablation_batchnorm": 30,
}


def trials(*arguments, **axes):
    found, problems = Sweep(*arguments, **axes).trials()
    assert not problems
    return found


def test_trials_are_the_product_of_the_axes_with_short_names_and_presets():
    found = trials(scheme=["fedavg", "moon"], data=["cifar10"], clients=[10, 20], seed=range(2), beta=[0.2])
    assert len(found) == len({trial.id for trial in found}) == 8
    config = found[-1].config()
    assert (config.scheme.name, config.data.name, config.fed.clients, config.run.seed) == ("moon", "cifar10", 20, 1)
    assert (config.data.beta, config.fed.rounds, config.model.name) == (
        0.2,
        50,
        "resnet18",
    )  # the last two: the preset's
    assert found[-1].labels == {"scheme": "moon", "data": "cifar10", "clients": "20", "seed": "1", "beta": "0.2"}
    assert found[0].name == f"fedavg-cifar10-c10-s0-{found[0].id}"


def test_an_id_is_the_hash_of_what_is_not_default_wherever_the_data_are():
    text = (
        '{"fed.clients": 10, "data.name": "file", "data.path": "x.npz", "run.seed": 3, "scheme.name": "fedprox", '
        '"scheme.mu": 0.25}'
    )
    expected = hashlib.sha256(json.dumps(json.loads(text), sort_keys=True).encode()).hexdigest()[:12]
    for path, device in (("/a/x.npz", "cpu"), ("/b/x.npz", "auto")):
        [trial] = trials(
            scheme=["fedprox"],
            seed=[3],
            settings={
                "data.name": "file",
                "data.path": path,
                "scheme.mu": "2.5e-1",
                "run.device": device,
                "fed.rounds": 10,
            },
        )
        assert trial.id == expected
    [other] = trials(
        scheme=["fedprox"], seed=[3], settings={"data.name": "file", "data.path": "/a/y.npz", "scheme.mu": 0.25}
    )
    assert other.id != expected


def test_labels_stand_for_settings_and_presets():
    found = trials(nu={"paper": {}, "repaired": {"preset": "repaired"}, "none": {"scheme.nu": 1}})
    assert [(trial.config().scheme.nu, trial.config().scheme.nu_rule) for trial in found] == [
        (0.25, "absolute"),
        (1.0, "relative"),
        (1.0, "absolute"),
    ]


@pytest.mark.parametrize("name", SPECS)
def test_specs_have_as_many_runs_as_they_say(name):
    path = toy.PROJECT / f"jobs/specs/{name}.toml"
    found, problems = Sweep.from_toml(path).trials()
    head = path.read_text().splitlines()
    assert not problems
    assert len(found) == SPECS[name]
    assert f"# {SPECS[name]} runs; " in "\n".join(head)
    assert f"hkd sweep launch {name}.toml" in head[1]
    assert {trial.config().fed.rounds for trial in found} == {50}


def test_specs_of_the_tables_have_the_papers_columns():
    found, _ = Sweep.from_toml(toy.PROJECT / "jobs/specs/table1.toml").trials()
    columns = {(c.config().data.name, c.config().fed.clients, c.config().data.fraction) for c in found}
    assert columns == {
        (data, clients, fraction)
        for data in ("svhn", "cifar10", "cifar100")
        for clients, fraction in ((10, 0.1), (20, 0.2), (50, 0.5))
    }
    assert {c.config().data.beta for c in found} == {0.5}
    found, _ = Sweep.from_toml(toy.PROJECT / "jobs/specs/table2.toml").trials()
    assert {(c.config().data.name, c.config().data.beta) for c in found} == {
        (data, beta) for data in ("svhn", "cifar10") for beta in (0.2, 5.0)
    }
    assert len({c.config().scheme.name for c in found}) == 9
    assert {c.config().fed.clients for c in found} == {10}


@pytest.mark.parametrize(
    "text, part",
    [
        ("[axes]\nseed = 3\n", "axis seed: must be a list"),
        ("[axes]\nseed = []\n", "axis seed: has no value"),
        ("[axes]\nloss = {a = 1}\n", "axis loss: each label needs"),
        ("[other]\nx = 1\n", "other: not known"),
        ("seed = 3\n", "seed: not known; a spec has tables [axes]"),
    ],
)
def test_a_wrong_spec_is_one_line(tmp_path, capsys, text, part):
    (tmp_path / "spec.toml").write_text(text)
    assert main(["launch", str(tmp_path / "spec.toml"), "--executor", "debug", "--root", str(tmp_path / "root")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hkd_hpc: ")
    assert part in line
    assert not (tmp_path / "root").exists()


def test_every_problem_is_told_once_before_anything_is_made(tmp_path, capsys):
    axes = ["seed = [0, 1]", '"scheme.name" = ["fedavg", "fedwrong"]', '"fed.rounds" = [1, 0]']
    (tmp_path / "spec.toml").write_text("\n".join(["[axes]", *axes]))
    arguments = [
        "launch",
        str(tmp_path / "spec.toml"),
        "--executor",
        "local",
        "--root",
        str(tmp_path / "root"),
        "data.name=cifar10",
        f"data.dir={tmp_path}/none",
    ]
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("hkd_hpc: ") for line in lines)
    for part in ("scheme.name=fedwrong: no such scheme", "fed.rounds=0: not allowed", "data.name=cifar10: "):
        assert sum(part in line for line in lines) == 1
    assert main([*arguments, "--dry-run"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "2 seed, 2 scheme.name, 2 fed.rounds: 2 trials: 2 missing; 2 to start"
    assert [line.partition(": ")[2] for line in shown if line.startswith("would be rejected")] == [
        line.removeprefix("hkd_hpc: ") for line in lines
    ]
    assert not (tmp_path / "root").exists()


def test_an_axis_cannot_be_set_for_all():
    with pytest.raises(UsageError, match="run.seed: is an axis"):
        Sweep(seed=[0, 1], overrides=["run.seed=3"])


def test_the_same_run_twice_is_rejected():
    found, problems = Sweep(scheme=["fedavg"], rounds={"a": {"fed.rounds": 10}, "b": {}}).trials()
    same = f"scheme=fedavg rounds=b and scheme=fedavg rounds=a are the same run: {found[0].id}"
    assert len(found) == 1
    assert problems == [same]


@pytest.mark.parametrize(
    "options, part",
    [
        ({"ranks": "all"}, "ranks=all"),
        ({"nodes": 0}, "nodes=0"),
        ({"time_min": 1.5}, "time_min=1.5"),
        ({"setup": "module load x"}, "setup=module load x: must be a list of texts"),
    ],
)
def test_options_that_cannot_be_meant(tmp_path, options, part):
    [problem] = check(trials(scheme=["fedavg"]), "local", tmp_path, Options(**options))
    assert problem.startswith(part)


def test_a_file_in_the_way_of_the_root(tmp_path):
    (tmp_path / "file").touch()
    [problem] = check(trials(scheme=["fedavg"]), "debug", tmp_path / "file/root", Options())
    assert problem == f"--root {tmp_path}/file/root: {tmp_path}/file is a file; name a folder"


def test_a_root_that_slurm_would_read_as_a_pattern_is_told(tmp_path):
    found = check(trials(scheme=["fedavg"]), "slurm", tmp_path / "50%j", Options())
    assert any("50%j: SLURM takes % in the names of its logs for a pattern" in line for line in found)


def test_a_study_does_not_begin_in_the_folder_of_a_run(tmp_path, capsys):
    RunFolder(tmp_path / "run").create()
    RunFolder(tmp_path / "run").write_config("{}")
    (tmp_path / "spec.toml").write_text('[axes]\nscheme = ["fedavg"]\n')
    there = sorted(path.name for path in (tmp_path / "run").iterdir())
    words = ["launch", str(tmp_path / "spec.toml"), "--executor", "debug", "--root", str(tmp_path / "run")]
    assert main(words) == 2
    told = f"--root {tmp_path}/run: holds a run, which a study would hide; name another folder"
    assert told in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == there


@pytest.mark.parametrize("root, part", [("file", "file is a file; name a folder"), ("", "--root: is empty")])
def test_a_root_that_is_no_folder_is_one_line(tmp_path, monkeypatch, capsys, root, part):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "spec.toml").write_text('[axes]\nscheme = ["fedavg"]\n')
    for more in ([], ["--dry-run"]):
        code = main(["launch", "spec.toml", "--executor", "debug", "--root", root, *more])
        said = capsys.readouterr()
        assert part in said.out + said.err
        assert code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "spec.toml"]


def test_table_has_mean_interval_and_number_in_the_papers_layout(tmp_path):
    study = trials(scheme=["fedavg", "fedmd"], clients=[10, 20], seed=range(3))
    local = {("fedavg", "10"): (0.5, 0.6, 0.7), ("fedmd", "10"): (0.5, 0.5, None), ("fedavg", "20"): (0.25, None, None)}
    for trial in study:
        value = local.get((trial.labels["scheme"], trial.labels["clients"]), (None,) * 3)[int(trial.labels["seed"])]
        if value is not None:
            (tmp_path / trial.name).mkdir()
            save_tree(
                tmp_path / trial.name / "metrics.h5",
                {
                    "parameters": {"held": 11_209_994},
                    "summary": {"local_test_accuracy_last": value, "global_test_accuracy_last": 0.125},
                    "clients": {"train_s": np.array([[1.0, 2.0, np.nan]])},
                },
            )
    lines = results.table(tmp_path, study).splitlines()
    assert lines[0].endswith("6 of 12 runs are complete")
    assert lines[2] == (
        "| scheme | local clients 10 | local clients 20 | global clients 10 | global clients 20 | "
        "parameters held (M) | seconds per client and round | public data |"
    )
    # t(.975, 2) = 4.3027: 4.3027 * .1 / sqrt(3) = .248
    assert lines[4] == "| fedavg | 0.600 ± 0.248 (3) | 0.250 (1) | 0.125 ± 0.000 (3) | 0.125 (1) | 11.210 | 1.50 | no |"
    assert lines[5] == "| fedmd | 0.500 ± 0.000 (2) | – | 0.125 ± 0.000 (2) | – | 11.210 | 1.50 | yes |"
    numbers = results.table(tmp_path, study, "csv").splitlines()
    assert numbers[2].startswith("scheme,local clients 10,local clients 10 ±,local clients 10 seeds,local clients 20,")
    assert numbers[3].startswith("fedavg,0.6,0.24841,3,0.25,,1,0.125,0,3,")
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-5}" in results.table(tmp_path, study, "latex")


def store(root, trial, **accuracies):
    (root / trial.name).mkdir()
    summary = {f"{goal}_test_accuracy_last": value for goal, value in accuracies.items()}
    save_tree(root / trial.name / "metrics.h5", {"summary": summary})


def test_table_has_the_paired_differences_of_each_setting(tmp_path):
    study = trials(scheme=["fedavg", "fedprox"], clients=[10, 20], seed=range(6))
    for trial in study:
        scheme, clients, seed = (trial.labels[axis] for axis in ("scheme", "clients", "seed"))
        more = 0.01 * (1 + int(seed)) * (scheme == "fedprox")
        if (scheme, clients, seed) != ("fedprox", "20", "0"):  # one pair is missing
            store(tmp_path, trial, **{"local": 0.5 + more, "global": 0.25})
    lines = results.table(tmp_path, study).splitlines()
    [head, _, fedavg, fedprox] = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines[2:6]]
    assert head[5:9] == [f"{goal} – fedavg clients {count}" for goal in ("local", "global") for count in (10, 20)]
    assert fedavg[5:9] == [""] * 4
    # t(.975, 5) = 2.5706: 2.5706 * .018708 / sqrt(6) = .0196
    assert fedprox[5:9] == ["+0.035 ± 0.020, better", "–", "+0.000 ± 0.000, not separated", "–"]
    assert lines[6].startswith("better, worse: exact sign-flip test")
    assert lines[6].endswith("over the 1 scheme of a column (controls by themselves), level 0.05; that needs 6 seeds.")


def test_differences_are_within_one_setting_and_name_a_scheme_with_several_by_its_own(tmp_path):
    methods = {
        "avg": {"scheme.name": "fedavg"},
        "prox 1": {"scheme.name": "fedprox", "scheme.mu": 1.0},
        "prox 2": {"scheme.name": "fedprox", "scheme.mu": 2.0},
    }
    study = trials(method=methods, rounds={"few": {"fed.rounds": 1}, "many": {"fed.rounds": 2}}, seed=range(2))
    add = {"avg": 0.0, "prox 1": 0.125, "prox 2": 0.25, "few": 0.0, "many": 0.5}
    for trial in study:
        value = add[trial.labels["method"]] + add[trial.labels["rounds"]]
        store(tmp_path, trial, **{"local": value, "global": value})
    lines = results.table(tmp_path, study).splitlines()[4:10]
    assert [line.split(" | ")[4] for line in lines] == [""] * 2 + [
        "+0.125 ± 0.000, cannot be told with 2 seeds",
        "+0.125 ± 0.000, cannot be told with 2 seeds",
        "+0.250 ± 0.000, cannot be told with 2 seeds",
        "+0.250 ± 0.000, cannot be told with 2 seeds",
    ]


def test_launches_with_other_settings_are_rows_of_their_own(tmp_path):
    """Two launches into one root, of 10 rounds (the default) and of 20: no mean is over both."""
    axes = {"scheme": ["fedavg"], "seed": range(2)}
    short, long = trials(**axes), trials(settings={"fed.rounds": 20}, **axes)
    for trial, value in zip([*short, *long], (0.25, 0.25, 0.5, 0.75)):
        (tmp_path / trial.name).mkdir()
        summary = {"local_test_accuracy_last": value, "global_test_accuracy_last": value}
        save_tree(tmp_path / trial.name / "metrics.h5", {"summary": summary})
    lines = results.table(tmp_path, [*short, *long]).splitlines()
    assert lines[2].startswith("| scheme | fed.rounds | local | global |")
    assert lines[4].startswith("| fedavg | default | 0.250 ± 0.000 (2) | 0.250 ± 0.000 (2) |")
    # t(.975, 1) = 12.706: 12.706 * .17678 / sqrt(2) = 1.588
    assert lines[5].startswith("| fedavg | 20 | 0.625 ± 1.588 (2) | 0.625 ± 1.588 (2) |")


def test_table_names_complete_trials_without_an_accuracy(tmp_path):
    study = trials(scheme=["fedavg"], seed=range(2))
    for trial, value in zip(study, (0.5, np.nan)):
        (tmp_path / trial.name).mkdir()
        save_tree(
            tmp_path / trial.name / "metrics.h5",
            {"summary": {"local_test_accuracy_last": 0.25, "global_test_accuracy_last": value}},
        )
    lines = results.table(tmp_path, study).splitlines()
    assert "| 0.250 ± 0.000 (2) | 0.500 (1) |" in lines[4]
    assert lines[5:] == [f"not in the table: {tmp_path / study[1].name}: complete, but without a global accuracy"]


def test_jobs_imports_without_torch():
    code = "import sys, jobs, jobs.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=toy.PROJECT).returncode == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"settings": {"scheme.mu": 0.25}},
        {"settings": {"scheme": {"mu": 0.25}}},
        {"overrides": ["scheme.mu=0.25"]},
        {"scheme.mu": [0.25]},
    ],
)
def test_a_setting_of_some_schemes_names_the_trial_and_the_form_that_mends_it(wrong):
    found, [problem] = Sweep(scheme=["fedavg", "fedprox", "fedproto"], seed=[3], **wrong).trials()
    assert len(found) == 1
    assert found[0].labels["scheme"] == "fedprox"
    assert problem.startswith(
        "scheme.mu: no such setting of fedavg, fedproto; fedprox, moon, fedalign have it (trial scheme=fedavg seed=3"
    )
    assert " and 1 more); in place of scheme.mu for all: scheme={" in problem
    mended = {
        label: (trial.config().scheme.name, getattr(trial.config().scheme, "mu", None))
        for trial in trials(scheme=ast.literal_eval(problem.partition(": scheme=")[2]), seed=[3])
        for label in [trial.labels["scheme"]]
    }
    assert mended == {"fedavg": ("fedavg", None), "fedprox": ("fedprox", 0.25), "fedproto": ("fedproto", None)}


def test_the_form_that_mends_a_spec_is_toml(tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text('[axes]\nscheme = ["fedavg", "fedprox"]\n"scheme.mu" = [0.25, 1.0]\n')
    _found, [problem] = Sweep.from_toml(spec).trials()
    spec.write_text(f"[axes]\n{problem.partition(' for all: ')[2]}\n")
    mended, problems = Sweep.from_toml(spec).trials()
    assert not problems
    assert [(trial.labels["scheme"], trial.settings.get("scheme.mu")) for trial in mended] == [
        ("fedavg", None),
        ("fedprox 0.25", 0.25),
        ("fedprox 1.0", 1.0),
    ]


def test_where_no_scheme_of_the_sweep_has_the_setting_nothing_is_to_be_given():
    _, [problem] = Sweep(scheme=["fedavg", "fedmd"], seed=[0, 1], settings={"scheme.mu": 0.25}).trials()
    assert problem == (
        "scheme.mu: no such setting of fedavg, fedmd; fedprox, moon, fedalign have it (trial scheme=fedavg "
        "seed=0 and 3 more)"
    )


def test_an_unknown_setting_is_one_line_however_many_trials_and_schemes():
    found, problems = Sweep(scheme="all", seed=range(3), settings={"train.wombat": 3}).trials()
    assert not found
    assert problems == ["train.wombat: no such setting; python -m hkd_hpc.train --help lists them"]


def test_each_unknown_setting_has_its_line_be_it_an_axis_or_a_setting():
    found, problems = Sweep(scheme=["fedavg"], lr=[0.1, 0.2], settings={"train.wombat": 3, "scheme.mu": 1}).trials()
    assert not found
    assert problems == [
        "train.wombat: no such setting; python -m hkd_hpc.train --help lists them",
        "lr: no such setting; did you mean train.lr?",
        "scheme.mu: no such setting of fedavg; fedprox, moon, fedalign have it (trial scheme=fedavg lr=0.1 and 1 more)",
    ]


@pytest.mark.parametrize("wrong", [3, "fed.rounds=3", ["fed.rounds"]])
def test_settings_that_are_no_mapping_are_one_line(wrong):
    with pytest.raises(UsageError) as error:
        Sweep(settings=wrong)
    assert (
        str(error.value)
        == f"settings={wrong!r}: must be a dict of settings and values, for example {{'fed.rounds': 3}}"
    )


def test_one_value_is_no_axis_and_nested_tables_are_settings(tmp_path):
    with pytest.raises(UsageError) as error:
        Sweep(**{"fed.rounds": 3})
    assert str(error.value) == (
        "axis fed.rounds: must be a list of values, not 3; write [3], or for one value in all trials "
        "settings={'fed.rounds': 3}, in a spec under [settings]"
    )
    [plain] = trials(scheme=["fedavg"], settings={"fed.rounds": 3, "data.beta": 0.25})
    [nested] = trials(scheme=["fedavg"], settings={"fed": {"rounds": 3}, "data": {"beta": 0.25}})
    [label] = trials(x={"a": {"scheme": {"name": "fedavg"}, "fed": {"rounds": 3}, "data": {"beta": 0.25}}})
    (tmp_path / "spec.toml").write_text('[axes]\nscheme = ["fedavg"]\ndata.beta = [0.25]\n[settings]\nfed.rounds = 3\n')
    [spec], _ = Sweep.from_toml(tmp_path / "spec.toml").trials()
    assert plain.id == nested.id == label.id == spec.id
    assert spec.labels == {"scheme": "fedavg", "data.beta": "0.25"}


@pytest.mark.parametrize(
    "data, warned", [([], []), (["data.dir=/d"], ["data.dir=/d has no effect with data.name=fmnist"])]
)
def test_a_trial_is_given_no_data_folder_that_nobody_gave(data, warned):
    [trial], _ = Sweep(scheme=["fedavg"], overrides=data).trials()
    asked, soft = collect(overrides=trial.arguments())
    assert without_effect(trial.config(), set(asked) - soft.keys()) == warned


def test_a_trial_of_official_files_finds_them_from_any_folder():
    [trial] = trials(scheme=["fedavg"], settings={"data.name": "cifar10"})
    assert trial.settings["data.dir"] == os.path.abspath("data")
