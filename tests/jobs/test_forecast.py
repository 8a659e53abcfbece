"""What a launch is said to cost, against numbers by hand and real files, and what is rejected before it costs
anything.
"""

from __future__ import annotations

import json
import os

import h5py
import numpy as np
import pytest
import torch
import toy

from hkd_hpc.data.registry import SOURCES, Sizes
from hkd_hpc.data.settings import DataSettings
from hkd_hpc.data.sizes import sizes_of
from hkd_hpc.jobs import forecast, probe, verdict, work
from hkd_hpc.jobs.__main__ import main
from hkd_hpc.jobs.options import Options
from hkd_hpc.jobs.probe_process import answer, make_net
from hkd_hpc.jobs.work import Work
from hkd_hpc.models.precision import allow_tf32
from hkd_hpc.runtime.environment import torch_kept
from hkd_hpc.store.folder import RunFolder
from hkd_hpc.store.tree import save_tree
from jobs import Sweep, launch

GPU = Options(gpus_per_node=1, time_min=240, array_parallelism=4)


def trials_of(**axes):
    found, problems = Sweep(**axes).trials()
    assert not problems
    return found


def paper(**axes):
    """Trials with the paper's settings."""
    return trials_of(**{"data": ["cifar10"], **axes})


def toy_sweep(data, *more, **axes):
    settings = dict(text.split("=", 1) for text in toy.settings(data, "model.name=small", *more))
    return Sweep(settings=settings, **axes)


def forecast_of(root, trials, executor="slurm", options=GPU, study=()):
    out = forecast.forecast(root, trials, [0] * len(trials), list(study), executor, options, 4)
    if root.exists():
        out.remember()
    return out


@pytest.fixture
def root(tmp_path):
    """The root of a study."""
    place = tmp_path / "root"
    place.mkdir()
    return place


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


# ---- the work of a round


def work_of(*overrides):
    [trial] = paper(scheme=[overrides[0]], settings=dict(text.split("=") for text in overrides[1:]))
    return Work(trial.config(), work.data_sizes(trial.config()))


def test_the_busiest_worker_trains_its_clients_images_as_often_as_there_are_epochs():
    # 10 % of 50,000 over 10 clients: 500, of which 125 for the local test
    found = work_of("fedavg")
    assert (found.images, found.tests, found.cohort) == (375, 125, 10)
    assert [found.trained(workers) for workers in (1, 10, 4)] == [18_750, 1_875, 3 * 1_875]
    assert [work.workers_of(*given) for given in ((1, 0), (11, 0), (11, 4), (11, 16), (1, 1))] == [1, 10, 4, 10, 1]
    assert found.tested(1, ranks=1) == 10 * 125 + 10_000
    assert found.tested(10, ranks=11) == 125


def test_sampling_validation_and_pooled_data_change_the_work():
    assert work_of("fedavg", "fed.participation=0.25").cohort == 3  # 2.5, rounded half up
    assert work_of("fedavg", "data.val_fraction=0.2").images == 300
    pooled = work_of("central")
    assert (pooled.clients, pooled.images, pooled.trained(1)) == (1, 3_750, 18_750)


def test_the_epochs_of_all_parts_of_a_clients_round_count():
    assert work_of("ditto").trained(10) == 2 * 1_875
    assert work_of("fedrep", "scheme.head_epochs=3").trained(10) == (3 + 5) * 375


def test_sizes_come_from_the_heads_of_the_files(data, tmp_path):
    assert sizes_of(DataSettings("file", path=str(data))) == Sizes(300, 100, 10, (3, 32, 32))
    with h5py.File(tmp_path / "grey.h5", "w") as file:
        for split, count in (("train", 12), ("test", 5)):
            file[f"x_{split}"], file[f"y_{split}"] = np.zeros((count, 28, 40), np.uint8), np.arange(count) % 4
    assert sizes_of(DataSettings("file", path=str(tmp_path / "grey.h5"))) == Sizes(12, 5, 4, (3, 32, 40))
    with h5py.File(toy.PROJECT / "hkd_hpc/data/fmnist.h5") as file:
        fmnist = SOURCES["fmnist"].sizes
        assert (len(file["y_train"]), len(file["y_test"])) == (fmnist.train, fmnist.test)
    assert sizes_of(DataSettings("file", path=str(tmp_path / "none.npz"))) is None


