"""What the ledger counts of data, schemes and rounds for which a noise multiplier alone says nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from federation import Federation, save_images, settings

from hkd_hpc import rounds
from hkd_hpc.commands.data import main as data_command
from hkd_hpc.privacy.ledger import FIXED, WHOLE
from hkd_hpc.privacy.releases import KINDS
from hkd_hpc.quarantine import INVALID_LOSS
from hkd_hpc.schemes.fedproto import FedProto

TINY = "model.name=tiny_models:Tiny"
VECTOR = ("privacy.mechanism=vector", "privacy.multiplier=4")
PRIVATE = (TINY, "fed.average=uniform", "privacy.update_clip=.1", "privacy.update_multiplier=4")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("data") / "images.npz")


def spending_of(data, *more):
    return Federation(data, "fedproto", *VECTOR, *more).part.server.spending


def test_an_image_that_is_one_input_has_the_figure_of_the_multiplier(data):
    assert spending_of(data, TINY).releases["features"].fixed_M.tolist() == [1 / 4] * 3


@pytest.mark.parametrize(
    "setting, mend",
    [
        ("data.partition=heuristic", "data.partition=dirichlet"),  # one image several times
        ("data.normalise=measured", "data.normalise=fixed"),  # one image moves all inputs
    ],
)
def test_features_of_images_that_count_more_than_once_have_no_bound(data, setting, mend):
    release = spending_of(data, TINY, setting).releases["features"]
    assert (release.fixed_M.tolist(), release.mend) == ([math.inf] * 3, f"{mend} privacy.extractor=received")


def test_it_is_the_partition_that_tells_whether_an_image_is_several_inputs(data, tmp_path):
    """From a file: the heuristic's copies count, whatever the setting is called; another's images are one each."""
    for kind, mu in (("heuristic", math.inf), ("iid", 1 / 4)):
        path = tmp_path / f"{kind}.npz"
        words = settings(data, "fedproto", f"data.partition={kind}")
        assert data_command(["partition", *words, "--out", str(path)]) == 0
        spending = spending_of(data, TINY, "data.partition=file", f"data.partition_file={path}")
        assert spending.releases["features"].fixed_M.tolist() == [mu] * 3


def test_what_does_not_differ_between_neighbours_stays_free(data):
    assert spending_of(data, TINY, "data.normalise=measured").releases["counts"].whole_M.tolist() == [0.0] * 3


class Teller(FedProto):
    """Reports something beside what `protects` names."""

    def report_shapes(self):
        return super().report_shapes() | {"more_C": (self.info.classes,)}


def test_what_a_scheme_reports_beside_what_it_protects_has_no_bound(data):
    scheme = spending_of(data, TINY).scheme
    found = Teller(scheme.settings, scheme.info).released(np.array([[3, 4]]), is_private=True)
    assert found["report"].whole_M.tolist() == [math.inf]


@pytest.mark.parametrize("figure", [FIXED, WHOLE])
def test_a_client_that_was_rejected_has_no_bound(data, figure):
    """That it was follows from its data, and shows in the sum; the others have the noise of two of three."""
    federation = Federation(data, "fedavg", *PRIVATE)
    reports = np.zeros(3, federation.part.worker.report_type)
    reports["client"], reports["status"] = range(3), [0, INVALID_LOSS, 0]
    mu_MK = federation.part.server.spending.of_reports(reports)[figure]
    expected = [math.sqrt(3 / 2) / 4, math.inf, math.sqrt(3 / 2) / 4]
    assert mu_MK[:, KINDS.index("weights")].tolist() == pytest.approx(expected)


def test_all_that_was_begun_is_paid_before_the_next_round(data):
    """mu 1 / 4 a round: round 2 begun once and round 4 twice, and none is done. Then one more for each that comes."""
    spending = Federation(data, "fedavg", *PRIVATE).part.server.spending
    ahead = list(spending.mu_ahead(None, 0, {2: 1, 4: 2}))
    assert [round for round, _ in ahead] == [1, 2, 3]
    assert [16 * mu**2 for _, mu in ahead] == pytest.approx([4, 5, 6])


def test_a_round_that_was_begun_is_not_later_than_the_last(data):
    """A client is rejected in round 1 while the budget allowed all four rounds: round 2 has begun, and is the last."""
    federation = Federation(data, "fedavg", *PRIVATE, "privacy.budget=100")
    part = federation.part
    reports = np.zeros(3, part.worker.report_type)
    reports["client"], reports["status"] = range(3), [0, INVALID_LOSS, 0]
    mu_by_figure = part.server.spending.of_reports(reports)
    part.server.history.append({"round": 1}, {"status": np.zeros(3), **mu_by_figure})
    rounds.agree_on_end(part, 2)
    assert part.last == 2
