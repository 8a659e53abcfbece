"""What a scheme asks of a model is told before the first round: exit code 2, one line, and nothing is written."""

from __future__ import annotations

import pytest
import toy

MODEL = """
import torch

class Own(torch.nn.Module):
    def __init__(self, classes, latent):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(12, latent))
        self.classifier = torch.nn.Sequential(torch.nn.Linear(latent, classes))

    def forward(self, x_BCHW):
        feature_BD = self.body(x_BCHW)
        return feature_BD, self.classifier(feature_BD)
"""
LINES = {
    "fedalign": "scheme.name=fedalign: model.name has no `last_stage`, the module of its last maps",
    "fedgen": "scheme.name=fedgen: the `classifier` of model.name must be a torch.nn.Linear with bias",
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scheme", LINES)
def test_a_model_that_a_scheme_cannot_train_is_rejected(tmp_path, monkeypatch, scheme, ranks):
    toy.write_module(tmp_path, "bare_model", MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = toy.save_data(tmp_path / "data.npz", 60, 20)
    settings = toy.settings(data, f"scheme.name={scheme}", "model.name=bare_model:Own")
    results = toy.train(ranks, *settings, "--out", tmp_path / "run")
    assert [result.exit_code for result in results] == [2] * ranks
    [line] = toy.our_lines([result.output for result in results])
    assert LINES[scheme] in line
    assert not (tmp_path / "run").exists()
