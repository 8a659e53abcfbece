"""FedHKD that measures the gradient of each of its terms."""

from __future__ import annotations

import pytest
import torch
import toy

from hkd_hpc.schemes.gradients import gradient_norm


def test_the_norm_of_a_gradient_by_hand():
    x, y = (torch.tensor(value, requires_grad=True) for value in (3.0, 2.0))
    assert gradient_norm(x * y**2, [x, y]) == pytest.approx(160**0.5)  # (4, 12)
    assert gradient_norm(x * 2, [x, y]) == 2
    assert gradient_norm(torch.tensor(1.0), [x, y]) == 0


def test_gradients_are_measured_and_the_weights_are_fedhkds(tmp_path):
    data = toy.save_data(tmp_path / "data.npz")
    for name, scheme in (("plain", "fedhkd"), ("measured", "hkd_hpc.schemes.gradients:MeasuredFedHKD")):
        toy.train_ok(1, f"scheme.name={scheme}", *toy.settings(data, "scheme.nu=0"), "--out", tmp_path / name)
    plain, measured = (toy.metrics(tmp_path / name) for name in ("plain", "measured"))
    assert plain["rounds/weights_sha256"].tolist() == measured["rounds/weights_sha256"].tolist()
    assert measured["rounds/loss/soft"].tolist() == plain["rounds/loss/soft"].tolist()
    soft, feature = (measured[f"rounds/loss/gradient_{term}"] for term in ("soft", "feature"))
    assert soft[0] == feature[0] == 0  # nothing is shared in round 1
    assert min(soft[1], feature[1], measured["rounds/loss/gradient_cross_entropy"].min()) > 0
