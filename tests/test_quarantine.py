"""Invalid clients, those that drop out, and stragglers: what is rejected, what is recorded, what the others do."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
import toy
from federation import Federation

from hkd_hpc import config, quarantine
from hkd_hpc.cohort import draw_failures
from hkd_hpc.quarantine import (
    DROPPED_OUT,
    INVALID_LOSS,
    INVALID_REPORT,
    INVALID_TEST,
    INVALID_WEIGHTS,
    OK,
    STRAGGLER,
    Finding,
)
from hkd_hpc.store.tree import load_tree, save_tree
from hkd_hpc.training import ClientRound


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz")


# ---- what is wrong

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "number, found", [(0.0, None), (65536.0, None), (-65537.0, -65537.0), (INF, INF), (-INF, -INF), (NAN, NAN)]
)
def test_a_bad_number_is_found_in_weights_buffers_and_reports(toy_net, number, found):
    from hkd_hpc.models.flat import FlatModel

    flat = FlatModel(toy_net())
    names = quarantine.names(flat, ["feature_CD"], ["cross_entropy"])
    assert names[0] == quarantine.UPDATE
    assert names[-2:] == ["report feature_CD", "loss cross_entropy"]
    for name, tensor in flat.tensors().items():
        before, tensor.view(-1)[-1] = tensor.view(-1)[-1].clone(), number
        result = quarantine.invalid_weights(flat)
        np.testing.assert_equal(
            result and (result.status, result.tensor, result.value), found and (INVALID_WEIGHTS, name, found)
        )
        assert name in names
        tensor.view(-1)[-1] = before
    report = {"count_C": torch.ones(3), "feature_CD": torch.tensor([[1.0, number]])}
    result = quarantine.invalid_report(report, 0)
    np.testing.assert_equal(
        result and (result.status, result.tensor, result.value), found and (INVALID_REPORT, "report feature_CD", found)
    )


def test_norms_beyond_the_setting_are_bad(toy_net):
    """A change of 3 in one weight and 4 in another is one of 5; so is a report tensor of 3 and 4."""
    from hkd_hpc.models.flat import FlatModel

    flat = FlatModel(toy_net())
    received_V = flat.values_V.clone()
    flat.values_V[0] += 3
    flat.values_V[-16] -= 4
    assert quarantine.invalid_update(flat, received_V, 0) is None
    assert quarantine.invalid_update(flat, received_V, 5.001) is None
    found = quarantine.invalid_update(flat, received_V, 4.999)
    assert (found.status, found.tensor) == (INVALID_WEIGHTS, quarantine.UPDATE)
    assert found.value == pytest.approx(5, abs=1e-5)
    report = {"soft_CC": torch.tensor([[3.0, -4.0]])}
    assert quarantine.invalid_report(report, 5.0) is None
    assert quarantine.invalid_report(report, 4.999) == Finding(INVALID_REPORT, "report soft_CC", 5.0)


@pytest.mark.parametrize(
    "number, found", [(0.0, None), (3e6, None), (-1.0, -1.0), (INF, INF), (-INF, -INF), (NAN, NAN)]
)
def test_counts_of_images_have_no_limit_but_are_finite_and_not_negative(number, found):
    result = quarantine.invalid_report({"count_C": torch.tensor([5.0, number])}, 5.0)
    assert (result is None) == (found is None)
    if result:
        assert (result.status, result.tensor) == (INVALID_REPORT, "report count_C")
        assert np.array_equal(result.value, found, equal_nan=True)


@pytest.mark.kernels
@pytest.mark.parametrize("scheme, more", [("fedhkd", ["scheme.noise=off"]), ("fedproto", []), ("fedgen", [])])
def test_a_limit_on_norms_rejects_nobody_for_the_number_of_its_images(data, scheme, more):
    """Norms of the counts are about 20; those of all else are below 10."""
    run = Federation(data, scheme, "fed.max_norm=10", "data.fraction=1", *more)
    assert run.play(1)[0].reports["status"].tolist() == [OK] * 3


def test_a_loss_that_is_not_finite_is_bad():
    assert quarantine.invalid_loss({"cross_entropy": 1e30, "soft": 0.0}) is None
    assert quarantine.invalid_loss({"cross_entropy": 1.0, "soft": -INF}) == Finding(INVALID_LOSS, "loss soft", -INF)


# ---- what becomes of it in a run


def make_invalid(client, round, where):
    """This client's loss is infinite in its last epoch, or its weights are large, or it predicts NaN, in one round."""

    def patch(rank):
        from hkd_hpc.models import evaluate
        from hkd_hpc.training import LocalTrainer

        original, predict = LocalTrainer.epochs, evaluate.predict
        now = []

        def epochs(self, given):
            for loss_K in original(self, given):
                now[:] = [(given.client.id, given.round)]
                yield loss_K * INF if now == [(client, round)] and where == "loss" else loss_K
            if now == [(client, round)]:
                self.flat.parameters_P[3] += 1000 * (where == "weights")

        def predicted(*arguments):
            feature_ND, logits_NC = predict(*arguments)
            return feature_ND, logits_NC * NAN if now == [(client, round)] and where == "predictions" else logits_NC

        LocalTrainer.epochs, evaluate.predict = epochs, predicted

    return patch


