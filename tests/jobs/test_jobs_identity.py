"""A study believes a run only if it is the trial's, and says where its runs come from different data, code or
threads.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import toy

from hkd_hpc.jobs import results
from hkd_hpc.jobs.__main__ import main
from hkd_hpc.jobs.files import Launch, Status, write_trials
from hkd_hpc.jobs.launcher import code_remarks
from hkd_hpc.jobs.options import Options
from hkd_hpc.jobs.task import Task
from hkd_hpc.store.tree import save_tree
from jobs import Study, Sweep

SPEC = """[axes]
scheme = ["fedavg"]
seed = [0, 1]
"""


@pytest.fixture
def study(tmp_path):
    """store(trials, *records): a study with a complete run in each trial's folder, with what is stored beside its
    numbers.
    """
    root = tmp_path / "root"

    def store(trials, *records):
        root.mkdir()
        write_trials(root, trials)
        for trial, record in zip(trials, records):
            text = {name: value if isinstance(value, str) else json.dumps(value) for name, value in record.items()}
            (root / trial.name).mkdir()
            save_tree(
                root / trial.name / "metrics.h5",
                {
                    "config_json": trial.config().to_json(),
                    **text,
                    "rounds": {
                        "round": np.arange(1, 11),
                        "local_test_accuracy": np.full(10, 0.5),
                        "global_test_accuracy": np.full(10, 0.25),
                    },
                    "summary": {"local_test_accuracy_last": 0.5, "global_test_accuracy_last": 0.25},
                },
            )
        return root

    return store


def trials(**axes):
    return Sweep(**axes).trials()[0]


def other(trial, **settings):
    """The settings of the trial with others in their place."""
    tree = json.loads(trial.config().to_json())
    for key, value in settings.items():
        section, name = key.split("_", 1)
        tree[section][name] = value
    return tree


@pytest.mark.parametrize(
    "record, text",
    [
        (lambda trial: {"config_json": other(trial, train_lr=0.5)}, "train.lr: stored 0.5, asked 0.001"),
        (lambda trial: {"config_json": other(trial, run_seed=7)}, "run.seed: stored 7, asked 1"),
        (
            lambda trial: {"config_json": trials(scheme=["moon"])[0].config().to_json()},
            "scheme.name: stored moon, asked fedavg",
        ),
        (
            lambda trial: {"changes_json": [{"after_round": 3, "train.lr": [0.5, 0.001]}]},
            "changed on the way: train.lr 0.5 -> 0.001",
        ),
        (
            lambda trial: {"changes_json": [{"after_round": 3, "data.content": ["ab" * 32, "cd" * 32]}]},
            "changed on the way: data.content abababab -> cdcdcdcd",
        ),
    ],
)
def test_a_complete_run_of_other_settings_is_not_the_trials(study, tmp_path, capsys, record, text):
    first, second = trials(scheme=["fedavg"], seed=[0, 1])
    root = study([first, second], {}, record(second))
    line = f"{root / second.name} holds another run: {text}"
    assert [state.state for state in Study(root).status()] == ["complete", "other settings"]
    assert main(["status", str(root)]) == 0
    assert line in (out := capsys.readouterr().out)
    assert "1 other settings" in out
    assert main(["table", str(root)]) == 1
    out = capsys.readouterr().out
    assert f"not in the table: {line}" in out
    assert "1 of 2 runs are complete" in out
    assert "0.500 (1)" in out
    (tmp_path / "spec.toml").write_text(SPEC)
    assert main(["launch", str(tmp_path / "spec.toml"), "--root", str(root), "--executor", "debug"]) == 2
    assert capsys.readouterr().err == f"hkd_hpc: {line}; move it away\n"


def test_what_changes_no_round_leaves_the_run_the_trials(study):
    [trial] = trials(scheme=["fedavg"])
    root = study(
        [trial],
        {
            "changes_json": [{"after_round": 3, "fed.rounds": [3, 10], "code.hkd_hpc": ["a", "b"]}],
            "config_json": other(trial, data_dir="/moved", comm_timeout_s=5.0),
        },
    )
    assert [state.state for state in Study(root).status()] == ["complete"]


def test_the_table_is_written_as_latex_and_csv_where_asked_for(study, capsys):
    root = study(trials(scheme=["fedavg"], seed=[0, 1]), {}, {})
    assert main(["table", str(root), "--format", "latex"]) == 0
    latex = capsys.readouterr().out.splitlines()
    assert latex[0].startswith("% Accuracy in the last round")
    assert r"fedavg & 0.500 $\pm$ 0.000 (2) & 0.250 $\pm$ 0.000 (2) & -- & -- & no \\" in latex
    assert main(["table", str(root), "--format", "csv"]) == 0
    comment, *_, head, row = capsys.readouterr().out.splitlines()
    assert comment.startswith("# Accuracy in the last round")
    assert head.startswith("scheme,local,local ±,local seeds,global,global ±,global seeds,")
    assert row == "fedavg,0.5,0,2,0.25,0,2,–,–,no"


def test_seeds_on_different_data_have_no_mean(study, capsys):
    study_trials = trials(scheme=["fedavg", "moon"], seed=[0, 1])
    one, two = {"data.content": "ab" * 32}, {"data.content": "cd" * 32}
    root = study(study_trials, *({"identity_json": sha} for sha in (one, two, one, one)))
    assert main(["table", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[4].startswith("| fedavg | different data | different data |")
    assert lines[5].startswith("| moon | 0.500 ± 0.000 (2) | 0.250 ± 0.000 (2) |")
    names = [trial.name for trial in study_trials]
    assert lines[6].startswith(
        f"not in the table: runs differ in data.content: abababab in {names[0]}, cdcdcdcd in {names[1]}; they"
    )


@pytest.mark.parametrize(
    "records, text",
    [
        ([{"code.hkd_hpc": "ab" * 32}, {"code.hkd_hpc": "cd" * 32}], "code.hkd_hpc: abababab in {0}, cdcdcdcd in {1}"),
        (
            [{"code.hkd_hpc": "ab" * 32, "code.mine": "12" * 32}, {"code.hkd_hpc": "ab" * 32}],
            "",
        ),  # two schemes, one package
        ([{}, {"code.hkd_hpc": "cd" * 32}], ""),
    ],
)  # one of a version that stored none
def test_runs_of_different_code_are_told_and_rejected_on_request(study, tmp_path, capsys, records, text):
    study_trials = trials(scheme=["fedavg"], seed=[0, 1])
    root = study(study_trials, *({"identity_json": record} for record in records))
    told = text and "remark: runs differ in " + text.format(*(trial.name for trial in study_trials))
    assert main(["table", str(root)]) == 0
    out = capsys.readouterr().out
    assert told in out
    assert ("remark" in out) == bool(text)
    assert main(["table", str(root), "--strict-code"]) == (2 if text else 0)
    assert "--strict-code rejects it" not in capsys.readouterr().err
    (tmp_path / "spec.toml").write_text(SPEC)
    arguments = ["launch", str(tmp_path / "spec.toml"), "--root", str(root), "--executor", "debug"]
    assert main(arguments) == 0
    assert told in capsys.readouterr().out
    assert main([*arguments, "--strict-code"]) == (2 if text else 0)
    assert "--strict-code rejects it" not in capsys.readouterr().err


def test_other_code_here_than_in_the_trials_that_began_is_told(study):
    study_trials = trials(scheme=["fedavg"], seed=[0, 1])
    root = study(study_trials, {"identity_json": {"code.hkd_hpc": "ab" * 32}})
    [line] = code_remarks(root, study_trials, study_trials[1:], Options())
    assert f"code.hkd_hpc: abababab in {study_trials[0].name}, " in line
    assert " in this launch; --strict-code rejects it" in line
    assert (
        code_remarks(root, study_trials, study_trials[1:], Options(python="another")) == []
    )  # of which nothing is known
    assert code_remarks(root, study_trials, [], Options()) == []


def test_threads_that_differ_are_told(study):
    study_trials = trials(scheme=["fedavg"], threads={"one": {}, "two": {"run.threads": 2}})
    root = study(study_trials, {}, {})
    names = [trial.name for trial in study_trials]
    assert results.table(root, study_trials).splitlines()[-1] == (
        f"remark: runs differ in run.threads: 1 in {names[0]}, 2 in {names[1]}; the number of threads changes the bits"
    )


def test_code_that_changed_since_the_submission_is_told_or_rejected(tmp_path):
    data = toy.save_data(tmp_path / "data.npz")
    settings = dict(text.split("=") for text in toy.settings(data, "fed.rounds=1"))
    [trial] = Sweep(scheme=["fedavg"], settings=settings).trials()[0]
    (tmp_path / "launches").mkdir()
    Launch("0001", "local", {"strict_code": True}, code={"code.hkd_hpc": "ab" * 32}).write(tmp_path)
    Launch("0002", "local", {}, code={"code.hkd_hpc": "ab" * 32}).write(tmp_path)
    with pytest.raises(SystemExit):
        Task(tmp_path, trial, "0001")()
    failed = Status.read(tmp_path / trial.name)
    assert failed.state == "failed"
    assert failed.error.startswith(
        "hkd_hpc: --strict-code: the code is not that of the submission (code.hkd_hpc abababab -> "
    )
    Task(tmp_path, trial, "0002")()
    log = (tmp_path / trial.name / "log.txt").read_text()
    assert "warning: the code is not that of the submission: code.hkd_hpc abababab -> " in log
    assert toy.rounds_done(tmp_path / trial.name) == 1