# ---- bytes


def test_bytes_are_those_of_the_real_model_and_scheme(data):
    [trial] = toy_sweep(data, scheme=["moon"]).trials()[0]
    found = Work(trial.config(), work.data_sizes(trial.config()))
    kind = {"a": {**forecast._describe(trial, found)}}
    sizes = answer({"begun": 0.0, "threads": 1, "device": "cpu", "timed": False, "kinds": kind})["kinds"]["a"]
    # 27 * 32 + 288 * 64 + 576 * 128, BatchNorm 2 * 224, 129 * 8, 9 * 10; beside them 448 running statistics, 3
    # counters. Flat, three tensors end in gaps of 8 and 6 floats. MOON keeps one such vector
    assert sizes["parameters"] == 94_594
    assert sizes["held"] == 283_782
    assert sizes["weights_bytes"] == 4 * 95_042 + 24
    assert sizes["flat_bytes"] == sizes["state_bytes"] == 4 * 95_056
    assert sizes["last_state_bytes"] == 2 * sizes["state_bytes"]  # its own model of the last round too
    assert sizes["initial_bytes"] == 0  # all of its model travels


@pytest.mark.parametrize(
    "precision, device, is_tf32, is_bf16, is_channels_last",
    [
        ("fp32", "cpu", False, False, True),
        ("bf16", "cpu", False, True, True),
        ("tf32", "cuda", True, False, False),
        ("fp32", "cuda", False, False, False),
    ],
)
def test_steps_are_timed_of_the_network_that_a_run_would_train(
    data, precision, device, is_tf32, is_bf16, is_channels_last
):
    [trial] = toy_sweep(data, f"train.precision={precision}").trials()[0]
    kind = forecast._describe(trial, Work(trial.config(), work.data_sizes(trial.config())))
    with torch_kept():
        allow_tf32(not is_tf32)
        net = make_net(trial.config(), kind, torch.device(device))
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is is_tf32
    assert ("forward" in vars(net)) is is_bf16
    assert net.channels_last is is_channels_last
    assert json.loads(kind["model"])[-1] == precision


@pytest.mark.parametrize("scheme, keep_state", [("moon", False), ("moon", True), ("local", True)])
def test_disk_is_what_the_files_of_a_real_trial_take(data, tmp_path, scheme, keep_state):
    sweep = toy_sweep(data, "fed.rounds=4", scheme=[scheme])
    options = Options(keep_state=keep_state)
    trials, _ = sweep.trials()
    [expected] = forecast_of(tmp_path, trials, "debug", options).estimates
    study = launch(sweep, "debug", root=tmp_path / "root", keep_state=keep_state)
    folder = RunFolder(study.root / study.trials[0].name)
    found = sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file())
    assert found <= expected.finished_bytes <= 1.25 * found
    if keep_state:  # while the last is written, two are there, and the metrics twice
        last, usual = (folder.checkpoint_path(round).stat().st_size for round in (4, 3))
        peak = last + 2 * usual + 2 * folder.metrics_path.stat().st_size
        assert peak <= expected.running_bytes <= 1.25 * peak


# ---- seconds