@pytest.mark.parametrize(
    "where, status, what, tensor, value",
    [
        ("loss", INVALID_LOSS, "loss", "loss cross_entropy", INF),
        ("weights", INVALID_WEIGHTS, "weights", quarantine.UPDATE, pytest.approx(1000, rel=1e-3)),
        ("predictions", INVALID_TEST, "predictions", "local test", 25),
    ],
)
def test_an_invalid_client_is_left_out_told_and_recorded(tmp_path, data, where, status, what, tensor, value):
    arguments = toy.settings(data, "scheme.name=fedavg", "fed.rounds=3", "fed.max_norm=100")
    for size in (1, 3):
        outputs = toy.train_ok(size, *arguments, "--out", tmp_path / str(size), patch=make_invalid(1, 2, where))
        [warning] = [line for line in outputs[0].splitlines() if "warning" in line]
        assert f"round 2: client 1 rejected: {tensor} has" in warning
        assert "counts with weight 0" in warning
    assert toy.rows(tmp_path / "1") == toy.rows(tmp_path / "3")
    found = toy.metrics(tmp_path / "3")
    assert found["clients/status"].tolist() == [[OK, OK, OK], [OK, status, OK], [OK, OK, OK]]
    events = {
        name.removeprefix("events/"): values.tolist() for name, values in found.items() if name.startswith("events/")
    }
    assert events == {"round": [2], "client": [1], "what": [what], "tensor": [tensor], "value": [value]}
    stored = toy.checkpoint(tmp_path / "3", 3)
    assert stored["events/client"].tolist() == [1]  # so that a resumed run still has it


def test_too_many_invalid_clients_stop_the_run_and_the_last_checkpoint_is_good(tmp_path, data):
    arguments = toy.settings(data, "scheme.name=fedavg", "fed.rounds=3", "fed.max_bad_fraction=0.3")
    results = toy.train(3, *arguments, "--out", tmp_path / "run", patch=make_invalid(1, 2, "loss"))
    assert [result.exit_code for result in results] == [1, 1, 1]
    [line] = toy.our_lines(result.output for result in results)
    assert "round 2: 1 of 3 clients were rejected, more than fed.max_bad_fraction=0.3 allows" in line
    found = toy.metrics(tmp_path / "run")
    assert found["rounds/round"].tolist() == [1]
    assert found["events/round"].tolist() == [2]
    toy.train_ok(2, *arguments, "--out", tmp_path / "run", "--resume")  # the client is well again
    toy.train_ok(1, *arguments, "--out", tmp_path / "well")
    assert toy.last_sha(tmp_path / "run") == toy.last_sha(tmp_path / "well")


def make_nan(client, round):
    """All weights and buffers of this client become NaN at the end of its training in one round."""

    def patch(rank):
        from hkd_hpc.training import LocalTrainer

        original = LocalTrainer.epochs

        def epochs(self, given):
            yield from original(self, given)
            if (given.client.id, given.round) == (client, round):
                self.flat.values_V.fill_(NAN)

        LocalTrainer.epochs = epochs

    return patch


