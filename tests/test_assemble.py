"""Ranks that do not hold the same: what differs, on which rank, and what it is there and on rank 0, in one line."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import toy
from federation import Federation, same_model, save_images

from hkd_hpc.common.errors import UsageError


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return toy.save_data(tmp_path_factory.mktemp("data") / "data.npz", 60, 20)


def on_rank_2(owner: str, name: str, change):
    """Rank 2 alone gets change(what the function `name` of hkd_hpc.<owner> returns)."""

    def patch(rank):
        if rank == 2:
            import importlib

            module = importlib.import_module(f"hkd_hpc.{owner}")
            original = getattr(module, name)
            setattr(module, name, lambda *arguments: change(original(*arguments)))

    return patch


DATA = ("assembly.federation", "node_copy")  # where every rank gets its data


def with_head(net, **options):
    net.classifier = torch.nn.Linear(8, 10, **options)
    return net


def reject(net):
    raise UsageError("model.name=mine:Net: forward must return (feature_BD, logits_BC)")


def with_fewer_counts(scheme):
    """Its class with a report of one count less."""
    return type("Fewer", (scheme,), {"report_shapes": lambda self: {**scheme.report_shapes(self), "count_C": (9,)}})


DIFFERENT = {
    "classes": (
        on_rank_2(*DATA, lambda data: dataclasses.replace(data, classes=11)),
        "data than rank 0 (classes is 11 on rank 2, 10 on rank 0)",
    ),
    "images": (
        on_rank_2(*DATA, lambda data: dataclasses.replace(data, x_train=data.x_train[:, :1])),
        "data than rank 0 (x_train is (60, 1, 32, 32) uint8 on rank 2, (60, 3, 32, 32) uint8 on rank 0)",
    ),
    "labels": (
        on_rank_2(*DATA, lambda data: dataclasses.replace(data, y_test=data.y_test.astype(np.int32))),
        "data than rank 0 (y_test is (20,) int32 on rank 2, (20,) int64 on rank 0)",
    ),
    "clients": (
        on_rank_2(*DATA, lambda data: dataclasses.replace(data, client_test=data.y_test)),
        "data than rank 0 (client_test is (20,) int64 on rank 2, absent on rank 0)",
    ),
    "dtype": (
        on_rank_2("models.networks", "build", lambda net: with_head(net, dtype=torch.float64)),
        "model than rank 0 (classifier.weight is (10, 8) torch.float64 on rank 2, (10, 8) torch.float32 on rank 0)",
    ),
    "bias": (
        on_rank_2("models.networks", "build", lambda net: with_head(net, bias=False)),
        "model than rank 0 (classifier.bias is absent on rank 2, (10,) torch.float32 on rank 0)",
    ),
    "problem": (
        on_rank_2("models.networks", "build", reject),
        "model than rank 0 (its problem is model.name=mine:Net: forward must return (feature_BD, logits_BC) on rank 2, "
        "None on "
        "rank 0)",
    ),
    "report": (
        on_rank_2("schemes", "get", with_fewer_counts),
        "scheme than rank 0 (report_shapes count_C is (9,) on rank 2, (10,) on rank 0)",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_rank_with_other_shapes_or_dtypes_is_named_with_both(tmp_path, data, what):
    patch, words = DIFFERENT[what]
    results = toy.train(3, *toy.settings(data), "--out", tmp_path / "run", patch=patch)
    output = "".join(result.output for result in results)
    assert [result.exit_code for result in results] == [1] * 3, output
    [line] = toy.our_lines([output])
    assert f"ranks [2] have another {words}" in line
    assert line.endswith("is the same code and data on all nodes?")
    assert "Traceback" not in output
    assert not (tmp_path / "run/metrics.h5").exists()


# ---- networks of one's own


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("images") / "images.npz")


@pytest.mark.parametrize("name", ["Remembers", "Replaces"])
def test_what_training_keeps_outside_of_the_state_dict_is_rejected(images, name):
    with pytest.raises(UsageError) as caught:
        Federation(images, "fedavg", f"model.name=moving_models:{name}")
    assert str(caught.value) == (
        f"model.name=moving_models:{name}: training changes buffer mean_D, which is not persistent and stays on its "
        "rank, so that the results would depend on the number of ranks; make it persistent, so that it travels and is "
        "averaged, or compute it anew in each forward"
    )


def test_a_buffer_that_is_filled_once_is_none_of_these_and_nothing_has_moved(images):
    names = ("moving_models:Fills", "tiny_models:Normed")
    tried, other = (Federation(images, "fedavg", f"model.name={name}").flat for name in names)
    assert torch.equal(tried.values_V, other.values_V)
    assert list(map(int, tried.counters)) == [0]


def test_a_network_that_draws_from_numpy_and_python_gives_the_same_bits(images):
    one, other = (Federation(images, "fedavg", "model.name=moving_models:Draws") for _ in range(2))
    assert all(map(same_model, one.play(2), other.play(2)))


def test_group_norm_says_what_batch_norm_it_leaves(images, capsys):
    Federation(images, "fedavg", "model.name=tiny_models:Normed", "model.norm=group")
    assert capsys.readouterr().err.splitlines() == [
        "hkd_hpc: warning: model.norm=group replaces BatchNorm2d alone; model.name=tiny_models:Normed keeps BatchNorm "
        "in extractor.3"
    ]
    Federation(images, "fedavg", "model.name=small", "model.norm=group", "model.latent_norm=batch")
    assert not capsys.readouterr().err
