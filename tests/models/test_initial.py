"""Initial weights from a file: state dicts of ours and of torchvision, and what does not fit."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace

import pytest
import torch
from torchvision import models

from hkd_hpc.common.errors import UsageError
from hkd_hpc.models import initial, networks
from hkd_hpc.models.flat import FlatModel
from hkd_hpc.models.settings import ModelSettings

SMALL = ModelSettings(name="small", latent=8)


def built(settings=SMALL, seed=0, classes=3):
    return networks.build(settings, classes, (3, 32, 32), seed)


def changed(net, by=0.5):
    """Its state dict with other numbers, BatchNorm's statistics and counters included."""
    return {name: tensor + (by if tensor.is_floating_point() else 7) for name, tensor in net.state_dict().items()}


def loaded(path, settings=SMALL, **more):
    net = built(settings, seed=1)
    initial.load_into(net, replace(settings, init=str(path), **more))
    return net.state_dict()


@pytest.fixture
def saved(tmp_path):
    """save(state dict): the path of it."""

    def save(state, name="start.pt"):
        torch.save(state, tmp_path / name)
        return tmp_path / name

    return save


def test_a_state_dict_of_ours_fills_the_flat_buffer(saved):
    state = changed(built())
    flat = FlatModel(built(seed=1))
    initial.load_into(flat.net, replace(SMALL, init=str(saved(state))))
    found = flat.arrays(flat.values_V, flat.counters)
    assert list(found) == list(state)
    assert all((found[name] == state[name].numpy()).all() for name in state)


def test_a_new_head_has_the_weights_of_the_seed(saved):
    """That of the file may have other classes, or be absent."""
    state, own = changed(built(classes=5)), built(seed=1).state_dict()
    for given in (state, {name: tensor for name, tensor in state.items() if not name.startswith("classifier")}):
        found = loaded(saved(given), init_head="new")
        is_head = {name: name.startswith("classifier.") for name in found}
        assert sum(is_head.values()) == 2
        assert all(torch.equal(found[name], (own if is_head[name] else state)[name]) for name in found)


def test_other_kinds_of_floats_and_files_without_counters(saved):
    state = {name: tensor.half() for name, tensor in changed(built()).items() if "num_batches" not in name}
    found = loaded(saved(state))
    assert all(torch.equal(found[name], state[name].float()) for name in state)
    assert {found[name].item() for name in found if "num_batches" in name} == {0}


def test_a_file_of_torchvision_gives_all_but_the_head(saved):
    settings = ModelSettings(name="shufflenet_v2", latent=8)
    state, own = changed(models.shufflenet_v2_x1_0(weights=None)), built(settings, seed=1).state_dict()
    path = saved(state)
    found = loaded(path, settings, init_head="new")
    kept = [name for name in found if name.removeprefix("extractor.") not in state or ".fc." in name]
    assert kept == ["extractor.fc.weight", "extractor.fc.bias", "classifier.weight", "classifier.bias"]
    assert all(torch.equal(found[name], own[name]) for name in kept)
    assert all(torch.equal(found[name], state[name.removeprefix("extractor.")]) for name in set(found) - set(kept))
    with pytest.raises(UsageError) as raised:
        loaded(path, settings)
    assert str(raised.value) == (
        f"model.init={path}: does not fit model.name=shufflenet_v2: classifier.weight is not in the file, "
        f"classifier.bias is not in the file, extractor.fc.weight has shape (1000, 1024), not (8, 1024) and 1 "
        "more; model.init_head=new begins with a new head"
    )
    with pytest.raises(UsageError, match="torchvision's file has the first layers of model.stem=imagenet alone"):
        loaded(path, replace(settings, stem="cifar"), init_head="new")


def test_the_names_of_torchvisions_resnet18():
    with torch.device("meta"):
        given = models.resnet18(weights=None).state_dict()
        own = built(ModelSettings(name="resnet18", latent=8)).state_dict()
    ours, head = initial.as_ours(given, own)
    assert {name for name in own if not name.startswith(head)} == {name for name in ours if not name.startswith(head)}


def without(state, name):
    return {key: tensor for key, tensor in state.items() if key != name}


MISFITS = {
    "extractor.fc.bias is not in the file": lambda state: without(state, "extractor.fc.bias"),
    "more is not in the model": lambda state: state | {"more": torch.zeros(1)},
    "extractor.fc.bias has shape (9,), not (8,)": lambda state: state | {"extractor.fc.bias": torch.zeros(9)},
    "extractor.fc.bias is torch.int64, not torch.float32": lambda state: (
        state | {"extractor.fc.bias": torch.zeros(8, dtype=torch.int64)}
    ),
    "extractor.fc.bias has NaN or infinity": lambda state: state | {"extractor.fc.bias": torch.full((8,), torch.inf)},
    "a is not in the model, b is not in the model, c is not in the model and 2 more": lambda state: (
        state | {name: torch.zeros(1) for name in "abcde"}
    ),
}


@pytest.mark.parametrize("text", MISFITS)
def test_what_does_not_fit_is_one_line(saved, text):
    path = saved(MISFITS[text](changed(built())))
    with pytest.raises(UsageError) as raised:
        loaded(path)
    assert str(raised.value) == f"model.init={path}: does not fit model.name=small: {text}"


class Code:
    """Unpickled, it would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


CONTENTS = {
    "text": b"not a state dict",
    "nothing": b"",
    "an object": pickle.dumps(ValueError("never made")),
    "code": pickle.dumps({"weight": Code()}, protocol=4),
    "no tensors": pickle.dumps({"epoch": 3}),
}


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.filterwarnings("error")
def test_what_is_no_state_dict_is_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.pt").write_bytes(CONTENTS[name])
    with pytest.raises(UsageError) as raised:
        loaded(tmp_path / "x.pt")
    assert str(raised.value).startswith(f"model.init={tmp_path / 'x.pt'}: is no state dict")
    assert "\n" not in str(raised.value)
    assert "weights_only" not in str(raised.value)
    assert not (tmp_path / "executed").exists()


def test_a_safetensors_file_is_read_and_a_broken_one_is_one_line(tmp_path):
    from safetensors.torch import save_file

    save_file(state := changed(built()), tmp_path / "x.safetensors")
    found = loaded(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UsageError, match=r"x.safetensors: is no state dict \(SafetensorError: "):
        loaded(tmp_path / "x.safetensors")


def test_a_checkpoint_of_a_training_is_no_state_dict(saved):
    path = saved({"epoch": 3, "state_dict": changed(built())})
    with pytest.raises(UsageError, match="is no state dict, which has tensors by name and nothing else"):
        loaded(path)


def test_what_shows_before_torch_is_there(tmp_path, monkeypatch):
    initial.check_present("")
    (tmp_path / "x.safetensors").write_bytes(b"")
    monkeypatch.setattr(initial, "installed", lambda package: None)
    for path, text in {
        tmp_path / "absent.pt": "there is no such file",
        tmp_path: "is no file",
        tmp_path / ("x" * 300): "cannot be looked at (File name too long)",
        tmp_path / "x.safetensors": "safetensors is not installed; pip install safetensors, or give a .pt file",
    }.items():
        with pytest.raises(UsageError) as raised:
            initial.check_present(str(path))
        assert str(raised.value) == f"model.init={path}: {text}"