def test_without_a_gpu_here_the_reference_is_scaled_by_work_and_scheme(root):
    if forecast.has_gpu():
        pytest.skip("this machine has a GPU")
    trials = [
        *paper(scheme=["fedhkd", "fedmd"]),
        *paper(scheme=["fedhkd"], clients=[20], settings={"data.fraction": 0.2}),
        *paper(scheme=["fedhkd"], data=["svhn"]),
    ]
    out = forecast_of(root, trials)
    found = [each.round_s for each in out.estimates]
    # 3.5 s; 3.5 * 2 / 1.1; twice the clients; SVHN: 732 a client, 183 of them for the local test
    assert found == pytest.approx([3.5, 3.5 * 2 / 1.1, 7.0, 3.5 * 549 / 375])
    assert {each.basis for each in out.estimates[:3]} == {forecast.REFERENCE_TEXT}
    assert out.estimates[3].basis == forecast.REFERENCE_TEXT + "; shufflenet_v2 taken to be as fast as its ResNet18"
    first, usual_s = out.estimates[0], 44.9e6 * 1.02 / 1e8  # the last checkpoint has the clients' models too
    assert first.gpu_hours == first.wall_s / 3600
    assert first.save_s == pytest.approx(11 * usual_s, rel=0.01)
    assert first.wall_s == pytest.approx(out.probed["start_s"] + 50 * (3.5 + usual_s) + first.save_s, rel=1e-3)
    [four] = forecast_of(root, trials[:1], options=Options(ranks=11, gpus_per_node=4, nodes=1)).estimates
    # three clients on the busiest, the slowest of four GPUs 1.030 of their mean; between the ranks 90 MB summed over 10
    # client ranks (12.9 ms, .9 in memory), 45 MB relayed (3.6), 17 steps (.3), 5 barriers (1.7), 2 status messages (.2)
    assert four.round_s == pytest.approx(3.5 * 3 / 10 * 1.0303 + 0.0196, rel=2e-4)
    assert four.basis == f"{forecast.REFERENCE_TEXT}; between ranks: 100 Gb/s a GPU, 20 us a step (assumed)"
    assert four.gpu_hours == pytest.approx(4 * four.wall_s / 3600)
    assert four.wall_s == pytest.approx(
        out.probed["start_s"] + 50 * four.round_s + four.save_s
    )  # others are made meanwhile


def write_rounds(folder, wall_s, plan="1 rank on 1 host, weights by local (one process); devices: rank 0 cpu", ranks=1):
    folder.mkdir(parents=True)
    save_tree(
        folder / "metrics.h5",
        {
            "rounds": {
                "round": np.arange(1, 1 + len(wall_s)),
                "wall_s": np.array(wall_s),
                "seconds": {"evaluate_and_save": np.full(len(wall_s), 0.5)},
            },
            "world": {"ranks": ranks, "plan": plan},
        },
    )


def test_rounds_of_the_study_come_first(data, root):
    study = toy_sweep(data, scheme=["fedavg", "moon"], clients=[3, 6]).trials()[0]
    by_name = {(trial.labels["scheme"], trial.labels["clients"]): trial for trial in study}
    write_rounds(root / by_name["fedavg", "3"].name, [9.0, 2.0, 2.0])  # the first pays for the library's preparations
    todo = [trial for trial in study if trial is not by_name["fedavg", "3"]]
    out = forecast_of(root, todo, "debug", Options(), study)
    found = {(e.trial.labels["scheme"], e.trial.labels["clients"]): e for e in out.estimates}
    # 2.5 s for 3 clients of 75 images; for 6 of 38 (50, of which 12) 2.5 * 228 / 225; MOON takes 1.25 of that
    assert found["fedavg", "6"].round_s == pytest.approx(2.5 * 228 / 225)
    assert found["moon", "3"].round_s == pytest.approx(2.5 * 1.25)
    assert found["fedavg", "6"].basis == "from rounds of this study"
    assert found["fedavg", "6"].is_measured
    assert found["moon", "3"].basis == "from rounds of another scheme in this study"


def test_rounds_on_a_cpu_say_nothing_of_a_gpu(data, root):
    [trial, other] = toy_sweep(data, scheme=["fedavg"], seed=[0, 1]).trials()[0]
    write_rounds(root / trial.name, [2.0])
    [of_gpu] = forecast_of(root, [other], study=[trial, other]).estimates
    assert not of_gpu.is_measured
    write_rounds(
        root / other.name, [2.0], "2 ranks on 1 host, weights by gloo; devices: ranks 0-1 GPU-1 (H200)", ranks=2
    )
    [of_gpu] = forecast_of(root, [other], study=[trial, other]).estimates
    assert of_gpu.is_measured
    assert of_gpu.round_s == 2.5  # rank 0 tests before it begins the next round, however many ranks there are