@pytest.mark.parametrize(
    "settings",
    [
        ("scheme.name=local",),
        ("scheme.name=fedproto", "scheme.weights=none"),
        ("scheme.name=moon",),
        ("scheme.name=fedavg", "train.batchnorm=local"),
    ],
    ids=" ".join,
)
def test_what_a_client_keeps_is_not_changed_by_an_invalid_round(tmp_path, data, settings):
    """Its own model or statistics are those of the round before, also in the first round, when there are none."""
    for invalid_round in (1, 2):
        folder = tmp_path / str(invalid_round)
        toy.train_ok(
            1, *toy.settings(data, *settings, "fed.rounds=3"), "--out", folder, patch=make_nan(1, invalid_round)
        )
        expected = [[OK, INVALID_WEIGHTS if round == invalid_round else OK, OK] for round in (1, 2, 3)]
        assert toy.metrics(folder)["clients/status"].tolist() == expected
        for round in (2, 3):
            stored = toy.checkpoint(folder, round)
            assert all(
                np.isfinite(stored[name]).all() for name in stored if name.startswith(("client_states/", "global/"))
            )


@pytest.mark.parametrize("what", ["its weights", "its statistics measured anew"])
def test_statistics_are_measured_anew_by_those_who_deliver(tmp_path, what):
    """16, 24 and 32 images to train on; in round 2 client 1 is invalid. At the end all measure once more."""
    data, log = toy.save_natural(tmp_path / "data.npz", [16, 24, 32]), tmp_path / "log"

    def patch(rank):
        from hkd_hpc.models import evaluate

        original = evaluate.reestimate_batch_norm

        def measured(net, x_uint8):
            original(net, x_uint8)
            log.open("a").write(f"{len(x_uint8)}\n")
            if what != "its weights" and log.read_text().split() == ["16", "24"]:
                net.extractor.stage1[1].running_var[0] = INF

        evaluate.reestimate_batch_norm = measured
        if what == "its weights":
            make_nan(1, 2)(rank)

    arguments = toy.settings(data, "scheme.name=fedavg", "data.partition=natural", "train.batchnorm=reestimate")
    output = toy.train_ok(1, *arguments, "--out", tmp_path / "run", patch=patch)[0]
    second = ["16", "32"] if what == "its weights" else ["16", "24", "32"]
    assert log.read_text().split() == ["16", "24", "32", *second, "16", "24", "32"]
    assert ("client 1: BatchNorm's statistics measured with the global weights have" in output) == (
        what != "its weights"
    )
    for round in (1, 2):
        stored = toy.checkpoint(tmp_path / "run", round)
        assert all(np.isfinite(stored[name]).all() for name in stored if name.startswith("global/"))


def test_without_statistics_of_anybody_the_message_is_about_them(tmp_path):
    data = toy.save_natural(tmp_path / "data.npz", [16, 24, 32])

    def patch(rank):
        from hkd_hpc.models import evaluate

        def measured(net, x_uint8):
            net.extractor.stage1[1].running_var[0] = INF

        evaluate.reestimate_batch_norm = measured

    arguments = toy.settings(data, "scheme.name=fedavg", "data.partition=natural")
    (result,) = toy.train(1, *arguments, "--out", tmp_path / "run", patch=patch)
    assert result.exit_code == 1
    assert (
        "no client of the cohort delivered BatchNorm's statistics within +-65,536, measured with the global weights, "
        "so there is nothing to average" in result.output
    )


def test_an_epoch_whose_loss_is_not_finite_is_the_last(toy_trainer, toy_net, toy_client):
    trainer = toy_trainer(toy_net(), "fedavg")
    steps, step = [], trainer._step
    trainer._step = lambda client, index_B, lr: steps.append(len(index_B)) or step(client, index_B, lr) * INF
    client = toy_client([0, 1, 2, 0])
    trainer.run(ClientRound(client, trainer.flat.values_V.clone(), [torch.tensor(0)], {}, 1, epochs=5))
    assert sum(steps) == 4  # images: one epoch


