"""What the record says of shared knowledge, by hand: classes, and noise against signal."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hkd_hpc import payload
from hkd_hpc.privacy.settings import PrivacySettings
from hkd_hpc.schemes.base import RunInfo, Scheme, SchemeSettings
from hkd_hpc.schemes.fedhkd import FedHKD, FedHKDSettings
from hkd_hpc.schemes.fedproto import FedProto
from hkd_hpc.schemes.shared_knowledge import shared_knowledge

INFO = RunInfo(classes=3, latent=2, clients=2, parameters=0, values=0, public=0)


def reports(scheme: Scheme, count_MC, feature_MCD) -> np.ndarray:
    records = np.zeros(len(count_MC), payload.record_type({}, {}, scheme.report_shapes()))
    records["tensors"]["count_C"], records["tensors"]["feature_CD"] = count_MC, feature_MCD
    return records


def of_fedhkd(count_MC, feature_MCD, **settings):
    scheme = FedHKD(FedHKDSettings(**settings), INFO)
    return shared_knowledge(scheme, reports(scheme, count_MC, feature_MCD))


FEATURES = [[[3.0, 1.0], [0.0, 0.0], [9.0, 9.0]], [[0.0, 0.0], [0.0, 0.0], [4.0, 2.0]]]


def test_noise_against_signal():
    """zeta = sigma = 1: std 2 / N. Shared with 2, 4 and 1 images: std 1, .5 and 2, mean 3.5 / 3; what was sent has the
    mean squares 5, 81 and 10, and without the variances 1, .25 and 4 they are 4, 80.75 and 6."""
    found = of_fedhkd([[2, 0, 4], [0, 0, 1]], FEATURES, zeta=1.0, sigma=1.0)
    assert found.classes.tolist() == [[True, False, True], [False, False, True]]
    assert found.noise_std == pytest.approx(3.5 / 3, rel=1e-12)
    assert found.signal_rms == pytest.approx(math.sqrt(90.75 / 3), rel=1e-12)


def test_one_draw_for_all_classes():
    """std 2 whatever the count: 4 less than 96 / 3, the mean square of what was sent."""
    found = of_fedhkd([[2, 0, 4], [0, 0, 1]], FEATURES, noise="code")
    assert found.noise_std == 2.0
    assert found.signal_rms == pytest.approx(math.sqrt(84 / 3), rel=1e-12)


@pytest.mark.parametrize("scheme_class", [FedHKD, FedProto])
@pytest.mark.parametrize("predictions", [False, True])
def test_noise_on_predictions_is_not_mixed_with_that_on_features(scheme_class, predictions):
    """Ball of 1, multiplier 1: std 2 / N on features, as above; sqrt(2) / N on predictions, which are not recorded."""
    privacy = PrivacySettings(mechanism="vector", bound=1.0, multiplier=1.0, predictions=predictions)
    scheme = scheme_class(scheme_class.Settings(), replace(INFO, privacy=privacy))
    found = shared_knowledge(scheme, reports(scheme, [[2, 0, 4], [0, 0, 1]], FEATURES))
    assert found.noise_std == pytest.approx(3.5 / 3, rel=1e-12)
    assert found.signal_rms == pytest.approx(math.sqrt(90.75 / 3), rel=1e-12)


@pytest.mark.parametrize("scheme_class", [FedHKD, FedProto])
@pytest.mark.parametrize(
    "settings",
    [{"mechanism": "off"}, {"mechanism": "off", "predictions": True}, {"mechanism": "vector", "multiplier": 0.0}],
)
def test_features_without_noise_have_no_entry(scheme_class, settings):
    scheme = scheme_class(scheme_class.Settings(), replace(INFO, privacy=PrivacySettings(**settings)))
    found = shared_knowledge(scheme, reports(scheme, [[2, 0, 4], [0, 0, 1]], FEATURES))
    assert (found.noise_std, found.signal_rms) == (None, None)


@pytest.mark.parametrize("settings", [{"noise": "off"}, {"sigma": 0.0}])
def test_nor_have_those_of_a_scheme_whose_own_noise_is_off(settings):
    found = of_fedhkd([[2, 0, 4], [0, 0, 1]], FEATURES, **settings)
    assert (found.noise_std, found.signal_rms) == (None, None)


def test_noise_that_hides_the_signal():
    """std 42 / N = 21: what was sent is smaller."""
    assert of_fedhkd([[2, 0, 0], [0, 0, 0]], FEATURES).signal_rms == 0.0


def test_a_round_that_shared_nothing():
    found = of_fedhkd([[0, 0, 0], [0, 0, 0]], FEATURES)
    assert not found.classes.any()
    assert math.isnan(found.noise_std)
    assert math.isnan(found.signal_rms)


class ByClass(Scheme):
    """Shares class means without noise."""

    def report_shapes(self):
        return {"count_C": (3,), "feature_CD": (3, 2)}


class CountsOfElse(ByClass):
    """What it calls count_C is not by class."""

    def report_shapes(self):
        return {"count_C": (2,), "feature_CD": (3, 2)}


class FeaturesByAnotherName(ByClass):
    protects = ("features", "counts")

    def report_shapes(self):
        return {"count_C": (3,), "prototype_CD": (3, 2)}


def of_own(scheme_class):
    scheme = scheme_class(SchemeSettings(), INFO)
    return shared_knowledge(scheme, reports(scheme, [[2, 0, 4], [0, 0, 1]], FEATURES))


def test_a_scheme_without_noise():
    found = of_own(ByClass)
    assert found.classes.tolist() == [[True, False, True], [False, False, True]]
    assert (found.noise_std, found.signal_rms) == (None, None)


def test_a_scheme_that_calls_its_features_otherwise_has_no_noise_recorded():
    scheme = FeaturesByAnotherName(SchemeSettings(), replace(INFO, privacy=PrivacySettings(mechanism="vector")))
    records = np.zeros(2, payload.record_type({}, {}, scheme.report_shapes()))
    records["tensors"]["count_C"] = [[2, 0, 4], [0, 0, 1]]
    found = shared_knowledge(scheme, records)
    assert found.classes.tolist() == [[True, False, True], [False, False, True]]
    assert (found.noise_std, found.signal_rms) == (None, None)


def test_a_scheme_that_shares_nothing_by_class():
    scheme = Scheme(SchemeSettings(), INFO)
    found = shared_knowledge(scheme, np.zeros(2, payload.record_type({}, {"client": ()}, {})))
    assert (found.classes, found.noise_std, found.signal_rms) == (None, None, None)


def test_counts_of_something_else_are_no_shared_classes():
    scheme = CountsOfElse(SchemeSettings(), INFO)
    found = shared_knowledge(scheme, reports(scheme, [[2, 0], [0, 1]], FEATURES))
    assert (found.classes, found.noise_std, found.signal_rms) == (None, None, None)