@pytest.mark.parametrize("other", [{"data.fraction": 0.5}, {"train.precision": "bf16"}])
def test_rounds_of_other_work_are_no_measure(data, root, other):
    """The test on all images costs the same whatever the clients train on."""
    full, part = toy_sweep(data, work={"usual": {}, "other": other}).trials()[0]
    write_rounds(root / full.name, [2.0])
    [estimate] = forecast_of(root, [part], "debug", Options(), study=[full, part]).estimates
    assert not estimate.is_measured


def test_a_probe_times_steps_here_and_is_remembered_by_a_launch(data, tmp_path, monkeypatch):
    sweep = toy_sweep(data, scheme=["fedavg"])
    trials, _ = sweep.trials()
    [found] = forecast_of(tmp_path / "root", trials, "debug", Options()).estimates
    assert found.basis == "from FedAvg steps timed on this machine (cpu), scaled"
    assert found.round_s > 0
    assert not (tmp_path / "root").exists()
    launch(sweep, "debug", root=tmp_path / "root")
    assert json.loads((tmp_path / "root" / "probe.json").read_text())["kinds"]
    monkeypatch.setattr(probe, "ask", None)  # so that it cannot be asked again
    forecast_of(tmp_path / "root", trials, "debug", Options())


def test_what_other_code_has_probed_is_probed_anew(data, tmp_path):
    sweep = toy_sweep(data, scheme=["fedavg"])
    trials, _ = sweep.trials()
    launch(sweep, "debug", root=tmp_path)
    stored = json.loads((tmp_path / "probe.json").read_text())
    stored["machine"]["hkd_hpc"] = "0" * 64
    for sizes in stored["kinds"].values():
        del sizes["initial_bytes"]  # which that code did not know of
    (tmp_path / "probe.json").write_text(json.dumps(stored))
    [found] = forecast_of(tmp_path, trials, "debug", Options()).estimates
    assert found.finished_bytes > 0


# ---- what is rejected


def set_start_up(root, trials, start_s, options=GPU):
    """As if a process had needed so long to start where the probe ran: a busy machine's own would decide the test."""
    forecast_of(root, trials, options=options)
    probed = json.loads((root / "probe.json").read_text())
    (root / "probe.json").write_text(json.dumps(probed | {"start_s": start_s}))


def test_a_time_limit_below_a_round_and_its_save_is_rejected(root):
    [trial] = paper(scheme=["fedhkd"])
    set_start_up(root, [trial], 10.0, Options(ranks=1))
    write_rounds(root / trial.name, [400.0, 400.0, 400.0])
    [line] = forecast_of(root, [trial], "slurm", Options(time_min=6, ranks=1), [trial]).problems
    # 2 * (400.5 + .45 for 45 MB) + 120 s of notice
    assert line.startswith(f"time_min=6: a round of {trial.name} takes about 6 min 40 s and its save ")
    assert line.endswith("(from rounds of this study); --time-min 16 leaves enough")
    assert not forecast_of(root, [trial], "slurm", Options(time_min=7), [trial]).problems


def test_a_time_that_was_not_measured_here_rejects_only_with_a_margin_of_two(root):
    if forecast.has_gpu():
        pytest.skip("this machine has a GPU")
    trials = paper(scheme=["fedhkd"], settings={"train.epochs": 5000})  # 3500 s a round
    set_start_up(root, trials, 10.0)
    assert not forecast_of(root, trials, options=Options(gpus_per_node=1, time_min=30)).problems
    [line] = forecast_of(root, trials, options=Options(gpus_per_node=1, time_min=29)).problems
    assert "takes about 58 min 20 s" in line
    assert "one H200" in line
    [remark] = forecast_of(root, trials, options=Options(gpus_per_node=1, time_min=30)).remarks
    assert "longer than the notice before the time limit" in remark
    assert "--signal-delay-s 52" in remark


