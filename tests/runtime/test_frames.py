"""A mistake in a user's own scheme or model: the first line that is told has the user's file, line and code."""

from __future__ import annotations

import json
import os
import sysconfig

import pytest
import torch
import toy

from hkd_hpc.runtime import frames

OWN = """
import torch
from torch import nn
from hkd_hpc.schemes.base import Scheme


class Begins(Scheme):
    def begin(self, client):
        client.cache["known"] = client.mesage  # line 9


class Loses(Scheme):
    def loss(self, client, batch):
        terms = super().loss(client, batch)
        return {"cross_entropy": helper(terms)}


def helper(terms):
    return terms["cross_entropi"]  # line 19


class Reports(Scheme):
    def report(self, client):
        return {"sum": torch.zeros(3) @ torch.zeros(4)}  # line 24: torch itself raises


class Combines(Scheme):
    def combine(self, server, reports):
        return 1 // len(reports)  # line 29


class Declares(Scheme):
    def message_shapes(self):
        return {"x": (self.fact.classes,)}  # line 34


class Forgets(nn.Module):
    def __init__(self, classes, latent):
        super().__init__()
        self.extractor = nn.Sequential(nn.Flatten(), nn.Linear(3072, latent))
        self.classifier = nn.Linear(latent, classes)

    def forward(self, x_BCHW):
        feature_BD = self.extractor(x_BCHW)
        if self.training:
            feature_BD = self.norm(feature_BD)  # line 46: called by torch, which raises
        return feature_BD, self.classifier(feature_BD)


class Rejects(nn.Module):
    def __init__(self, classes, latent):
        self.classifier = nn.Linear(latent, classes)  # line 52: before super().__init__()
"""
MISTAKES = {
    "scheme.name=typos:Begins": 'typos.py:9, in begin: client.cache["known"] = client.mesage  # line 9: '
    "failed with AttributeError: 'Client' object has no attribute 'mesage'",
    "scheme.name=typos:Loses": (
        'typos.py:19, in helper: return terms["cross_entropi"]  # line 19: failed with KeyError: '
    ),
    "scheme.name=typos:Reports": 'typos.py:24, in report: return {"sum": torch.zeros(3) @ torch.zeros(4)}  # line 24: '
    "torch itself raises: failed with RuntimeError: ",
    "scheme.name=typos:Combines": "typos.py:29, in combine: return 1 // len(reports)  # line 29: "
    "failed with ZeroDivisionError: ",
    "scheme.name=typos:Declares": 'typos.py:34, in message_shapes: return {"x": (self.fact.classes,)}  # line 34: '
    "failed with ",
    "model.name=typos:Forgets": "typos.py:46, in forward: feature_BD = self.norm(feature_BD)  # line 46: "
    "called by torch, which raises: failed with AttributeError: 'Forgets' object has no attribute 'norm'",
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    toy.write_module(tmp_path, "typos", OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return toy.save_data(tmp_path / "data.npz", 60, 20)


@pytest.mark.parametrize("size, setting", [(1, setting) for setting in MISTAKES] + [(3, "scheme.name=typos:Begins")])
def test_the_users_line_comes_first_and_once(tmp_path, own, size, setting):
    name = "" if "scheme" in setting else "scheme.name=fedavg"
    results = toy.train(size, *toy.settings(own, setting, *filter(None, [name])), "--out", tmp_path / "run")
    assert [result.exit_code for result in results] == [1] * size
    output = "".join(result.output for result in results)
    [line] = toy.our_lines([output])
    assert f"{tmp_path}/{MISTAKES[setting]}" in line
    assert output.count("Traceback") == 1
    trace = output[output.index(line) :].splitlines()
    assert f'File "{tmp_path}/typos.py"' in trace[2]
    assert "hkd_hpc/train.py" not in output


def test_a_mistake_in_the_constructor_of_a_model_is_one_line(tmp_path, own):
    result = toy.train(1, *toy.settings(own, "model.name=typos:Rejects"), "--out", tmp_path / "run")[0]
    [line] = toy.our_lines([result.output])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert f"model.name=typos:Rejects: {tmp_path}/typos.py:52, in __init__: self.classifier" in line
    assert "Rejects(10, 8) raised AttributeError: cannot assign module before Module.__init__() call" in line


@pytest.mark.parametrize(
    "path, own",
    [
        ("/home/me/my_scheme.py", True),
        ("/home/me/hkd_hpc_schemes/mine.py", True),
        ("relative/mine.py", True),
        (toy.__file__, True),
        (frames.__file__, False),
        (json.__file__, False),
        (torch.__file__, False),
        ("<string>", False),
        ("<frozen importlib._bootstrap>", False),
        ("/usr/lib/python3/dist-packages/torch/nn.py", False),
        (os.path.join(sysconfig.get_path("purelib"), "numpy/core.py"), False),
    ],
)
def test_whose_code_a_file_is(path, own):
    assert frames.is_own(path) == own


def test_an_error_of_our_own_keeps_its_whole_traceback():
    try:
        json.loads("{")
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next  # as if no code of the user's were on the way
        assert frames.place_of(error) == ""
        assert frames.trace_of(error).count("File") == 3