# ---- predictions that are not finite

MODEL = '''
import torch
from torch import nn


class Marked(nn.Module):
    """In eval mode the logits of an image are NaN where its last pixel is 255."""

    def __init__(self, classes, latent):
        super().__init__()
        self.extractor = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, latent))
        self.classifier = nn.Linear(latent, classes)

    def forward(self, x_BCHW):
        feature_BD = self.extractor(x_BCHW)
        logits_BC = self.classifier(feature_BD)
        if not self.training:
            logits_BC[self.is_broken(x_BCHW[:, 0, -1, -1])] = float("nan")
        return feature_BD, logits_BC

    def is_broken(self, pixel_B):
        return pixel_B == 1


class Invalid(Marked):
    """In eval mode all logits are NaN."""

    def is_broken(self, pixel_B):
        return pixel_B == pixel_B
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Arguments of a small run with a model of this name from MODEL."""
    folder = tmp_path_factory.mktemp("models")
    toy.write_module(folder, "moods", MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield lambda name, data, *more: toy.settings(
            data,
            "scheme.name=fedavg",
            f"model.name=moods:{name}",
            "data.val_fraction=0.2",
            "fed.finetune_epochs=1",
            *more,
        )


@pytest.fixture(scope="module")
def well(tmp_path_factory, data, model):
    """The folder of a run of which no image is marked."""
    folder = tmp_path_factory.mktemp("well") / "run"
    toy.train_ok(1, *model("Marked", data), "--out", folder)
    return folder


def events(folder):
    found = toy.metrics(folder)
    return list(zip(*(found[f"events/{name}"].tolist() for name in ("round", "client", "what", "tensor", "value"))))


@pytest.mark.parametrize("size", [1, 3])
def test_a_model_that_predicts_nan_in_eval_mode_has_no_accuracy(tmp_path, data, model, size):
    """Class 0 is what argmax makes of NaN: a tenth of all images would be right."""
    results = toy.train(size, *model("Invalid", data), "--out", tmp_path / "run")
    assert [result.exit_code for result in results] == [1] * size
    [line] = toy.our_lines(result.output for result in results)
    assert "round 1: 3 of 3 clients were rejected, more than fed.max_bad_fraction=0.5 allows" in line
    warning = (
        "round 1: client 2 rejected: local test has 25 images whose logits are not finite; it counts with weight 0"
    )
    assert results[0].output.count("warning: ") == 3
    assert warning in results[0].output
    assert "global 0" not in results[0].output
    assert events(tmp_path / "run") == [(1, client, "predictions", "local test", 25) for client in range(3)]


def mark(source, path, array, index):
    """The data with one image whose last pixel is 255."""
    arrays = dict(np.load(source))
    arrays[array][index, 0, -1, -1] = 255
    np.savez(path, **arrays)
    return path


def test_a_global_model_with_a_prediction_that_is_not_finite_has_no_accuracy(tmp_path, data, model, well):
    """Image 7 of the test split: the clients never see it. The run has no result, unless one without an accuracy will
    do.
    """
    marked = mark(data, tmp_path / "data.npz", "x_test", 7)
    for size, more in ((1, ()), (3, ()), (1, ("--resume",))):
        results = toy.train(size, *model("Marked", marked), *more, "--out", tmp_path / str(size))
        assert [result.exit_code for result in results] == [1] * size
        [line] = toy.our_lines(result.output for result in results)
        assert (
            "the final global model has logits that are not finite on 1 of 100 images of the test split, 1 of 100 "
            "images of "
            "the test split with BatchNorm re-estimated: the run has no result"
        ) in line
        told = [line for line in results[0].output.splitlines() if "warning" in line]
        assert (
            told == []
            if more
            else [
                line.endswith(
                    f"round {round}: the global model has logits that are not finite on 1 of 100 "
                    "images of the test split: no accuracy"
                )
                for round, line in enumerate(told, 1)
            ]
        )
    found, expected, rows = toy.metrics(tmp_path / "3"), toy.rows(well), toy.rows(tmp_path / "1")
    assert rows == toy.rows(tmp_path / "3")
    usual, right = (np.array(columns.pop("rounds/global_test_correct_by_class")) for columns in (expected, rows))
    assert (usual - right)[:, 7].max() == 1  # image 7 is of class 7, and not right any more
    assert not np.delete(usual - right, 7, axis=1).any()
    measures = ("accuracy", "balanced_accuracy", "macro_f1", "macro_auc", "loss")
    assert rows == expected | {
        **{f"rounds/global_test_{measure}": [None, None] for measure in measures},
        "rounds/global_test_nonfinite": [1, 1],
        "rounds/global_test_undefined": ["1 of 100 images without finite logits"] * 2,
    }
    assert not [name for name in found if name.startswith("summary/")]
    output = toy.train_ok(1, "--resume", "--allow-change", "fed.max_bad_fraction=1", "--out", tmp_path / "1")[0]
    assert "WARNING in 2 of 2 rounds: the global model's logits were not finite" in output
    summary = {name: value for name, value in toy.metrics(tmp_path / "1").items() if name.startswith("summary/")}
    for name in ("last", "mean_last_5", "oracle", "batchnorm_reestimated"):
        assert np.isnan(summary[f"summary/global_test_accuracy_{name}"])
    assert summary["summary/local_test_accuracy_last"] == expected["rounds/local_test_accuracy"][1]


@pytest.mark.parametrize(
    "kind, tensor, images",
    [
        ("test", "local test", "1 of 75 images of the clients' own tests"),
        ("val", "validation", "1 of 45 images of the validation images"),
    ],
)
def test_a_client_with_a_prediction_that_is_not_finite_is_left_out(tmp_path, data, model, well, kind, tensor, images):
    """The first image that client 1 holds out is marked: it is left out in both rounds, and fine-tuned."""
    part = toy.metrics(well)
    index = part[f"partition/{kind}_index"][part[f"partition/{kind}_offset"][1]]
    marked = mark(data, tmp_path / "data.npz", "x_train", index)
    output = toy.train_ok(1, *model("Marked", marked, "fed.max_bad_fraction=1"), "--out", tmp_path / "run")[0]
    found = toy.metrics(tmp_path / "run")
    assert found["clients/status"].tolist() == [[OK, INVALID_TEST, OK]] * 2
    tuned = [(2, 1, "predictions", "local test, fine-tuned", 1)] if kind == "test" else []
    assert events(tmp_path / "run") == [(round, 1, "predictions", tensor, 1) for round in (1, 2)] + tuned
    assert found["summary/finetuned_on_local_test"][:, 0].tolist() == ([0, 2] if kind == "test" else [0, 1, 2])
    assert np.isfinite(found["summary/finetuned_on_local_test_accuracy"])
    assert np.isnan(found["summary/global_on_local_test_accuracy"]) == (kind == "test")
    assert found["rounds/global_val_nonfinite"].tolist() == [int(kind == "val")] * 2
    assert np.isnan(found["rounds/global_val_accuracy"]).all() == (kind == "val")
    assert f"the final global model has logits that are not finite on {images}" in output


def test_a_run_that_an_older_version_began_is_tested_again_and_goes_on(tmp_path, data, model, well):
    """Its rows lack the columns, and its accuracy may be one of NaN."""
    folder = tmp_path / "run"
    shutil.copytree(well, folder)
    (folder / "checkpoints/round_0002.h5").unlink()
    for path in (folder / "metrics.h5", folder / "checkpoints/round_0001.h5"):
        tree = load_tree(path)
        tree.pop("summary", None)
        tree["rounds"] = {name: values for name, values in tree["rounds"].items() if "nonfinite" not in name}
        tree["rounds"]["global_test_accuracy"] = tree["rounds"]["global_test_accuracy"] * 0 + 0.1
        save_tree(path, tree)
    toy.train_ok(1, "--resume", "--out", folder)
    assert toy.rows(folder) == toy.rows(well)
    assert "summary/finished" in toy.metrics(folder)


# ---- clients that fail, as a study


def fed(**settings):
    return config.resolve(overrides=[f"fed.{name}={value}" for name, value in {"clients": 6, **settings}.items()]).fed


def test_failures_are_drawn_by_seed_and_round_alone():
    everyone = list(range(6))
    assert draw_failures(fed(), 0, 1, everyone) == (set(), set())
    drawn = [draw_failures(fed(drop_rate=0.3, straggler_rate=0.4), 7, round, everyone) for round in range(1, 401)]
    assert drawn == [
        draw_failures(fed(drop_rate=0.3, straggler_rate=0.4), 7, round, everyone) for round in range(1, 401)
    ]
    assert all(not dropped & stragglers for dropped, stragglers in drawn)
    # 2,400 draws: .3 are dropped; of the others .4 straggle; four standard deviations are .037 and .037
    assert sum(len(dropped) for dropped, _ in drawn) / 2400 == pytest.approx(0.3, abs=0.037)
    assert sum(len(stragglers) for _, stragglers in drawn) / 2400 == pytest.approx(0.28, abs=0.037)
    few = [draw_failures(fed(drop_rate=0.3), 7, round, [1, 4])[0] for round in range(1, 401)]
    both = [dropped & {1, 4} for dropped, _ in drawn]  # who is sampled changes nobody's fate, unless none would be left
    assert all(one == other for one, other in zip(few, both) if other != {1, 4})


@pytest.mark.parametrize("settings", [{"drop_rate": 1}, {"straggler_rate": 1}, {"drop_rate": 0.5, "straggler_rate": 1}])
def test_one_client_at_least_delivers(settings):
    for round in range(1, 30):
        dropped, stragglers = draw_failures(fed(**settings), 0, round, [0, 2, 5])
        assert len(dropped | stragglers) == 2
    dropped, stragglers = draw_failures(fed(straggler_rate=1, straggler_epochs=1), 0, 1, [0, 2, 5])
    assert (dropped, stragglers) == (set(), {0, 2, 5})  # they deliver, after fewer epochs


@pytest.mark.parametrize("scheme", ["fedhkd", "moon"])
def test_a_run_with_failing_clients_has_the_same_bits_on_any_number_of_ranks(tmp_path, data, scheme):
    """Seed 0 of three rounds; who fails is the same for both schemes, and a straggler is left out."""
    arguments = toy.settings(
        data, f"scheme.name={scheme}", "fed.rounds=3", "fed.drop_rate=0.3", "fed.straggler_rate=0.3"
    )
    for size in (1, 3):
        toy.train_ok(size, *arguments, "--out", tmp_path / str(size))
    assert toy.rows(tmp_path / "1") == toy.rows(tmp_path / "3")
    assert toy.last_sha(tmp_path / "1") == toy.last_sha(tmp_path / "3")
    found = toy.metrics(tmp_path / "3")
    expected = [
        [DROPPED_OUT if client in dropped else STRAGGLER if client in stragglers else OK for client in range(3)]
        for dropped, stragglers in (
            draw_failures(fed(clients=3, drop_rate=0.3, straggler_rate=0.3), 0, round, [0, 1, 2]) for round in (1, 2, 3)
        )
    ]
    assert found["clients/status"].tolist() == expected
    assert np.ptp(expected) > 0
    assert found["rounds/clients_failed"].tolist() == [sum(status > 0 for status in row) for row in expected]


def test_a_straggler_may_end_fewer_epochs(tmp_path, data):
    """All are stragglers and end 1 of 3 epochs: the run of 1 epoch."""
    stragglers = toy.settings(data, "train.epochs=3", "fed.straggler_rate=1", "fed.straggler_epochs=1")
    toy.train_ok(1, *stragglers, "--out", tmp_path / "stragglers")
    toy.train_ok(1, *toy.settings(data, "train.epochs=1"), "--out", tmp_path / "short")
    assert toy.last_sha(tmp_path / "stragglers") == toy.last_sha(tmp_path / "short")