def test_less_memory_than_the_clients_states_take_is_rejected(root):
    trials = paper(scheme=["moon"], clients=[50], settings={"data.fraction": 0.5, "run.client_models": "false"})
    [line] = forecast_of(root, trials, options=Options(gpus_per_node=1, mem_gb=4)).problems  # 50 x 45 MB, twice
    assert line.startswith(f"mem_gb=4: {trials[0].name} needs about ")
    assert "--mem-gb " in line
    suggested = int(line.rpartition(" ")[2])
    assert 4 < suggested <= 8
    assert not forecast_of(root, trials, options=Options(gpus_per_node=1, mem_gb=suggested)).problems


@pytest.fixture
def small_disk(tmp_path):
    with toy.small_disk(tmp_path / "disk", "8m") as place:
        yield place


def test_a_study_that_does_not_fit_is_rejected_before_anything_is_made(data, small_disk, capsys):
    sweep = toy_sweep(data, scheme=["fedavg"], seed=range(30))
    spec = [f'"{key}" = "{value}"' for key, value in sweep.settings.items()]
    path = small_disk.parent / "spec.toml"
    path.write_text("\n".join(["[settings]", *spec, "[axes]", f"seed = {list(range(30))}"]))
    arguments = ["launch", str(path), "--executor", "debug", "--root", str(small_disk / "root")]
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hkd_hpc: --root {small_disk}/root: 8.4 MB are free there and ")
    assert "on a larger disk" in line
    assert main([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == line.replace("hkd_hpc: ", "would be rejected: ", 1)
    assert os.listdir(small_disk) == []


def test_a_model_that_cannot_be_built_is_rejected_with_its_line(data, tmp_path, monkeypatch, capsys):
    toy.write_module(tmp_path, "broken_model", "class Net:\n    def __init__(self, classes, latent):\n        pass\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{toy.PROJECT}")
    (tmp_path / "spec.toml").write_text("[axes]\nseed = [0]\n")
    assert (
        main(
            [
                "launch",
                str(tmp_path / "spec.toml"),
                "--executor",
                "debug",
                "--root",
                str(tmp_path / "root"),
                "model.name=broken_model:Net",
            ]
        )
        == 2
    )
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "hkd_hpc: the probe of model and scheme failed: model.name=broken_model:Net: must be an nn.Module"
    )
    assert not (tmp_path / "root").exists()


# ---- as people read it


def test_many_trials_are_grouped_and_few_are_listed(data, root):
    out = forecast_of(root, toy_sweep(data, scheme=["fedavg", "moon"], seed=range(3)).trials()[0], "debug", Options())
    few, many = verdict.lines(out), verdict.lines(out, most=5)
    assert few[0].split()[:4] == ["trial", "ranks", "trials", "round"]
    assert len(many) == len(few) - 4
    assert [line.split()[:5] for line in many[1:3]] == [
        ["fedavg", "file", "3", "1", "3"],
        ["moon", "file", "3", "1", "3"],
    ]
    assert "a quota cannot be seen from here" in few[7]
    assert few[8].startswith("seconds of 6 trials: from FedAvg steps")


def test_more_nodes_than_ranks_are_rejected(root):
    [trial] = paper(scheme=["fedhkd"])
    out = forecast_of(root, [trial], options=Options(nodes=12, gpus_per_node=0, ranks=11))
    assert "nodes=12: a trial has 11 rank(s), one node for each at most; --nodes 11" in out.problems
    assert not [
        line
        for line in forecast_of(root, [trial], options=Options(nodes=11, gpus_per_node=0, ranks=11)).problems
        if line.startswith("nodes=")
    ]


def test_trials_that_share_a_gpu_get_a_remark(root):
    [trial] = paper(scheme=["fedhkd"])
    options = Options(pack=True, slots=3, gpus_per_node=1)
    [line] = [line for line in forecast_of(root, [trial], options=options).remarks if line.startswith("--slots 3: ")]
    assert line.endswith("time and GPU hours may be up to 3 times as much")
